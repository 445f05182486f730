"""`weft bench predict`: how good predicted lengths are, on real prompts and answers: the ridge, and S3's encoder.

Each set is split by prompt into 60 % to fit, 20 % to calibrate, 20 % to measure. docs/benchmarks/scheduling.md has the
method.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from weft.domain.prediction import PredictItem
from weft.domain.request import FinishReason, Outcome
from weft_bench import cases
from weft_bench.data import find, rows
from weft_bench.run import Run
from weft_predictor.core import LengthModel
from weft_predictor.core.encoder import class_of, tenths
from weft_predictor.encoder_files import read_model
from weft_predictor.errors import BadData
from weft_predictor_train.datasets import AnsweredPrompt
from weft_predictor_train.evaluation import evaluate
from weft_predictor_train.training import EncoderOptions, Split, save_model, split, train, train_encoder_model
from weft_stage.errors import BenchFailed
from weft_stage.lines import Line, Origin

MAXIMA = (512, 2_048)  # of S3's ten equal buckets
UNBIASED = {"random", "pr5000"}  # the other sources of the Alpaca set were chosen by length or quality
TIMED_PROMPTS = 200
DRIFT = ("random", "helpful45", "claude45")
SETTLED = (300, 1_300)  # requests after the start of a drift: not those before, as many in all
EPOCHS = 2  # the third already has a higher held-out loss on Alpaca, at every size measured
MODELS = 8  # of the AlpacaEval matrix, evenly spaced among those that are models
NO_MODELS = {"id", "NullModel", "gpt4_gamed"}
Rows = Iterator[AnsweredPrompt]


@dataclass(frozen=True, slots=True)
class DataSet:
    """Some files of `--data DIR`, and what makes rows of them."""

    name: str
    files: tuple[str, ...]
    read: Callable[[Sequence[Path]], Rows]


def _instructions(paths: Sequence[Path], *, keep: Callable[[Any], bool], adapter: Callable[[Any], str]) -> Rows:
    for raw in filter(keep, rows(paths[0])):
        yield AnsweredPrompt(f"{raw['instruction']}\n{raw['input']}", adapter(raw), int(raw["n_in"]), int(raw["n_out"]))


def alpaca_rows(paths: Sequence[Path]) -> Rows:
    """The rows that were not chosen by length or quality."""
    return _instructions(paths, keep=lambda row: bool(UNBIASED & set(row["src"])), adapter=lambda _: "base")


def _dolly(paths: Sequence[Path]) -> Rows:
    return _instructions(paths, keep=lambda _: True, adapter=lambda row: row["category"])


def _alpaca_eval(paths: Sequence[Path]) -> Rows:
    prompts = {str(row["id"]): row for row in rows(paths[0])}
    for lengths in rows(paths[1]):
        models = sorted(lengths.keys() - NO_MODELS)
        prompt = prompts[lengths["id"]]
        for model in models[:: len(models) // MODELS][:MODELS]:
            yield AnsweredPrompt(prompt["instruction"], model, int(prompt["n_in"]), int(lengths[model]))


SETS = (
    DataSet("Alpaca", ("alpaca_15k.jsonl.gz",), alpaca_rows),
    DataSet("Dolly, a category as an adapter", ("dolly_3k.jsonl.gz",), _dolly),
    DataSet(
        "AlpacaEval, 8 models as adapters",
        ("alpacaeval_prompts.jsonl.gz", "alpacaeval_output_lengths.csv.gz"),
        _alpaca_eval,
    ),
)


def figures(options: cases.Predict, run: Run) -> Iterator[Line]:
    """Measure every set that is there. Raises BenchFailed."""
    origin, data = run.origin("scipy"), options.data
    for data_set in SETS:
        paths = [find(file, data) for file in data_set.files]
        if None in paths:
            run.say(f"skipped: {data_set.name}: no {' or '.join(data_set.files)} in {data or '(give --data DIR)'}")
            continue
        parts = split(data_set.read([path for path in paths if path]))
        ridge = train(parts)
        yield from _model(origin, f"{data_set.name}: ridge", parts, ridge, dict.fromkeys(MAXIMA, ridge))
        for size in options.sizes:
            folder = options.networks / data_set.files[0].split(".")[0]
            by_maximum = {maximum: network(parts, size, maximum, folder) for maximum in MAXIMA}
            model = network(parts, size, None, folder)
            yield from _model(origin, f"{data_set.name}: encoder {size}", parts, model, by_maximum)
    if alpaca := find(SETS[0].files[0], data):
        yield from _drift(origin, alpaca)


def _model(
    origin: Origin, case: str, parts: Split, model: LengthModel, by_maximum: Mapping[int, LengthModel]
) -> Iterator[Line]:
    """Yield the figures of a model. `by_maximum`: what predicts S3's buckets up to each maximum."""
    used = np.array([row.tokens for row in parts.measure], dtype=np.int64)
    fitted = np.array([row.tokens for row in parts.fit], dtype=np.int64)
    items = [_item(row) for row in parts.measure]
    report = evaluate(model.predict_batch(items), used, fitted, max_context_tokens=MAXIMA[-1])
    by_policy = {packing.policy: packing for packing in report.packings}
    ours, constant = by_policy["this model, p90"], by_policy["best constant"]
    tau = ">= 0.57" if case == "Alpaca: ridge" else None
    yield origin.line(case, "Kendall tau", report.kendall_tau, "", target=tau)
    yield origin.line(case, "mean absolute error", report.mae_tokens, "tokens", baseline=report.mae_constant)
    yield origin.line(case, "coverage of p90, at least", report.coverage, "share", target=">= 0.88")
    yield origin.line(case, "coverage of p90, at most", report.coverage, "share", target="<= 0.92")
    yield origin.line(case, "quantile loss of p90", report.pinball, "tokens")
    yield origin.line(case, "reserved / used", ours.initial, "", baseline=constant.initial)
    yield origin.line(case, "overruns", ours.overrun, "share", baseline=constant.overrun)
    target = "<= 0.3" if case.endswith("ridge") else None
    yield origin.line(case, "time a prompt, one at a time", _ms(model, parts), "ms", target=target)
    for maximum, buckets in by_maximum.items():
        predicted = buckets.predict_batch(items)
        chosen = np.array([one.p50_tokens if buckets is model else one.bucket_tokens for one in predicted])
        real = class_of(used, tenths(maximum))
        accuracy = float(np.mean(class_of(chosen, tenths(maximum)) == real))
        commonest = float(np.bincount(real).max() / len(real))
        yield origin.line(case, f"bucket accuracy, maximum {maximum}", accuracy, "share", baseline=commonest)


