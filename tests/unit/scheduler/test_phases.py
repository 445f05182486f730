"""A request's phases follow one another as the table says, and in no other way."""

from itertools import product

import pytest

from weft.domain.request import Submit
from weft_scheduler.core.model.request import NEXT_PHASES, Phase, Request

WAY = {
    Phase.UNPLACED: (),
    Phase.WAITING: (Phase.WAITING,),
    Phase.ASSIGNED: (Phase.ASSIGNED,),
    Phase.RUNNING: (Phase.ASSIGNED, Phase.RUNNING),
    Phase.STOPPING: (Phase.ASSIGNED, Phase.STOPPING),
}


def enter(request: Request, phase: Phase) -> None:
    request._enter(phase)  # pyright: ignore[reportPrivateUsage]


def request_in(phase: Phase) -> Request:
    request = Request(Submit("r", "acme/p", "acme", "m", "", 16, 100), "g", 0.0, 1, newcomer=True)
    for step in WAY[phase]:
        enter(request, step)
    return request


@pytest.mark.parametrize(("before", "after"), [*product(Phase, Phase)])
def test_a_phase_follows_only_where_the_table_allows_it(before: Phase, after: Phase) -> None:
    request = request_in(before)
    if after in NEXT_PHASES[before]:
        enter(request, after)
        assert request.phase is after
    else:
        with pytest.raises(AssertionError):
            enter(request, after)
        assert request.phase is before
