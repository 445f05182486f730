"""Answers end where the table says, and the table is read strictly."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from weft.domain.ids import Epoch
from weft.domain.machine import Connected, Received
from weft.domain.request import Ended, FinishReason, NoCapacity, Sampling, SessionHello, Start, Step
from weft_bench.drive import Sizes, settings
from weft_runner.model import Executor
from weft_runner.shell import Engine, Output
from weft_runner.shell.engine_factory import build_engine
from weft_stage.cpu_models import base_model, files
from weft_stage.errors import BadTable
from weft_stage.playing import SESSION, Folders
from weft_stage.shapes import Shape
from weft_stage.trace_executor import FAST, Pace, TracedAnswer, TraceExecutor, read_table

SMALLEST = Shape(hidden=32, layers=1, heads=2, kv_heads=1, inner=48, vocab=8)  # so few tokens that an end comes soon
PROMPT_TOKENS, LONG, EOS = 5, 200, 2


class Served:
    """An engine whose executor knows some answers, and what it sent."""

    def __init__(self, folder: Path, answers: dict[int, TracedAnswer], pace: Pace = FAST) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.finish: dict[str, FinishReason] = {}
        self.numerics = list[str]()

        def wrap(executor: Executor) -> Executor:
            made = TraceExecutor(executor, answers, pace)
            self.numerics += [executor.numerics_class, made.numerics_class]
            return made

        sizes = Sizes(executor="reference", rows=4, slots=1, context_tokens=512)
        built = build_engine(
            settings(sizes), files(base_model(folder, "smallest", SMALLEST)), Folders(), self._take, wrap=wrap
        )
        self.engine: Engine = built.engine
        self.engine.post(Connected(SESSION, SessionHello("bench", "")))

    def _take(self, output: Output) -> None:
        for _, message in output.sends:
            assert not isinstance(message, Ended | NoCapacity), message
            for part in message.sequences if isinstance(message, Step) else ():
                self.tokens.setdefault(part.request_id, []).extend(part.tokens)
                if part.finish is not None:
                    self.finish[part.request_id] = part.finish

    def answer(self, *seeds: int, max_tokens: int = 2 * LONG) -> None:
        """Serve a request of each seed at once, to their ends."""
        for seed in seeds:
            prompt = tuple(random.Random(seed).choices(range(3, SMALLEST.vocab), k=PROMPT_TOKENS))
            sampling = Sampling(seed=seed, temperature=1.0)
            start = Start(str(seed), Epoch(1, seed), prompt, (), max_tokens, max_tokens, sampling=sampling)
            self.engine.post(Received(SESSION, start))
        while len(self.finish) < len(seeds):
            self.engine.run_once()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    answers = {seed: TracedAnswer(seed, PROMPT_TOKENS, tokens) for seed, tokens in ((1, LONG), (2, 3), (3, 1))}
    made = Served(tmp_path, answers)
    yield made
    made.engine.close()


def test_answers_of_a_trace_end_at_their_lengths_and_others_as_the_model_ends_them(served: Served) -> None:
    served.answer(1, 2, 3, 99)
    lengths = {seed: len([token for token in tokens if token != EOS]) for seed, tokens in served.tokens.items()}
    assert {seed: lengths[seed] for seed in "123"} == {"1": LONG, "2": 3, "3": 1}
    assert lengths["99"] < LONG, "a model of eight tokens says the end before that"
    assert set(served.finish.values()) == {FinishReason.EOS}


def test_the_limit_of_a_request_still_holds(served: Served) -> None:
    served.answer(1, max_tokens=7)
    assert served.finish == {"1": FinishReason.LENGTH}
    assert len(served.tokens["1"]) == 7


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"seed": 1, "prompt_tokens": 1}', "instead of"),
        ('{"seed": -1, "prompt_tokens": 1, "output_tokens": 1}', "seed is -1"),
        ('{"seed": 1, "prompt_tokens": 1, "output_tokens": 1.5}', "output_tokens is 1.5"),
        ('{"seed": 1, "prompt_tokens": 1, "output_tokens": 1}\n' * 2, "line 2: seed 1 again"),
        ("[]", "line 1"),
    ],
)
def test_a_table_that_is_none_is_refused_with_its_line(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "table").write_text(text)
    with pytest.raises(BadTable, match=why):
        read_table(tmp_path / "table")
