"""`weft bench predictor`: how good predicted lengths are, on real prompts and answers.

Each set is split by prompt into 60 % to fit, 20 % to calibrate, 20 % to measure. The accuracy of S3's ten buckets
stands beside the share of the commonest bucket (its baseline): where they are equal, the buckets say nothing.
`reserved / used` is S3's packing figure of reserving the calibrated p90, beside the best constant of the fitted part.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft_bench.data import find, rows
from weft_bench.lines import Line, Origin
from weft_predictor.datasets import AnsweredPrompt
from weft_predictor.evaluation import Report
from weft_predictor.training import measure, split, train

MAX_CONTEXT_TOKENS = 2048
UNBIASED = {"random", "pr5000"}  # the other sources of the Alpaca set were chosen by length or quality


@dataclass(frozen=True, slots=True)
class DataSet:
    """A file of `--data DIR`; `keep` chooses rows, `adapter` names what stands for the adapter of a row."""

    name: str
    file: str
    keep: Callable[[dict[str, Any]], bool]
    adapter: Callable[[dict[str, Any]], str]


SETS = (
    DataSet("Alpaca", "alpaca_15k.jsonl.gz", lambda row: bool(UNBIASED & set(row["src"])), lambda _: "base"),
    DataSet("Dolly, a category as an adapter", "dolly_3k.jsonl.gz", lambda _: True, lambda row: row["category"]),
)


def figures(origin: Origin, data: Path | None, skipped: Callable[[str], None]) -> Iterator[Line]:
    """The lines of every set that is there; `skipped` hears of the others."""
    for data_set in SETS:
        path = find(data_set.file, data)
        if path is None:
            skipped(f"skipped: {data_set.name}: there is no {data_set.file} in {data or '(give --data DIR)'}")
            continue
        parts = split(_row(raw, data_set) for raw in rows(path) if data_set.keep(raw))
        yield from lines(origin, data_set.name, measure(train(parts), parts, MAX_CONTEXT_TOKENS))


def lines(origin: Origin, case: str, report: Report) -> Iterator[Line]:
    """The figures of one report."""
    by_policy = {packing.policy: packing for packing in report.packings}
    model, constant = by_policy["this model, p90"], by_policy["best constant"]
    yield origin.line(case, "bucket accuracy", report.bucket_accuracy, "share", baseline=report.majority)
    yield origin.line(case, "Kendall tau", report.kendall_tau, "")
    yield origin.line(case, "mean absolute error", report.mae_tokens, "tokens", baseline=report.mae_constant)
    yield origin.line(case, "coverage of p90, at least", report.coverage, "share", target=">= 0.87")
    yield origin.line(case, "coverage of p90, at most", report.coverage, "share", target="<= 0.93")
    yield origin.line(case, "reserved / used", model.initial, "", baseline=constant.initial)
    yield origin.line(case, "overruns", model.overrun, "share", baseline=constant.overrun)
    yield origin.line(case, "reserved / used after doublings", model.final, "", baseline=constant.final)
    yield origin.line(case, "doublings per request", model.doublings, "", baseline=constant.doublings)


def _row(raw: dict[str, Any], data_set: DataSet) -> AnsweredPrompt:
    prompt = f"{raw['instruction']}\n{raw['input']}"
    return AnsweredPrompt(
        prompt=prompt, tokens=int(raw["n_out"]), adapter=data_set.adapter(raw), prompt_tokens=int(raw["n_in"])
    )
