"""What a runner measured of itself at start, and what follows from it: a step model, and its best batch. Pure.

The best batch (Punica, section 5.1, picks it by hand: 32 on an A100) is the one beyond which nothing measured yields
5 % more tokens per second, or the largest that keeps the pool's token time, if that is smaller.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf

from weft_runner.core.step_time_model import GuessTimes, StepModel

GAIN = 1.05  # a larger batch is worth it from here on: below it a request gains more from a runner of its own
TOKEN_MS_LEAST = 1e-6  # a prompt token costs something, or its factor could never be learnt


@dataclass(frozen=True, slots=True)
class DecodeTime:
    """Time of a step of `rows` decode rows, which attend to `keys` tokens in sum."""

    rows: int
    keys: int
    ms: float

    @property
    def per_s(self) -> float:
        """Tokens a second."""
        return 1e3 * self.rows / self.ms


@dataclass(frozen=True, slots=True)
class PrefillTime:
    """The time of a step with the first `tokens` tokens of a prompt."""

    tokens: int
    ms: float

    @property
    def per_s(self) -> float:
        return 1e3 * self.tokens / self.ms


@dataclass(frozen=True, slots=True)
class Profile:
    """Reported figures. `decode` is ordered by rows; unmeasured rows are missing at the end.

    `layer_by_layer_tokens`: prompts of at least that length are over earlier where KV is sent as it is computed.
    `kv_bytes_per_s`: of KV to another runner, its network aside; 0: not measured.
    """

    decode: tuple[DecodeTime, ...]
    prefill: tuple[PrefillTime, ...]
    model: StepModel
    best_batch: int
    step_ms_best: float
    layer_by_layer_tokens: float = inf
    kv_bytes_per_s: float = 0.0

    @property
    def step_ms_1(self) -> float:
        return self.decode[0].ms

    @property
    def prefill_tokens_per_s(self) -> float:
        """At the best chunk."""
        return max(chunk.per_s for chunk in self.prefill)


def make_profile(
    decode: Sequence[DecodeTime],
    prefill: Sequence[PrefillTime],
    longer: DecodeTime | None,
    *,
    max_sequences: int,
    token_time_ms: float,
    batches: int = 1,
    guess_times: GuessTimes = (),
) -> Profile:
    """Make a profile of at least one time of each kind.

    `longer`: as many rows as one of `decode` with more keys (None: not measured). `guess_times`: of steps with
    drafted tokens.

    `batches` in flight at a time share out the sequences; while one takes its way through the stages the others do, so
    that all of them get a token in the time of one: the best number of sequences is `batches` times the best batch.
    """
    model = replace(fit(decode, prefill, longer), guess_times=guess_times)
    measured = _measured(decode, model, max_sequences)
    best = min(best_batch(measured, token_time_ms), -(-max_sequences // batches))
    return Profile(
        tuple(decode), tuple(prefill), model, min(best * batches, max_sequences), round(_at(measured, best), 3)
    )


def best_batch(times: Sequence[DecodeTime], token_time_ms: float) -> int:
    """Return the rows up to which more pay, within the target.

    A target that one row alone does not keep limits nothing: no batch would help.
    """
    best = next(
        time.rows for i, time in enumerate(times) if not any(t.per_s >= GAIN * time.per_s for t in times[i + 1 :])
    )
    if times[0].ms > token_time_ms:
        return best
    return max(rows for rows in range(1, best + 1) if _at(times, rows) <= token_time_ms)


def fit(decode: Sequence[DecodeTime], prefill: Sequence[PrefillTime], longer: DecodeTime | None) -> StepModel:
    """Least squares of relative errors; no coefficient is negative."""
    key_ms = _key_ms(decode, longer)
    base_ms, row_ms = _line([(t.rows, t.ms - key_ms * t.keys, t.ms) for t in decode])
    if len(prefill) > 1:
        token_ms = _line([(t.tokens, t.ms, t.ms) for t in prefill])[1]
    else:
        token_ms = max(0.0, prefill[0].ms - base_ms) / prefill[0].tokens
    return StepModel(base_ms, row_ms, key_ms, max(token_ms, TOKEN_MS_LEAST))


def _key_ms(decode: Sequence[DecodeTime], longer: DecodeTime | None) -> float:
    equal_rows = next(
        (t for t in decode if longer is not None and t.rows == longer.rows and t.keys < longer.keys), None
    )
    if equal_rows is None or longer is None:
        return 0.0
    return max(0.0, longer.ms - equal_rows.ms) / (longer.keys - equal_rows.keys)


def _line(points: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """(intercept, slope) through (x, y) with errors in proportion to the third, neither below zero."""
    weights = [1.0 / size**2 for _, _, size in points]
    total = sum(weights)
    x_mean = sum(w * x for w, (x, _, _) in zip(weights, points, strict=True)) / total
    y_mean = sum(w * y for w, (_, y, _) in zip(weights, points, strict=True)) / total
    spread = sum(w * (x - x_mean) ** 2 for w, (x, _, _) in zip(weights, points, strict=True))
    joint = sum(w * (x - x_mean) * (y - y_mean) for w, (x, y, _) in zip(weights, points, strict=True))
    slope = max(0.0, joint / spread) if spread > 0.0 else 0.0
    if y_mean - slope * x_mean < 0.0:  # through the origin instead
        squares = sum(w * x * x for w, (x, _, _) in zip(weights, points, strict=True))
        return 0.0, max(0.0, sum(w * x * y for w, (x, y, _) in zip(weights, points, strict=True)) / squares)
    return y_mean - slope * x_mean, slope


def _measured(decode: Sequence[DecodeTime], model: StepModel, max_sequences: int) -> list[DecodeTime]:
    """What was measured, and the model's word for the largest batch where there was no time to measure it."""
    last = decode[-1]
    if last.rows >= max_sequences:
        return list(decode)
    keys = last.keys * max_sequences // last.rows
    return [*decode, DecodeTime(max_sequences, keys, max(last.ms, model.decode_ms(max_sequences, keys)))]


def _at(times: Sequence[DecodeTime], rows: int) -> float:
    """Return milliseconds of a batch, interpolated linearly between two times."""
    for low, high in pairwise(times):
        if rows <= high.rows:
            return low.ms + (high.ms - low.ms) * (rows - low.rows) / (high.rows - low.rows)
    return times[-1].ms
