"""`weft bench speculate`: drafts on, beside the same engine with drafts off, in turn, the engine alone.

Each figure is the median over paired rounds of the time without drafts through the time with them, for the same
requests; the answers of both engines are the same tokens, or the run is refused.

- quickstart: one stream of a task's adapter, after `--warm` of its answers. Its model takes less for a step than the
  host does beside it: what drafts cost is seen best there.
- again: a random model of the named shape, greedy, one adapter; prompts that it has answered before. Almost every guess
  is right: the most that drafts can give, beside the bound, which is the rate if each step of both engines took what
  their profile says of as many tokens (with prompts: what it took), and nothing else any time.
- random: the same model at temperature 1. Hardly any guess is right: the least.
- json: one stream of the same model at temperature 1, held to compact JSON by a schema, with a tokenizer of its size.
  Keys are drafted, from what the grammar forces and from the answers before; values come at random.
- arctic: no engine, drafts alone, beside arctic-inference's suffix cache with its defaults (the baselines): answers of
  the quickstart are drafted for again, step by step. Both are given the same ones, task by task, and keep all of them.
  "In our bytes": its cache keeps as many of the latest as take no less memory than ours takes for all. Ours takes every
  guess that it weighs, since there is no step to pay for.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from llguidance import LLMatcher

from weft.domain.request import Sampling
from weft_bench.cpu_engine import Ask, Played, Sizes, Subject
from weft_bench.cpu_shapes import RANK, SHAPES, prompts
from weft_bench.figures.accuracy import sentences
from weft_bench.speculate_arctic import arctic_figures
from weft_bench.speculate_json import SCHEMA, forced_share, tokenizer
from weft_runner.core import StepModel
from weft_stage.cpu_models import adapter, base_model, files
from weft_stage.errors import EngineRefused
from weft_stage.lines import Line, Origin

PARTS = ("quickstart", "again", "random", "json", "arctic")
TASKS = {
    "json": ">= 1.8", "reverse-words": ">= 1.8", "digits": ">= 1.8", "upper": ">= 1.05", "cipher": ">= 1.05",
    "initials": ">= 0.98",
}  # fmt: skip
ANSWERS = 8  # of a task in a round
STREAMS = (1, 4, 16)
RANDOM_STREAMS = (1, 16, 32)
PROMPT_TOKENS, ANSWER_TOKENS = 32, 64
JSON_TOKENS = 256  # at most: an answer ends with its object
RATE, ACCEPTED = "rate with drafts / without", "tokens a step"
Bar = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]


@dataclass(frozen=True, slots=True)
class Pair:
    """Two engines of one model, which differ in drafts alone."""

    drafting: Subject
    plain: Subject

    def warm(self, asks: Sequence[Ask], streams: int) -> None:
        for subject in (self.drafting, self.plain):
            subject.play(asks, streams=streams)

    def compare(self, rounds: Sequence[Sequence[Ask]], streams: int, advanced: Callable[[int], None]) -> "Compared":
        """Play each round through both, by turns first. Raises EngineRefused: the answers differ."""
        found: list[tuple[Played, Played]] = []
        for number, asks in enumerate(rounds):
            order = (self.drafting, self.plain) if number % 2 else (self.plain, self.drafting)
            played = {id(subject): subject.play(asks, streams=streams) for subject in order}
            one, other = played[id(self.drafting)], played[id(self.plain)]
            if [life.answer for life in one.lives] != [life.answer for life in other.lives]:
                raise EngineRefused("answers with drafts are not those without them")
            found.append((one, other))
            advanced(1)
        return Compared(found)


@dataclass(frozen=True, slots=True)
class Compared:
    """What became of the rounds: with drafts, and without."""

    rounds: Sequence[tuple[Played, Played]]

    @property
    def rate(self) -> float:
        return median(other.wall_s / one.wall_s for one, other in self.rounds)

    def bound(self, model: StepModel) -> float:
        """Return what the rate would be if each step took what the profile says, and nothing else any time."""
        return median(_predicted_s(model, other) / _predicted_s(model, one) for one, other in self.rounds)

    @property
    def tokens_a_row(self) -> float:
        """Tokens that a row of a step gave, prompts' steps left out of neither."""
        rows = sum(beat.rows for one, _ in self.rounds for beat in one.beats)
        return sum(one.tokens for one, _ in self.rounds) / rows


