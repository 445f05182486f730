"""Adapters: where one is, where it has to be, and what the registry declares."""

from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Annotated, NamedTuple

from weft.domain.bounds import (
    MAX_ID,
    MAX_MODEL,
    MAX_RANK,
    Any64,
    Bound,
    Capacity,
    Detail,
    EosTokens,
    Listed,
    ModelName,
    Rank,
    SomeDigest,
    Text,
)

MOST_NAMES = 4  # that metrics list of one adapter
MAX_VERSIONS = 101  # of an adapter, as the schema's, and a canary
AdapterUid = Annotated[str, Bound(MAX_ID, 1, "an adapter's uid")]
FILES = ("adapter_config.json", "adapter_model.safetensors")  # of every adapter, as PEFT writes them
OPTIONAL_FILES = (
    "chat_template.jinja",
    "additional_chat_templates/tool_use.jinja",
    "tokenizer_config.json",
    "special_tokens_map.json",
)  # where training wrote them
OTHER_FORMS = {  # that training may have written instead, and what to do
    "adapter_model.bin": "a pickle, which can run code when it is opened: save it as safetensors",
    "adapters.safetensors": "mlx-lm's form: save it as PEFT does",
}


class Tier(IntEnum):
    """The nearest place that has an adapter, or has to have it at least; the nearer to the device, the higher."""

    UNSPECIFIED = 0
    REMOTE = 1
    DISK = 2
    HOST = 3
    DEVICE = 4


class AdapterVersion(NamedTuple):
    """A content of an adapter beside the present one: an earlier one that requests may pin, or its canary.

    `name`: "" for none. `weight`: percent of the requests without a pin that a canary gets. `eos_token_ids`: its own,
    beside the base's. `own_chat_template`: chats are rendered by the one among its files.
    """

    digest: SomeDigest
    rank: Rank
    bytes: Any64 = 0
    name: Text = ""
    weight: Annotated[int, Bound(100)] = 0
    eos_token_ids: EosTokens = ()
    own_chat_template: bool = False


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """An adapter as the registry declares it; without a digest it is not served, for `reason` (of weft.api.reasons).

    `version`: the name of its content; "" for none. `versions`: its canary, then earlier contents, the newest first,
    which are loaded on demand.
    """

    uid: AdapterUid
    namespace: Text
    name: Text
    model_name: Annotated[str, Bound(MAX_MODEL)]
    pool: Text
    digest: Text
    rank: Annotated[int, Bound(MAX_RANK)]
    bytes: Any64 = 0
    pinned: bool = False
    created_unix_s: Any64 = 0
    tier: Tier = Tier.UNSPECIFIED  # the least that a Ready runner holds it in; UNSPECIFIED and REMOTE: on demand
    reason: Text = ""
    message: Detail = ""
    version: Text = ""
    versions: Annotated[tuple[AdapterVersion, ...], Bound(MAX_VERSIONS)] = ()
    generation: Any64 = 0  # of the object's spec that this follows from
    eos_token_ids: EosTokens = ()  # of its content, beside the base's
    own_chat_template: bool = False  # chats are rendered by the one among the files of its content
    chat_template: Text = ""  # digest of the artifact of the one that the spec gives instead; "": none
    chat_template_fault: Detail = ""  # the spec gives one that could not be read: why; chats are refused

    @property
    def contents(self) -> "tuple[AdapterSpec, ...]":
        """The present content and the others, each as an adapter of its own.

        Of earlier contents none is held. A canary is never pinned (slots are counted without it), but in host memory
        where the adapter is pinned.
        """
        canary_tier = Tier.HOST if self.pinned else self.tier
        others = (
            replace(
                self, digest=v.digest, rank=v.rank, bytes=v.bytes, pinned=False,
                tier=canary_tier if v.weight else Tier.UNSPECIFIED, versions=(),
            )
            for v in self.versions
            if v.digest != self.digest
        )  # fmt: skip
        return (self, *others) if self.digest else ()

    @property
    def canary(self) -> AdapterVersion | None:
        """The content that gets a share of the requests."""
        return next((v for v in self.versions if v.weight and v.digest != self.digest), None)

    @property
    def held(self) -> bool:
        """Whether every Ready runner of its pool holds it; the others load it when a request names it."""
        return self.pinned or self.tier in (Tier.DISK, Tier.HOST)


@dataclass(frozen=True, slots=True)
class DesiredAdapter:
    """An adapter that a Ready runner holds: pinned ones in a device slot, others at their tier or nearer.

    `model_names`: the first few that requests name it by, for metrics; other names alone make no other adapter.
    """

    digest: SomeDigest
    rank: Rank
    bytes: Any64
    pinned: bool
    tier: Annotated[Tier, Tier.UNSPECIFIED] = Tier.UNSPECIFIED
    model_names: Annotated[tuple[ModelName, ...], Bound(MOST_NAMES, cut=True)] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class DesiredChange:
    """What a runner holds, as a whole (`full`) or as what changed since the version before.

    `removed` digests leave every tier after their last sequence, whether they were held or loaded on demand.
    """

    version: Any64
    full: bool
    adapters: Listed[DesiredAdapter] = ()
    removed: Listed[SomeDigest] = ()


class AdapterState(NamedTuple):
    """An adapter on a runner. `shortfall`: why it is held on a lower tier than desired; it serves all the same.

    A tuple, for reports carry many: a frozen dataclass takes 1 us more to make.
    """

    digest: SomeDigest
    tier: Annotated[Tier, Tier.UNSPECIFIED]
    running: Capacity = 0  # sequences that use it or wait for it
    bytes: Any64 = 0
    rank: Rank = 0
    loading: bool = False
    error: Detail = ""  # why the last load failed
    shortfall: Detail = ""
