"""Punica's placement (arXiv 2310.18547, section 5.1), aware of slots, ranks and residency.

The runner with the largest working set that is under its batch limit and has pages for the request; ties to the highest
runner UUID; nobody: the queue. Large working sets first keeps the fleet at "full or idle", so that idle runners can be
given back. The batch limit is the runner's own measured best batch; where every runner that could take the request has
reached it, the one least beyond takes it, up to what it can hold: a slower batch is better than waiting. Beyond the
paper: a runner whose device slots are all busy takes only adapters that run there, and rank and context have to fit its
shape.
"""

from collections.abc import Container
from dataclasses import dataclass
from typing import Protocol

from weft_scheduler.core.ranking import Key
from weft_scheduler.core.shelves import Shape, Shelves


@dataclass(frozen=True, slots=True)
class Ask:
    """What a request needs: `room_tokens` now (prompt, emitted, reservation), `context_tokens` at the most."""

    digest: str
    rank: int
    room_tokens: int
    context_tokens: int
    avoid: Container[str] = ()
    skip_limit: int = 64
    numerics_class: str = ""  # of the runner; none: any will do


class Placement(Protocol):
    """A pure choice over a pool's runners."""

    def place(self, shelves: Shelves, ask: Ask, closed: Container[Shape]) -> Key | None: ...


class Punica:
    """See the module's text."""

    def place(self, shelves: Shelves, ask: Ask, closed: Container[Shape]) -> Key | None:
        found: Key | None = None
        for shape, shelf in shelves.by_shape.items():
            if shape in closed or not shape.takes(ask.rank, ask.context_tokens, ask.numerics_class):
                continue
            key = shelf.best(ask.digest, ask.room_tokens, ask.avoid, ask.skip_limit)
            if key is not None and (found is None or key > found):
                found = key
        return found
