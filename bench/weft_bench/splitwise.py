"""Splitwise: prompt and token phases on machines of their own, simulated in planning mode (`weft_sim.planning`).

Machines are those of the paper: DGX-A100 and DGX-H100 with BLOOM-176B, by splitwise-sim's published performance model
(github.com/Mutinifni/splitwise-sim @8f99e7d, MIT). Traces are drawn as it draws them: exponential gaps, prompt and
output lengths independently from the Azure traces of 2023 (`--data DIR`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from weft_bench.cpu_context import Bar
from weft_stage.errors import BenchFailed
from weft_stage.lines import Line, Origin, newest, read

# Each is a module `splitwise_PART` with `run(context)`; `pictures(lines)`, where it has one, draws the newest lines.
PARTS = ("compat", "batching", "budget", "throughput", "plan")


class LacksData(BenchFailed):
    """A data set that a part needs is not there."""


@dataclass(frozen=True, slots=True)
class SplitwiseContext:
    """What every part is given. `seconds`: of a drawn trace; `known`: figures that are there, by case and metric."""

    origin: Origin
    data: Path | None
    seconds: float
    seed: int
    jobs: int
    bar: Bar
    known: Mapping[tuple[str, str], float | None]

    def file(self, name: str) -> Path:
        """A file of the data directory. Raises LacksData."""
        path = self.data / name if self.data else None
        if path is None or not path.is_file():
            raise LacksData(f"no {name} in {self.data or '(give --data DIR)'}")
        return path

    def missing(self, case: str, metric: str) -> bool:
        return (case, metric) not in self.known


def figures(context: SplitwiseContext, parts: Sequence[str], complain: Callable[[str], None]) -> Iterator[Line]:
    """The lines of these parts; one whose data is absent is skipped."""
    for part in parts:
        try:
            yield from _module(part).run(context)
        except LacksData as error:
            complain(f"skipped: {part}: {error}")


def about(docs: Path) -> str:
    """What the page says before its figures: of each part what is measured, and its pictures, drawn anew."""
    lines, found, pictures = newest(read(docs / "raw" / "splitwise.jsonl")), [__doc__ or ""], docs / "pictures"
    for part in PARTS:
        module = _module(part)
        title, _, text = (module.__doc__ or "").partition("\n")
        found.append(f"## {title.rstrip('.')}\n{text}".strip())
        for name, svg in module.pictures(lines).items() if hasattr(module, "pictures") else ():
            (pictures / f"splitwise-{name}.svg").write_text(svg, encoding="utf-8")
            found.append(f"![{name}](pictures/splitwise-{name}.svg)")
    return "\n\n".join(text.strip() for text in found)


def _module(part: str) -> Any:
    return import_module(f"weft_bench.splitwise_{part}")
