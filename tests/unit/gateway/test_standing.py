"""Whether an adapter answers now, and if not, why."""

import pytest

from weft.domain.adapter import Tier
from weft.domain.fleet import FleetAdapter, FleetReport, FleetRunner
from weft.domain.routes import PoolRoute
from weft.domain.runner import RunnerRole
from weft_gateway.core.standing import places_by_digest, standing

READY, EMPTY = (PoolRoute("acme/p", "", "", ready_runners=count) for count in (1, 0))
LOADED, FAILED = FleetAdapter("sha256:a", Tier.DEVICE), FleetAdapter("sha256:a", Tier.HOST, error="rank 7")


@pytest.mark.parametrize(
    ("pool", "places", "up", "state", "why"),
    [
        (READY, [], True, "served", ""),
        (READY, [LOADED, FAILED], True, "served", ""),
        (READY, [FAILED], True, "failing", "rank 7"),
        (EMPTY, [FAILED], True, "waiting", "up to 30 s"),
        (None, [], True, "waiting", "not known"),
        (READY, [LOADED], False, "waiting", "scheduler is not connected"),
    ],
)
def test_an_adapter_stands_where_its_next_request_would(
    pool: PoolRoute | None, places: list[FleetAdapter], up: bool, state: str, why: str
) -> None:
    found = standing(pool, places, 30.0, scheduler_up=up)
    assert (found.state, why in found.reason) == (state, True)


def test_every_place_of_an_adapter_is_found() -> None:
    runner = FleetRunner("a", "acme/p", "1", True, False, RunnerRole.MIXED, *[0] * 10, adapters=(LOADED, FAILED))
    assert places_by_digest(FleetReport((runner,))) == {"sha256:a": [LOADED, FAILED]}
