"""Several batches in flight through real stages: requests, cancels and adapters come and go meanwhile.

A stage that is stopped (SIGSTOP) holds what it was told: whatever the engine does then, it does while steps are in
flight. Nothing here depends on how long anything takes.
"""

import os
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import pytest

from harness.ranks import load, staged
from harness.runner_machine import flat
from harness.waiting import wait_until
from weft.domain.ids import Epoch
from weft.domain.request import Ended, Sampling, Stop
from weft_kernels.plan import SegmentPlan
from weft_runner.core import BatchLimits, Drain
from weft_runner.core.request_pool import check_pool
from weft_runner.core.sequence import SequencePhase
from weft_runner.model import StepInput, StepRow, map_tensors
from weft_runner.parallel import PipelineParallelExecutor

GREEDY = Sampling(ignore_eos=True)
PAGES, PAGE_TOKENS, SLOTS = 48, 4, 2
ADAPTERS = ("a0", "a1", "a2")
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 61, "hidden_size": 32,
    "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "eos_token_id": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, new_world: Any) -> Any:
    """More adapters than slots."""
    world = new_world(tmp_path_factory.mktemp("model") / "w", CONFIG)
    world.write_base()
    for i, name in enumerate(ADAPTERS):
        world.write_adapter(name, seed=i, rank=1 + 3 * i)
    return world


@pytest.fixture(scope="module", params=[pytest.param(2, marks=pytest.mark.slow), 3], ids=["two stages", "three stages"])
def stages(request: Any, model: Any) -> Iterator[PipelineParallelExecutor]:
    files = {path.name: path for path in model.base.iterdir()}
    with staged(files, request.param, kv_pages=PAGES, page_tokens=PAGE_TOKENS, max_adapters=SLOTS) as executor:
        yield executor


@pytest.fixture
def driver_of(model: Any, stages: PipelineParallelExecutor, make_driver: Callable[..., Any]) -> Callable[..., Any]:
    """Drivers of the stages, or of one process (`alone=True`); every beat leaves balanced books behind."""

    def make(*, alone: bool = False, **limits: Any) -> Any:
        how = {} if alone else {"make_executor": lambda *_: stages}
        sizes = {"total_pages": PAGES, "page_tokens": PAGE_TOKENS, "max_adapters": SLOTS, **limits}
        driver = make_driver(model, **sizes, **how)
        beat = driver.engine.run_once
        driver.engine.run_once = lambda: [beat(), check_pool(driver.pool)]
        return driver

    return make


@contextmanager
def held(stages: PipelineParallelExecutor) -> Iterator[None]:
    """The last stage does nothing meanwhile."""
    pid = stages.workers.pids[-1]
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED, "a stage stops")
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def flying(driver: Any) -> int:
    return len(driver.engine.steps._launched)


def land(driver: Any) -> None:
    """Complete the oldest step and launch none."""
    steps = driver.engine.steps
    steps._schedule = lambda _: None
    steps.advance()
    del steps._schedule


def ask(driver: Any, key: str, first: int, max_tokens: int = 12, adapter: str = "", **fields: Any) -> Any:
    request = driver.request(key, [first, 7, 9], max_tokens, adapter, **{"sampling": GREEDY, **fields})
    driver.post(request)
    return request


def alone_says(driver_of: Callable[..., Any], first: int, max_tokens: int = 12, adapter: str = "") -> list[int]:
    driver = driver_of(alone=True)
    ask(driver, "r", first, max_tokens, adapter)
    driver.finish()
    return driver.answer("r")


# ---- in flight at the same time


