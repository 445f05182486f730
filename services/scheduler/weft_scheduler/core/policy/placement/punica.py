"""Punica's placement; `README.md` in this folder has its rules and the reasons."""

from collections.abc import Container
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from weft.domain.ids import BASE
from weft_scheduler.core.policy.placement.capacity_treap import RunnerKey
from weft_scheduler.core.policy.placement.runner_index import RunnerEntry, RunnerIndex, RunnerShape

_PACKED = 1 << 32  # more than any batch


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """What a request needs: `footprint_tokens` now (prompt, emitted, reservation), `context_tokens` at the most.

    `adapter_bytes`: what its adapter takes where it is not busy yet.
    """

    adapter: str
    rank: int
    footprint_tokens: int
    context_tokens: int
    avoid: Container[str] = ()  # uuids of runners
    skip_limit: int = 64
    numerics_class: str = ""  # of the runner; "": any
    adapter_bytes: int = 0


class RunnerLoad(NamedTuple):
    """A runner that can be placed on, as a policy indexes it."""

    uuid: str
    shape: RunnerShape
    working_set: int  # sequences that it has or was assigned
    good_sequences: int  # the batch that it runs well
    free_tokens: int
    busy_adapters: tuple[str, ...]  # in use, or pinned
    full: bool  # it takes no other adapters
    packed_sequences: int = 0  # the batch beyond its best that is preferred to a lightly loaded runner; 0: none


class PlacementPolicy(Protocol):
    """Where a request runs. The policy owns the index that it decides by; one for each pool."""

    def update(self, runner: RunnerLoad) -> None:
        """The runner may be placed on, and this is its load now."""
        ...

    def remove(self, uuid: str) -> None:
        """Nothing may be placed on that runner. Unknown ones are ignored."""
        ...

    def place(self, request: PlacementRequest, closed: Container[RunnerShape]) -> str | None:
        """The uuid of the runner for a request, of no closed shape; None: no runner can take it now."""
        ...

    def placeable_shapes(self, request: PlacementRequest) -> AbstractSet[RunnerShape]:
        """The shapes that could ever run the request and have a placeable runner that it does not avoid."""
        ...

    def has_capacity(self, closed: Container[RunnerShape]) -> bool:
        """Whether a runner of a shape that is not closed could take anything at all."""
        ...

    def free_tokens(self) -> int:
        """The most tokens that a runner has free."""
        ...

    def loads(self) -> dict[str, RunnerEntry]:
        """The index, for checks: to be read only."""
        ...


def placement_score(working_set: int, good_sequences: int, packed_sequences: int = 0) -> int:
    """How much a runner is preferred: below its best batch the fuller the better (Punica, section 5.1).

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
    """The runner with the largest working set below its best batch that can take the request."""

    def __init__(self) -> None:
        self._index = RunnerIndex()

    def update(self, runner: RunnerLoad) -> None:
        score = placement_score(runner.working_set, runner.good_sequences, runner.packed_sequences)
        key = RunnerKey(score, runner.uuid)
        entry = RunnerEntry(runner.shape, key, runner.free_tokens, runner.busy_adapters, runner.full)
        self._index.update(runner.uuid, entry)

    def remove(self, uuid: str) -> None:
        self._index.update(uuid, None)

    def place(self, request: PlacementRequest, closed: Container[RunnerShape]) -> str | None:
        found: RunnerKey | None = None
        index = self._index
        for shape in index.by_shape:
            if shape in closed or not shape.fits(request.rank, request.context_tokens, request.numerics_class):
                continue
            key = index.best(
                shape, request.adapter, request.footprint_tokens, request.avoid, request.skip_limit,
                adapter_bytes=request.adapter_bytes,
            )  # fmt: skip
            if key is not None and (found is None or key > found):
                found = key
        return found.uuid if found is not None else None

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

    def loads(self) -> dict[str, RunnerEntry]:
        return self._index.entries
