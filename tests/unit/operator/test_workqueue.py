"""The queue: nothing lost, nothing twice, nothing early, never one object in two hands."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.waiting import PATIENCE_S
from tests.unit.operator.planning import pool_ref
from weft_operator.controller import WorkQueue
from weft_operator.core import Ref


async def test_a_marked_object_comes_once_and_in_its_time() -> None:
    now = [0.0]
    queue = WorkQueue(lambda: now[0])
    queue.add([pool_ref("a"), pool_ref("b")])
    queue.add([pool_ref("a")])
    queue.add_at(pool_ref("c"), 5.0)
    queue.add_at(pool_ref("d"), 9.0)
    queue.add_at(pool_ref("d"), 4.0)  # the last one said counts
    assert [await queue.get(), await queue.get()] == [pool_ref("a"), pool_ref("b")]
    now[0] = 4.5
    assert await queue.get() == pool_ref("d")
    now[0] = 10.0
    assert await queue.get() == pool_ref("c")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await queue.get()


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.floats(0, 10)), max_size=30))
async def test_every_marked_object_comes_and_none_comes_early(marks: list[tuple[str, float]]) -> None:
    now = [0.0]
    queue = WorkQueue(lambda: now[0])
    due: dict[Ref, float] = {}
    for name, when in marks:
        queue.add_at(pool_ref(name), when)
        due[pool_ref(name)] = when
    for when in sorted(set(due.values())):
        now[0] = when
        expected = {ref for ref, at in due.items() if at == when}
        assert {await queue.get() for _ in expected} == expected


async def test_what_is_marked_while_it_is_worked_on_comes_once_after_that() -> None:
    queue = WorkQueue(lambda: 0.0)
    queue.add([pool_ref("a")])
    assert await queue.get() == pool_ref("a")
    queue.add([pool_ref("a"), pool_ref("b")])
    queue.add([pool_ref("a")])
    assert await queue.get() == pool_ref("b")
    waiting = asyncio.create_task(queue.get())
    await asyncio.sleep(0)
    assert not waiting.done()
    queue.done(pool_ref("a"))
    assert await waiting == pool_ref("a")
    queue.done(pool_ref("a"))
    assert len(queue) == 0


@given(st.lists(st.tuples(st.sampled_from(["add", "get", "done"]), st.sampled_from("abc")), max_size=60))
async def test_no_object_is_in_two_hands_and_no_mark_is_lost(steps: list[tuple[str, str]]) -> None:
    queue, working, marked = WorkQueue(lambda: 0.0), set[Ref](), set[Ref]()
    for step, name in steps:
        ref = pool_ref(name)
        if step == "add":
            queue.add([ref])
            marked.add(ref)
        elif step == "done" and ref in working:
            working.remove(ref)
            queue.done(ref)
        elif step == "get" and marked - working:
            got = await queue.get()
            assert got in marked - working
            marked.remove(got)
            working.add(got)
        assert len(queue) == len(marked)


async def test_many_idle_consumers_each_get_another_object() -> None:
    queue = WorkQueue(lambda: 0.0)
    consumers = [asyncio.create_task(queue.get()) for _ in range(8)]
    await asyncio.sleep(0)
    refs = {pool_ref(letter) for letter in "abcdefgh"}
    queue.add(refs)
    async with asyncio.timeout(PATIENCE_S):
        assert set(await asyncio.gather(*consumers)) == refs
