"""Prompts beside running rows, on a whole engine: chunks by the token time, the same text, and cheap iterations."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness.costs import calls_of
from harness.runner_machine import session, start_of
from weft.domain.machine import Connected, Received
from weft.domain.request import Sampling, SessionHello
from weft_runner.core import BatchLimits, PoolLimits, Runner, SampledToken, StepModel
from weft_runner.core.step_time_model import MIN_CHUNK
from weft_runner.model import Capabilities
from weft_runner.shell import Engine

GREEDY = Sampling(ignore_eos=True)
NO_TIME = BatchLimits(1, 512, token_time_ms=1e-6)


def test_beside_running_rows_a_prompt_is_chunked_to_the_token_time_and_alone_it_is_not(drive):
    driver, prompt = drive(batch=NO_TIME, page_tokens=16), list(range(3, 60)) * 2
    driver.ask("alone", prompt, 30, sampling=GREEDY)
    driver.beat()
    assert driver.batches[-1].n_tokens == 2 * 57, "nobody waits for a token"
    driver.ask("late", prompt, 3, sampling=GREEDY)
    driver.beat(4)
    assert [batch.n_tokens - 1 for batch in driver.batches[-4:]] == [MIN_CHUNK, MIN_CHUNK, MIN_CHUNK, 114 - 96]
    assert all(len(batch.rows) == 2 for batch in driver.batches[-4:]), "the running row has its token every time"


@pytest.mark.parametrize("limits", [NO_TIME, BatchLimits(1, 512, 0.5), BatchLimits(3, 90, 2.0)], ids=str)
def test_chunks_passing_and_age_change_no_text(drive, world, limits):
    world.write_adapter("a", rank=4)

    def answers(driver: Any) -> list[list[int]]:
        for i, length in enumerate((100, 3, 40, 7, 90, 1)):
            prompt = [(7 * i + k) % 57 + 3 for k in range(length)]
            driver.ask(f"r{i}", prompt, 12, ("", "a")[i % 2], sampling=GREEDY)
        driver.finish()
        return [driver.answer(f"r{i}") for i in range(6)]

    whole = answers(drive(batch=BatchLimits(1, 512), page_tokens=16))
    assert answers(drive(batch=limits, page_tokens=16)) == whole


def test_the_engine_learns_how_long_its_steps_take(drive):
    driver = drive()
    driver.pool.scheduler.step_time.model = StepModel(1e7, 0.0, 0.0, 1.0)
    driver.run("r", [3, 4, 5], 60, sampling=GREEDY)
    assert driver.pool.scheduler.step_time.decode < 0.2, "no step took hours"


# ---- what an iteration costs around the executor


class Instant:
    """An executor that returns at once: what is left is the engine's own work."""

    numerics_class, adapters, can = "instant", None, Capabilities()

    def __init__(self, vocab: int) -> None:
        self.spec = SimpleNamespace(vocab_size=vocab)
        self._logits = torch.zeros(64, vocab)
        self._choice = SampledToken(5)

    def clear_pages(self, pages: list[int]) -> None:
        del pages

    def allocate_adapter_pages(self, pages: Any) -> None:
        del pages

    def run(self, step: Any) -> torch.Tensor:
        return self._logits[: len(step.rows)]

    def sample(self, logits: torch.Tensor, draws: list[Any]) -> list[SampledToken]:
        del logits
        return [self._choice] * len(draws)


class NoAdapters:
    """No adapter is asked for."""

    def __init__(self) -> None:
        self.ranks: dict[int, int] = {}

    def execute(self, actions: Any) -> None:
        assert not list(actions)


def running_engine(rows: int) -> Engine:
    """Make an engine in which `rows` rows decode."""
    limits = PoolLimits(4096, 16, 64, 8, 4096, 64)
    engine: Any = Engine(Runner(limits), Instant(64), lambda _post: NoAdapters(), lambda _output: None)
    engine.post(Connected(session(), SessionHello("g", "")))
    for i in range(rows):
        engine.post(Received(session(), start_of(f"r{i}", i + 1, (1, 2), 900, sampling=GREEDY)))
    while engine.runner.pool.scheduler.reusable_batch is None:
        engine.run_once()
    engine.runner.reporter._due_at = float("inf")  # until a test asks for one
    return engine


def test_an_iteration_of_an_unchanged_batch_makes_a_dozen_python_calls_a_row():
    """Time depends on the machine, calls do not: with 12 a row, and 40 besides, 32 rows took 75 us, of 340 before."""
    few, many = running_engine(8), running_engine(32)
    per_row = (calls_of(many.run_once) - calls_of(few.run_once)) / 24
    assert per_row <= 13
    assert calls_of(many.run_once) - 32 * per_row <= 42, "the rest does not depend on the rows"


def test_what_a_report_calls_does_not_depend_on_the_rows():
    """Used pages and waiting sequences were a call for each row, four in all."""

    def of_a_report(engine: Engine) -> int:
        without = calls_of(engine.run_once)
        engine.runner.reporter._due_at = 0.0
        return calls_of(engine.run_once) - without

    few, many = of_a_report(running_engine(8)), of_a_report(running_engine(32))
    assert many - few <= 8
    assert many <= 60
