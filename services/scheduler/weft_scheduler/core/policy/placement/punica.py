"""Punica's placement; `README.md` in this folder has its rules and the reasons."""

from collections.abc import Container
from collections.abc import Set as AbstractSet

from weft.domain.ids import BASE
from weft_scheduler.core.policy.placement.capacity_treap import RunnerKey
from weft_scheduler.core.policy.placement.policy import Choice, PlacementRequest, RunnerLoad
from weft_scheduler.core.policy.placement.runner_index import RunnerEntry, RunnerIndex, RunnerShape

_PACKED = 1 << 32  # more than any batch


def placement_score(working_set: int, good_sequences: int, packed_sequences: int = 0) -> int:
    """Return how much a runner is preferred: below its best batch the fuller the better (Punica, section 5.1).

    At its best batch and beyond it is below every runner that is not there yet, the less the farther it has gone, but
    still a candidate: a request that only it can take is better off in a slower batch than in the queue. Where the pool
    packs, runners up to `packed_sequences` come before those that are less than half full, so that these become idle.
    """
    if good_sequences <= working_set < packed_sequences:
        return _PACKED + good_sequences - working_set
    if working_set < good_sequences:
        return working_set + (2 * _PACKED if packed_sequences and 2 * working_set >= good_sequences else 0)
    return good_sequences - 1 - working_set


class Punica:
    """Placement on the runner with the largest working set below its best batch that can take the request."""

    def __init__(self) -> None:
        self._index = RunnerIndex()

    def update(self, runner: RunnerLoad) -> None:
        score = placement_score(runner.working_set, runner.good_sequences, runner.packed_sequences)
        key = RunnerKey(score, runner.uuid)
        entry = RunnerEntry(runner.shape, key, runner.free_tokens, runner.busy_adapters, runner.full)
        self._index.update(runner.uuid, entry)

    def remove(self, uuid: str) -> None:
        self._index.update(uuid, None)

    def place(self, request: PlacementRequest, closed: Container[RunnerShape]) -> Choice | None:
        best: RunnerKey | None = None
        for shape in self._index.by_shape:
            if shape not in closed and shape.fits(request.rank, request.context_tokens, request.numerics_class):
                key = self._index.best(
                    shape, request.adapter, request.footprint_tokens, request.avoid, request.skip_limit,
                    adapter_bytes=request.adapter_bytes,
                )  # fmt: skip
                if key is not None and (best is None or key > best):
                    best = key
        return Choice(best.uuid) if best is not None else None

    def placeable_shapes(self, request: PlacementRequest) -> AbstractSet[RunnerShape]:
        return {
            shape
            for shape in self._index.by_shape
            if shape.fits(request.rank, request.context_tokens, request.numerics_class)
            and self._index.best(shape, BASE, 0, request.avoid, request.skip_limit) is not None
        }

    def has_capacity(self, closed: Container[RunnerShape]) -> bool:
        return any(shape not in closed for shape in self._index.by_shape)

    def free_tokens(self) -> int:
        return max((index.free_tokens for index in self._index.by_shape.values()), default=0)

    def entries(self) -> dict[tuple[str, str], RunnerEntry]:
        return {("all", uuid): entry for uuid, entry in self._index.entries.items()}
