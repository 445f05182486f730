"""`weft bench fidelity --part silicon`: performance models (`weft_sim.performance`) beside published points.

The points are those of NVIDIA's aiconfigurator: H100 and H200; vLLM, TensorRT-LLM, SGLang; Llama-3.1-8B and 70B,
Qwen3-32B; 1 to 8 devices, 4 to 512 clients. Held out by model and by hardware: constants are fitted on the points of
the other models, or of the other hardware. `off by` is how far predicted over measured is from 1. Not predicted: five
disaggregated points. Counted, yet not fitted on: 28 points, 7 without a number of clients and 21 of a sweep in which
some are faster than the data sheet allows; "measured as described" leaves these out. What clients do is read from how
points are named (`fidelity_points.Protocol`). Constants are held out; what is not: the form of the terms, the priors
(`fidelity_fit.PRIORS`) and how many prompts are computed before a request's own where clients come back in groups.
They were chosen with all points in view.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from weft_bench.cpu_context import Bar
from weft_bench.data import find, table
from weft_bench.fidelity_fit import Fitted, fit, ratios, toml
from weft_bench.fidelity_points import COLUMNS, Array, Point, play, points
from weft_sim.performance.accelerator import accelerator
from weft_sim.performance.architecture import architecture
from weft_sim.performance.roofline import Efficiency, Roofline
from weft_stage.lines import Line, Origin

FILE = "silicon_dense_h100_h200.csv.gz"
METRICS = ("TTFT", "TPOT", "end to end")
TARGETS = {("TTFT", 50): 0.17, ("TPOT", 50): 0.07, ("end to end", 50): 0.07, ("end to end", 90): 0.15}
IMPOSSIBLE = 0.95  # of what the data sheet allows; a source with such a point was not measured as it is described
IDEAL = Efficiency(
    weights_bandwidth=1, kv_bandwidth=1, bf16_compute=1, fp8_compute=1, attention_compute=1, short_tokens=0,
    tile_waves=0, layer_us=0, step_us=0, row_us=0, prompt_us=0, reduce_us=0, reduce_bandwidth=1, activation_passes=0,
    request_ms=0,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Errors:
    """Predicted over measured, [points] each, in the order of METRICS."""

    points: Sequence[Point]
    ratios: Sequence[Array]

    def lines(self, origin: Origin, case: str, aimed: bool = True) -> Iterator[Line]:
        """Yield how far off the predictions are, over all points."""
        yield origin.line(case, "points", len(self.points), "")
        for name, found in zip(METRICS, self.ratios, strict=True):
            off = np.abs(found - 1)
            for percent in (50, 90):
                most = TARGETS.get((name, percent)) if aimed else None
                value = float(np.quantile(off, percent / 100))
                yield origin.line(
                    case, f"{name} off by, p{percent}", value, "share", target=f"<= {most:g}" if most else None
                )

    def of(self, chosen: Callable[[Point], bool]) -> "Errors":
        """Return the errors of the points that `chosen` takes."""
        kept = np.array([chosen(one) for one in self.points])
        return Errors([one for one in self.points if chosen(one)], [found[kept] for found in self.ratios])


def figures(origin: Origin, data: Path, constants: Path | None, bar: Bar) -> Iterator[Line]:
    """Compare all points; with `constants` the shipped ones, fitted on every point, are written there."""
    path = find(FILE, data)
    if path is None:
        return
    known = points(table(path, COLUMNS))
    usable = believable(known)
    folds = [("model", one.model) for one in known] + [("hardware", one.hardware) for one in known]
    folds = list(dict.fromkeys(folds))
    found = dict[str, list[Errors]]()
    with bar("fits", len(folds) + 1) as advanced:
        for kind, name in folds:
            within = [one for one in usable if getattr(one, kind) != name]
            found.setdefault(kind, []).append(errors([one for one in known if getattr(one, kind) == name], fit(within)))
            advanced(1)
        all_of_it = fit(usable)
        advanced(1)
    known_well = set(usable)
    for kind, parts in found.items():
        held = joined(parts)
        yield from held.lines(origin, f"held out by {kind}")
        described = held.of(lambda one: one in known_well)
        yield from described.lines(origin, f"held out by {kind}, measured as described", aimed=False)
        for source in dict.fromkeys(one.source for one in held.points):
            case = f"held out by {kind}, {', '.join(source)}"
            of_source = held.of(lambda one, source=source: one.source == source)
            yield from of_source.lines(origin, case, aimed=False)
            for name, ratio in zip(METRICS, of_source.ratios, strict=True):
                yield origin.line(case, f"{name}, predicted / measured, p50", float(np.median(ratio)), "")
    yield from errors(known, all_of_it).lines(origin, "fitted on all", aimed=False)
    unused = len(known) - len(usable)
    yield origin.line("fitted on all", "points left out of fits", unused, "")
    if constants:
        shipped = {name: one.efficiency for name, one in all_of_it.items() if name}
        constants.write_text(toml(shipped, origin.command, about(usable)), encoding="utf-8")


def about(usable: Sequence[Point]) -> list[str]:
    """Say what chose the constants."""
    sources = dict.fromkeys(" ".join(each for each in one.source) for one in usable)
    return [f"Fitted on {len(usable)} points of {FILE}:", *(f"- {source}" for source in sources)]


def believable(known: Sequence[Point]) -> list[Point]:
    """Return the points to fit on: clients are counted, and none of their source is beyond the data sheet."""
    beyond = {one.source for one in known if one.counted and least_s(one) / one.e2e_s > IMPOSSIBLE}
    return [one for one in known if one.counted and one.source not in beyond]


def least_s(one: Point) -> float:
    """Return the least time end to end: every client's prompt is computed, every token's step reads."""
    model = Roofline(
        accelerator(one.hardware), architecture(one.model), IDEAL, one.tensor_parallel, one.dtype, one.protocol.kv_dtype
    )
    prompt = one.mean_prompt
    return float(
        one.clients * model.seconds_of(1, prompt, prompt * prompt / 2, 0, 0)
        + one.mean_gaps * model.seconds_of(0, 0, 0, one.clients, 0)
    )


def errors(chosen: Sequence[Point], fitted: dict[str, Fitted]) -> Errors:
    """Return how far the constants are from these points."""
    parts = list[Errors]()
    for engine in dict.fromkeys(one.backend for one in chosen):
        constants = fitted.get(engine, fitted[""])
        played = play([one for one in chosen if one.backend == engine], constants.efficiency)
        parts.append(Errors([one for group in played for one in group.points], ratios(played, constants)))
    return joined(parts)


def joined(parts: Sequence[Errors]) -> Errors:
    """Join the errors of several parts."""
    together = [np.concatenate([part.ratios[i] for part in parts]) for i in range(len(METRICS))]
    return Errors([one for part in parts for one in part.points], together)
