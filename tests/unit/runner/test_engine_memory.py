"""The engine with real executors where adapters and tokens share one budget and prefixes are read again."""

import mmap
import queue
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from harness.desired import desired, whole
from harness.runner_machine import state_of
from harness.small_runner import executor_of
from harness.waiting import PATIENCE_S
from weft.domain.adapter import Tier
from weft.domain.request import NoCapacity, Sampling
from weft_kernels.cpu import memory as host_memory
from weft_runner.core import Fetch, Fetched
from weft_runner.core.events import Load
from weft_runner.core.request_pool import check_pool
from weft_runner.errors import ArtifactUnreachable
from weft_runner.model import HostTensorStore, LocalKvMemory
from weft_runner.shell import AdapterPool, InSlot

GREEDY = Sampling(ignore_eos=True)
P = 16
SYSTEM = [(7 * i + i * i) % 50 + 3 for i in range(3 * P)]  # a prompt's beginning that many requests share


@pytest.fixture(params=["reference", "cpu"])
def driver_of(request, new_world, small_config, tmp_path, make_driver) -> Any:
    """Drivers over a model that both executors compute; the world has adapters `a` and `b`."""
    world = new_world(tmp_path / "wide", {**small_config, "hidden_size": 64, "intermediate_size": 96})
    world.write_base()
    for seed, name in enumerate("ab"):
        world.write_adapter(name, seed=seed, rank=8)
    make = partial(executor_of, kind=request.param, threads=2)
    return lambda **limits: make_driver(world, make_executor=make, **{"page_tokens": P, **limits})


def ask(driver: Any, key: str, tail: list[int], adapter: str = "", salt: str = "tenant", **fields: Any) -> None:
    fields = {"sampling": GREEDY, "cache_salt": salt, **fields}
    driver.ask(key, [*SYSTEM, *tail], 12, adapter, **fields)


CASES = [
    ("one", [5], ""), ("two", [6, 6], "a"), ("three", [5], ""), ("four", [9] * 20, "a"), ("five", [5], "b"),
    ("pages", [], ""),
]  # fmt: skip


def test_tokens_are_the_same_whether_a_prefix_is_computed_or_read_again(driver_of):
    fresh, shared = driver_of(total_pages=64), driver_of(total_pages=64)
    for driver, salt in ((fresh, ""), (shared, "tenant")):
        for key, tail, adapter in CASES:
            ask(driver, key, tail, adapter, salt)
            driver.finish()
        for key, tail, adapter in CASES:  # and all at once
            ask(driver, f"{key} again", tail, adapter, salt)
        driver.finish()
        check_pool(driver.pool)
    for key, _, _ in CASES:
        assert shared.answer(key) == fresh.answer(key) == shared.answer(f"{key} again") == fresh.answer(f"{key} again")
    assert state_of(fresh.pool).prefix_reused_tokens == 0
    assert state_of(shared.pool).prefix_reused_tokens >= 7 * 3 * P, "three of the first were the first of their kind"
    computed = [state_of(driver.pool).tokens for driver in (shared, fresh)]
    assert computed[1] - computed[0] == state_of(shared.pool).prefix_reused_tokens


def cached_tokens(driver: Any, key: str) -> list[int]:
    return [event.cached_tokens for event in driver.events if event.request_id == key]


def others(driver: Any, count: int) -> None:
    """Requests without a salt, of four pages each, at once; copies to host memory have ended afterwards."""
    for number in range(count):
        prompt = [(number + i * i) % 40 + 3 for i in range(3 * P)]
        driver.ask(f"other {number} of {count}", prompt, 12, sampling=GREEDY)
    driver.finish()
    for _ in range(1000):
        if not driver.pool.host_prefixes.saves:
            return
        driver.beat()
    raise AssertionError("a copy does not end")


@pytest.mark.parametrize("adapter", ["", "a"])
def test_a_prefix_that_the_device_evicted_is_read_from_host_memory(driver_of, adapter):
    """Bit for bit what computing it gives, and two that want it at once bring it once."""
    fresh, small = driver_of(total_pages=64), driver_of(total_pages=12, swap_page_bytes=1)
    logprobs = Sampling(temperature=1.0, seed=3, ignore_eos=True, top_logprobs=3)
    for driver, salt in ((fresh, ""), (small, "tenant")):
        for key in ("first", "second"):
            ask(driver, key, [5], adapter, salt)
            driver.finish()
        others(driver, 2)
        others(driver, 3)
        for key, tail in (("third", [6]), ("fourth", [7, 7])):
            ask(driver, key, tail, adapter, salt, sampling=logprobs)
        driver.finish()
        check_pool(driver.pool)
    for key in ("first", "second", "third", "fourth"):
        assert small.answer(key) == fresh.answer(key)
    if not isinstance(small.engine.executor.kv_memory, LocalKvMemory):
        third = [[e.logprobs for e in driver.events if e.request_id == "third"] for driver in (fresh, small)]
        assert third[0] == third[1]
    assert state_of(small.pool).prefix_reused_tokens == 3 * 3 * P, "but for the first everybody reads it"
    first, *others_of = [cached_tokens(small, key) for key in ("first", "second", "third", "fourth")]
    assert first == [0] * 12
    assert others_of == [[3 * P] + [0] * 11] * 3, "a gateway learns of it with the first token"
    assert small.pool.reuse.host_tokens == 3 * P
    assert fresh.pool.reuse.queried == 0, "nothing is looked up without a salt"
    prefixes, swap = small.pool.host_prefixes, small.pool.swap
    assert (len(prefixes), prefixes.out_bytes, swap.prefix_in_bytes) == (3, 3, 3)
    assert (swap.num_swapped_out, swap.out_bytes) == (0, 0)


