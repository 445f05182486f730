"""Manifests that only other objects forbid, and such as may pass: for the webhook, the local API and the pure rules.

Each row is a small world of its own (`there`, stored in this order), a wish, and what has to be said to it. The
namespaces are PLATFORM, whose pools others use, and TENANT; a test with namespaces of its own puts those instead.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from harness.bad_manifests import Manifest, adapter, pool

PLATFORM, TENANT = "platform", "tenant"


@dataclass(frozen=True)
class Wish:
    """An object that is wanted in a world; an update where the world has it already."""

    name: str
    there: tuple[Manifest, ...]
    wish: Manifest
    reason: str = ""  # empty: it passes
    field: str = ""
    says: str = ""
    warns: str = ""


def base(**spec: Any) -> Manifest:
    """The platform's pool, whose model is `base`, open to everybody."""
    return pool("base", PLATFORM, **{"model": {"name": "base", "uri": "file:m"}, "allowedNamespaces": ["*"]} | spec)


def lora(name: str, namespace: str = TENANT, **spec: Any) -> Manifest:
    """A tenant's adapter in that pool."""
    return adapter(name, namespace, **{"poolRef": {"name": "base", "namespace": PLATFORM}} | spec)


def pinned(*names: str) -> tuple[Manifest, ...]:
    return tuple(lora(name, pinned=True) for name in names)


def slots(number: int) -> Manifest:
    return {"advanced": {"maxAdapters": number}}


def ranked(manifest: Manifest, rank: int) -> Manifest:
    """With a status, as after its content was read."""
    return manifest | {"status": {"rank": rank}}


def going(manifest: Manifest) -> Manifest:
    """Deleted, and kept by a finalizer."""
    return manifest | {"metadata": manifest["metadata"] | {"finalizers": ["serving.weft.dev/unload"]}, "deleted": True}


def upper(name: str) -> Manifest:
    return lora(name, modelName="upper")


def elsewhere(name: str, **spec: Any) -> Manifest:
    """A tenant's adapter in its own pool, OTHER."""
    return adapter(name, TENANT, poolRef={"name": "other"}, **spec)


def _refused(reason: str, field: str, rows: Mapping[str, tuple[tuple[Manifest, ...], Manifest, str]]) -> Iterator[Wish]:
    """Yield wishes that are refused for one reason at one field; each row: what is there, the wish, what is said."""
    for name, (there, wish, says) in rows.items():
        yield Wish(name, there, wish, reason, field, says)


CLOSED = {"allowedNamespaces": []}
OTHER = pool("other", TENANT, model={"uri": "file:o"})
RANK_16 = {"lora": {"maxRank": 16}}
OF_A, OF_BASE = "belongs to LoRAAdapter tenant/a", "is the base model of ServingPool platform/base"
NOT_ADMITTED = "does not admit adapters of namespace tenant"
PINS_2 = "pins at most 2: one slot is never pinned (pinned: LoRAAdapters tenant/a, tenant/b)"
STOLEN = "the name 'tenant/a' belongs to an adapter of another namespace"
RELIED_ON = "baseModel of LoRAAdapter tenant/a says 'base'"

REFUSED: tuple[Wish, ...] = (
    *_refused("NameConflict", "spec.modelName", {
        "another adapter's name": ((base(), upper("a")), upper("b"), f"the name 'upper' {OF_A}"),
        "the name that another adapter has by default": ((base(), lora("a")), lora("b", modelName="tenant/a"), OF_A),
        "a default name that another adapter has taken": ((base(), lora("a", modelName="tenant/b")), lora("b"), OF_A),
        "a base model's name": ((base(),), lora("a", modelName="base"), f"the name 'base' {OF_BASE}"),
        "a name of another namespace that is served there": (
            (base(), lora("a")), lora("thief", PLATFORM, modelName=f"{TENANT}/a"), STOLEN),
        "renamed to a name that is taken, though itself the older": (
            (base(), lora("a"), upper("b")), upper("a"), "belongs to LoRAAdapter tenant/b"),
    }),
    *_refused("NoSlots", "spec.pinned", {
        "one pinned adapter more than the pool has room for": (
            (base(**slots(3)), *pinned("a", "b")), lora("c", pinned=True), PINS_2),
        "pinned in a pool with a single slot": (
            (base(**slots(1)),), lora("a", pinned=True),
            "advanced.maxAdapters 1 pins at most 0: one slot is never pinned"),
        "pinned later, in a full pool": (
            (base(**slots(2)), *pinned("a"), lora("b")), lora("b", pinned=True), "pins at most 1"),
        "moved, pinned, into a full pool": (
            (base(**slots(2)), *pinned("a"), OTHER, elsewhere("b", pinned=True)), lora("b", pinned=True),
            "pinned: LoRAAdapter tenant/a"),
    }),
    *_refused("NotPermitted", "spec.poolRef", {
        "a namespace that the pool does not admit": (
            (base(**CLOSED),), lora("a"), f"ServingPool platform/base {NOT_ADMITTED}"),
        "a namespace that is not in the pool's list": (
            (base(allowedNamespaces=["somebody"]),), lora("a"), NOT_ADMITTED),
        "moved to a pool that does not admit it": ((base(**CLOSED), OTHER, elsewhere("a")), lora("a"), NOT_ADMITTED),
    }),
    *_refused("RankTooLarge", "spec.maxRank", {
        "a rank above the pool's": ((base(**RANK_16),), lora("a", maxRank=32), "takes ranks up to 16, not 32"),
        "a rank raised above the pool's": (
            (base(**RANK_16), lora("a", maxRank=8)), lora("a", maxRank=17), "takes ranks up to 16, not 17"),
    }),
    *_refused("BaseMismatch", "spec.baseModel", {
        "another base than the pool's": (
            (base(),), lora("a", baseModel="llama"), "ServingPool platform/base serves 'base', not 'llama'"),
    }),
    *_refused("NameConflict", "spec.model.name", {
        "a second pool of one model name": (
            (base(),), pool("second", TENANT, model={"name": "base", "uri": "file:m"}), f"the name 'base' {OF_BASE}"),
        "a pool whose own name is another pool's model": ((base(),), pool("base", TENANT), OF_BASE),
        "a pool that takes a served adapter's name": (
            (base(), upper("a")), pool("upper", PLATFORM), f"the name 'upper' {OF_A}"),
        "a pool renamed to a name that is taken": (
            (base(), pool("other", TENANT)), pool("other", TENANT, model={"name": "base", "uri": "file:models/tiny"}),
            OF_BASE),
    }),
    *_refused("BaseMismatch", "spec.model.name", {
        "a pool renamed though adapters rely on the name": (
            (base(), lora("a", baseModel="base")), base(model={"name": "better", "uri": "file:m"}), RELIED_ON),
    }),
    *_refused("NoSlots", "spec.advanced.maxAdapters", {
        "fewer slots than adapters are pinned": (
            (base(**slots(4)), *pinned("a", "b")), base(**slots(2)), "advanced.maxAdapters 2 pins at most 1"),
    }),
    *_refused("RankTooLarge", "spec.lora.maxRank", {
        "a largest rank below one that is served": (
            (base(lora={"maxRank": 64}), ranked(lora("a"), 32)), base(**RANK_16),
            "LoRAAdapter tenant/a of rank 32 would not be served any more"),
    }),
)  # fmt: skip

