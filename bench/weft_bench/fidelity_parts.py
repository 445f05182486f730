"""The parts of `weft bench fidelity` that compare with published measurements, and what its page says first."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from weft_bench import fidelity, fidelity_adapters, fidelity_silicon, fidelity_vllm
from weft_bench.cpu_context import Bar
from weft_stage.errors import BenchFailed
from weft_stage.lines import Line, Origin

PARTS = ("silicon", "vllm", "adapters")
ABOUT = "\n\n".join(
    (part.__doc__ or "").strip() for part in (fidelity, fidelity_silicon, fidelity_vllm, fidelity_adapters)
)


def figures(
    origin: Origin, parts: Sequence[str], data: Path | None, fit: Path | None, every: int, jobs: int, bar: Bar
) -> Iterator[Line]:
    """The lines of these parts. Raises BenchFailed without data."""
    for part in parts:
        if data is None:
            raise BenchFailed(f"{part}: give --data, the folder of the data sets")
        if part == "silicon":
            yield from fidelity_silicon.figures(origin, data, fit, bar)
        elif part == "vllm":
            yield from fidelity_vllm.figures(origin, data, bar)
        else:
            yield from fidelity_adapters.figures(origin, data, fit, every, jobs, bar)
