"""The heartbeat with the real executor, beat by beat: loading beside running, failures alone, stops at once."""

import queue
import random
import threading

import pytest
import torch

from harness.desired import desired, whole
from harness.runner_machine import state_of
from harness.small_runner import World
from harness.waiting import PATIENCE_S
from weft.domain.adapter import Tier
from weft.domain.machine import Connected, Kind, Peer, Received
from weft.domain.request import Ended, EndReason, FinishReason, NoCapacity, Sampling, Stop
from weft.domain.runner import Heartbeat, Registered
from weft_runner.core import Fetch
from weft_runner.core.events import Retain
from weft_runner.core.request_pool import check_pool
from weft_runner.core.runner import RETRY_S
from weft_runner.core.sequence import SequencePhase
from weft_runner.errors import ArtifactUnreachable
from weft_runner.shell import EngineThread

GREEDY = Sampling(ignore_eos=True)


def test_a_stop_frees_the_pages_within_one_iteration(drive):
    driver = drive()
    request = driver.request("r", [3, 4, 5], max_tokens=100, sampling=GREEDY)
    other = driver.request("other", [3, 4, 5], max_tokens=3, sampling=GREEDY)
    driver.post(request, other)
    driver.beat(2)
    reserved = driver.pool.pages.reserved_by("other")
    driver.post(Stop("r", request.epoch))
    driver.beat()
    assert driver.pool.pages.reserved_pages == reserved
    assert driver.status.figures.free_pages == 64 - reserved
    driver.finish()
    assert len(driver.answer("other")) == 3


def test_heartbeats_alone_check_nothing_again(drive, monkeypatch):
    driver, checks = drive(), list[int]()
    monkeypatch.setattr(driver.engine.runner, "check", lambda: checks.append(len(driver.outputs)))
    supervisor = Peer(Kind.SUPERVISOR, "s")

    def idle() -> None:
        for _ in range(10):
            driver.skipped_s += 1.0
            driver.beat()

    driver.post(Connected(supervisor), Received(supervisor, Registered(2_000, 50)))
    idle()
    registered = len(checks)
    idle()
    assert [type(send.message) for output in driver.outputs[-10:] for send in output.sends] == 10 * [Heartbeat]
    assert len(checks) == registered > 0
    driver.run("r", [3, 4, 5])
    idle()
    ran = len(checks)
    idle()
    assert len(checks) == ran > registered


def test_one_forward_an_iteration_whatever_the_adapters_and_rows(drive, world):
    for i in range(6):
        world.write_adapter(f"a{i}", seed=i, rank=1 + i)
    driver = drive(max_adapters=6)
    for i in range(6):
        driver.ask(f"load {i}", [1], 1, f"a{i}", sampling=GREEDY)
    driver.finish()  # all in their slots: how long loading takes decides nothing
    for i in range(12):
        driver.ask(f"r{i}", [3 + i] * (1 + i), 20, f"a{i % 6}", sampling=GREEDY)
    driver.finish()
    assert driver.pool.figures(ready=True).forwards == driver.pool.iterations
    assert max(batch.n_adapters for batch in driver.batches) == 6


class GatedSource(World):
    """A source that hands an adapter out when the test says so."""

    def __init__(self, world: World) -> None:
        super().__init__(world.root, world.config)
        self.gate = threading.Event()

    def adapter(self, digest):
        assert self.gate.wait(PATIENCE_S)
        return super().adapter(digest)


class Flaky(World):
    """A source that does not answer `fails` times."""

    def __init__(self, world: World, fails: int) -> None:
        super().__init__(world.root, world.config)
        self.fails, self.tries = fails, 0

    def adapter(self, digest):
        self.tries += 1
        if self.tries <= self.fails:
            raise ArtifactUnreachable("no answer")
        return super().adapter(digest)


def test_the_batch_runs_on_while_an_adapter_loads_and_the_request_joins_at_a_later_step(drive, world):
    world.write_adapter("slow")
    source = GatedSource(world)
    driver = drive(source)
    driver.ask("base", [3, 4], 30, sampling=GREEDY)
    driver.ask("tuned", [3, 4], 5, "slow", sampling=GREEDY)
    driver.beat(10)
    assert len(driver.answer("base")) == 10
    assert driver.answer("tuned") == []
    assert driver.pool.sequences["tuned"].phase is SequencePhase.WAITING
    source.gate.set()
    driver.finish()
    assert len(driver.answer("tuned")) == 5
    assert driver.answer("tuned") != driver.answer("base")[:5]