def _drift(origin: Origin, path: Path) -> Iterator[Line]:
    model = train(split(_of_sources(path, {DRIFT[0]}, set())))
    for source in DRIFT[1:]:
        stream = list(_of_sources(path, {source}, UNBIASED))
        Random(0).shuffle(stream)
        begun, settled = SETTLED
        covered = [_covered(model, row, f"{source}/{i}x") for i, row in enumerate(stream[:settled])][begun:]
        coverage, case = float(np.mean(covered)), f"Alpaca: ridge of {DRIFT[0]}, then {source}"
        yield origin.line(case, "coverage of p90 after the drift, at least", coverage, "share", target=">= 0.87")
        yield origin.line(case, "coverage of p90 after the drift, at most", coverage, "share", target="<= 0.93")


def _of_sources(path: Path, wanted: set[str], others: set[str]) -> Rows:
    def keep(row: Any) -> bool:
        return bool(wanted & set(row["src"])) and not others & set(row["src"])

    return _instructions([path], keep=keep, adapter=lambda _: "base")


def _covered(model: LengthModel, row: AnsweredPrompt, request_id: str) -> bool:
    """Whether p90 held the answer, which is then learned."""
    (predicted,) = model.predict_batch([replace(_item(row), request_id=request_id)])
    end = Outcome(request_id, "", "", row.adapter, "", row.prompt_tokens, row.tokens, FinishReason.EOS, 0)
    model.observe(end)
    return row.tokens <= predicted.p90_tokens


def network(parts: Split, size: str, tenths_of: int | None, kept: Path) -> LengthModel:
    """Return the network of an earlier run, or train one, which takes minutes of one core."""
    folder = kept / f"{size}-{tenths_of or 'deciles'}"
    if not folder.exists():
        try:
            files, model = train_encoder_model(parts, EncoderOptions(size, epochs=EPOCHS, tenths_of=tenths_of))
        except BadData as error:
            raise BenchFailed(str(error)) from error
        save_model(folder, model, files)
    return read_model(folder)


def _item(row: AnsweredPrompt) -> PredictItem:
    return PredictItem("", row.prompt, "", row.adapter, row.prompt_tokens, 0)


def _ms(model: LengthModel, parts: Split) -> float:
    """The median over some prompts, each predicted alone."""
    times: list[float] = []
    for row in parts.measure[:TIMED_PROMPTS]:
        begin = time.perf_counter()
        model.predict_batch([_item(row)])
        times.append(1000 * (time.perf_counter() - begin))
    return float(np.median(times))
