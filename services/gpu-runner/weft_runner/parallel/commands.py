"""Commands of rank 0 to its workers: tuples of a name and arguments, in two channels (`parallel.worker_group`).

`steps`, in their order, between two steps: ("run", Step, Layers), ("again", tokens, positions, Layers) for the step
before a position further (`Step.advance`), ("put", slot, number, numbers to forget), ("clear", slot),
("clear_pages", pages), ("allocate_pages", pages), ("kv", ShardOrder) of a transfer to or from another runner.
`loads`, beside steps: ("hello", None), `RankStart`, ("ready", RankReady); ("build" or "device_bytes", arguments) and an
adapter's file, answered by a `BuiltShard` or a RunnerError.
`events`, to rank 0: `RankStopping`; `StageState` of a stage that offloads; `ShardComplete`, `ShardLost` of
`core.transfer.shards`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any

from weft.domain.ids import RunnerId
from weft.domain.model.spec import ModelSpec
from weft_runner.core.transfer.shards import ShardComplete, ShardLost, ShardOrder
from weft_runner.model.partition import RankGrid
from weft_runner.model.step import StepInput
from weft_runner.offload.plan import OffloadPolicy
from weft_runner.offload.stages import StageState
from weft_runner.parallel.shared_tensors import Table
from weft_runner.settings import RunnerSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStart:
    """START: which rank it is, of what, and how they meet: `store_port`: of rank 0, where ranks are on several hosts.

    `threads`: of each rank. `device`: its kind. `runner`, `policy`: see `ModelSource`. `patience_s`: of the ranks for
    each other.
    """

    settings: RunnerSettings
    spec: ModelSpec
    files: Mapping[str, Path]
    threads: int
    device: str
    runner: RunnerId | None
    policy: OffloadPolicy | None
    grid: RankGrid
    patience_s: float
    store_port: int = 0
    rank: int = 0


@dataclass(frozen=True, slots=True)
class Layers:
    """Layers [first, last) of a step; `hidden`: they begin with what rank 0 broadcasts, not with the embedding."""

    first: int
    last: int
    hidden: bool


@dataclass(frozen=True, slots=True)
class RankStopping:
    """A rank's process is asked to end: the runner drains, and all its ranks end together."""


@dataclass(frozen=True, slots=True)
class RankReady:
    """A rank has loaded its part. `kv_address`: where it takes KV of other runners, "" nowhere.

    `stage`: None: its weights are all in memory.
    """

    kv_address: str
    stage: StageState | None


@dataclass(frozen=True, slots=True)
class BuiltShard:
    """What a rank has, or will have, of an adapter: its ranks there (0: nothing, or not built) and its KV pages."""

    pages: int
    rank: int = 0
    site_rank: int = 0


COMMANDS: Mapping[str, Sequence[Any]] = {  # the types of what follows the name
    "hello": (NoneType,), "ready": (RankReady,), "beside": (RunnerSettings, Mapping[str, Path], int),
    "run": (StepInput, Layers), "again": (list[int], list[int], Layers), "put": (int, int, list[int]),
    "clear": (int,), "clear_pages": (list[int],), "allocate_pages": (list[int],), "kv": (ShardOrder,),
    "device_bytes": (Table, dict[str, float]), "build": (Table, dict[str, float], int, tuple[int, ...], int),
}  # fmt: skip
KINDS = (RankStart, BuiltShard, RankStopping, StageState, ShardComplete, ShardLost)
