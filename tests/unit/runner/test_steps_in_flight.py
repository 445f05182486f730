"""Steps launched before the tokens of the one before are here, with whatever has changed meanwhile.

The executor is the reference behind a door: it runs a step when it is launched, as a device does in its stream, and
tells what was sampled only when it is asked for. What is answered is compared with steps run one after the other.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.small_runner import SMALL, Driver, World, reference_executor
from weft.domain.request import FinishReason, Sampling, Stop
from weft_runner.core import Batching, BatchLimits, SampledToken, check_pool
from weft_runner.model.sampling import SamplingArgs
from weft_runner.model.step import StepInput, check_step

GREEDY = Sampling(ignore_eos=True)


@dataclass(eq=False)
class Handle:
    sampled: list[SampledToken | None]
    told: list["Handle"]

    def result(self) -> list[SampledToken | None]:
        self.told.append(self)
        return self.sampled


@dataclass(eq=False)
class LateExecutor:
    """`behind`: how many tokens a step launched behind another took from it, of each such step."""

    inner: Any
    page_tokens: int
    behind: list[int] = field(default_factory=list)
    launched: list[Handle] = field(default_factory=list)
    told: list[Handle] = field(default_factory=list)
    fail_next: bool = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def keeps_tokens(self, draws: Sequence[SamplingArgs]) -> bool:
        return not any(draw.shifts or draw.mask or draw.given or draw.sampling.top_logprobs for draw in draws)

    def can_follow(self, step: StepInput, draws: Sequence[SamplingArgs]) -> bool:
        return len(step.tokens) == len(step.rows) == len(draws) and self.keeps_tokens(draws)

    def launch(self, step: StepInput, draws: Sequence[SamplingArgs]) -> Handle:
        tokens = list(step.tokens)
        for at, number in step.taken.items():
            tokens[at] = self._last[number]
        return self._run(step, tokens, draws, len(step.taken))

    def follow(self, step: StepInput, draws: Sequence[SamplingArgs]) -> Handle:
        return self._run(step, self._last, draws, len(draws))

    @property
    def _last(self) -> list[int]:
        return [token.token for token in self.launched[-1].sampled if token is not None]

    def _run(self, step: StepInput, tokens: list[int], draws: Sequence[SamplingArgs], taken: int) -> Handle:
        in_flight = len(self.launched) - len(self.told)
        assert self.told == self.launched[: len(self.told)], "told in the order in which they were launched"
        assert in_flight <= 1
        assert not taken or in_flight == 1, "tokens are taken from a step in flight"
        if in_flight:
            self.behind.append(taken)
            if self.fail_next:
                self.fail_next = False
                raise RuntimeError("a device's own trouble")
        step = StepInput(tokens, step.rows, step.plan)
        check_step(step, self.page_tokens)
        self.launched.append(Handle(self.inner.sample(self.inner.run(step), draws), self.told))
        return self.launched[-1]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> World:
    world = World(tmp_path_factory.mktemp("world") / "world", {**SMALL, "num_hidden_layers": 1})
    world.write_base()
    for seed, name in enumerate("ab"):
        world.write_adapter(name, seed=seed, rank=4)
    return world


@contextmanager
def driving(world: World, *, late: bool, **limits: Any) -> Iterator[Driver]:
    def made(*given: Any) -> Any:
        executor = reference_executor(*given)
        return LateExecutor(executor, given[2].page_tokens) if late else executor

    driver = Driver(world, make_executor=made, **limits)
    try:
        yield driver
    finally:
        driver.engine.close()


Samplings = st.sampled_from(
    [
        GREEDY, GREEDY, Sampling(), Sampling(temperature=1.0, seed=3), Sampling(stop_token_ids=(5, 9, 30)),
        Sampling(presence_penalty=1.0, ignore_eos=True), Sampling(top_logprobs=1, ignore_eos=True),
        Sampling(prompt_logprobs=1, temperature=1.0, seed=5, ignore_eos=True),
    ]
)  # fmt: skip
Requests = st.tuples(
    st.lists(st.integers(3, 60), min_size=1, max_size=30), st.integers(1, 12), st.sampled_from(["", "", "a", "b"]),
    Samplings, st.sampled_from([1, 4, 12]),
)  # fmt: skip
Moves = st.lists(
    st.one_of(Requests, st.integers(1, 4), st.integers(1, 4), st.tuples(st.just("stop"), st.integers(0, 9))),
    min_size=2, max_size=16,
)  # fmt: skip


def play(driver: Driver, moves: Sequence[Any], *, stops: bool = True) -> list[str]:
    """Requests by their numbers, beats between them, and some of them stopped: the keys of those."""
    stopped, starts = list[str](), list[Any]()
    for move in moves:
        match move:
            case int():
                for _ in range(move):
                    if driver.pool.runnable or driver.engine.steps.in_flight:
                        driver.beat()
                        check_pool(driver.pool)
            case ("stop", number):
                if number < len(starts) and stops:
                    driver.post(Stop(starts[number].request_id, starts[number].epoch))
                    stopped.append(starts[number].request_id)
            case (prompt, n_tokens, adapter, sampling, reserved):
                key = str(len(starts))
                starts.append(driver.request(
                    key, prompt, n_tokens, adapter, sampling=sampling, reservation_tokens=min(reserved, n_tokens)
                ))  # fmt: skip
                driver.post(starts[-1])
    if starts:
        driver.finish()
    check_pool(driver.pool)
    return stopped


@settings(max_examples=settings.default.max_examples // 2)
@given(
    moves=Moves, pages=st.sampled_from([24, 200]), chunk=st.sampled_from([7, 64]),
    batching=st.sampled_from([Batching.MIXED, Batching.MIXED, Batching.REQUEST]),
)  # fmt: skip
def test_answers_are_those_of_steps_one_after_the_other(
    small: World, moves: list[Any], pages: int, chunk: int, batching: Batching
) -> None:
    """Joins, ends, stops, adapters, growth, chunks of prompts, swaps and refusals while a step is in flight."""
    batch = BatchLimits(max_prefills=2, max_batch_tokens=chunk, batching=batching)
    with driving(small, late=True, total_pages=pages, swap_page_bytes=1, batch=batch) as late:
        stopped = play(late, moves)
    with driving(small, late=False, total_pages=400, batch=batch) as one_by_one:
        play(one_by_one, moves, stops=False)
    finished = {event.request_id for event in late.events if getattr(event, "finish", None) is not None}
    for number in range(sum(len(move) == 5 for move in moves if isinstance(move, tuple))):
        answer, expected = late.answer(key := str(number)), one_by_one.answer(str(number))
        if key in finished:
            assert answer == expected
        else:
            assert answer == expected[: len(answer)]
            assert key in stopped or pages < 200, "neither stopped nor refused"


def test_steps_with_prompts_are_launched_behind_others_and_have_others_behind_them(small: World) -> None:
    with driving(small, late=True) as driver:
        driver.post(driver.request("loads", [3], 1, "a", sampling=GREEDY))  # else the first may end before it is there
        driver.finish()
        driver.post(driver.request("first", [5, 9, 4], 12, sampling=GREEDY))
        driver.beat(3)
        driver.post(driver.request("second", [7] * 9, 3, "a", sampling=GREEDY))
        driver.finish()
        late = driver.engine.executor
        assert len(late.launched) - 2 == len(late.behind), "each but the first of those and of the one before"
        shapes = [(batch.n_prefills, len(batch.rows)) for batch in driver.batches]
        assert shapes.index((1, 2)) > 0
        assert {1, 2} == set(late.behind)


def test_a_row_that_ends_by_length_is_in_no_step_too_many(small: World) -> None:
    with driving(small, late=True) as driver:
        driver.post(
            driver.request("short", [5, 9], 3, sampling=GREEDY), driver.request("long", [4], 7, sampling=GREEDY)
        )
        driver.finish()
        assert sum(len(batch.rows) for batch in driver.batches) == 3 + 7


def test_a_row_that_ends_unseen_is_computed_once_more_and_not_accounted_for(small: World) -> None:
    with driving(small, late=False) as driver:
        driver.post(driver.request("x", [5, 9, 4], 8, sampling=GREEDY))
        driver.finish()
        stop = driver.answer("x")[3]
    with driving(small, late=True) as driver:
        sampling = Sampling(stop_token_ids=(stop,), ignore_eos=True)
        driver.post(driver.request("x", [5, 9, 4], 8, sampling=sampling))
        driver.post(driver.request("beside", [7, 7], 8, sampling=GREEDY))
        driver.finish()
        assert driver.ending("x").finish is FinishReason.STOP
        assert driver.pool.tokens == sum(batch.n_tokens for batch in driver.batches) - 1


def test_a_draw_beside_a_prompt_that_is_scored_is_the_one_that_it_is_alone(small: World) -> None:
    """A step that was scheduled behind another has tokens that are not counted yet, whatever else is in it."""
    answers = list[list[int]]()
    for late in (True, False):
        with driving(small, late=late) as driver:
            drawn = Sampling(temperature=2.0, seed=11, ignore_eos=True)
            driver.post(driver.request("drawn", [5, 9, 4], 8, sampling=drawn))
            driver.beat(2)
            scored = Sampling(prompt_logprobs=1, ignore_eos=True)
            driver.post(driver.request("scored", [7] * 6, 2, sampling=scored))
            driver.finish()
            assert not late or driver.engine.executor.behind
            answers.append(driver.answer("drawn"))
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(presence_penalty=1.0), Sampling(top_logprobs=1), Sampling(bad_words=((5,),)),
        Sampling(prompt_logprobs=1),
    ],
    ids=["penalty", "logprobs", "bad words", "prompt logprobs"],
)  # fmt: skip
def test_what_the_next_token_needs_of_this_one_is_waited_for(small: World, sampling: Sampling) -> None:
    with driving(small, late=True) as driver:
        driver.post(driver.request("x", [5, 9, 4], 4, sampling=sampling))
        driver.finish()
        waits = sampling.prompt_logprobs is None
        assert len(driver.engine.executor.behind) == (0 if waits else len(driver.batches) - 2)


def test_a_launch_that_fails_behind_a_step_costs_nobody_a_token(small: World, caplog: pytest.LogCaptureFixture) -> None:
    answers = list[list[list[int]]]()
    for late in (True, False):
        with driving(small, late=late) as driver:
            driver.post(driver.request("x", [5, 9, 4], 6, "a", sampling=GREEDY))
            driver.beat(2)
            driver.post(driver.request("y", [7, 7], 6, sampling=GREEDY))
            if late:
                driver.engine.executor.fail_next = True
            driver.finish()
            answers.append([driver.answer(key) for key in "xy"])
    assert "its rows run alone" in caplog.text
    assert answers[0] == answers[1]
