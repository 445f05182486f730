"""`weft predictor train DATA`: fit on a part, calibrate on another, measure on a third, keep what is better.

The split is by a stable hash of the prompt, so a prompt never stands on both sides, and a model trained earlier from
the same file has not seen the rows that it is compared on.
"""

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TextIO, TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from scipy.sparse.linalg import lsqr

from weft.domain.prediction import PredictItem
from weft_predictor.checkpoint import save
from weft_predictor.core import (
    COLD_SCALE,
    DIM,
    RIDGE,
    TARGET,
    VARIANCE_FLOOR,
    ConformalCalibrators,
    Features,
    Featurizer,
    Group,
    HashedGrams,
    LengthModel,
    Offsets,
    ResidualScale,
    Ridge,
    RidgeModel,
    deciles,
    shrunk_median,
    tenths,
)
from weft_predictor.encoder_files import CALIBRATION, EncoderFiles, encoder_of, read_files, read_model, write_files
from weft_predictor.errors import BadData, CorruptModel
from weft_predictor_train.datasets import AnsweredPrompt, Columns, read
from weft_predictor_train.evaluation import Report, evaluate

# Layers, heads, channels and hidden channels of a network from scratch; its parameters with 8,192 tokens.
SIZES = {"1.5M": (2, 2, 128, 512), "5.4M": (4, 4, 256, 1_024), "14M": (6, 6, 384, 1_536), "49M": (6, 12, 768, 3_072)}
MIN_ROWS = 50
FOLDS = 5
BACKFITS = 2  # rounds of: ridge without the offsets, offsets without the ridge
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Split:
    """60 % to fit, 20 % to calibrate, 20 % to measure."""

    fit: list[AnsweredPrompt]
    calibrate: list[AnsweredPrompt]
    measure: list[AnsweredPrompt]