@pytest.mark.slow
def test_as_many_batches_are_in_flight_as_there_are_stages_and_each_has_its_part(driver_of, stages):
    """While the last stage holds the first one, the first stage has computed its part of all the others."""
    driver = driver_of()
    for i in range(6):
        ask(driver, f"r{i}", 3 + i)
    while (
        not all(s.phase is SequencePhase.DECODE for s in driver.pool.sequences.values())
        or len(driver.pool.sequences) < 6
    ):
        driver.beat()
    while flying(driver):
        land(driver)
    with held(stages):
        driver.beat(stages.depth)  # a beat that waited for the last stage would not come back
        assert flying(driver) == stages.depth
        rows = [[row.key for row in flight.step.batch.rows] for flight in driver.engine.steps._launched]
        assert [len(keys) for keys in rows] == [6 // stages.depth] * stages.depth
        assert len({key for keys in rows for key in keys}) == 6, "nobody is in two of them"
        assert not driver.pool.runnable
    driver.finish()
    for i in range(6):
        assert driver.answer(f"r{i}") == alone_says(driver_of, 3 + i)


def test_chunks_of_a_prompt_that_choose_nothing_are_not_waited_for(driver_of, stages):
    """Chunks follow each other through the stages; the last one brings the token."""
    driver, prompt = driver_of(batch=BatchLimits(max_batch_tokens=32)), [5, 6, 7, 8] * 36
    with held(stages):
        driver.ask("r", prompt, 3, sampling=GREEDY)
        driver.beat(2 * stages.depth)  # each is launched in a beat, and accounted for in the next
        assert driver.pool.sequences["r"].in_kv == 32 * stages.depth
    driver.finish()
    alone = driver_of(alone=True)
    alone.run("r", prompt, 3, sampling=GREEDY)
    assert driver.answer("r") == alone.answer("r")


def test_more_and_fewer_batches_in_flight_change_no_token(driver_of, stages, monkeypatch):
    """One at a time is launched and completed in one beat; more are in flight only once none is."""
    driver, chance, wanted = driver_of(batch=BatchLimits(max_batch_tokens=8)), random.Random(3), list[int]()

    def depth_for(tokens):
        assert 1 <= tokens() <= 8
        wanted.append(chance.choice([1, stages.depth]))
        return wanted[-1]

    monkeypatch.setattr(stages, "depth_for", depth_for)
    for i in range(6):
        ask(driver, f"r{i}", 3 + i)
    while any(len(driver.answer(f"r{i}")) < 12 for i in range(6)):
        before = flying(driver)
        driver.beat()
        assert flying(driver) <= before or wanted[-1] == stages.depth
    monkeypatch.undo()
    for i in range(6):
        assert driver.answer(f"r{i}") == alone_says(driver_of, 3 + i)


# ---- what comes and goes meanwhile


def test_a_request_that_is_cancelled_in_flight_is_gone_at_once_and_its_pages_are_safe_for_the_next(driver_of, stages):
    """The step in flight writes to pages that have changed hands: every stage clears them after it."""
    driver = driver_of(total_pages=8)
    first = ask(driver, "first", 3, reservation_tokens=12)
    ask(driver, "second", 4, reservation_tokens=12)
    while len(driver.answer("second")) < 3:
        driver.beat()
    with held(stages):
        while flying(driver) < 2:
            driver.beat()
        pages = set(driver.pool.pages.pages_of("first"))
        driver.post(Stop("first", first.epoch))
        ask(driver, "third", 5, reservation_tokens=12)
        driver.engine._take_events()
        assert "first" not in driver.pool.sequences
        assert set(driver.pool.pages.pages_of("third")) & pages
        told = len(driver.answer("first"))
    driver.finish()
    assert len(driver.answer("first")) == told
    assert driver.answer("second") == alone_says(driver_of, 4)
    assert driver.answer("third") == alone_says(driver_of, 5)


def test_a_request_that_comes_again_under_its_name_does_not_get_the_token_of_its_former_self(driver_of, stages):
    driver = driver_of()
    ask(driver, "r", 3)
    while len(driver.answer("r")) < 2:
        driver.beat()
    with held(stages):
        while not flying(driver):
            driver.beat()
        driver.ask("r", [4, 7, 9], 5, sampling=GREEDY, epoch=Epoch(9, 9))
        driver.engine._take_events()
    driver.finish()
    told = [t for e in driver.events if e.epoch == Epoch(9, 9) for t in e.tokens]
    assert told == alone_says(driver_of, 4, 5)


def test_an_engine_without_requests_lets_its_batches_land_and_sleeps(driver_of, stages):
    driver = driver_of()
    for i in range(4):
        ask(driver, f"r{i}", 3 + i)
    driver.beat(3)
    with held(stages):
        while flying(driver) < 2:
            driver.beat()
        driver.post(Drain(on=True))
        driver.engine._take_events()
        assert not driver.pool.sequences
        assert all(isinstance(message, Ended) for message in flat(driver.engine._output.sends)[-4:])
    while flying(driver):
        driver.beat()
    assert driver.pool.pages.reserved_pages == 0
    driver.post(Drain(on=False))
    driver.beat()  # it has heard this; with nothing said, it would sleep
    assert flying(driver) == 0


def test_an_adapter_of_few_layers_is_counted_by_the_stage_that_has_most_of_it(model, stages):
    """Pages have the same numbers everywhere, whatever a stage's share (`parallel.adapters`)."""
    adapter = load(stages, 0, model.root / "a2")
    assert (adapter.rank, adapter.site_rank) == (7, 21)
    assert adapter.n_bytes % stages.page_bytes == 0
    source = model.adapter("a2")
    tensors = map_tensors(source.tensors)
    assert stages.adapters.device_bytes(tensors, source.scales) == adapter.n_bytes
    for layer in range(3):
        some = {name: tensor for name, tensor in tensors.items() if f".layers.{layer}." in name}
        built = stages.adapters.build(some, source.scales)
        assert (built.rank, built.site_rank) == (7, 21), "whichever stage has it"
        assert built.n_bytes == stages.adapters.device_bytes(some, source.scales) > 0


# ---- everything at once


class Play:
    """A script of requests, cancels, moves and adapters from a seed, on an engine of stages."""

    def __init__(self, driver: Any, seed: int) -> None:
        self.driver, self.rng = driver, random.Random(seed)
        self.asked: dict[str, tuple[list[int], int, str]] = {}
        self.cancelled: set[str] = set()

    def begin(self) -> None:
        rng, key = self.rng, f"r{len(self.asked)}"
        prompt = rng.choices(range(3, 61), k=rng.choice((1, 4, 9, 30)))
        self.asked[key] = prompt, rng.randint(1, 14), rng.choice(("", *ADAPTERS))
        self._post(key, ())

    def cancel(self) -> None:
        if live := list(self.driver.pool.sequences.values()):
            victim = self.rng.choice(live)
            self.cancelled.add(victim.key)
            self.driver.post(Stop(victim.key, victim.start.epoch))

    def move(self) -> None:
        """Preempted, and back at once with what it had: what a supervisor and a scheduler make of an overrun."""
        if live := list(self.driver.pool.reservations.paused) or list(self.driver.pool.sequences):
            sequence = self.driver.pool.sequences[self.rng.choice(live)]
            self.driver.post(Stop(sequence.key, sequence.start.epoch))
            if sequence.key not in self.cancelled:
                self._post(sequence.key, tuple(self.driver.answer(sequence.key)))

    def run(self, beats: int) -> None:
        for _ in range(beats):
            self.rng.choices((self.begin, self.cancel, self.move, lambda: None), (4, 1, 1, 16))[0]()
            self.step()
        while self.driver.pool.sequences:
            self.step()

    def step(self) -> None:
        pool = self.driver.pool
        loading = pool.adapters.slots.loading or pool.adapters.queue.fetching
        if pool.reservations.paused and not pool.runnable and not flying(self.driver) and not loading:
            self.move()
        if pool.sequences or not self.driver.engine._events.empty() or flying(self.driver):
            self.driver.beat()

    def _post(self, key: str, emitted: tuple[int, ...]) -> None:
        prompt, max_tokens, adapter = self.asked[key]
        fields = {"emitted": emitted, "reservation_tokens": self.rng.randint(0, 6)}
        salt = self.rng.choice(("", "salt"))
        self.driver.ask(key, prompt, max_tokens, adapter, sampling=GREEDY, cache_salt=salt, **fields)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(3, 12))])
