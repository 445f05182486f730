"""Choice of batch requests that leave for interactive ones that wait; `README.md` in this folder has the rules."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from weft_scheduler.core.policy.priority.claims import Claim


class BatchSequence(NamedTuple):
    """A batch request on a runner, which may be removed."""

    request_id: str
    adapter: str
    tokens: int  # tokens that its pages hold
    computed_tokens: int  # tokens that are lost with it
    arrived_s: float


@dataclass(slots=True)
class Capacity:
    """A runner with batch requests. Capacity of removed requests counts as free.

    `free_adapters`: how many adapters it may take beyond those in use; negative where too many are. `shared`: adapters
    in use by others than these batch requests. `leaving_adapters`: those of what is about to leave, which need no
    memory of their own again.
    """

    uuid: str
    free_tokens: int
    free_sequences: int
    free_interactive: int  # places that the token time leaves to interactive ones, whatever batch requests there are
    free_adapters: int
    shared: set[str]
    lines: list[BatchSequence]
    leaving_adapters: set[str] = field(default_factory=set[str])


class Need(NamedTuple):
    """A waiting interactive request. `tokens`: its need on each possible runner, by uuid.

    A pair: where its adapter is in use there, and if it is not. `assigned`: uuid of the runner that has room for it.
    """

    adapter: str  # "": the base
    tokens: Mapping[str, tuple[int, int]]
    assigned: str = ""

    def tokens_on(self, uuid: str, *, in_use: bool) -> int | None:
        """Return the tokens that it needs of a runner; None: it cannot run there."""
        pair = self.tokens.get(uuid)
        return pair[not in_use] if pair is not None else None


def select_preempted(
    needs: Iterable[Need], capacities: Sequence[Capacity]
) -> tuple[list[tuple[str, str]], list[Claim | None]]:
    """Return (runner, request) of victims, so that as many of `needs` as possible find room, and the room of each need.

    In the order of `needs`: a request takes the room that is assigned to it, else room that is there, or about to be,
    before anybody leaves for it. `capacities` is used up. Another call, with the victims about to leave and the claims
    made, returns no victims and the same claims.
    """
    victims, claims = list[tuple[str, str]](), list[Claim | None]()
    for need in needs:
        leaving, capacity = _select(need, capacities) or ((), None)
        claims.append(_take(need, capacity, leaving) if capacity is not None else None)
        victims += [(capacity.uuid, victim.request_id) for victim in leaving if capacity is not None]
    return victims, claims


def _select(need: Need, capacities: Sequence[Capacity]) -> tuple[list[BatchSequence], Capacity] | None:
    """Return the runner for `need`, and who leaves it: the fewest computed tokens are lost. None: no runner helps."""
    for capacity in capacities:
        if capacity.uuid == need.assigned and _has_slot(need, capacity) and _fits(need, capacity, ()):
            return [], capacity
    helping = [(leaving, capacity) for capacity in capacities if (leaving := _leaving(need, capacity)) is not None]
    return min(helping, key=lambda pair: (_lost(pair[0]), pair[1].uuid), default=None)


def _leaving(need: Need, capacity: Capacity) -> list[BatchSequence] | None:
    """Return the requests to remove from this runner for `need`, least progress first; None if it cannot help."""
    leaving: list[BatchSequence] = []
    if not _has_slot(need, capacity):
        of_adapter: dict[str, list[BatchSequence]] = {}
        for line in capacity.lines:
            if line.adapter not in capacity.shared:
                of_adapter.setdefault(line.adapter, []).append(line)
        if not of_adapter or capacity.free_adapters < 0:
            return None
        leaving = min(of_adapter.values(), key=_lost)
    rest = [line for line in capacity.lines if line not in leaving]
    rest.sort(key=lambda line: (line.computed_tokens, -line.arrived_s, line.request_id))
    selected = list(leaving)
    while not _fits(need, capacity, selected):
        if not rest:
            return None
        selected.append(rest.pop(0))
    for line in reversed(selected[len(leaving) :]):  # a small one that was selected before a large one may stay
        fewer = [other_line for other_line in selected if other_line is not line]
        if _fits(need, capacity, fewer):
            selected = fewer
    return selected


def _has_slot(need: Need, capacity: Capacity) -> bool:
    """Return whether the adapter of `need` is in use, as the base always is, or the runner may take one more."""
    in_use = not need.adapter or need.adapter in capacity.shared
    return in_use or capacity.free_adapters > 0 or any(line.adapter == need.adapter for line in capacity.lines)


def _tokens(need: Need, capacity: Capacity) -> int | None:
    """Return the tokens of `need` on this runner; None if it cannot run there.

    The memory of an adapter whose last request leaves is its own again.
    """
    adapter = need.adapter
    in_use = not adapter or adapter in capacity.shared or adapter in capacity.leaving_adapters
    in_use = in_use or any(line.adapter == adapter for line in capacity.lines)
    return need.tokens_on(capacity.uuid, in_use=in_use)


def _fits(need: Need, capacity: Capacity, leaving: Sequence[BatchSequence]) -> bool:
    tokens = _tokens(need, capacity)
    if tokens is None or capacity.free_tokens + sum(line.tokens for line in leaving) < tokens:
        return False
    return capacity.free_interactive > 0 and capacity.free_sequences + len(leaving) > 0


def _lost(leaving: Iterable[BatchSequence]) -> tuple[int, int]:
    computed = [line.computed_tokens for line in leaving]
    return sum(computed), len(computed)


def _take(need: Need, capacity: Capacity, leaving: Sequence[BatchSequence]) -> Claim:
    """Give the request its place there."""
    tokens = _tokens(need, capacity)
    assert tokens is not None, "it fits"
    old_adapters = {line.adapter for line in capacity.lines} | capacity.shared
    capacity.lines = [line for line in capacity.lines if line not in leaving]
    adapters = {line.adapter for line in capacity.lines} | capacity.shared
    capacity.free_tokens += sum(line.tokens for line in leaving) - tokens
    capacity.free_sequences += len(leaving) - 1
    capacity.free_interactive -= 1
    capacity.free_adapters += len(old_adapters) - len(adapters) - (need.adapter not in adapters)
    capacity.shared.add(need.adapter)
    capacity.leaving_adapters.update(line.adapter for line in leaving)
    return Claim(capacity.uuid, need.adapter, tokens)
