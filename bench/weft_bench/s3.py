"""`weft bench s3`: scheduling with speculated output lengths, in parts.

Simulated figures come from the machines that ship (`weft_sim`), on hardware that the part describes; `live`, `penalty`
and parts whose names end in `-live` run stacks. Lengths are those of public traces (`--data DIR`); a part whose traces
are absent is skipped.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from math import inf
from pathlib import Path
from typing import Any

from weft_bench.cpu_context import Bar
from weft_stage.errors import BenchFailed
from weft_stage.lines import Line, Origin, newest, read

LOADS = (1.6, 1.3, 1.0)
# Each is a module `s3_PART` with `run(context)`; `pictures(lines)`, where it has one, draws the newest lines.
PARTS = (
    "queue",
    "live",
    "penalty",
    "reservations",
    "unasked",
    "paper",
    "punica",
    "consolidation",
    "consolidation-live",
    "fairness",
    "fairness-live",
)  # fmt: skip


class NoData(BenchFailed):
    """A data set that a part needs is not there."""


@dataclass(frozen=True, slots=True)
class Context:
    """What every part is given. `traces`: to measure; `loads`: of a queue, in its capacity under fcfs; `requests`: of
    a queue; `jobs`: simulations at a time; `known`: figures that are there, by case and metric; `until`: on the
    monotonic clock, when no further live cell begins.
    """

    origin: Origin
    data: Path | None
    traces: Sequence[str]
    loads: Sequence[float]
    pictures: Path
    seed: int
    quick: bool
    requests: int
    jobs: int
    bar: Bar
    complain: Callable[[str], None]
    known: Mapping[tuple[str, str], float | None] = field(default_factory=dict[tuple[str, str], float | None])
    until: float = inf

    def file(self, name: str) -> Path:
        """A file of the data directory. Raises NoData."""
        path = self.data / name if self.data else None
        if path is None or not path.is_file():
            raise NoData(f"no {name} in {self.data or '(give --data DIR)'}")
        return path

    def missing(self, case: str, metric: str) -> bool:
        """Whether this cell is to be measured now: it is not there yet, and there is time."""
        if (case, metric) in self.known:
            return False
        if time.monotonic() < self.until:
            return True
        self.complain(f"left for the same command's next run: {case}")
        return False

    def draw(self, name: str, svg: str) -> None:
        """Keep a picture of the page."""
        self.pictures.mkdir(parents=True, exist_ok=True)
        (self.pictures / f"{name}.svg").write_text(svg, encoding="utf-8")


def figures(context: Context, parts: Sequence[str]) -> Iterator[Line]:
    """The lines of these parts; one whose data is absent is skipped."""
    for part in parts:
        try:
            yield from _module(part).run(context)
        except NoData as error:
            context.complain(f"skipped: {part}: {error}")


def about(pictures: Path, folder: Path) -> str:
    """What the page says before its figures: of each part what is measured, and its pictures, drawn anew."""
    lines, found = newest(read(folder / "raw" / "s3.jsonl")), [__doc__ or ""]
    for part in PARTS:
        module = _module(part)
        for name, svg in module.pictures(lines).items() if hasattr(module, "pictures") else ():
            pictures.mkdir(parents=True, exist_ok=True)
            (pictures / f"{part}-{name}.svg").write_text(svg, encoding="utf-8")
        title, _, text = (module.__doc__ or "").partition("\n")
        found.append(f"## {title.rstrip('.')}\n{text}".strip())
        found += [
            f"![{path.stem}]({path.relative_to(folder).as_posix()})" for path in sorted(pictures.glob(f"{part}*.svg"))
        ]
    return "\n\n".join(text.strip() for text in found)


def _module(part: str) -> Any:
    return import_module(f"weft_bench.s3_{part.replace('-', '_')}")
