"""Adapters: where one is, if it has to be, and what the registry declares."""

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Annotated, NamedTuple

from weft.domain.bounds import (
    MAX_NAME_CHARS,
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

MAX_METRIC_NAMES = 4  # that metrics list of one adapter
MAX_VERSIONS = 101  # of an adapter, as the schema's, and a canary
AdapterUid = Annotated[str, Bound(MAX_NAME_CHARS, 1, "an adapter's uid")]
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
    """A content of an adapter besides the present content: an earlier version for pins, or the canary.

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
class DesiredAdapter:
    """An adapter held by a Ready runner: pinned adapters in a device slot, the rest at least at their tier.

    `model_names`: the first few that requests name it by, for metrics; other names alone make no other adapter.
    """

    digest: SomeDigest
    rank: Rank
    bytes: Any64
    pinned: bool
    tier: Annotated[Tier, Tier.UNSPECIFIED] = Tier.UNSPECIFIED
    model_names: Annotated[tuple[ModelName, ...], Bound(MAX_METRIC_NAMES, cut=True)] = field(default=(), compare=False)


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
