"""`weft bench speculate`: drafts on, beside the same engine with drafts off, in turn, the engine alone.

Each figure is the median over paired rounds of the time without drafts through the time with them, for the same
requests; the answers of both engines are the same tokens, or the run is refused. docs/benchmarks/engine-cpu.md has the
method.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from weft.domain.request import Sampling
from weft_bench import cases
from weft_bench.cpu_shapes import RANK, SHAPES, prompts
from weft_bench.drive.engine import Sizes, Subject
from weft_bench.figures.accuracy import sentences
from weft_bench.run import Run
from weft_runner.core import StepModel
from weft_stage.cpu_models import adapter, base_model, cache_dir, files
from weft_stage.errors import EngineRefused
from weft_stage.lines import Line
from weft_stage.playing import Ask, Played

TASKS = {
    "json": ">= 1.8", "reverse-words": ">= 1.8", "digits": ">= 1.8", "upper": ">= 1.05", "cipher": ">= 1.05",
    "initials": ">= 0.98",
}  # fmt: skip
ANSWERS = 8  # of a task in a round
STREAMS = {"again": (1, 4, 16), "random": (1, 16, 32)}
PROMPT_TOKENS, ANSWER_TOKENS = 32, 64
GREEDY, RANDOM = Sampling(ignore_eos=True), Sampling(temperature=1.0, ignore_eos=True)
RATE, ACCEPTED = "rate with drafts / without", "tokens a step"


@dataclass(frozen=True, slots=True)
class Pair:
    """Two engines of one model, which differ in drafts alone."""

    drafting: Subject
    plain: Subject

    def warm(self, asks: Sequence[Ask], streams: int) -> None:
        for subject in (self.drafting, self.plain):
            subject.play(asks, streams=streams)

    def compare(self, rounds: Sequence[Sequence[Ask]], streams: int, advance: Callable[[int], None]) -> "Compared":
        """Play each round through both, by turns first. Raises EngineRefused: the answers differ."""
        played = list[tuple[Played, Played]]()
        for number, asks in enumerate(rounds):
            order = (self.drafting, self.plain) if number % 2 else (self.plain, self.drafting)
            of_subject = {id(subject): subject.play(asks, streams=streams) for subject in order}
            drafted, plain = of_subject[id(self.drafting)], of_subject[id(self.plain)]
            if [life.answer for life in drafted.lives] != [life.answer for life in plain.lives]:
                raise EngineRefused("answers with drafts are not those without them")
            played.append((drafted, plain))
            advance(1)
        return Compared(played)


@dataclass(frozen=True, slots=True)
class Compared:
    """What became of the rounds: with drafts, and without."""

    rounds: Sequence[tuple[Played, Played]]

    @property
    def rate(self) -> float:
        return median(plain.wall_s / drafted.wall_s for drafted, plain in self.rounds)

    def bound(self, model: StepModel) -> float:
        """Return what the rate would be if each step took what the profile says, and nothing else any time."""
        return median(_predicted_s(model, plain) / _predicted_s(model, drafted) for drafted, plain in self.rounds)

    @property
    def tokens_a_row(self) -> float:
        """Tokens that a row of a step gave, prompts' steps left out of neither."""
        rows = sum(beat.rows for drafted, _ in self.rounds for beat in drafted.beats)
        return sum(drafted.tokens for drafted, _ in self.rounds) / rows


def figures(options: cases.Speculate, run: Run) -> Iterator[Line]:
    """Measure the parts. Raises EngineRefused."""
    if "quickstart" in options.parts:
        yield from _quickstart(options, run)
    for part in STREAMS:
        for streams in STREAMS[part] if part in options.parts else ():
            yield from _random_model(part, streams, options, run)