def test_a_bad_adapter_ends_its_own_sequences_and_nobody_elses(drive, world):
    world.write_adapter("good", seed=1)
    (world.write_adapter("torn", seed=2) / "adapter_model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{")
    world.write_adapter("wide", seed=3, rank=65)
    driver = drive()
    for i, adapter in enumerate(("good", "torn", "wide", "absent", "")):
        driver.ask(f"r{i}", [5, 6], 4, adapter, sampling=GREEDY)
    driver.finish()
    endings = [driver.ending(f"r{i}") for i in range(5)]
    length, failed = FinishReason.LENGTH, EndReason.LOAD_FAILED
    reasons = [e.reason if isinstance(e, Ended) else e.finish for e in endings]
    assert reasons == [length, failed, failed, EndReason.UNKNOWN_ADAPTER, length]
    assert "--max-rank" in endings[2].detail
    check_pool(driver.pool)
    driver.engine.adapters._builder.submit(lambda: None).result(PATIENCE_S)  # what was ordered before is done
    assert driver.engine.adapters._host.keys() == {"good"}, "what cannot be built leaves nothing in host memory"


def test_what_is_being_fetched_stays_on_disk_whatever_an_older_retain_says(drive, world):
    world.write_adapter("new")
    kept: queue.SimpleQueue[frozenset[str]] = queue.SimpleQueue()

    class Recording(GatedSource):
        def retain(self, digests):
            kept.put(digests)

    source = Recording(world)
    driver = drive(source)
    driver.engine.adapters.execute(Fetch("new"))
    driver.engine.adapters.execute(Retain(frozenset(["old"])))
    assert kept.get(timeout=PATIENCE_S) == {"old", "new"}
    source.gate.set()


def test_memory_work_goes_on_between_steps_and_without_them(drive):
    driver = drive()
    after = list[int]()

    def slices():
        for _ in range(10_000):
            after.append(driver.pool.iterations)
            yield

    task = driver.engine.gaps.add(slices())
    driver.run("r", [5], 20, sampling=GREEDY)
    assert after, "some of it was done between steps"
    failures: list[BaseException] = []
    thread = EngineThread(driver.engine, 1, failures.append)
    thread.start()
    task.result(PATIENCE_S)
    driver.engine.gaps.add(iter([None] * 3)).result(PATIENCE_S)  # it sleeps until there is something to do
    assert thread.stop(PATIENCE_S)
    assert not failures
    assert driver.engine.gaps.add(iter([None] * 3)).done(), "by the caller: no engine runs"


def test_an_adapter_that_computes_nonsense_ends_alone_and_leaves_nothing_in_the_pages(drive, world):
    folder = world.write_adapter("nan")
    from safetensors.torch import load_file, save_file

    tensors = {
        name: torch.full_like(t, torch.nan) for name, t in load_file(folder / "adapter_model.safetensors").items()
    }
    save_file(tensors, folder / "adapter_model.safetensors")
    quiet, noisy = drive(total_pages=12), drive(total_pages=12)
    for driver in (quiet, noisy):
        if driver is noisy:
            driver.ask("bad", [9] * 9, 20, "nan", reservation_tokens=3)
        driver.run("good", [7, 8, 9], 20, sampling=GREEDY)
        for i in range(3):  # whoever gets the pages next is not disturbed either
            driver.ask(f"next{i}", [i + 3] * 5, 10, sampling=GREEDY)
        driver.finish()
    assert driver.ending("bad").reason is EndReason.INTERNAL
    assert "finite" in driver.ending("bad").detail
    for key in ("good", "next0", "next1", "next2"):
        assert noisy.answer(key) == quiet.answer(key)


def test_a_forward_that_fails_is_repeated_row_by_row_and_only_the_guilty_sequence_ends(drive):
    quiet, driver = drive(), drive()
    executor = driver.engine.executor
    run = executor.run

    def failing(step, **layers):
        if 13 in step.tokens:
            raise RuntimeError("token 13")
        return run(step, **layers)

    executor.run = failing
    for d in (quiet, driver):
        if d is driver:
            d.ask("guilty", [13, 4], 5)
        d.run("good", [3, 4], 5, sampling=GREEDY)
    assert driver.ending("guilty").reason is EndReason.INTERNAL
    assert "token 13" in driver.ending("guilty").detail
    assert driver.answer("good") == quiet.answer("good")
    assert driver.pool.figures(ready=True).forwards > driver.pool.iterations - 2


def test_finishes_and_overruns_are_reported_at_once_and_quiet_iterations_are_not(drive):
    driver = drive(total_pages=2, page_tokens=4)
    driver.beat()
    driver.engine.runner.reporter.register(Registered(lease_ms=10**9, report_ms=10**9))
    driver.outputs.clear()
    driver.engine.runner.reporter._due_at = float("inf")
    driver.ask("r", [3, 4, 5], 5, reservation_tokens=1, sampling=GREEDY)
    driver.beat(2)
    assert all(output.status is None for output in driver.outputs)
    driver.finish()
    assert driver.outputs[-1].status is not None
    crowd = drive(total_pages=2, page_tokens=4)
    for key in "ab":
        crowd.ask(key, [3, 4, 5], 5, reservation_tokens=1, sampling=GREEDY)
    while crowd.pool.runnable or not crowd.pool.sequences:
        crowd.beat()
    assert max(n for output, n in zip(crowd.outputs, crowd.paused, strict=True) if output.status is not None) == 1


