"""What a placement policy is asked, what it knows of runners, and what it answers."""

from collections.abc import Container
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from weft.domain.runner import RunnerRole
from weft_scheduler.core.policy.placement.runner_index import RunnerEntry, RunnerShape


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """What a request needs: `footprint_tokens` now (prompt, emitted, reservation), `context_tokens` at the most.

    `adapter_bytes`: what its adapter takes where it is not busy yet. `prefill_tokens`: of the footprint, those that are
    computed before its next token. `one_runner`: where phases are split, both of its phases run on one runner.
    """

    adapter: str
    rank: int
    footprint_tokens: int
    context_tokens: int
    avoid: Container[str] = ()  # uuids of runners
    skip_limit: int = 64
    numerics_class: str = ""  # of the runner; "": any
    adapter_bytes: int = 0
    prefill_tokens: int = 0
    one_runner: bool = False


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
    role: RunnerRole = RunnerRole.MIXED
    reserved_tokens: int = 0  # of sequences and adapters
    pending_prompt_tokens: int = 0  # of prompts that it has or was assigned, not computed yet
    queue_open: bool = True  # they are fewer than it may have


class Choice(NamedTuple):
    """The runner of a request, by uuid. `token`: the one of the tokens after the first, where that is another."""

    uuid: str
    token: str | None = None


class PlacementPolicy(Protocol):
    """Where a request runs. The policy owns the index that it decides by; one for each pool."""

    def update(self, runner: RunnerLoad) -> None:
        """The runner may be placed on, and this is its load now."""
        ...

    def remove(self, uuid: str) -> None:
        """Nothing may be placed on that runner. Unknown ones are ignored."""
        ...

    def place(self, request: PlacementRequest, closed: Container[RunnerShape]) -> Choice | None:
        """The runner or the two runners for a request, of no closed shape; None: none can take it now."""
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

    def entries(self) -> dict[tuple[str, str], RunnerEntry]:
        """The index, for checks: by its name and the runner's uuid."""
        ...
