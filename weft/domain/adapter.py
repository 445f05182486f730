"""Adapters: where one is, where it has to be, and what the registry declares."""

from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import NamedTuple

MOST_NAMES = 4  # that metrics list of one adapter
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

    digest: str
    rank: int
    bytes: int = 0
    name: str = ""
    weight: int = 0
    eos_token_ids: tuple[int, ...] = ()
    own_chat_template: bool = False


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """An adapter as the registry declares it; without a digest it is not served, for `reason` (of weft.api.reasons).

    `version`: the name of its content; "" for none. `versions`: its canary, then earlier contents, the newest first,
    which are loaded on demand.
    """

    uid: str
    namespace: str
    name: str
    model_name: str
    pool: str
    digest: str
    rank: int
    bytes: int = 0
    pinned: bool = False
    created_unix_s: int = 0
    tier: Tier = Tier.UNSPECIFIED  # the least that a Ready runner holds it in; UNSPECIFIED and REMOTE: on demand
    reason: str = ""
    message: str = ""
    version: str = ""
    versions: tuple[AdapterVersion, ...] = ()
    generation: int = 0  # of the object's spec that this follows from
    eos_token_ids: tuple[int, ...] = ()  # of its content, beside the base's
    own_chat_template: bool = False  # chats are rendered by the one among the files of its content
    chat_template: str = ""  # digest of the artifact of the one that the spec gives instead; "": none
    chat_template_fault: str = ""  # the spec gives one that could not be read: why; chats are refused

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

    digest: str
    rank: int
    bytes: int
    pinned: bool
    tier: Tier = Tier.UNSPECIFIED
    model_names: tuple[str, ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class DesiredChange:
    """What a runner holds, as a whole (`full`) or as what changed since the version before.

    `removed` digests leave every tier after their last sequence, whether they were held or loaded on demand.
    """

    version: int
    full: bool
    adapters: tuple[DesiredAdapter, ...] = ()
    removed: tuple[str, ...] = ()


class AdapterState(NamedTuple):
    """An adapter on a runner. `shortfall`: why it is held on a lower tier than desired; it serves all the same.

    A tuple, for reports carry many: a frozen dataclass takes 1 us more to make.
    """

    digest: str
    tier: Tier
    running: int = 0  # sequences that use it or wait for it
    bytes: int = 0
    rank: int = 0
    loading: bool = False
    error: str = ""  # why the last load failed
    shortfall: str = ""
