"""`weft bench slots`: its step times come from measured lines, and a known run is not repeated."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from weft_bench import slots
from weft_bench.errors import BenchFailed
from weft_bench.lines import Line, Origin, append

ORIGIN = Origin("command", "machine", "versions")


@contextmanager
def bar(label: str, length: int) -> Generator[Callable[[int], None]]:
    del label, length
    yield lambda _: None


def test_step_times_are_the_newest_of_that_model_and_never_fall(tmp_path: Path) -> None:
    raw = tmp_path / "fidelity.jsonl"
    with pytest.raises(BenchFailed, match="fidelity"):
        slots.engine_of(raw)
    values = {"step of 1 tokens": 9000.0, "step of 8 tokens": 12000.0, "step of 16 tokens": 11000.0}
    lines = [ORIGIN.line("m135, cost", metric, value, "us") for metric, value in values.items()]
    other = ORIGIN.line("quickstart, cost", "step of 1 tokens", 1.0, "us")
    append(raw, [*lines, ORIGIN.line("m135, cost", "adapter in a step", 500.0, "us"), other])
    times = slots.engine_of(raw)
    assert times.curve == ((1.0, 9.0), (8.0, 12.0), (16.0, 12.0))
    assert times.adapter_ms == 0.5


def test_what_is_known_is_not_simulated_again(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[int] = []

    def measure(*arguments: object) -> slots.Measured:
        bound = arguments[2]
        assert isinstance(bound, int)
        runs.append(bound)
        return slots.Measured(95.0 if bound == slots.UNBOUNDED else 100.0, 0.1)

    monkeypatch.setattr(slots, "measure", measure)
    times = slots.StepTimes(1.0, 1.0, 1.0)

    def figures(known: list[Line]) -> list[Line]:
        return list(slots.figures(ORIGIN, times, known, seed=0, quick=True, bar=bar))

    first = figures([])
    assert runs == [slots.UNBOUNDED, *slots.SLOTS]
    assert first[-1].value == 0.95
    assert figures(first)[-1].value == 0.95
    assert len(runs) == 1 + len(slots.SLOTS), "the second time nothing ran"