PASSING: tuple[Wish, ...] = (
    Wish("no pool yet", (), lora("a"), warns="there is no ServingPool platform/base yet"),
    Wish("no pool yet, and pinned", (), lora("a", pinned=True), warns="PoolNotFound"),
    Wish("a namespace in the pool's list", (base(allowedNamespaces=[TENANT]),), lora("a")),
    Wish("a pool behind its adapters", (lora("a", pinned=True), lora("b", pinned=True)), base(**slots(1))),
    Wish("the same again", (base(**slots(2)), *pinned("a")), lora("a", pinned=True)),
    Wish("the last slot that may be pinned", (base(**slots(3)), *pinned("a")), lora("b", pinned=True)),
    Wish("not pinned in a full pool", (base(**slots(2)), *pinned("a")), lora("b")),
    Wish("a name of one that goes", (base(), going(upper("a"))), upper("b")),
    Wish(
        "a name of one's own namespace that somebody elsewhere has taken",
        (base(), lora("thief", PLATFORM, modelName=f"{TENANT}/a")),
        lora("a"),
    ),
    Wish("two runners for two phases", (), base(phases={"mode": "Split"}, replicas=2)),
    Wish("one runner, two phases", (), base(phases={"mode": "Split"}, replicas=1), warns="one that is alone does both"),
    Wish("a pool that goes", (going(base()),), lora("a"), warns="there is no ServingPool platform/base yet"),
    Wish("a rank as large as the pool's", (base(**RANK_16),), lora("a", maxRank=16)),
    Wish("the base that the pool has", (base(),), lora("a", baseModel="base")),
    Wish(
        "a slot that a refused adapter wants",
        (*pinned("a"), base(**slots(2), **CLOSED)),
        adapter("c", PLATFORM, poolRef={"name": "base"}, pinned=True),
    ),
    Wish(
        "an old conflict of names is not told to who edits something else",
        (upper("a"), upper("b"), base()),
        lora("b", modelName="upper", tier="Disk"),
    ),
    Wish("a pool renamed that nobody relies on", (base(), lora("a")), base(model={"name": "better", "uri": "file:m"})),
    Wish(
        "an old rank is not told to who edits something else",
        (ranked(lora("a"), 32), base(**RANK_16)),
        base(lora={"maxRank": 16}, drainSeconds=100),
    ),
    Wish("a slot of one that goes", (base(**slots(2)), going(*pinned("a"))), lora("b", pinned=True)),
    Wish("a name that a refused adapter wants", (upper("a"), base(**CLOSED)), pool("upper", TENANT)),
    Wish("fewer slots, enough for the pinned", (base(**slots(4)), *pinned("a")), base(**slots(2))),
    Wish(
        "a pool that becomes smaller for nobody", (base(lora={"maxRank": 64}), ranked(lora("a"), 16)), base(**RANK_16)
    ),
    Wish(
        "a namespace taken away",
        (base(), lora("a")),
        base(**CLOSED),
        warns="LoRAAdapter tenant/a will not be served any more",
    ),
    Wish(
        "an old conflict is not told to who edits something else",
        (lora("a", maxRank=32), base(**RANK_16)),
        lora("a", maxRank=32, tier="Disk"),
    ),
)


def in_namespaces(value: Any, names: Mapping[str, str]) -> Any:
    """The same world, or text about it, in other namespaces."""
    if isinstance(value, str):
        return _replaced(value, names)
    if isinstance(value, dict):
        return {key: in_namespaces(item, names) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(in_namespaces(item, names) for item in value)
    return value


def _replaced(text: str, names: Mapping[str, str]) -> str:
    for name, other in names.items():
        text = (
            other
            if text == name
            else text.replace(f"{name}/", f"{other}/").replace(f"namespace {name}", f"namespace {other}")
        )
    return text
