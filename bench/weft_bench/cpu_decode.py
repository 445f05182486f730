"""Decode and prefill of one engine: batches of one kind, in rounds with the base so that ratios are of one time."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TypeVar

from weft_bench.cpu_engine import Ask, Played, Subject
from weft_bench.cpu_shapes import BASE, RANK, adapter_of_row, distinct, prompts, ranks_of
from weft_bench.roofline import Work, adapter_work, decode_work
from weft_stage.cpu_models import adapter
from weft_stage.cpu_witness import Beat
from weft_stage.errors import WrongAdapter
from weft_stage.shapes import Shape

Key = TypeVar("Key")
PROMPT_TOKENS = 64
MAX_ROUNDS = 8  # to bring adapters into slots
FOLDERS = 32  # adapters on disk that stand for many: each digest is read and packed anew


@dataclass(frozen=True, slots=True)
class Batch:
    """`rows` requests of one popularity; adapter i has rank `ranks[i % len(ranks)]`."""

    rows: int
    popularity: str
    ranks: tuple[int, ...] = (RANK,)

    @property
    def name(self) -> str:
        mixed = f", ranks {min(self.ranks)}-{max(self.ranks)}" if len(self.ranks) > 1 else ""
        return f"batch {self.rows}, {self.popularity}{mixed}"

    @property
    def adapters(self) -> list[int | None]:
        return adapter_of_row(self.popularity, self.rows)

    def work(self, shape: Shape, context: float, weight_bytes: float) -> Work:
        """What a decode step of it must read and compute."""
        return decode_work(shape, self.rows, context, weight_bytes) + self.adapters_work(shape)

    def adapters_work(self, shape: Shape, tokens: int = 1) -> Work:
        """What its adapters add to a step."""
        return adapter_work(shape, *ranks_of(self.adapters, self.ranks), tokens)


@dataclass(frozen=True, slots=True)
class Model:
    """A shape, where its checkpoints are kept, and where prompts come from."""

    name: str
    shape: Shape
    folder: Path
    rng: random.Random = field(default_factory=random.Random)

    def digest(self, subject: Subject, number: int, rank: int) -> str:
        """The digest under which the subject knows this adapter, which is written if need be."""
        digest = f"{self.name}-r{rank}-{number}"
        if digest not in subject.adapters.paths:
            subject.adapters.paths[digest] = adapter(self.folder, self.name, self.shape, number, rank)
        return digest

    def alias(self, subject: Subject, digest: str, number: int) -> str:
        """One more adapter for the subject, of the usual rank, with one of `FOLDERS` files; returns its digest."""
        subject.adapters.paths[digest] = subject.adapters.paths[self.digest(subject, number % FOLDERS, RANK)]
        return digest

    def write_folders(self, subject: Subject) -> None:
        """All files that aliases share are there."""
        for number in range(FOLDERS):
            self.digest(subject, number, RANK)

    def asks(self, subject: Subject, batch: Batch, prompt_tokens: int, tokens: int) -> list[Ask]:
        """A batch's requests, with prompts that were never asked before: nothing is found in a cache."""
        made = prompts(self.rng, batch.rows, prompt_tokens, self.shape.vocab)
        names = [
            "" if number is None else self.digest(subject, number, batch.ranks[number % len(batch.ranks)])
            for number in batch.adapters
        ]
        return [Ask(name, prompt, tokens) for name, prompt in zip(names, made, strict=True)]


@dataclass(frozen=True, slots=True)
class Decoded:
    """Decode steps of a full batch: the mean step (all time included), and how it is spread."""

    step_s: float
    steps_s: tuple[float, ...]


def load_all(model: Model, subject: Subject, kinds: Sequence[Batch]) -> None:
    """Bring every adapter of these batches into a slot. One that is loaded late may evict one that has run already."""
    for _ in range(MAX_ROUNDS):
        adapters = set[str]()
        for kind in kinds:
            asks = model.asks(subject, kind, 1, 1)
            subject.play(asks)
            adapters.update(ask.adapter for ask in asks if ask.adapter)
        if all(subject.engine.runner.pool.adapters.adapters[digest].resident for digest in adapters):
            return


def decode(
    model: Model, subject: Subject, batch: Batch, prompt_tokens: int, tokens: int,
    between: Callable[[], None] | None = None,
) -> Decoded:  # fmt: skip
    """Run a batch and take its steady steps. Raises WrongAdapter when a step reads another number of adapters."""
    played = subject.play(model.asks(subject, batch, prompt_tokens, tokens), between=between)
    return steady(played, batch.rows, distinct(batch.adapters))


def steady(played: Played, rows: int, adapters: int) -> Decoded:
    """The steps between the last row's first token and the first row's end: every row in each. Raises WrongAdapter."""
    beats = [beat for beat in played.beats if not beat.prefills and beat.rows == rows]
    if any(beat.distinct != adapters for beat in beats):
        raise WrongAdapter(f"steps read {sorted({beat.distinct for beat in beats})} adapters, not {adapters}")
    if not beats:
        raise WrongAdapter(f"no step had all {rows} rows in decode")
    ends = [beats[0].began, *(beat.ended for beat in beats)]
    steps = tuple(after - before for before, after in pairwise(ends))
    return Decoded((ends[-1] - ends[0]) / len(steps), steps)


def prefill_s(model: Model, subject: Subject, batch: Batch, prompt_tokens: int) -> float:
    """From the first beat to the last row's first token."""
    played = subject.play(model.asks(subject, batch, prompt_tokens, 1))
    return busy_s(played.beats)


def busy_s(beats: Sequence[Beat]) -> float:
    """From the first beat's begin to the last one's end."""
    return beats[-1].ended - beats[0].began


def whole_s(model: Model, subject: Subject, batch: Batch, prompt_tokens: int, tokens: int) -> float:
    """The whole run, prefill included, as whoever asks sees it."""
    return subject.play(model.asks(subject, batch, prompt_tokens, tokens)).wall_s


def alternating(kinds: Sequence[Key], repetitions: int, run: Callable[[Key], float]) -> dict[Key, list[float]]:
    """The seconds of each kind: `repetitions` rounds in which each of them runs once, after one that warms up."""
    for kind in kinds:
        run(kind)
    seconds: dict[Key, list[float]] = {kind: [] for kind in kinds}
    for _ in range(repetitions):
        for kind in kinds:
            seconds[kind].append(run(kind))
    return seconds


def paired(over: Sequence[float], under: Sequence[float]) -> float:
    """The median of the ratios of what was measured in the same round."""
    return median(a / b for a, b in zip(over, under, strict=True))


def base(rows: int) -> Batch:
    return Batch(rows, BASE)
