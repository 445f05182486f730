"""Waiting for what a watch tells. The API server is played: a list, and lines of a stream that the test writes."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from kubernetes.aio.client import ApiException

from harness.waiting import PATIENCE_S
from weft_bench.errors import NotInTime
from weft_bench.following import Following


def thing(name: str, *, good: bool = True) -> dict[str, Any]:
    return {"metadata": {"name": name}, "good": good}


def is_good(obj: dict[str, Any]) -> bool:
    return obj["good"]


class Answer:
    """An answer whose body is read whole, or line by line as the lines come."""

    def __init__(self, body: Any, lines: asyncio.Queue[bytes]) -> None:
        self._body, self.content = body, self
        self._lines = lines

    async def read(self) -> bytes:
        return json.dumps(self._body).encode()

    async def readline(self) -> bytes:
        return await self._lines.get()

    def release(self) -> None:
        pass

    close = release


class Things:
    """An API of the client, with one resource."""

    def __init__(self, *things: dict[str, Any]) -> None:
        self.there = list(things)
        self.lines: asyncio.Queue[bytes] = asyncio.Queue()
        self.lists = 0

    async def list_things(self, namespace: str, **options: Any) -> None:
        raise AssertionError("nobody needs models of things")

    async def list_things_without_preload_content(self, namespace: str, **options: Any) -> Answer:
        assert (namespace, options.pop("label_selector")) == ("ours", "a=b")
        self.lists += not options.get("watch", False)
        return Answer({"metadata": {"resourceVersion": "7"}, "items": self.there}, self.lines)

    def say(self, event: str, obj: dict[str, Any]) -> None:
        self.lines.put_nowait(json.dumps({"type": event, "object": obj}).encode() + b"\n")

    def fail(self, code: int) -> None:
        self.say("ERROR", {"code": code, "reason": "Expired", "message": "too old"})


@asynccontextmanager
async def following(things: Things) -> AsyncGenerator[Following]:
    made = Following(things.list_things, "ours", label_selector="a=b")
    running = asyncio.create_task(made.run())
    await made.listed.wait()
    try:
        yield made
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_what_is_listed_counts_at_once() -> None:
    async with following(Things(thing("a"), thing("b"))) as made:
        assert await made.until(["a", "b"], is_good, PATIENCE_S) > 0


async def test_it_waits_until_it_holds_for_all_at_the_same_time() -> None:
    things = Things(thing("a"))
    steps: list[int] = []
    async with following(things) as made:
        waiting = asyncio.create_task(made.until(["a", "b"], is_good, PATIENCE_S, steps.append))
        things.say("MODIFIED", thing("a", good=False))
        things.say("ADDED", thing("b"))
        things.say("MODIFIED", thing("unasked"))
        things.say("MODIFIED", thing("a"))
        await waiting
    assert sum(steps) == 2  # a, not a, b, a


async def test_an_object_is_gone_once_the_watch_says_so() -> None:
    things = Things(thing("a"))
    async with following(things) as made:
        waiting = asyncio.create_task(made.until_gone("a", PATIENCE_S))
        things.say("MODIFIED", thing("a", good=False))
        things.say("DELETED", thing("a"))
        await waiting
        assert made.objects == {}


async def test_what_does_not_come_is_named() -> None:
    async with following(Things(thing("a"))) as made:
        with pytest.raises(NotInTime, match=r"1 of 2, as .*'b'"):
            await made.until(["a", "b"], is_good, 0.02)


async def test_listeners_hear_of_every_object_and_its_end() -> None:
    things, heard = Things(thing("a")), asyncio.Queue[tuple[str, bool]]()
    made = Following(
        things.list_things,
        "ours",
        listen=lambda obj, gone: heard.put_nowait((obj["metadata"]["name"], gone)),
        label_selector="a=b",
    )
    running = asyncio.create_task(made.run())
    things.say("DELETED", thing("a"))
    assert [await heard.get(), await heard.get()] == [("a", False), ("a", True)]
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_after_a_forgotten_version_it_lists_again_and_misses_nobody() -> None:
    things = Things(thing("a"), thing("b"))
    async with following(things) as made:
        waiting = asyncio.create_task(made.until_gone("a", PATIENCE_S))
        things.there = [thing("b")]
        for _ in range(2):  # the client itself tries once more
            things.fail(410)
        await waiting
        assert things.lists == 2
        assert set(made.objects) == {"b"}


async def test_a_refusal_ends_it() -> None:
    things = Things()
    running = asyncio.create_task(Following(things.list_things, "ours", label_selector="a=b").run())
    things.fail(403)
    with pytest.raises(ApiException):
        await running