def test_whatever_comes_and_goes_each_request_gets_the_tokens_that_it_gets_alone(driver_of, stages, seed):
    """Pages are scarce, so that sequences pause; prefixes are read again; adapters have fewer slots than there are."""
    driver = driver_of(
        total_pages=24, max_sequences=9, page_bytes=1 << 14,
        batch=BatchLimits(max_batch_tokens=9 + 7 * (seed % 3), max_prefills=1 + seed % 2),
    )  # fmt: skip
    play = Play(driver, seed)
    play.run(250)
    check_pool(driver.pool)
    alone = driver_of(alone=True, total_pages=PAGES)
    finished = {e.request_id for e in driver.events if getattr(e, "finish", None) is not None}
    for key, (prompt, max_tokens, adapter) in play.asked.items():
        alone.run(key, prompt, max_tokens, adapter, sampling=GREEDY)
        whole = alone.answer(key)
        told = driver.answer(key)
        assert told == (whole if key in finished else whole[: len(told)])
    assert len(finished) >= 5, "they were not all refused or cancelled; how many depends on the loader's thread"
    assert driver.pool.reservations.doublings, "sequences outran their reservations"


# ---- the end


@pytest.mark.slow
def test_stages_are_ended_whatever_is_in_flight(stages, monkeypatch):
    """Last of this module, since nothing flies afterwards. One that is stopped does not end by itself."""
    monkeypatch.setattr("weft_runner.parallel.worker_group.END_S", 0.05)
    step, pids = StepInput([1, 2, 3], (StepRow(0, 3, 0, (0,), True),), SegmentPlan(3, ())), stages.others.pids
    os.kill(pids[-1], signal.SIGSTOP)
    flights = [stages.launch(step, []) for _ in range(2)]
    stages.close()
    assert all(flight.logits is not None for flight in flights)
    assert not any(psutil.pid_exists(pid) for pid in pids)
