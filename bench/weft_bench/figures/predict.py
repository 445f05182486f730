"""`weft bench predict`: how good predicted lengths are, on real prompts and answers: the ridge, and S3's encoder.

Each set is split by prompt into 60 % to fit, 20 % to calibrate, 20 % to measure. docs/benchmarks/scheduling.md has the
method.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from weft.domain.prediction import PredictItem
from weft.domain.request import FinishReason, Outcome
from weft_bench import cases
from weft_bench.data import find, rows
from weft_bench.run import Run
from weft_predictor.core import LengthModel, class_of, tenths
from weft_predictor.encoder_files import read_model
from weft_predictor.errors import BadData
from weft_predictor_train.datasets import AnsweredPrompt
from weft_predictor_train.evaluation import evaluate
from weft_predictor_train.training import EncoderOptions, Split, save_model, split, train, train_encoder_model
from weft_stage.errors import BenchFailed
from weft_stage.lines import Line, Origin

MAXIMUM = 2_048  # of S3's ten equal buckets
UNBIASED = {"random", "pr5000"}  # the other sources of the Alpaca set were chosen by length or quality
TIMED_PROMPTS = 200
DRIFT = ("random", "helpful45", "claude45")
SETTLED = (300, 1_300)  # requests after the start of a drift: not those before, as many in all
EPOCHS = 2  # the third already has a higher held-out loss on Alpaca, at every size measured
MODELS = 8  # of the AlpacaEval matrix, evenly spaced among those that are models
NO_MODELS = {"id", "NullModel", "gpt4_gamed"}
Rows = Iterator[AnsweredPrompt]


def alpaca_rows(paths: Sequence[Path], sources: Set[str] = UNBIASED, without: Set[str] = frozenset()) -> Rows:
    """The rows of some sources, none of which are of others. Default: those not chosen by length or quality."""
    for row in rows(paths[0]):
        if sources & set(row["src"]) and not without & set(row["src"]):
            yield _instruction(row, "base")


def _dolly(paths: Sequence[Path]) -> Rows:
    return (_instruction(row, row["category"]) for row in rows(paths[0]))


def _instruction(row: Any, adapter: str) -> AnsweredPrompt:
    return AnsweredPrompt(f"{row['instruction']}\n{row['input']}", adapter, int(row["n_in"]), int(row["n_out"]))


def _alpaca_eval(paths: Sequence[Path]) -> Rows:
    prompts = {str(row["id"]): row for row in rows(paths[0])}
    for lengths in rows(paths[1]):
        models = sorted(lengths.keys() - NO_MODELS)
        prompt = prompts[lengths["id"]]
        for model in models[:: len(models) // MODELS][:MODELS]:
            yield AnsweredPrompt(prompt["instruction"], model, int(prompt["n_in"]), int(lengths[model]))


ALPACA = "alpaca_15k.jsonl.gz"
SETS: Mapping[str, tuple[Sequence[str], Callable[[Sequence[Path]], Rows]]] = {  # name: files, and what reads them
    "Alpaca": ((ALPACA,), alpaca_rows),
    "Dolly, a category as an adapter": (("dolly_3k.jsonl.gz",), _dolly),
    "AlpacaEval, 8 models as adapters": (
        ("alpacaeval_prompts.jsonl.gz", "alpacaeval_output_lengths.csv.gz"), _alpaca_eval,
    ),
}  # fmt: skip


def figures(options: cases.Predict, run: Run) -> Iterator[Line]:
    """Measure every set that is there. Raises BenchFailed."""
    origin, data = run.origin("scipy"), options.data
    for name, (names, read) in SETS.items():
        paths = [path for file in names if (path := find(file, data))]
        if len(paths) < len(names):
            run.say(f"skipped: {name}: no {' or '.join(names)} in {data or 'any folder: give --data DIR'}")
            continue
        parts = split(read(paths))
        ridge = train(parts)
        yield from _model(origin, f"{name}: ridge", parts, ridge, None)
        for size in options.sizes:
            folder = options.networks / names[0].split(".")[0]
            model, s3 = (network(parts, size, maximum, folder) for maximum in (None, MAXIMUM))
            yield from _model(origin, f"{name}: encoder {size}", parts, model, s3)
    if alpaca := find(ALPACA, data):
        yield from _drift(origin, alpaca)


def _model(origin: Origin, case: str, parts: Split, model: LengthModel, s3: LengthModel | None) -> Iterator[Line]:
    """Yield the figures of a model. `s3`: what predicts S3's buckets; None: the median of the model."""
    used, fitted = (np.array([row.tokens for row in part], dtype=np.int64) for part in (parts.measure, parts.fit))
    items = [_item(row) for row in parts.measure]
    report = evaluate(predicted := model.predict_batch(items), used, fitted, max_context_tokens=MAXIMUM)
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
    yield origin.line(case, "time a prompt, one at a time", _ms(model, items), "ms", target=None if s3 else "<= 0.3")
    tokens = [one.bucket_tokens for one in s3.predict_batch(items)] if s3 else [one.p50_tokens for one in predicted]
    chosen, real = (class_of(np.array(each), tenths(MAXIMUM)) for each in (tokens, used))
    commonest = float(np.bincount(real).max() / len(real))
    yield origin.line(
        case, f"bucket accuracy, maximum {MAXIMUM}", float(np.mean(chosen == real)), "share", baseline=commonest
    )


def _drift(origin: Origin, path: Path) -> Iterator[Line]:
    model = train(split(alpaca_rows([path], {DRIFT[0]})))
    for source in DRIFT[1:]:
        stream = list(alpaca_rows([path], {source}, UNBIASED))
        Random(0).shuffle(stream)
        begun, settled = SETTLED
        covered = [_covered(model, row, f"{source}/{i}x") for i, row in enumerate(stream[:settled])][begun:]
        coverage, case = float(np.mean(covered)), f"Alpaca: ridge of {DRIFT[0]}, then {source}"
        yield origin.line(case, "coverage of p90 after the drift, at least", coverage, "share", target=">= 0.87")
        yield origin.line(case, "coverage of p90 after the drift, at most", coverage, "share", target="<= 0.93")


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


def _ms(model: LengthModel, items: Sequence[PredictItem]) -> float:
    """Return the median over some prompts, each predicted alone."""
    times_ms: list[float] = []
    for item in items[:TIMED_PROMPTS]:
        begin = time.perf_counter()
        model.predict_batch([item])
        times_ms.append(1e3 * (time.perf_counter() - begin))
    return float(np.median(times_ms))
