"""`weft bench speculate`: drafts on, beside the same engine with drafts off, in turn, the engine alone.

Each figure is the median over paired rounds of the time without drafts through the time with them, for the same
requests; the answers of both engines are the same tokens, or the run is refused. docs/benchmarks/engine-cpu.md has the
method.
"""

import random
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
class Case:
    """Requests for two engines. `warm`: played before, `warm_streams` at a time; then each of the rounds is."""

    name: str
    warm: Sequence[Ask]
    warm_streams: int
    rounds: Sequence[Sequence[Ask]]
    streams: int
    target: str | None = None
    bound: bool = False  # whether the rate is compared with what the profile allows


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
    base = {path.name: path for path in (folder / "model").iterdir()}
    with engines(base, sizes, {task: folder / "adapters" / task for task in TASKS}) as subjects:
        for task, target in TASKS.items():
            asks = [Ask(task, text, 512, salt=task, sampling=Sampling()) for text in texts]
            rounds = [asks[at : at + ANSWERS] for at in range(warm, len(asks), ANSWERS)]
            name = f"quickstart, {task}, 1 stream after {warm} answers"
            yield from _lines(run, *subjects, Case(name, asks[:warm], 8, rounds, 1, target))


def _random_model(part: str, streams: int, options: cases.Speculate, run: Run) -> Iterator[Line]:
    """Measure a random model with an adapter, whose prompts come again, or whose answers are random."""
    name, folder, again = options.model_shape, options.models or cache_dir(), part == "again"
    shape, rounds = SHAPES[name], options.rounds
    sizes = Sizes(rows=streams, context_tokens=PROMPT_TOKENS + ANSWER_TOKENS, slots=1, adapter_pages=512, profile=True)
    adapters = {"adapter": adapter(folder, name, shape, 0, RANK)}
    with engines(files(base_model(folder, name, shape)), sizes, adapters) as subjects:
        made = prompts(random.Random(0), streams * (1 if again else 1 + rounds), PROMPT_TOKENS, shape.vocab)
        asks = [
            Ask("adapter", prompt, ANSWER_TOKENS, sampling=GREEDY if again else replace(RANDOM, seed=seed))
            for seed, prompt in enumerate(made)
        ]
        played = [asks[:streams] if again else asks[at * streams : (at + 1) * streams] for at in range(1, rounds + 1)]
        case, target = (
            f"{name}, {part}, {streams} {'stream' if streams == 1 else 'streams'}",
            None if again else ">= 0.99",
        )
        yield from _lines(run, *subjects, Case(case, asks[:streams], streams, played, streams, target, again))


@contextmanager
def engines(base: Mapping[str, Path], sizes: Sizes, adapters: Mapping[str, Path]) -> Generator[tuple[Subject, Subject]]:
    """Build two engines of one model: with drafts, and without."""
    with Subject(base, replace(sizes, speculation="suffix")) as drafting, Subject(base, sizes) as plain:
        for subject in (drafting, plain):
            subject.adapters.paths.update(adapters)
        yield drafting, plain


def _lines(run: Run, drafting: Subject, plain: Subject, case: Case) -> Iterator[Line]:
    """Play the rounds through both engines, by turns first. Raises EngineRefused: the answers differ."""
    origin, played = run.origin("tokenizers"), list[tuple[Played, Played]]()
    origin = replace(origin, versions=f"{origin.versions}, {drafting.executor}")
    with run.progress(case.name, len(case.rounds)) as advance:
        for subject in (drafting, plain):
            subject.play(case.warm, streams=case.warm_streams)
        for number, asks in enumerate(case.rounds):
            order = (drafting, plain) if number % 2 else (plain, drafting)
            of_subject = {id(subject): subject.play(asks, streams=case.streams) for subject in order}
            with_drafts, without = of_subject[id(drafting)], of_subject[id(plain)]
            if [life.answer for life in with_drafts.lives] != [life.answer for life in without.lives]:
                raise EngineRefused("answers with drafts are not those without them")
            played.append((with_drafts, without))
            advance(1)
    rate = median(without.wall_s / with_drafts.wall_s for with_drafts, without in played)
    rows = sum(beat.rows for with_drafts, _ in played for beat in with_drafts.beats)  # prompts' steps are among them
    yield origin.line(case.name, RATE, rate, "x", target=case.target)
    yield origin.line(case.name, ACCEPTED, sum(with_drafts.tokens for with_drafts, _ in played) / rows, "tokens")
    if case.bound:
        profile = drafting.built.profile
        assert profile is not None, "engines are profiled"
        bound = median(
            _predicted_s(profile.model, without) / _predicted_s(profile.model, with_drafts)
            for with_drafts, without in played
        )
        yield origin.line(case.name, "share of the bound", rate / bound, "share", target=">= 0.9")


def _predicted_s(model: StepModel, played: Played) -> float:
    """Return the time of its steps: as measured with prompts, else what the profile says of as many rows and tokens."""
    predicted_s = 0.0
    for beat in played.beats:
        keys, guesses = beat.rows * (PROMPT_TOKENS + ANSWER_TOKENS // 2), beat.tokens - beat.rows
        decode_ms = model.decode_ms(beat.rows, keys) + model.guesses_ms(beat.rows, guesses)
        predicted_s += beat.ended - beat.began if beat.prefills else decode_ms / 1e3
    return predicted_s
