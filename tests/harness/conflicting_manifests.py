"""Manifests that only other objects forbid, and such as may pass: for the webhook, the local API and the pure rules.

Each row is a small world of its own (`there`, stored in this order), a wish, and what has to be said to it. The
namespaces are PLATFORM, whose pools others use, and TENANT; a test with namespaces of its own puts those instead.
"""

from collections.abc import Mapping
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
    refusal: str = ""  # `field: reason: message`; empty: it passes
    warns: str = ""

    @property
    def field(self) -> str:
        return self.refusal.split(": ", 2)[0]

    @property
    def reason(self) -> str:
        return self.refusal.split(": ", 2)[1]

    @property
    def says(self) -> str:
        return self.refusal.split(": ", 2)[2]


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


CLOSED = {"allowedNamespaces": []}

REFUSED: tuple[Wish, ...] = (
    Wish(
        "another adapter's name",
        (base(), lora("a", modelName="upper")),
        lora("b", modelName="upper"),
        "spec.modelName: NameConflict: the name 'upper' belongs to LoRAAdapter tenant/a",
    ),
    Wish(
        "the name that another adapter has by default",
        (base(), lora("a")),
        lora("b", modelName="tenant/a"),
        "spec.modelName: NameConflict: belongs to LoRAAdapter tenant/a",
    ),
    Wish(
        "a default name that another adapter has taken",
        (base(), lora("a", modelName="tenant/b")),
        lora("b"),
        "spec.modelName: NameConflict: belongs to LoRAAdapter tenant/a",
    ),
    Wish(
        "a base model's name",
        (base(),),
        lora("a", modelName="base"),
        "spec.modelName: NameConflict: the name 'base' is the base model of ServingPool platform/base",
    ),
    Wish(
        "a name of another namespace that is served there",
        (base(), lora("a")),
        lora("thief", PLATFORM, modelName=f"{TENANT}/a"),
        "spec.modelName: NameConflict: the name 'tenant/a' belongs to an adapter of another namespace",
    ),
    Wish(
        "renamed to a name that is taken, though itself the older",
        (base(), lora("a"), lora("b", modelName="upper")),
        lora("a", modelName="upper"),
        "spec.modelName: NameConflict: belongs to LoRAAdapter tenant/b",
    ),
    Wish(
        "one pinned adapter more than the pool has room for",
        (base(**slots(3)), *pinned("a", "b")),
        lora("c", pinned=True),
        "spec.pinned: NoSlots: pins at most 2: one slot is never pinned (pinned: LoRAAdapters tenant/a, tenant/b)",
    ),
    Wish(
        "pinned in a pool with a single slot",
        (base(**slots(1)),),
        lora("a", pinned=True),
        "spec.pinned: NoSlots: advanced.maxAdapters 1 pins at most 0: one slot is never pinned",
    ),
    Wish(
        "pinned later, in a full pool",
        (base(**slots(2)), *pinned("a"), lora("b")),
        lora("b", pinned=True),
        "spec.pinned: NoSlots: pins at most 1",
    ),
    Wish(
        "moved, pinned, into a full pool",
        (
            base(**slots(2)),
            *pinned("a"),
            pool("other", TENANT, model={"uri": "file:o"}),
            adapter("b", TENANT, poolRef={"name": "other"}, pinned=True),
        ),
        lora("b", pinned=True),
        "spec.pinned: NoSlots: pinned: LoRAAdapter tenant/a",
    ),
    Wish(
        "a namespace that the pool does not admit",
        (base(**CLOSED),),
        lora("a"),
        "spec.poolRef: NotPermitted: ServingPool platform/base does not admit adapters of namespace tenant",
    ),
    Wish(
        "a namespace that is not in the pool's list",
        (base(allowedNamespaces=["somebody"]),),
        lora("a"),
        "spec.poolRef: NotPermitted: does not admit adapters of namespace tenant",
    ),
    Wish(
        "moved to a pool that does not admit it",
        (
            base(**CLOSED),
            pool("other", TENANT, model={"uri": "file:o"}),
            adapter("a", TENANT, poolRef={"name": "other"}),
        ),
        lora("a"),
        "spec.poolRef: NotPermitted: does not admit adapters of namespace tenant",
    ),
    Wish(
        "a rank above the pool's",
        (base(lora={"maxRank": 16}),),
        lora("a", maxRank=32),
        "spec.maxRank: RankTooLarge: takes ranks up to 16, not 32",
    ),
    Wish(
        "a rank raised above the pool's",
        (base(lora={"maxRank": 16}), lora("a", maxRank=8)),
        lora("a", maxRank=17),
        "spec.maxRank: RankTooLarge: takes ranks up to 16, not 17",
    ),
    Wish(
        "another base than the pool's",
        (base(),),
        lora("a", baseModel="llama"),
        "spec.baseModel: BaseMismatch: ServingPool platform/base serves 'base', not 'llama'",
    ),
    Wish(
        "a second pool of one model name",
        (base(),),
        pool("second", TENANT, model={"name": "base", "uri": "file:m"}),
        "spec.model.name: NameConflict: the name 'base' is the base model of ServingPool platform/base",
    ),
    Wish(
        "a pool whose own name is another pool's model",
        (base(),),
        pool("base", TENANT),
        "spec.model.name: NameConflict: is the base model of ServingPool platform/base",
    ),
    Wish(
        "a pool that takes a served adapter's name",
        (base(), lora("a", modelName="upper")),
        pool("upper", PLATFORM),
        "spec.model.name: NameConflict: the name 'upper' belongs to LoRAAdapter tenant/a",
    ),
    Wish(
        "a pool renamed to a name that is taken",
        (base(), pool("other", TENANT)),
        pool("other", TENANT, model={"name": "base", "uri": "file:models/tiny"}),
        "spec.model.name: NameConflict: is the base model of ServingPool platform/base",
    ),
    Wish(
        "a pool renamed though adapters rely on the name",
        (base(), lora("a", baseModel="base")),
        base(model={"name": "better", "uri": "file:m"}),
        "spec.model.name: BaseMismatch: baseModel of LoRAAdapter tenant/a says 'base'",
    ),
    Wish(
        "fewer slots than adapters are pinned",
        (base(**slots(4)), *pinned("a", "b")),
        base(**slots(2)),
        "spec.advanced.maxAdapters: NoSlots: advanced.maxAdapters 2 pins at most 1",
    ),
    Wish(
        "a largest rank below one that is served",
        (base(lora={"maxRank": 64}), ranked(lora("a"), 32)),
        base(lora={"maxRank": 16}),
        "spec.lora.maxRank: RankTooLarge: LoRAAdapter tenant/a of rank 32 would not be served any more",
    ),
)