def figures(
    parts: Sequence[str], shape: str, quickstart: Path, folder: Path, warm: int, n_rounds: int, arctic: Path | None,
    origin: Origin, bar: Bar,
) -> Iterator[Line]:  # fmt: skip
    """Measure the parts. `folder`: of random models; `arctic`: a Python that has the part of that name, or None.

    Raises EngineRefused, PeerFailed.
    """
    if "quickstart" in parts:
        yield from quickstart_figures(quickstart, warm, n_rounds, origin, bar)
    for part, streams in (("again", STREAMS), ("random", RANDOM_STREAMS)):
        for n_streams in streams if part in parts else ():
            yield from shape_figures(part, n_streams, shape, folder, n_rounds, origin, bar)
    if "json" in parts:
        yield from json_figures(shape, folder, n_rounds, origin, bar)
    if arctic is not None:
        base, adapters, asks = _tasks(quickstart, warm + ANSWERS * n_rounds)
        with Subject(base, Sizes(rows=16, context_tokens=1024, slots=len(TASKS))) as subject:
            subject.adapters.paths.update(adapters)
            yield from arctic_figures(arctic, subject, asks, warm, origin, bar)


def quickstart_figures(quickstart: Path, warm: int, n_rounds: int, origin: Origin, bar: Bar) -> Iterator[Line]:
    """Measure one stream of each task."""
    base, adapters, of_task = _tasks(quickstart, warm + ANSWERS * n_rounds)
    with ExitStack() as ending:
        sizes = Sizes(rows=16, context_tokens=1024, slots=len(TASKS), profile=True)
        pair = _pair(ending, base, sizes, adapters)
        origin = replace(origin, versions=f"{origin.versions}, {pair.drafting.executor}")
        for task, target in TASKS.items():
            asks = of_task[task]
            rounds = [asks[at : at + ANSWERS] for at in range(warm, len(asks), ANSWERS)]
            with bar(task, n_rounds) as advanced:
                pair.warm(asks[:warm], 8)
                compared = pair.compare(rounds, 1, advanced)
            case = f"quickstart, {task}, 1 stream after {warm} answers"
            yield origin.line(case, RATE, compared.rate, "x", target=target)
            yield origin.line(case, ACCEPTED, compared.tokens_a_row, "tokens")


def _tasks(quickstart: Path, count: int) -> tuple[dict[str, Path], dict[str, Path], dict[str, list[Ask]]]:
    """Return the quickstart's base, the adapters of its tasks, and the same `count` sentences asked of each."""
    base = {path.name: path for path in (quickstart / "model").iterdir()}
    texts = [prompt for prompt, _ in sentences(quickstart, count, 0)]
    asks = {task: [Ask(task, text, 512, salt=task, sampling=Sampling()) for text in texts] for task in TASKS}
    return base, {task: quickstart / "adapters" / task for task in TASKS}, asks


def shape_figures(
    part: str, streams: int, name: str, folder: Path, n_rounds: int, origin: Origin, bar: Bar
) -> Iterator[Line]:
    """Measure a random model with an adapter, whose prompts come again, or whose answers are random."""
    shape, again = SHAPES[name], part == "again"
    with ExitStack() as ending:
        sizes = Sizes(
            rows=streams, context_tokens=PROMPT_TOKENS + ANSWER_TOKENS, slots=1, adapter_pages=512, profile=True
        )
        base = files(base_model(folder, name, shape))
        pair = _pair(ending, base, sizes, {"adapter": adapter(folder, name, shape, 0, RANK)})
        origin = replace(origin, versions=f"{origin.versions}, {pair.drafting.executor}")
        drawn = prompts(random.Random(0), streams * (1 if again else 1 + n_rounds), PROMPT_TOKENS, shape.vocab)
        asks = [
            Ask("adapter", prompt, ANSWER_TOKENS, sampling=_sampling(seed, again=again))
            for seed, prompt in enumerate(drawn)
        ]
        rounds = [asks[:streams] if again else asks[at * streams : (at + 1) * streams] for at in range(1, n_rounds + 1)]
        case = f"{name}, {part}, {streams} {'stream' if streams == 1 else 'streams'}"
        with bar(case, n_rounds) as advanced:
            pair.warm(asks[:streams], streams)
            compared = pair.compare(rounds, streams, advanced)
        yield origin.line(case, RATE, compared.rate, "x", target=None if again else ">= 0.99")
        yield origin.line(case, ACCEPTED, compared.tokens_a_row, "tokens")
        if again:
            profile = pair.drafting.built.profile
            assert profile is not None, "engines are profiled"
            share = compared.rate / compared.bound(profile.model)
            yield origin.line(case, "share of the bound", share, "share", target=">= 0.9")