def test_a_hundred_adapters_over_eight_slots_are_all_served(drive, world):
    """Popularity 1/i, every adapter at least once, arrivals as fast as there is room."""
    rng = random.Random(7)
    names = [f"a{i}" for i in range(100)]
    for i, name in enumerate(names):
        world.write_adapter(name, seed=i, rank=1 + i % 8, modules=("q_proj", "v_proj") if i % 3 else ("down_proj",))
    asked = [*names, *rng.choices(names, [1 / (i + 1) for i in range(len(names))], k=100)]
    rng.shuffle(asked)
    driver = drive(max_adapters=8, total_pages=128, host_bytes=1 << 16)
    driver.post(whole(*(desired(name, pinned=name == "a0") for name in names)))
    prompts = {f"r{i}": [rng.randrange(61) for _ in range(rng.randint(1, 9))] for i in range(len(asked))}
    left = [driver.request(f"r{i}", prompts[f"r{i}"], 4, name, sampling=GREEDY) for i, name in enumerate(asked)]
    beats = 0
    while left or driver.pool.sequences:
        while left and len(driver.pool.sequences) < 24:
            driver.post(left.pop(0))
            driver.engine._take_events()
        driver.beat()
        beats += 1
        check_pool(driver.pool)
        assert beats < 30_000
    assert not any(isinstance(event, Ended | NoCapacity) for event in driver.events)
    assert all(len(driver.answer(f"r{i}")) == 4 for i in range(len(asked)))
    assert driver.pool.figures(ready=True).forwards == driver.pool.iterations
    assert driver.pool.pages.free_pages == 128
    manager = driver.pool.adapters
    assert len(manager.slots.by_slot) == 8
    assert manager.host.held_bytes <= 1 << 16
    assert manager.adapters["a0"].nearest_tier is Tier.DEVICE, "pinned"
    fresh = drive(max_adapters=8)
    for i in rng.sample(range(len(asked)), 12):  # eviction and reloading have not mixed any weights up
        fresh.run(f"r{i}", prompts[f"r{i}"], 4, asked[i], sampling=GREEDY)
        assert fresh.answer(f"r{i}") == driver.answer(f"r{i}")


def test_an_engine_with_nothing_to_run_waits_on_its_queue_and_ends_when_told(drive):
    driver = drive()
    told = threading.Event()
    driver.engine._on_output = lambda output: (driver.outputs.append(output), output.done and told.set())
    failures: list[BaseException] = []
    thread = EngineThread(driver.engine, 1, failures.append)
    thread.start()
    driver.ask("r", [3, 4], 5, sampling=GREEDY)
    assert told.wait(PATIENCE_S)
    assert thread.stop(PATIENCE_S)
    assert not failures
    assert len(driver.outputs) <= 5 + 3, "an idle engine does not beat"


def test_a_bug_in_the_engine_is_told_and_ends_its_thread(drive):
    driver = drive()
    failures: list[BaseException] = []
    heard = threading.Event()
    thread = EngineThread(driver.engine, 1, lambda error: (failures.append(error), heard.set()))
    driver.pool.schedule = lambda *_: 1 / 0
    thread.start()
    assert heard.wait(PATIENCE_S)
    assert isinstance(failures[0], ZeroDivisionError)


def test_a_depot_that_does_not_answer_fails_the_load_and_a_later_start_tries_again(drive, world):
    world.write_adapter("a")
    driver = drive(Flaky(world, 1))
    driver.run("first", [5], 3, "a", sampling=GREEDY)
    assert driver.ending("first").reason is EndReason.INTERNAL, "nothing is wrong with the artifact: tried elsewhere"
    assert len(driver.run("second", [5], 3, "a", sampling=GREEDY)) == 3


@pytest.mark.parametrize("fails", [1, 2])
def test_a_pinned_adapter_that_failed_is_tried_again_when_asked(drive, world, fails):
    world.write_adapter("a")
    driver = drive(Flaky(world, fails))
    driver.post(whole(desired("a", pinned=True)))
    for tries in range(1, fails + 1):
        while driver.engine.adapters._source.tries < tries or driver.pool.adapters.queue.adapters:
            driver.beat()
        assert "pinned" in state_of(driver.pool).not_ready
        assert driver.pool.adapters.adapters["a"].error == "no answer", "it is not tried again by itself"
        driver.skipped_s += RETRY_S
    while state_of(driver.pool).not_ready:
        driver.beat()