def test_the_choices_of_one_request_prefill_its_prompt_once(driver_of):
    driver = driver_of(total_pages=64)
    for choice in range(4):
        ask(driver, f"choice {choice}", [4], sampling=Sampling(choice=choice, temperature=1.0, ignore_eos=True))
    driver.finish()
    assert state_of(driver.pool).prefix_reused_tokens == 3 * 3 * P


def test_nothing_is_shared_between_tenants_adapters_or_without_a_salt(driver_of):
    driver = driver_of(total_pages=64)
    for i, (adapter, salt) in enumerate((("", "t"), ("a", "t"), ("b", "t"), ("", "u"), ("", ""), ("", ""))):
        ask(driver, f"r{i}", [5], adapter, salt)
        driver.finish()
    assert state_of(driver.pool).prefix_reused_tokens == 0
    ask(driver, "again", [5], "a", "t")
    driver.finish()
    assert state_of(driver.pool).prefix_reused_tokens == 3 * P


def test_texts_that_may_become_long_share_with_each_other_alone(driver_of):
    """Their keys are rotated otherwise: by what the prompt and the answer may come to, as long as the request lives."""
    driver = driver_of(total_pages=64, short_tokens=3 * P + 13)
    for key, tail, reused in (("short", [5], 0), ("long", [5, 6], 0), ("longer", [5, 6, 7], 1), ("again", [5], 2)):
        ask(driver, key, tail)
        driver.finish()
        assert state_of(driver.pool).prefix_reused_tokens == 3 * P * reused, key


def test_a_sequence_that_comes_back_with_its_tokens_so_far_reads_its_own_pages_again(driver_of):
    driver = driver_of(total_pages=64)
    ask(driver, "whole", [5])
    driver.finish()
    emitted = tuple(driver.answer("whole")[:11])
    ask(driver, "moved", [5], emitted=emitted)
    driver.finish()
    assert [*emitted, *driver.answer("moved")[-1:]] == driver.answer("whole")
    assert state_of(driver.pool).prefix_reused_tokens == 3 * P


