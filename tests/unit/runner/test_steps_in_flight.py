"""Steps launched before the tokens of the one before are here, with whatever has changed meanwhile.

The executor is the reference behind a door: it runs a step when it is launched, as a device does in its stream, and
tells what was sampled only when it is asked for. What is answered is compared with steps run one after the other.
Masks of grammars are computed beats later, and requests move with their KV to a second engine of the same kind.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from harness.numerics import near
from harness.runner_machine import session
from harness.small_runner import SMALL, Driver, LaggingThreads, World, executor_of
from weft.domain.ids import Epoch, RunnerId
from weft.domain.kv_transfer import KvReady
from weft.domain.machine import TICK, Close, Closed, Connected, Kind, Peer, Received
from weft.domain.request import Ended, FinishReason, Freeze, Frozen, KvTarget, PromptLogprobs, Sampling, Start, Stop
from weft_runner.core import Batching, BatchLimits, KvIdentity, OpenKvStream, ReceiveKv, SampledToken, SendKv
from weft_runner.core.events import DropKv
from weft_runner.core.request_pool import check_pool
from weft_runner.model import Capabilities, SamplingArgs, StepInput, check_step

GREEDY = Sampling(ignore_eos=True)
RUNNERS = RunnerId("ns.a", "1"), RunnerId("ns.b", "1")
TO_SECOND, FROM_FIRST = Peer(Kind.RUNNER, "ns.b/1"), Peer(Kind.RUNNER, "ns.a/1/7")


def expect(holds: bool, what: str) -> None:
    """A fault is told by no exception: whatever an executor raises, its engine goes on."""
    if not holds:
        pytest.fail(what)


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
    logits: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    keeps_tokens = True

    @property
    def can(self) -> Capabilities:
        return self.inner.can._replace(follows=self)

    def can_follow(self, step: StepInput) -> bool:
        return len(step.tokens) == len(step.rows)

    def run(self, step: StepInput) -> Any:
        tokens = list(step.tokens)
        for at, number in step.taken.items():
            tokens[at] = self._last[number]
        return self._run(step, tokens, len(step.taken))

    def follow(self, step: StepInput) -> Any:
        return self._run(step, self._last, len(step.rows))

    @property
    def _last(self) -> list[int]:
        return [0 if token is None else token.token for token in self.launched[-1].sampled]

    def _run(self, step: StepInput, tokens: list[int], taken: int) -> Any:
        in_flight = len(self.launched) - len(self.told)
        expect(self.logits is None, "a step is drawn from before the next one is launched")
        expect(self.told == self.launched[: len(self.told)], "told in the order in which they were launched")
        expect(in_flight <= 1, "one step behind another")
        expect(not taken or in_flight == 1, "tokens are taken from a step in flight")
        if in_flight:
            self.behind.append(taken)
            if self.fail_next:
                self.fail_next = False
                del self.launched[len(self.told) :]
                raise RuntimeError("a device's own trouble")
        step = StepInput(tokens, step.rows, step.plan)
        try:
            check_step(step, self.page_tokens)
        except AssertionError as error:
            pytest.fail(repr(error))
        self.logits = self.inner.run(step)
        return self.logits

    def draw(self, logits: Any, draws: Sequence[SamplingArgs]) -> Handle:
        self.launched.append(Handle(self.sample(logits, draws), self.told))
        return self.launched[-1]

    def sample(self, logits: Any, draws: Sequence[SamplingArgs]) -> list[SampledToken | None]:
        expect(logits is self.logits, "only the logits of the latest step are there")
        self.logits = None
        return self.inner.sample(logits, draws)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> World:
    world = World(tmp_path_factory.mktemp("world") / "world", {**SMALL, "num_hidden_layers": 1})
    base = world.write_base()
    ends = {"id": 2, "content": "</s>", "special": True}
    vocab = {chr(62 + token): token for token in range(3, 61)}  # A to z
    tokenizer = {"added_tokens": [ends], "decoder": {"type": "Fuse"}, "model": {"vocab": vocab}}
    (base / "tokenizer.json").write_text(json.dumps(tokenizer))
    for seed, name in enumerate("ab"):
        world.write_adapter(name, seed=seed, rank=4)
    return world


@contextmanager
def driving(world: World, *, late: bool, **limits: Any) -> Iterator[Driver]:
    def made(*given: Any) -> Any:
        executor = executor_of(*given)
        return LateExecutor(executor, given[2].page_tokens) if late else executor

    driver = Driver(world, make_executor=made, **limits)
    try:
        yield driver
    finally:
        driver.engine.close()


PAIRS, WORDS = (LLMatcher.grammar_from_regex(regex) for regex in ("([A-M][a-z])*", "([A-Z]{1,3}_(x|yz)+)+"))
Samplings = st.sampled_from(
    [
        GREEDY, GREEDY, Sampling(), Sampling(temperature=1.0, seed=3), Sampling(stop_token_ids=(5, 9, 30)),
        Sampling(presence_penalty=1.0, ignore_eos=True), Sampling(top_logprobs=1, ignore_eos=True),
        Sampling(prompt_logprobs=1, temperature=1.0, seed=5, ignore_eos=True),
        Sampling(repetition_penalty=1.5, bad_words=((7, 8), (9,)), temperature=2.0, seed=7, ignore_eos=True),
        Sampling(min_tokens=4, stop_token_ids=tuple(range(3, 40)), logit_bias=((50, 0.5),), top_logprobs=2),
        Sampling(allowed_token_ids=(5, 9, 30, 31), temperature=1.0, seed=9, ignore_eos=True),
        Sampling(grammar=PAIRS, temperature=1.0, seed=11), Sampling(grammar=WORDS, frequency_penalty=0.5),
        Sampling(grammar=WORDS, temperature=3.0, seed=13, top_logprobs=1),
    ]
)  # fmt: skip
Requests = st.tuples(
    st.lists(st.integers(3, 60), min_size=1, max_size=30), st.integers(1, 12), st.sampled_from(["", "", "a", "b"]),
    Samplings, st.sampled_from([1, 4, 12]),
)  # fmt: skip
Moves = st.lists(
    st.one_of(
        Requests, Requests, st.integers(1, 4), st.integers(1, 4),
        st.tuples(st.sampled_from(["stop", "move", "move"]), st.integers(0, 9)),
    ),
    min_size=2, max_size=16,
)  # fmt: skip


@dataclass(eq=False)
class KvEnd:
    """One end of the stream of KV between two engines: pages are copied as they are sent, before what follows them."""

    own: Driver
    other: Driver
    to: Peer  # the other one
    known_as: Peer  # by the other one
    awaited: dict[str, ReceiveKv] = field(default_factory=dict)

    def execute(self, action: Any, ahead: int) -> None:
        match action:
            case OpenKvStream(_, _, hello):
                self.other.engine.post(Connected(self.known_as, hello))
            case SendKv(_, key, _, first, pages):
                if (awaited := self.other.engine._kv.awaited.get(key)) is not None:  # type: ignore[union-attr]
                    to = [awaited.pages[i - awaited.first_page] for i in range(first, first + len(pages))]
                    ours, theirs = (driver.engine.executor._kv.tensor for driver in (self.own, self.other))
                    theirs[to] = ours[list(pages)]
            case ReceiveKv():
                self.awaited[action.request_id] = action
            case DropKv(_, key):
                self.awaited.pop(key, None)
            case Close(_, reason):
                self.own.engine.post(Closed(self.to, reason))
                self.other.engine.post(Closed(self.known_as, reason))

    def send(self, peer: Peer, message: object) -> None:
        self.other.engine.post(
            Connected(self.known_as) if isinstance(message, KvReady) else Received(self.known_as, message)
        )

    def step_failed(self) -> None:
        raise AssertionError("no step fails")

    def close(self) -> None:
        pass


class Play:
    """Requests by their numbers, and beats between them; some are stopped, some move from the first engine on."""

    def __init__(self, drivers: Sequence[Driver], lags: Sequence[int] = (0,)) -> None:
        self.drivers, self.stopped, self.moved = drivers, set[str](), set[str]()
        self._starts, self._heard = list[Start](), 0
        self._threads = [LaggingThreads(lags) for _ in drivers]
        for driver, threads in zip(drivers, self._threads, strict=True):
            driver.engine._grammars._grammars.threads = threads  # type: ignore[assignment]
        if len(drivers) > 1:
            first, second = drivers
            first.engine.exchange_kv(KvEnd(first, second, TO_SECOND, FROM_FIRST))
            second.engine.exchange_kv(KvEnd(second, first, FROM_FIRST, TO_SECOND))

    def go(self, moves: Sequence[Any], *, quiet: bool = False) -> None:
        """`quiet`: nothing is stopped, and nothing moves."""
        for move in moves:
            match move:
                case int():
                    for _ in range(move):
                        self._beat()
                case (what, int(number)):
                    if number < len(self._starts) and not quiet:
                        self._disturb(what, self._starts[number])
                case (prompt, n_tokens, adapter, sampling, reserved):
                    fields = {"sampling": sampling, "reservation_tokens": min(reserved, n_tokens)}
                    key, first = str(len(self._starts)), self.drivers[0]
                    self._starts.append(first.request(key, prompt, n_tokens, adapter, **fields))
                    first.post(self._starts[-1])
        for _ in range(10_000):
            if not any(d.pool.sequences or d.engine.runner.grammars.waiting or d.engine.backlog for d in self.drivers):
                return
            if not self._beat():
                for driver, threads in zip(self.drivers, self._threads, strict=True):
                    threads.beat(9)
                    driver.post(TICK)
        raise AssertionError("sequences are left")

    def _beat(self) -> bool:
        """All that have something to do."""
        able = [d for d in self.drivers if d.pool.runnable or d.engine.steps.in_flight or d.engine.backlog]
        for threads in self._threads:
            threads.beat(1)
        for driver in able:
            driver.beat()
            check_pool(driver.pool)
        events = self.drivers[0].events
        for event in events[self._heard :]:
            if isinstance(event, Frozen) or (isinstance(event, Ended) and event.request_id in self.moved):
                self._go_on(event)
        self._heard = len(events)
        return bool(able)

    def _disturb(self, what: str, start: Start) -> None:
        key = start.request_id
        if what == "stop":
            self.stopped.add(key)
            for driver in self.drivers:
                driver.post(Stop(key, Epoch(2, 1)))
        elif len(self.drivers) > 1 and key not in self.moved | self.stopped:
            self.moved.add(key)
            freeze = Freeze(key, start.epoch, Epoch(2, 1), KvTarget(RUNNERS[1], "kv"))
            self.drivers[0].engine.post(Received(session(), freeze))

    def _go_on(self, event: Frozen | Ended) -> None:
        """What the second engine says, behind what the first one has said; after an end without its KV."""
        key = event.request_id
        if key in self.stopped or key in self.finished or event.epoch.term > 1:
            return
        source = RUNNERS[0] if isinstance(event, Frozen) else None
        start, emitted = self._starts[int(key)], tuple(self.drivers[0].answer(key))
        self.drivers[1].post(replace(start, epoch=Epoch(2, 1), emitted=emitted, kv_from=source))

    # ---- what was said

    @property
    def finished(self) -> set[str]:
        return {one.request_id for one in self._events if getattr(one, "finish", None) is not None}

    @property
    def _events(self) -> list[Any]:
        return [event for driver in self.drivers for event in driver.events]

    @property
    def n_requests(self) -> int:
        return len(self._starts)

    def answer(self, key: str) -> list[int]:
        return [token for driver in self.drivers for token in driver.answer(key)]

    def logprobs(self, key: str) -> list[float]:
        """The log probabilities of the prompt's tokens, each with its alternatives, and those of the answer's."""
        said = [one for one in self._events if one.request_id == key and getattr(one, "logprobs", ())]
        said.sort(key=lambda one: (not isinstance(one, PromptLogprobs), getattr(one, "first", 0)))
        return [value for one in said for it in one.logprobs for value in (it.logprob, *(other for _, other in it.top))]


@settings(max_examples=settings.default.max_examples // 2)
@given(
    moves=Moves, pages=st.sampled_from([24, 200]), chunk=st.sampled_from([7, 64]),
    batching=st.sampled_from([Batching.MIXED, Batching.MIXED, Batching.REQUEST]),
    lags=st.lists(st.sampled_from([0, 0, 0, 1, 3]), min_size=1, max_size=5),
)  # fmt: skip
def test_answers_are_those_of_steps_one_after_the_other(
    small: World, moves: list[Any], pages: int, chunk: int, batching: Batching, lags: list[int]
) -> None:
    """Joins, ends, stops, moves, adapters, growth, chunks of prompts, swaps, late masks, refusals: a step in flight."""
    batch = BatchLimits(max_prefills=2, max_batch_tokens=chunk, batching=batching)
    with ExitStack() as stack:
        limits = {"total_pages": pages, "swap_page_bytes": 1, "batch": batch}
        kv = [KvIdentity(runner, "p", "base", "layout") for runner in RUNNERS]
        late = Play([stack.enter_context(driving(small, late=True, kv=one, **limits)) for one in kv], lags)
        late.go(moves)
        one_by_one = Play([stack.enter_context(driving(small, late=False, total_pages=400, batch=batch))])
        one_by_one.go(moves, quiet=True)
        for number in range(late.n_requests):
            answer, expected = late.answer(key := str(number)), one_by_one.answer(str(number))
            if key in late.finished:
                assert answer == expected
                if key not in late.moved:
                    near(
                        "fp32: log probabilities of two orders of steps",
                        late.logprobs(key), one_by_one.logprobs(key), 1e-4,
                    )  # fmt: skip
            else:
                assert answer == expected[: len(answer)]
                assert key in late.stopped or pages < 200, "neither stopped nor refused"


def test_steps_with_prompts_are_launched_behind_others_and_have_others_behind_them(small: World) -> None:
    with driving(small, late=True) as driver:
        driver.run("loads", [3], 1, "a", sampling=GREEDY)  # else the first may end before it is there
        driver.ask("first", [5, 9, 4], 12, sampling=GREEDY)
        driver.beat(3)
        driver.run("second", [7] * 9, 3, "a", sampling=GREEDY)
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
        stop = driver.run("x", [5, 9, 4], 8, sampling=GREEDY)[3]
    with driving(small, late=True) as driver:
        sampling = Sampling(stop_token_ids=(stop,), ignore_eos=True)
        driver.ask("x", [5, 9, 4], 8, sampling=sampling)
        driver.run("beside", [7, 7], 8, sampling=GREEDY)
        assert driver.ending("x").finish is FinishReason.STOP
        assert driver.pool.figures(ready=True).tokens == sum(batch.n_tokens for batch in driver.batches) - 1


def test_a_draw_beside_a_prompt_that_is_scored_is_the_one_that_it_is_alone(small: World) -> None:
    """A step that was scheduled behind another has tokens that are not counted yet, whatever else is in it."""
    answers = list[list[int]]()
    for late in (True, False):
        with driving(small, late=late) as driver:
            drawn = Sampling(temperature=2.0, seed=11, ignore_eos=True)
            driver.ask("drawn", [5, 9, 4], 8, sampling=drawn)
            driver.beat(2)
            scored = Sampling(prompt_logprobs=1, ignore_eos=True)
            driver.run("scored", [7] * 6, 2, sampling=scored)
            assert not late or driver.engine.executor.behind
            answers.append(driver.answer("drawn"))
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(presence_penalty=1.0), Sampling(top_logprobs=1), Sampling(bad_words=((5,),)),
        Sampling(prompt_logprobs=1), Sampling(min_tokens=3), Sampling(logit_bias=((5, 9.0),)),
        Sampling(allowed_token_ids=(5, 9)),
    ],
    ids=["penalty", "logprobs", "bad words", "prompt logprobs", "least length", "bias", "allowed"],
)  # fmt: skip
def test_whatever_a_row_samples_the_next_step_is_launched_behind(small: World, sampling: Sampling) -> None:
    with driving(small, late=True) as driver:
        driver.run("x", [5, 9, 4], 6, sampling=replace(sampling, ignore_eos=True))
        assert len(driver.engine.executor.behind) == len(driver.batches) - 1 == 5


def test_a_launch_that_fails_behind_a_step_costs_nobody_a_token(small: World, caplog: pytest.LogCaptureFixture) -> None:
    answers = list[list[list[int]]]()
    for late in (True, False):
        with driving(small, late=late) as driver:
            driver.ask("x", [5, 9, 4], 6, "a", sampling=GREEDY)
            driver.beat(2)
            driver.ask("y", [7, 7], 6, sampling=GREEDY)
            if late:
                driver.engine.executor.fail_next = True
            driver.finish()
            answers.append([driver.answer(key) for key in "xy"])
    assert "its rows run alone" in caplog.text
    assert answers[0] == answers[1]
