"""The protocol of placement policies: what one is asked, what it knows of runners, and what it answers."""

from collections.abc import Container
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from weft.domain.runner import RunnerRole
from weft_scheduler.core.policy.placement.runner_index import RunnerEntry, RunnerShape


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """The needs of a request: `footprint_tokens` now (prompt, emitted, reservation), `context_tokens` at most.

    `adapter_bytes`: what its adapter takes if it is not busy yet. `prefill_tokens`: of the footprint, those that are
    computed before its next token. `one_runner`: where phases are split, both of its phases run on one runner.
    """

    adapter: str
    rank: int
    footprint_tokens: int
    context_tokens: int
    avoid: Container[str] = ()  # uuids of runners
    skip_limit: int = 64
    numerics_class: str = ""  # class of the runner; "": any
    adapter_bytes: int = 0
    prefill_tokens: int = 0
    one_runner: bool = False


class RunnerLoad(NamedTuple):
    """A placeable runner as indexed by a policy."""

    uuid: str
    shape: RunnerShape
    working_set: int  # sequences that it has or was assigned
    good_sequences: int  # the batch that it runs well
    free_tokens: int
    busy_adapters: tuple[str, ...]  # in use, or pinned
    full: bool  # it takes no other adapters
    packed_sequences: int = 0  # the batch beyond its best that is preferred to a lightly loaded runner; 0: none
    role: RunnerRole = RunnerRole.MIXED
    reserved_tokens: int = 0  # tokens of sequences and adapters
    pending_prompt_tokens: int = 0  # tokens of prompts that it has or was assigned, not computed yet
    queue_open: bool = True  # fewer prompt tokens are pending than it may have


class Choice(NamedTuple):
    """The runner of a request, by uuid. `token`: the runner of all tokens after the first, if it differs."""

    uuid: str
    token: str | None = None


class PlacementPolicy(Protocol):
    """The choice of runners for requests. Each pool has a policy, which owns its index."""

    def update(self, runner: RunnerLoad) -> None:
        """Index a placeable runner by its present load."""
        ...

    def remove(self, uuid: str) -> None:
        """Place nothing more on this runner. Unknown runners are ignored."""
        ...

    def place(self, request: PlacementRequest, closed: Container[RunnerShape]) -> Choice | None:
        """Return the runner or the two runners for a request, of no closed shape; None: none can take it now."""
        ...

    def placeable_shapes(self, request: PlacementRequest) -> AbstractSet[RunnerShape]:
        """Return the shapes with enough capacity for the request and a placeable runner that it does not avoid."""
        ...

    def has_capacity(self, closed: Container[RunnerShape]) -> bool:
        """Return whether a runner of a shape that is not closed could take anything at all."""
        ...

    def free_tokens(self) -> int:
        """Return the maximum of the runners' free tokens."""
        ...

    def entries(self) -> dict[tuple[str, str], RunnerEntry]:
        """Return the index, for checks: by its name and the runner's uuid."""
        ...
