"""A flood on small runners, through every machine and all laws: others get its places, and its answers lose nothing."""

from collections.abc import Sequence
from typing import Any

import pytest

from weft_runner.core.preempt.parking import SequenceParking
from weft_scheduler.core import Requeued, SequencesParked
from weft_sim.process import SimulatedProcess
from weft_sim.simulate import PoolDescription, simulate
from weft_sim.stack import World
from weft_sim.traces import TraceArrival

PLACES = PoolDescription(runners=2, max_sequences=4, best_batch=4, total_pages=512, adapters=0, cpu=False)
PAGES = PoolDescription(
    runners=2, max_sequences=16, best_batch=4, total_pages=20, page_kib=1.0, swaps=True, adapters=0, cpu=False
)


def arrivals() -> list[TraceArrival]:
    """Sixty long answers at once, then one with a long prompt of another tenant every half second."""
    flood = [TraceArrival(0.01 * number, 16, 60, tenant="flood") for number in range(60)]
    return [*flood, *(TraceArrival(3.0 + 0.5 * number, 112, 8, tenant="victim") for number in range(12))]


@pytest.mark.parametrize("pool", [PLACES, PAGES], ids=["places", "pages"])
def test_a_flood_makes_room_and_its_answers_are_whole(pool: PoolDescription, monkeypatch: pytest.MonkeyPatch) -> None:
    parked, again, copied = list[str](), set[str](), list[str]()
    defer = SequenceParking.defer

    def deferred(parking: SequenceParking, start: Any) -> None:
        copied.append(start.start.request_id)
        defer(parking, start)

    def watch(world: World) -> None:
        laws = world.scheduler.on_effects
        assert laws is not None, "the laws are checked"

        def counted(process: SimulatedProcess, event: object, effects: Sequence[Any]) -> None:
            parked.extend(one for effect in effects if isinstance(effect, SequencesParked) for one in effect.parks)
            again.update(effect.reason for effect in effects if isinstance(effect, Requeued))
            laws(process, event, effects)

        world.scheduler.on_effects = counted

    monkeypatch.setattr(SequenceParking, "defer", deferred)
    figures = simulate(pool, arrivals(), check=True, attach=watch).figures
    assert not figures.failures
    assert [one.tokens for one in figures.served if one.tenant == "flood"] == [60] * 60
    assert parked
    assert again <= {"no_capacity"}, "nothing is computed again"
    assert bool(copied) == (pool is PAGES)
    longest_s = max(one.ttft_ms for one in figures.served if one.tenant == "victim") / 1e3
    assert longest_s < 60 * 0.02, "shorter than the flood's shortest answer, behind which it would have waited"
