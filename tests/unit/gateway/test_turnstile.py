"""Work in turn between tenants: in the event loop, in threads, and by the one process that checks grammars."""

import asyncio
import threading
from collections.abc import Callable

import pytest

from harness.waiting import PATIENCE_S, soon, until
from weft_gateway.errors import Overloaded
from weft_gateway.forms import StructuredOutput, grammar_checker
from weft_gateway.shell import BoundedTurnstile


async def test_in_the_loop_a_newcomer_is_not_behind_a_burst() -> None:
    turns, order = BoundedTurnstile(4, 100), list[str]()

    async def ask(tenant: str) -> None:
        await turns.in_loop(tenant, lambda: order.append(tenant))

    burst = [asyncio.create_task(ask("flood")) for _ in range(100)]
    other = asyncio.create_task(ask("other"))
    await soon(asyncio.gather(*burst, other))
    assert order.index("other") <= 4
    assert len(order) == 101


class Blocked:
    """Work in a thread that ends when it may."""

    def __init__(self) -> None:
        self.running, self.may_end = 0, threading.Event()

    def __call__(self) -> None:
        self.running += 1
        assert self.may_end.wait(PATIENCE_S)


async def test_in_threads_a_tenant_leaves_a_place_to_others() -> None:
    turns, blocked = BoundedTurnstile(4, 100), Blocked()
    flood = [asyncio.create_task(turns.in_thread("flood", blocked)) for _ in range(50)]
    await until(lambda: blocked.running == 2)
    assert await soon(turns.in_thread("other", lambda: 5)) == 5
    assert blocked.running == 2
    blocked.may_end.set()
    await soon(asyncio.gather(*flood))
    assert blocked.running == 50


async def test_who_is_cancelled_leaves_at_once_and_gives_its_place_back_when_its_work_ends() -> None:
    turns, blocked, begun = BoundedTurnstile(2, 100), Blocked(), list[str]()
    running, waiting, last = (
        asyncio.create_task(turns.in_thread("a", work))
        for work in (blocked, lambda: begun.append("waiting"), lambda: begun.append("last"))
    )
    await until(lambda: blocked.running == 1)
    for task in (running, waiting):
        task.cancel()
    await soon(asyncio.wait([running, waiting]))
    assert running.cancelled()
    assert waiting.cancelled()
    assert not last.done(), "the thread goes on"
    blocked.may_end.set()
    await soon(last)
    assert begun == ["last"]


async def test_who_is_cancelled_as_its_turn_comes_hands_it_on() -> None:
    turns = BoundedTurnstile(1, 100)
    await turns.enter("a")
    first, second = (asyncio.create_task(turns.enter("a")) for _ in range(2))
    await asyncio.sleep(0)
    turns.leave("a", 1.0)
    first.cancel()  # its turn has come, and it has not run since
    await soon(second)
    assert first.cancelled()
    third, fourth = (asyncio.create_task(turns.enter("a")) for _ in range(2))
    await asyncio.sleep(0)
    third.cancel()
    turns.leave("a", 1.0)  # it does not know yet that it is cancelled
    await soon(fourth)


async def test_any_number_may_be_cancelled_at_once() -> None:
    turns = BoundedTurnstile(1, 5000)
    await turns.enter("a")
    waiting = [asyncio.create_task(turns.enter("a")) for _ in range(3000)]
    last = asyncio.create_task(turns.enter("a"))
    await asyncio.sleep(0)
    for task in waiting:
        task.cancel()
    turns.leave("a", 1.0)
    await soon(last)


async def test_beyond_a_bound_a_tenant_is_refused_and_others_wait() -> None:
    turns = BoundedTurnstile(1, 2)
    await turns.enter("a")
    waiting = [asyncio.create_task(turns.enter(tenant)) for tenant in "aab"]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await turns.enter("a")
    for tenant in "abaa":
        turns.leave(tenant, 1.0)
        await asyncio.sleep(0)
    await soon(asyncio.gather(*waiting))
    await turns.enter("a")


@pytest.mark.parametrize("way", ["in_loop", "in_thread"])
async def test_what_work_raises_reaches_its_caller_and_the_place_is_free_again(way: str) -> None:
    turns = BoundedTurnstile(1, 100)
    do: Callable[[str, Callable[[], float]], asyncio.Future[float]] = getattr(turns, way)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            await soon(do("a", lambda: 1 / 0))


async def test_a_tenants_grammars_wait_behind_each_other_and_before_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    checker, order, may_go = grammar_checker.GrammarChecker(BoundedTurnstile(1, 64)), list[str](), asyncio.Event()

    async def ask(output: StructuredOutput) -> tuple[str, str, str]:
        await may_go.wait()
        order.append(output.text)
        return output.text, "", ""

    monkeypatch.setattr(checker, "_ask", ask)
    of = [StructuredOutput("form", "regex", str(number)) for number in range(66)]
    flood = [asyncio.create_task(checker.grammar("flood", one)) for one in of]
    await until(lambda: flood[-1].done())
    with pytest.raises(Overloaded):
        flood.pop().result()
    same, other = (asyncio.create_task(checker.grammar("other", one)) for one in (of[0], of[-1]))
    await asyncio.sleep(0)
    may_go.set()
    assert await soon(asyncio.gather(*flood)) == [one.text for one in of[:-1]]
    assert (await soon(same), await soon(other)) == (of[0].text, of[-1].text)
    assert order.index(of[-1].text) <= 2
    assert order.count(of[0].text) == 1, "what has been built meanwhile is not built again"