def _quickstart(options: cases.Speculate, run: Run) -> Iterator[Line]:
    """Measure one stream of each task."""
    folder, warm = options.quickstart, options.warm
    texts = [prompt for prompt, _ in sentences(folder, warm + ANSWERS * options.rounds, 0)]
    sizes = Sizes(rows=16, context_tokens=1024, slots=len(TASKS), profile=True)
    with ExitStack() as ending:
        base = {path.name: path for path in (folder / "model").iterdir()}
        pair = _pair(ending, base, sizes, {task: folder / "adapters" / task for task in TASKS})
        for task, target in TASKS.items():
            asks = [Ask(task, text, 512, salt=task, sampling=Sampling()) for text in texts]
            case = f"quickstart, {task}, 1 stream after {warm} answers"
            rounds = [asks[at : at + ANSWERS] for at in range(warm, len(asks), ANSWERS)]
            yield from _lines(run, case, pair, asks[:warm], 8, rounds, 1, target, bound=False)


def _random_model(part: str, streams: int, options: cases.Speculate, run: Run) -> Iterator[Line]:
    """Measure a random model with an adapter, whose prompts come again, or whose answers are random."""
    name, folder, again = options.model_shape, options.models or cache_dir(), part == "again"
    shape, rounds = SHAPES[name], options.rounds
    sizes = Sizes(rows=streams, context_tokens=PROMPT_TOKENS + ANSWER_TOKENS, slots=1, adapter_pages=512, profile=True)
    with ExitStack() as ending:
        base = files(base_model(folder, name, shape))
        pair = _pair(ending, base, sizes, {"adapter": adapter(folder, name, shape, 0, RANK)})
        made = prompts(random.Random(0), streams * (1 if again else 1 + rounds), PROMPT_TOKENS, shape.vocab)
        asks = [
            Ask("adapter", prompt, ANSWER_TOKENS, sampling=GREEDY if again else replace(RANDOM, seed=seed))
            for seed, prompt in enumerate(made)
        ]
        played = [asks[:streams] if again else asks[at * streams : (at + 1) * streams] for at in range(1, rounds + 1)]
        case = f"{name}, {part}, {streams} {'stream' if streams == 1 else 'streams'}"
        target = None if again else ">= 0.99"
        yield from _lines(run, case, pair, asks[:streams], streams, played, streams, target, bound=again)


def _lines(
    run: Run, case: str, pair: Pair, warm: Sequence[Ask], warm_streams: int, rounds: Sequence[Sequence[Ask]],
    streams: int, target: str | None, *, bound: bool,
) -> Iterator[Line]:  # fmt: skip
    """Play the rounds, and yield the figures of a case."""
    origin = run.origin("tokenizers")
    origin = replace(origin, versions=f"{origin.versions}, {pair.drafting.executor}")
    with run.progress(case, len(rounds)) as advance:
        pair.warm(warm, warm_streams)
        compared = pair.compare(rounds, streams, advance)
    yield origin.line(case, RATE, compared.rate, "x", target=target)
    yield origin.line(case, ACCEPTED, compared.tokens_a_row, "tokens")
    if bound:
        profile = pair.drafting.built.profile
        assert profile is not None, "engines are profiled"
        share = compared.rate / compared.bound(profile.model)
        yield origin.line(case, "share of the bound", share, "share", target=">= 0.9")


def _predicted_s(model: StepModel, played: Played) -> float:
    """Return the time of its steps: as measured with prompts, else what the profile says of as many rows and tokens."""
    predicted_s = 0.0
    for beat in played.beats:
        keys, guesses = beat.rows * (PROMPT_TOKENS + ANSWER_TOKENS // 2), beat.tokens - beat.rows
        decode_ms = model.decode_ms(beat.rows, keys) + model.guesses_ms(beat.rows, guesses)
        predicted_s += beat.ended - beat.began if beat.prefills else decode_ms / 1e3
    return predicted_s


def _pair(ending: ExitStack, base: dict[str, Path], sizes: Sizes, adapters: dict[str, Path]) -> Pair:
    drafting = ending.enter_context(Subject(base, replace(sizes, speculation="suffix")))
    plain = ending.enter_context(Subject(base, sizes))
    for subject in (drafting, plain):
        subject.adapters.paths.update(adapters)
    return Pair(drafting, plain)