def json_figures(name: str, folder: Path, n_rounds: int, origin: Origin, bar: Bar) -> Iterator[Line]:
    """Measure one stream of answers by SCHEMA, with an adapter, after a round that is not measured."""
    shape, grammar = SHAPES[name], LLMatcher.grammar_from_json_schema(SCHEMA)
    base, made = files(base_model(folder, name, shape)), adapter(folder, name, shape, 0, RANK)
    with ExitStack() as ending:
        scratch = Path(ending.enter_context(TemporaryDirectory(prefix="weft-bench-")))
        base["tokenizer.json"] = scratch / "tokenizer.json"
        base["tokenizer.json"].write_text(tokenizer(shape.vocab), encoding="utf-8")
        sizes = Sizes(rows=1, context_tokens=PROMPT_TOKENS + JSON_TOKENS, slots=1, adapter_pages=512, profile=True)
        pair = _pair(ending, base, sizes, {"adapter": made})
        origin = replace(origin, versions=f"{origin.versions}, {pair.drafting.executor}")
        drawn = prompts(random.Random(0), ANSWERS * (1 + n_rounds), PROMPT_TOKENS, shape.vocab)
        asks = [
            Ask("adapter", prompt, JSON_TOKENS, grammar=grammar, sampling=Sampling(seed=seed, temperature=1.0))
            for seed, prompt in enumerate(drawn)
        ]
        rounds = [asks[at : at + ANSWERS] for at in range(ANSWERS, len(asks), ANSWERS)]
        case = f"{name}, json by a schema, 1 stream"
        with bar(case, n_rounds) as advanced:
            pair.warm(asks[:ANSWERS], 1)
            compared = pair.compare(rounds, 1, advanced)
        yield origin.line(case, RATE, compared.rate, "x", target=">= 2.5")
        yield origin.line(case, ACCEPTED, compared.tokens_a_row, "tokens")
        beginning = LLMatcher(pair.plain.built.grammars.prepare(), grammar)
        answers = [life.answer for _, other in compared.rounds for life in other.lives]
        yield origin.line(case, "forced by the grammar", forced_share(beginning, answers), "share")


def _sampling(seed: int, *, again: bool) -> Sampling:
    return Sampling(ignore_eos=True) if again else Sampling(seed=seed, temperature=1.0, ignore_eos=True)


def _predicted_s(model: StepModel, played: Played) -> float:
    """Return the time of its steps: as measured with prompts, else what the profile says of as many rows and tokens."""
    found_s = 0.0
    for beat in played.beats:
        keys, guesses = beat.rows * (PROMPT_TOKENS + ANSWER_TOKENS // 2), beat.tokens - beat.rows
        decode_ms = model.decode_ms(beat.rows, keys) + model.guesses_ms(beat.rows, guesses)
        found_s += beat.ended - beat.began if beat.prefills else decode_ms / 1e3
    return found_s


def _pair(ending: ExitStack, base: dict[str, Path], sizes: Sizes, adapters: dict[str, Path]) -> Pair:
    make = partial(Subject, base)
    pair = Pair(
        ending.enter_context(make(replace(sizes, speculation="suffix"))), ending.enter_context(make(sizes))
    )  # fmt: skip
    for subject in (pair.drafting, pair.plain):
        subject.adapters.paths.update(adapters)
    return pair
