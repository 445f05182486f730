"""Splitwise's placement against a plain search over random fleets."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from weft.domain.runner import RunnerRole
from weft_scheduler.core.policy.placement.policy import Choice, PlacementRequest, RunnerLoad
from weft_scheduler.core.policy.placement.runner_index import RunnerShape
from weft_scheduler.core.policy.placement.splitwise import Splitwise, can_split, domain_of

SHAPES = [
    RunnerShape(64, 1000, "x", 0, 0, "m"),
    RunnerShape(64, 1000, "y", 0, 0, "m"),
    RunnerShape(8, 1000, "x", 0, 0, "other"),
    RunnerShape(64, 1000, "x"),
]
PROMPT, TOKEN, MIXED = RunnerRole.PROMPT, RunnerRole.TOKEN, RunnerRole.MIXED


@st.composite
def loads(draw: st.DrawFn, uuid: str) -> RunnerLoad:
    shape = draw(st.sampled_from(SHAPES))
    role = draw(st.sampled_from([PROMPT, TOKEN, MIXED])) if shape.kv_layout else MIXED
    free, pending = draw(st.sampled_from([5, 11, 20, 21, 40, 60, 100])), draw(st.integers(0, 60))
    busy = tuple(draw(st.sets(st.sampled_from(["d1", "d2"]))))
    return RunnerLoad(uuid, shape, 1, 9, free, busy, draw(st.booleans()), 0, role, 100 - free, pending, pending < 50)


FLEETS = st.sets(st.sampled_from("abcdefgh")).flatmap(lambda uuids: st.tuples(*[loads(u) for u in sorted(uuids)]))


class PlainSearch:
    """The rules as they are written down, over all runners."""

    def __init__(self, fleet: tuple[RunnerLoad, ...], request: PlacementRequest, across: bool, closed: Any) -> None:
        self.fleet, self.request, self.across, self.closed = fleet, request, across, closed

    def takes(self, load: RunnerLoad, tokens: int) -> bool:
        request, shape = self.request, load.shape
        suits = shape.fits(request.rank, request.context_tokens, request.numerics_class) and shape not in self.closed
        slot = request.adapter in ("", *load.busy_adapters) or not load.full
        return suits and slot and load.uuid not in request.avoid and load.free_tokens >= tokens

    def best(self, role: RunnerRole, tokens: int, *, by_queue: bool, domain: Any = None) -> str | None:
        found: tuple[int, str] | None = None
        for shape in {load.shape for load in self.fleet}:
            if domain is not None and domain_of(shape, self.across) != domain:
                continue
            of_shape = [
                (-(load.pending_prompt_tokens if by_queue else load.reserved_tokens), load.uuid)
                for load in self.fleet
                if load.shape == shape
                and load.role is role
                and self.takes(load, tokens)
                and (load.queue_open or not by_queue)
            ]
            if not of_shape:
                continue
            best = max(of_shape)
            holding = [one for one in of_shape if self.request.adapter in self.load(one[1]).busy_adapters]
            if holding and max(holding)[0] + tokens >= best[0]:
                best = max(holding)
            found = best if found is None else max(found, best)
        return found[1] if found else None

    def load(self, uuid: str) -> RunnerLoad:
        return next(load for load in self.fleet if load.uuid == uuid)

    def place(self) -> Choice | None:
        request = self.request
        needed, first = request.footprint_tokens, request.prefill_tokens + 1
        if request.one_runner:
            for role, by_queue in ((MIXED, True), (TOKEN, False), (PROMPT, True)):
                if uuid := self.best(role, needed, by_queue=by_queue):
                    return Choice(uuid)
            return None
        choices: list[tuple[int, int, str, Choice]] = []
        for domain in {domain_of(load.shape, self.across) for load in self.fleet}:
            prompt = token = None
            if domain.kv_layout:
                prompt = self.best(PROMPT, first, by_queue=True, domain=domain)
                token = self.best(TOKEN, needed, by_queue=False, domain=domain)
            whole = self.best(MIXED, needed, by_queue=True, domain=domain)
            sides = (prompt is not None) + (token is not None)
            if not sides and whole:
                choices.append((0, -self.load(whole).pending_prompt_tokens, whole, Choice(whole)))
            elif domain.kv_layout:
                prompt = prompt or self.best(MIXED, first, by_queue=True, domain=domain)
                token = token or self.best(MIXED, needed, by_queue=False, domain=domain)
                if prompt and token:
                    choices.append((sides, -self.load(prompt).pending_prompt_tokens, prompt, Choice(prompt, token)))
        return max(choices)[3] if choices else None


@given(
    fleet=FLEETS,
    request=st.builds(
        PlacementRequest,
        adapter=st.sampled_from(["", "d1", "d3"]),
        rank=st.sampled_from([0, 16]),
        footprint_tokens=st.sampled_from([20, 40, 60]),
        context_tokens=st.sampled_from([50, 2000]),
        avoid=st.sets(st.sampled_from("abc")),
        numerics_class=st.sampled_from(["", "", "x"]),
        prefill_tokens=st.sampled_from([4, 10, 19]),
        one_runner=st.booleans(),
    ),
    across=st.booleans(),
    closed=st.sets(st.sampled_from(SHAPES), max_size=1),
)
def test_the_index_finds_what_a_plain_search_finds(
    fleet: tuple[RunnerLoad, ...], request: PlacementRequest, across: bool, closed: set[RunnerShape]
) -> None:
    policy = Splitwise(across)
    for load in fleet:
        policy.update(load._replace(role=MIXED, free_tokens=1))  # as it was before
        policy.update(load)
    choice = policy.place(request, closed)
    assert choice == PlainSearch(fleet, request, across, closed).place()
    if choice is not None and not request.one_runner:
        assert policy.has_capacity(closed)
    if choice is not None and choice.token is not None:
        prompt, token = (next(load for load in fleet if load.uuid == uuid) for uuid in choice)
        assert prompt.shape.kv_layout == token.shape.kv_layout != ""
        assert across or prompt.shape.numerics_class == token.shape.numerics_class
    fitting = [load for load in fleet if load.shape.fits(request.rank, request.context_tokens)]
    pairs = [(a.shape, b.shape) for a in fitting for b in fitting if (a.role, b.role) == (PROMPT, TOKEN)]
    splits = any(domain_of(a, across) == domain_of(b, across) for a, b in pairs) or MIXED in {r.role for r in fitting}
    accepting = {(load.role, load.shape) for load in fleet}
    assert can_split(accepting, request.rank, request.context_tokens, across) == splits
    for_tokens = [load.free_tokens for load in fleet if load.role is not PROMPT]
    assert policy.free_tokens() == max(for_tokens, default=0)
    assert policy.placeable_shapes(request) == {
        load.shape
        for load in fleet
        if load.shape.fits(request.rank, request.context_tokens, request.numerics_class)
        and load.uuid not in request.avoid
        and (load.queue_open or load.role is not PROMPT)
    }


def test_a_pair_comes_before_one_runner_for_both_phases_and_of_pairs_that_with_the_shorter_queue() -> None:
    policy = Splitwise()
    policy.update(RunnerLoad("z", SHAPES[3], 1, 9, 50, (), False, 0, MIXED))
    for pair, (shape, pending) in enumerate(((SHAPES[0], 10), (SHAPES[2], 5)), 1):
        policy.update(RunnerLoad(f"p{pair}", shape, 1, 9, 50, (), False, 0, PROMPT, 50, pending))
        policy.update(RunnerLoad(f"t{pair}", shape, 1, 9, 50, (), False, 0, TOKEN, 50))
    assert policy.place(PlacementRequest("", 0, 10, 50, prefill_tokens=4), ()) == Choice("p2", "t2")


def test_runners_that_leave_are_forgotten() -> None:
    policy = Splitwise()
    for role in RunnerRole:
        policy.update(RunnerLoad("a", SHAPES[0], 1, 9, 5, (), False, 0, role))
        assert {uuid for _, uuid in policy.entries()} == {"a"}
    policy.remove("a")
    assert policy.entries() == {}
    assert not policy.has_capacity(())