@dataclass(frozen=True, slots=True)
class EncoderOptions:
    """`tenths_of`: S3's ten equal buckets of that many tokens; None: ten classes with as many answers in each."""

    size: str = "1.5M"
    seed: int = 0
    epochs: int = 8
    tenths_of: int | None = None
    checkpoint: Path | None = None


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns 0: measured (and the better model written), 1: data that cannot be used."""
    args = _parser().parse_args(argv)
    columns = Columns(args.prompt_column, args.length_column, args.adapter_column, args.prompt_tokens_column)
    tenths_of = args.max_context_tokens if args.buckets == "tenths" else None
    options = EncoderOptions(args.size, args.seed, args.epochs, tenths_of, args.checkpoint)
    try:
        parts = split(read(args.data, columns))
        if args.kind == "encoder":
            files, model = train_encoder_model(parts, options, sys.stderr)
        else:
            files, model = None, train(parts, progress=sys.stderr)
        report = measure(model, parts, args.max_context_tokens)
        sys.stdout.write(describe(report, parts))
        if args.out:
            sys.stdout.write(promote(model, report, parts, args.out, args.max_context_tokens, files) + "\n")
    except (BadData, CorruptModel, OSError) as error:
        sys.stderr.write(f"weft predictor train: {error}\n")
        return 1
    return 0


def split(rows: Iterable[AnsweredPrompt]) -> Split:
    """Split rows by prompt: every row of a prompt goes to the same part. Raises BadData with too few rows in a part."""
    parts = Split([], [], [])
    hashed = [(sha256(row.prompt.encode(errors="replace")).digest()[:8], row) for row in rows]
    for place, row in sorted(hashed, key=lambda pair: pair[0]):
        share = (
            int.from_bytes(place, "big") / 2**64 * 997 % 1.0
        )  # the order within a part is as good as random: no file order, no drift
        (parts.fit if share < 0.6 else parts.calibrate if share < 0.8 else parts.measure).append(row)
    smallest = min(len(parts.fit), len(parts.calibrate), len(parts.measure))
    if smallest < MIN_ROWS:
        raise BadData(
            f"a part of the split has {smallest} rows, at least {MIN_ROWS} are needed (5 times as many in all)"
        )
    return parts


def train(parts: Split, *, progress: TextIO | None = None, dim: int = DIM) -> RidgeModel:
    """Train the hashed ridge, of all rows but the measured ones."""
    return fit_and_calibrate(HashedGrams(dim), [*parts.fit, *parts.calibrate], progress)


def train_encoder_model(
    parts: Split, options: EncoderOptions, progress: TextIO | None = None
) -> tuple[EncoderFiles, RidgeModel]:
    """Train the S3 form: a network that classifies, and a ridge on its classes, fitted on rows it has not seen."""
    try:
        # with torch and transformers, which a ridge does not need
        from weft_predictor_train.networks import from_files, from_scratch, train_network
    except ImportError as error:
        text = f"an encoder is trained by torch and transformers: pip install 'weft[encoder-training]' ({error})"
        raise BadData(text) from error
    prompts, tokens = [row.prompt for row in parts.fit], [row.tokens for row in parts.fit]
    if options.checkpoint is not None:
        start = from_files(read_files(options.checkpoint))
    else:
        edges = tenths(options.tenths_of) if options.tenths_of else deciles(np.array(tokens))
        start = from_scratch(SIZES[options.size], prompts, edges, options.seed)
    train_network(
        start,
        start.examples(prompts, tokens),
        start.examples([row.prompt for row in parts.calibrate], [row.tokens for row in parts.calibrate]),
        seed=options.seed,
        epochs=options.epochs,
        batches=lambda batches: _bar("train", batches, progress),
    )
    files = start.files()
    return files, fit_and_calibrate(encoder_of(files), parts.calibrate, progress)


def fit_and_calibrate(featurizer: Featurizer, rows: Sequence[AnsweredPrompt], progress: TextIO | None) -> RidgeModel:
    """Fit a ridge on all rows, calibrated by what ridges on the other folds say of each (cross-conformal, Vovk 2015).

    On Alpaca a Kendall tau of 0.575, where a ridge on three quarters of the rows, calibrated on the last, has 0.567.
    """
    xs = [_features(row, featurizer) for row in _bar("features", rows, progress)]
    folds = [range(i * len(rows) // FOLDS, (i + 1) * len(rows) // FOLDS) for i in range(FOLDS)]  # prompts stay together
    shared = list[float]()
    for fold in _bar("folds", folds, progress):
        remaining = [i for i in range(len(rows)) if i not in fold]
        ridge, _ = _backfit([xs[i] for i in remaining], [rows[i] for i in remaining], featurizer.dim)
        shared += [ridge.predict(xs[i]) for i in fold]
    ridge, offsets = _backfit(xs, rows, featurizer.dim)
    family = featurizer.name or f"ridge-{sha256(ridge.weight.tobytes()).hexdigest()[:8]}"
    calibrators = ConformalCalibrators(target=TARGET)
    model = RidgeModel(family, ridge, offsets, ResidualScale.cold(COLD_SCALE), calibrators, featurizer=featurizer)
    _calibrate(model, shared, rows)
    for group in (calibrators.pooled, *calibrators.by_group.values()):
        group.level = TARGET  # rows in no order have no drift to follow: plain split conformal
    return model


def measure(model: LengthModel, parts: Split, max_context_tokens: int) -> Report:
    """Measure a model on the part kept for that. The model does not learn from it."""
    used = np.array([row.tokens for row in parts.measure], dtype=np.int64)
    lengths = np.array([row.tokens for row in parts.fit], dtype=np.int64)
    items = [PredictItem("", row.prompt, "", row.adapter, row.prompt_tokens, 0) for row in parts.measure]
    predicted = model.predict_batch(items)
    return evaluate(predicted, used, lengths, max_context_tokens=max_context_tokens)


def promote(
    model: RidgeModel, report: Report, parts: Split, out: Path, max_context_tokens: int, files: EncoderFiles | None
) -> str:
    """Write the model unless the one that is there is at least as good on the same held-out rows. Returns which.

    An encoder (`files`) is a folder with its calibration, a ridge a file.
    """
    if (out / CALIBRATION if files else out).exists():
        present = measure(read_model(out), parts, max_context_tokens)
        if present.pinball <= report.pinball:
            return f"kept {out}: its q90 loss is {present.pinball:.2f} tokens, the new model's {report.pinball:.2f}"
    save_model(out, model, files)
    return f"wrote {out}: {model.version}"


def save_model(out: Path, model: RidgeModel, files: EncoderFiles | None) -> None:
    """Write what `read_model` reads: a folder with an encoder's files, or the ridge's file."""
    if files:
        write_files(out, files)
    save(out / CALIBRATION if files else out, model.save())


def describe(report: Report, parts: Split) -> str:
    """Write the figures as text."""
    lines = [
        f"rows: {len(parts.fit)} fitted, {len(parts.calibrate)} calibrated, {report.rows} measured",
        f"bucket accuracy     {report.bucket_accuracy:7.2%}   always the commonest bucket: {report.majority:.2%}",
        f"Kendall tau         {report.kendall_tau:7.3f}   R2 of log length: {report.r2_log:.3f}",
        f"MAE, tokens         {report.mae_tokens:7.1f}   always the median: {report.mae_constant:.1f}",
        f"coverage at q90     {report.coverage:7.2%}   quantile loss, tokens: {report.pinball:.2f}",
        "",
        f"{'reservation':<18}{'reserved/used':>15}{'overruns':>11}{'after doubling':>16}{'doublings/request':>19}",
    ]
    for row in report.packings:
        figures = f"{row.initial:>15.2f}{row.overrun:>11.1%}{row.final:>16.2f}{row.doublings:>19.3f}"
        lines.append(f"{row.policy:<18}{figures}")
    return "\n".join(lines) + "\n"


def fit_ridge(rows: Sequence[Features], target: NDArray[np.float64], dim: int) -> Ridge:
    """Minimize |X w + b - target|^2 + RIDGE |w|^2, by LSQR on the sparse X (0.5 s for 6,000 prompts). `target`: [n].

    The variances say what n rows taught, so online learning continues from here.
    """
    matrix, base = _matrix(rows, dim), float(np.mean(target))
    weight = lsqr(matrix, target - base, damp=RIDGE**0.5, atol=1e-5, btol=1e-5, iter_lim=100)[0]
    mass = np.asarray(matrix.multiply(matrix).sum(axis=0)).ravel()
    variance = np.maximum(1.0 / (RIDGE + mass), VARIANCE_FLOOR)
    return Ridge(weight.astype(np.float32), variance.astype(np.float32), base)


def _matrix(rows: Sequence[Features], dim: int) -> "sparse.csr_matrix":
    starts = np.cumsum([0, *(len(row.index) for row in rows)])
    index = np.concatenate([row.index for row in rows])
    value = np.concatenate([row.value for row in rows])
    return sparse.csr_matrix((value, index, starts), shape=(len(rows), dim))


def _backfit(xs: Sequence[Features], rows: Sequence[AnsweredPrompt], dim: int) -> tuple[Ridge, Offsets]:
    """Fit in turn the ridge on what the adapters' offsets leave, and offsets on what the ridge leaves."""
    target = np.log([row.tokens for row in rows])
    offset = np.zeros(len(rows))
    adapters = np.array([row.adapter for row in rows])
    offsets = Offsets()
    ridge = Ridge.cold(dim, 0.0)
    for _ in range(BACKFITS if len(set(adapters)) > 1 else 1):
        ridge = fit_ridge(xs, target - offset, dim)
        residual = target - np.array([ridge.predict(x) for x in xs])
        for adapter in dict.fromkeys(adapters):
            offset[adapters == adapter] = shrunk_median(residual[adapters == adapter])
    return ridge, offsets