PASSING: tuple[Wish, ...] = (
    Wish("no pool yet", (), lora("a"), warns="there is no ServingPool platform/base yet"),
    Wish("no pool yet, and pinned", (), lora("a", pinned=True), warns="PoolNotFound"),
    Wish("a namespace in the pool's list", (base(allowedNamespaces=[TENANT]),), lora("a")),
    Wish("a pool behind its adapters", (lora("a", pinned=True), lora("b", pinned=True)), base(**slots(1))),
    Wish("the same again", (base(**slots(2)), *pinned("a")), lora("a", pinned=True)),
    Wish("the last slot that may be pinned", (base(**slots(3)), *pinned("a")), lora("b", pinned=True)),
    Wish("not pinned in a full pool", (base(**slots(2)), *pinned("a")), lora("b")),
    Wish("a name of one that goes", (base(), going(lora("a", modelName="upper"))), lora("b", modelName="upper")),
    Wish(
        "a name of one's own namespace that somebody elsewhere has taken",
        (base(), lora("thief", PLATFORM, modelName=f"{TENANT}/a")),
        lora("a"),
    ),
    Wish("two runners for two phases", (), base(phases={"mode": "Split"}, replicas=2)),
    Wish("one runner, two phases", (), base(phases={"mode": "Split"}, replicas=1), warns="one that is alone does both"),
    Wish("a pool that goes", (going(base()),), lora("a"), warns="there is no ServingPool platform/base yet"),
    Wish("a rank as large as the pool's", (base(lora={"maxRank": 16}),), lora("a", maxRank=16)),
    Wish("the base that the pool has", (base(),), lora("a", baseModel="base")),
    Wish(
        "a slot that a refused adapter wants",
        (*pinned("a"), base(**slots(2), **CLOSED)),
        adapter("c", PLATFORM, poolRef={"name": "base"}, pinned=True),
    ),
    Wish(
        "an old conflict of names is not told to who edits something else",
        (lora("a", modelName="upper"), lora("b", modelName="upper"), base()),
        lora("b", modelName="upper", tier="Disk"),
    ),
    Wish("a pool renamed that nobody relies on", (base(), lora("a")), base(model={"name": "better", "uri": "file:m"})),
    Wish(
        "an old rank is not told to who edits something else",
        (ranked(lora("a"), 32), base(lora={"maxRank": 16})),
        base(lora={"maxRank": 16}, drainSeconds=100),
    ),
    Wish("a slot of one that goes", (base(**slots(2)), going(*pinned("a"))), lora("b", pinned=True)),
    Wish("a name that a refused adapter wants", (lora("a", modelName="upper"), base(**CLOSED)), pool("upper", TENANT)),
    Wish("fewer slots, enough for the pinned", (base(**slots(4)), *pinned("a")), base(**slots(2))),
    Wish(
        "a pool that becomes smaller for nobody",
        (base(lora={"maxRank": 64}), ranked(lora("a"), 16)),
        base(lora={"maxRank": 16}),
    ),
    Wish(
        "a namespace taken away",
        (base(), lora("a")),
        base(**CLOSED),
        warns="LoRAAdapter tenant/a will not be served any more",
    ),
    Wish(
        "an old conflict is not told to who edits something else",
        (lora("a", maxRank=32), base(lora={"maxRank": 16})),
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