def test_an_unused_adapter_gives_way_to_tokens_and_comes_again(driver_of):
    driver = driver_of(total_pages=64)
    ask(driver, "first", [5], "a")
    driver.finish()
    n_bytes = driver.pool.adapters.adapters["a"].n_bytes
    small = driver_of(total_pages=8, page_bytes=n_bytes // 3 + 1, max_context_tokens=8 * P)
    ask(small, "a", [5], "a")
    small.finish()
    assert (state_of(small.pool).free_pages, state_of(small.pool).adapter_pages) == (8, 0), "nobody uses it"
    assert len(small.pool.adapters.adapters["a"].pages) == 3
    small.ask("long", [5] * 90, 30, sampling=GREEDY)
    small.beat()
    assert len(small.pool.adapters.adapters["a"].pages) == 0
    small.finish()
    ask(small, "a again", [5], "a")
    small.finish()
    assert small.answer("a again") == small.answer("a") == driver.answer("first")
    check_pool(small.pool)


def test_a_request_without_room_beside_what_an_adapter_waits_for_is_told_so(drive, world):
    world.write_adapter("a")
    sized = drive(total_pages=64)
    ask(sized, "r", [5], "a")
    sized.finish()
    driver = drive(total_pages=12, page_bytes=sized.pool.adapters.adapters["a"].n_bytes // 5 + 1)
    driver.post(whole(desired("a", tier=Tier.DISK)))
    while state_of(driver.pool).not_ready:
        driver.beat()
    driver.ask("runs", [5] * 4, 16, sampling=GREEDY)
    driver.ask("waits", [5] * 4, 12, "a")
    driver.ask("newcomer", [5] * 4, 4)
    driver.beat()
    assert driver.pool.pages.free_pages == 3, "enough for it, and the adapter waits for them"
    assert driver.events[0] == NoCapacity("newcomer", driver.events[0].epoch, 0, "pages")
    driver.finish()


# ---- the loader


class Orders:
    """An adapter pool without an engine: what it reports, in order."""

    def __init__(self, store: Any, source: Any) -> None:
        self.reports: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.pool = AdapterPool(store, 64, source, self.reports.put)

    def __call__(self, *orders: Any) -> Any:
        for order in orders:
            self.pool.execute(order)
        return self.reports.get(timeout=PATIENCE_S)


class Store(HostTensorStore):
    """Builds nothing, and notes what it was given."""

    def __init__(self) -> None:
        self.given: list[Any] = []
        self.threads: set[str] = set()

    page_bytes, slots = 0, 8

    def device_bytes(self, tensors: Any, scales: Any) -> int:
        del tensors, scales
        return self.n_bytes

    def build(self, tensors: Any, scales: Any, pages: Any) -> Any:
        del scales, pages
        self.given.append(tensors)
        self.threads.add(threading.current_thread().name)
        return self

    rank = site_rank = n_bytes = 4

    def put(self, slot: int, adapter: Any) -> None:
        del slot, adapter

    def clear(self, slot: int) -> None:
        del slot


@pytest.fixture
def orders(world):
    world.write_adapter("a")
    made = Orders(Store(), world)
    yield made
    made.pool.close()


def is_mapped(tensor: np.ndarray, path: Path) -> bool:
    """Whether a tensor's memory is the mapping of that file."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(end, 16) for end in line.split()[0].split("-"))
        if first <= tensor.ctypes.data < last:
            return line.endswith(str(path))
    return False


def test_without_a_tier_an_adapter_is_built_from_its_mapped_file_and_nothing_else_is_kept(orders, world):
    loaded = orders(Load("a", 0, to_host=False))
    assert isinstance(loaded, InSlot)
    assert loaded.loaded.host_bytes is None
    store: Any = loaded.adapter
    assert all(is_mapped(t, world.root / "a" / "adapter_model.safetensors") for t in store.given[0].values())
    assert store.threads == {"adapter-builder_0"}
    assert not orders.pool._host


@pytest.mark.parametrize("slow", [4, 100])
def test_a_download_waits_for_no_other(world, slow):
    go_on, held = threading.Event(), threading.Semaphore(0)

    def adapter(digest: str) -> Any:
        if digest != "a":
            held.release()
            assert go_on.wait(PATIENCE_S)
            raise ArtifactUnreachable("the depot does not answer")
        return world.adapter(digest)

    world.write_adapter("a")
    orders = Orders(Store(), SimpleNamespace(adapter=adapter))
    try:
        for i in range(slow):
            orders.pool.execute(Fetch(f"slow {i}", urgent=True))
        for _ in range(slow):
            assert held.acquire(timeout=PATIENCE_S)
        assert orders(Fetch("a", urgent=True)).digest == "a"
        assert orders(Load("a", 0)).loaded.digest == "a"
        go_on.set()
        failed = [orders.reports.get(timeout=PATIENCE_S) for _ in range(slow)]
        assert {one.digest for one in failed} == {f"slow {i}" for i in range(slow)}
    finally:
        go_on.set()
        orders.pool.close()


def test_with_tier_host_it_is_built_from_its_copy_in_memory(orders, world):
    assert isinstance(orders(Fetch("a", to_host=True)), Fetched)
    loaded = orders(Load("a", 0, to_host=True))
    n_bytes = sum(t.nbytes for t in loaded.adapter.given[0].values())
    assert loaded.loaded.host_bytes == n_bytes
    path = world.root / "a" / "adapter_model.safetensors"
    assert not any(is_mapped(t, path) for t in loaded.adapter.given[0].values())


def test_what_an_adapter_takes_in_pages_is_known_before_anything_is_built(orders):
    assert orders(Fetch("a", urgent=True)).n_bytes is None
    fetched = orders(Fetch("a", urgent=True, measure=True))
    assert not orders.pool._host
    loaded = orders(Load("a", 0, to_host=False, pages=(7, 8)))
    assert fetched.n_bytes == loaded.adapter.n_bytes == 4
    assert len(loaded.adapter.given) == 1


def test_a_load_right_after_its_fetch_asks_the_source_only_once(world):
    asked = []
    world.write_adapter("a")
    source = SimpleNamespace(adapter=lambda digest: asked.append(digest) or world.adapter(digest))
    orders = Orders(Store(), source)
    try:
        orders(Fetch("a", urgent=True))
        assert isinstance(orders(Load("a", 0)), InSlot)
        assert asked == ["a"]
    finally:
        orders.pool.close()


def test_discarded_memory_reads_as_zeros_and_its_neighbours_stay():
    memory = host_memory.MappedMemory(5 * mmap.PAGESIZE)
    view = memory._bytes
    start = memory.address - torch.frombuffer(view, dtype=torch.uint8).data_ptr()
    bytes_of = torch.frombuffer(view, dtype=torch.uint8)[start : start + memory.n_bytes]
    bytes_of.fill_(7)
    memory.discard(mmap.PAGESIZE // 2, 3 * mmap.PAGESIZE)
    zeros = (bytes_of == 0).sum().item()
    assert zeros in (2 * mmap.PAGESIZE, 3 * mmap.PAGESIZE), "whole pages of the system, as many as lie inside"
    assert (bytes_of[: mmap.PAGESIZE // 2] == 7).all()
    assert (bytes_of[mmap.PAGESIZE // 2 + 3 * mmap.PAGESIZE :] == 7).all()
