"""Published points: their iterations weigh what the simulation took, and the shipped constants are what a fit gives."""

from dataclasses import replace
from pathlib import Path

import pytest

from weft_bench.data import rows
from weft_bench.fidelity_fit import PRIORS, fit
from weft_bench.fidelity_points import Point, Protocol, limits, play, points
from weft_bench.fidelity_silicon import FILE, believable
from weft_sim.performance import models

ROOT = Path(__file__).parents[3]
DATA = [folder for folder in (ROOT / "data", ROOT.parent / "shared" / "data") if (folder / FILE).is_file()]
POINT = Point("a", "vllm", "1", "meta-llama/Llama-3.1-8B", "H100", "bf16", 1, 8, 512, 32, 0.1, 0.01, Protocol(rounds=3))


def test_a_point_s_times_are_those_of_its_simulation() -> None:
    """The sums over iterations give what the requests saw."""
    (played,) = play([POINT, replace(POINT, clients=3)], models.efficiency("vllm"))
    ttft, tpot = played.times(replace(models.efficiency("vllm"), request_ms=0), 3.0)
    e2e = [t + o * POINT.mean_gaps for t, o in zip(ttft, tpot, strict=True)]
    assert all(0 < t < e for t, e in zip(ttft, e2e, strict=True))
    step = played.roofline.seconds_of(0, 0, 0, 8, 8 * 530)
    assert float(tpot[0]) == pytest.approx(float(step), rel=0.35)
    assert limits(POINT, played.roofline).kv_tokens > 300_000


@pytest.mark.long  # of the data and the fit alone, which no other change touches
@pytest.mark.skipif(not DATA, reason="no data sets")
def test_shipped_constants_are_what_the_fit_gives() -> None:
    shipped = {name: models.efficiency(name) for name in ("vllm", "trtllm", "sglang")}
    found = fit(believable(points(rows(DATA[0] / FILE))))
    for name, constants in shipped.items():
        for each in PRIORS:
            assert getattr(found[name].efficiency, each) == pytest.approx(getattr(constants, each), rel=0.02), each
