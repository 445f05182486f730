"""Choice of batch requests that leave for interactive ones that wait; `README.md` in this folder has the rules."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class BatchSequence(NamedTuple):
    """A batch request on a runner that may leave."""

    request_id: str
    adapter: str
    tokens: int  # tokens that its pages hold
    computed_tokens: int  # tokens that are lost with it
    arrived_s: float


@dataclass(slots=True)
class Capacity:
    """A runner that has batch requests. What is about to leave counts as free.

    `free_adapters`: how many adapters it may take beyond those in use; `shared`: adapters in use by others than these
    batch requests.
    """

    uuid: str
    free_tokens: int
    free_sequences: int
    free_interactive: int  # places that the token time leaves to interactive ones, whatever batch requests there are
    free_adapters: int
    shared: set[str]
    lines: list[BatchSequence]


class Need(NamedTuple):
    """An interactive request that waits. `tokens`: what it needs of each runner where it can run, by uuid.

    A pair: where its adapter is in use there, and where it is not.
    """

    adapter: str  # "": the base
    tokens: Mapping[str, tuple[int, int]]

    def tokens_on(self, uuid: str, *, in_use: bool) -> int | None:
        """Return the tokens that it needs of a runner; None: it cannot run there."""
        pair = self.tokens.get(uuid)
        return pair[not in_use] if pair is not None else None


def select_preempted(needs: Iterable[Need], capacities: Sequence[Capacity]) -> list[tuple[str, str]]:
    """Return (runner, request) of victims, so that as many of `needs` as possible find room; `capacities` is used up.

    In the order of `needs`: a request takes room that is there, or about to be, before anybody leaves for it.
    """
    victims: list[tuple[str, str]] = []
    for need in needs:
        found = [(leaving, capacity) for capacity in capacities if (leaving := _leaving(need, capacity)) is not None]
        if not found:
            continue
        leaving, capacity = min(found, key=lambda one: (_lost(one[0]), one[1].uuid))
        victims += [(capacity.uuid, victim.request_id) for victim in leaving]
        _take(need, capacity, leaving)
    return victims


def _leaving(need: Need, capacity: Capacity) -> list[BatchSequence] | None:
    """Return the requests that have to leave that runner for `need`, least progress first; None: it does not help."""
    leaving: list[BatchSequence] = []
    if not _in_use(need.adapter, capacity, ()) and not capacity.free_adapters:
        of_adapter: dict[str, list[BatchSequence]] = {}
        for one in capacity.lines:
            if one.adapter not in capacity.shared:
                of_adapter.setdefault(one.adapter, []).append(one)
        if not of_adapter:
            return None
        leaving = min(of_adapter.values(), key=_lost)
    rest = [one for one in capacity.lines if one not in leaving]
    rest.sort(key=lambda one: (one.computed_tokens, -one.arrived_s, one.request_id))
    selected = list(leaving)
    while not _fits(need, capacity, selected):
        if not rest:
            return None
        selected.append(rest.pop(0))
    for one in reversed(selected[len(leaving) :]):  # a small one that was selected before a large one may stay
        fewer = [other for other in selected if other is not one]
        if _fits(need, capacity, fewer):
            selected = fewer
    return selected


def _in_use(adapter: str, capacity: Capacity, leaving: Sequence[BatchSequence]) -> bool:
    """True where an adapter is in use once `leaving` have left; the base always is."""
    of_lines = any(one.adapter == adapter and one not in leaving for one in capacity.lines)
    return not adapter or adapter in capacity.shared or of_lines


def _fits(need: Need, capacity: Capacity, leaving: Sequence[BatchSequence]) -> bool:
    tokens = need.tokens_on(capacity.uuid, in_use=_in_use(need.adapter, capacity, leaving))
    if tokens is None or capacity.free_tokens + sum(one.tokens for one in leaving) < tokens:
        return False
    return capacity.free_interactive > 0 and capacity.free_sequences + len(leaving) > 0


def _lost(leaving: Iterable[BatchSequence]) -> tuple[int, int]:
    computed = [one.computed_tokens for one in leaving]
    return sum(computed), len(computed)


def _take(need: Need, capacity: Capacity, leaving: Sequence[BatchSequence]) -> None:
    """The request has its place there."""
    tokens = need.tokens_on(capacity.uuid, in_use=_in_use(need.adapter, capacity, leaving))
    assert tokens is not None, "it fits"
    before = {one.adapter for one in capacity.lines} | capacity.shared
    capacity.lines = [one for one in capacity.lines if one not in leaving]
    after = {one.adapter for one in capacity.lines} | capacity.shared
    capacity.free_tokens += sum(one.tokens for one in leaving) - tokens
    capacity.free_sequences += len(leaving) - 1
    capacity.free_interactive -= 1
    capacity.free_adapters += len(before) - len(after) - (need.adapter not in after)
    capacity.shared.add(need.adapter)
