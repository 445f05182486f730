"""Commands of rank 0 to its workers: tuples of a name and arguments, in two channels (`parallel.worker_group`).

`steps`, in their order, between two steps: ("run", Step, Layers), ("again", tokens, positions, Layers) for the step
before a position further (`Step.advance`), ("put", slot, number, numbers to forget), ("clear", slot),
("clear_pages", pages), ("allocate_pages", pages), ("kv", ShardOrder) of a transfer to or from another runner.
`loads`, beside steps: the START of a rank; ("build" or "device_bytes", arguments) and an adapter's file, answered by a
`BuiltShard` or a RunnerError.
`events`, to rank 0: `RankStopping`; `StageState` of a stage that offloads; `ShardComplete`, `ShardLost` of
`core.transfer.shards`.
"""

from dataclasses import dataclass

from weft_runner.offload.stages import StageState


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