def _calibrate(model: RidgeModel, shared: Sequence[float], rows: Sequence[AnsweredPrompt]) -> None:
    """Calibrate offsets first, then the scale of the residuals around them, then the scores in units of that scale."""
    target = [float(np.log(row.tokens)) for row in rows]
    for row, real, base in zip(rows, target, shared, strict=True):
        model.offsets.learn(_group(row), real - base)
    centres = [base + model.offsets.of_group(_group(row)) for row, base in zip(rows, shared, strict=True)]
    for real, centre in zip(target, centres, strict=True):
        model.residual_scale.learn(centre, real - centre)
    for row, real, centre in zip(rows, target, centres, strict=True):
        model.calibrators.learn(_group(row), (real - centre) / model.residual_scale.scale_at(centre))


def _group(row: AnsweredPrompt) -> Group:
    return "", row.adapter


def _features(row: AnsweredPrompt, featurizer: Featurizer) -> Features:
    rows, _ = featurizer.rows([(row.prompt, row.prompt_tokens)])
    return Features(rows.index, rows.value)


def _bar(title: str, rows: Sequence[T], progress: TextIO | None) -> Iterator[T]:
    """Yield the rows; on a terminal, with a bar of how many have passed."""
    shown = progress if progress is not None and progress.isatty() else None
    for done, row in enumerate(rows, 1):
        yield row
        if shown and (done % 200 == 0 or done == len(rows)):
            filled = "#" * (30 * done // len(rows))
            shown.write(f"\r{title:<10}[{filled:<30}] {done}/{len(rows)}" + ("\n" if done == len(rows) else ""))
            shown.flush()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="weft predictor train",
        description="Fit a length model on answered prompts and print how good it is on prompts kept aside.",
    )
    parser.add_argument("data", type=Path, help=".jsonl(.gz) or .csv(.gz): a prompt and a length in tokens per row")
    parser.add_argument(
        "--out", type=Path, help="write the model here, unless the one there is better on the same rows"
    )
    parser.add_argument(
        "--kind",
        choices=("ridge", "encoder"),
        default="ridge",
        help="ridge: hashed words, seconds (default); encoder: S3's transformer, minutes",
    )
    encoder = parser.add_argument_group("of --kind encoder")
    encoder.add_argument("--size", choices=SIZES, default="1.5M", help="parameters of a network from scratch (1.5M)")
    encoder.add_argument("--checkpoint", type=Path, help="go on from this folder (Hugging Face) instead")
    encoder.add_argument(
        "--buckets",
        choices=("deciles", "tenths"),
        default="deciles",
        help="its ten classes: as many answers in each (default), or S3's tenths of --max-context-tokens",
    )
    encoder.add_argument("--epochs", type=int, default=8, help="at most; it ends earlier when it stops getting better")
    encoder.add_argument("--seed", type=int, default=0, help="the same seed gives the same network")
    parser.add_argument("--prompt-column", help="default: prompt, prompt_text, instruction (+ input), question or text")
    parser.add_argument("--length-column", help="default: n_out, output_tokens, completion_tokens, length, ...")
    parser.add_argument("--adapter-column", help="default: adapter, model_name, model or category, where there is one")
    parser.add_argument("--prompt-tokens-column", help="default: n_in, prompt_tokens or input_tokens; else estimated")
    parser.add_argument("--max-context-tokens", type=int, default=2_048, help="S3's buckets are tenths of this (2048)")
    return parser
