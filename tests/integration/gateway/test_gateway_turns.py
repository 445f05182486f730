"""A tenant's burst of dear requests waits behind itself: another tenant's are read and encoded meanwhile."""

import asyncio
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from weft_gateway.openai import COMPLETIONS
from weft_gateway.shell import CallerTurns, ModelTokenizer, turnstile

from .conftest import ANSWER, PATIENCE_S, World, serving, soon, until
from .test_gateway_refusals import with_keys

REQUESTS = 60  # more than the 32 threads that an event loop has at the most
PARSED = "x" * 30_000  # is parsed in a thread


STANDS = "stand still" * 100  # long enough for a thread


class Slow:
    """Work that stands still where its text says so, until it may go on."""

    def __init__(self) -> None:
        self.begun, self.may_end = 0, threading.Event()

    def on(self, text: Any) -> None:
        if "stand" in str(text)[:200]:
            self.begun += 1
            assert self.may_end.wait(PATIENCE_S)


@pytest.fixture
def slow() -> Slow:
    return Slow()


async def beside_a_burst(world: World, slow: Slow, prompt: str, path: str) -> None:
    """Answer a tenant while the work of another one's burst stands still; then all of the burst."""
    async with world.http() as http:

        async def ask(tenant: str, model: str, prompt: str, path: str = "/v1/completions") -> Any:
            body, key = {"model": model, "prompt": prompt}, {"authorization": f"Bearer key-of-{tenant}"}
            return await http.post(path, json=body, headers=key)

        burst = [asyncio.create_task(ask("rival", "rival/secret", prompt, path)) for _ in range(REQUESTS)]
        try:
            await until(lambda: slow.begun and len(world.server.server_state.connections) == REQUESTS)
            answer = await soon(ask("acme", "acme/upper", "hello"))
            assert answer.json()["choices"][0]["text"] == ANSWER
            assert not any(task.done() for task in burst)
        finally:
            slow.may_end.set()
        assert {answer.status_code for answer in await soon(asyncio.gather(*burst))} <= {200, 400}
        assert slow.begun == REQUESTS
        await world.settled()


@pytest.fixture
def slow_prompts(slow: Slow, monkeypatch: pytest.MonkeyPatch) -> Slow:
    encode = ModelTokenizer.encode

    def encoded(self: ModelTokenizer, text: str, *args: Any, **options: Any) -> list[int]:
        slow.on(text)
        return encode(self, text, *args, **options)

    monkeypatch.setattr(ModelTokenizer, "encode", encoded)
    return slow


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
async def test_prompts_of_others_are_encoded_beside_a_burst(
    parts: World, tmp_path: Path, slow_prompts: Slow, path: str
) -> None:
    parts.scheduler.routes = with_keys(parts)
    async with serving(parts, parts.settings(tmp_path, auth=True)) as world:
        await beside_a_burst(world, slow_prompts, STANDS, path)


async def test_bodies_of_others_are_parsed_beside_a_burst(
    parts: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow: Slow
) -> None:
    parse = type(COMPLETIONS).parse

    def parsed(self: Any, body: bytes) -> Any:
        slow.on(body)
        return parse(self, body)

    monkeypatch.setattr(type(COMPLETIONS), "parse", parsed)
    parts.scheduler.routes = with_keys(parts)
    async with serving(parts, parts.settings(tmp_path, auth=True)) as world:
        await beside_a_burst(world, slow, f"stand {PARSED}", "/v1/completions")


async def test_who_goes_away_as_it_waits_is_not_worked_for(parts: World, tmp_path: Path, slow_prompts: Slow) -> None:
    slow, threads = slow_prompts, min(turnstile.MAX_PROCESSORS, len(os.sched_getaffinity(0)))  # of one tenant
    async with serving(parts, parts.settings(tmp_path)) as world:
        async with world.http() as http:
            burst = [
                asyncio.create_task(http.post("/v1/completions", json={"model": "tiny", "prompt": STANDS}))
                for _ in range(20)
            ]
            prompts = world.gateway.turns._processors  # a request that has no turn yet is not asked whether it is gone
            await until(lambda: slow.begun == threads and prompts.waiting("") == len(burst) - threads)
            for task in burst:
                task.cancel()
            await asyncio.wait(burst)
        await until(lambda: not world.server.server_state.connections)
        slow.may_end.set()
        await world.settled()
        assert slow.begun == threads < len(burst)


async def test_cheap_requests_begin_a_few_in_a_turn_of_the_loop_and_in_turn_between_callers(world: World) -> None:
    begun = list[str]()

    async def app(scope: Any, _receive: Any, _send: Any) -> None:
        begun.append(scope["client"][0] + scope["path"])

    turns = CallerTurns(app, world.gateway, [COMPLETIONS.path])

    def ask(host: str, path: str) -> "asyncio.Task[None]":
        scope = {"type": "http", "path": path, "headers": [], "client": (host, 1)}
        return asyncio.create_task(turns(scope, None, None))  # pyright: ignore[reportArgumentType]

    flood = [ask("flood", "/metrics") for _ in range(100)]
    rivals = [ask("rival", "/healthz"), ask("rival", COMPLETIONS.path)]
    await asyncio.sleep(0)
    assert sorted(begun) == ["flood/metrics"] * (turnstile.IN_LOOP // 2) + ["rival/healthz", f"rival{COMPLETIONS.path}"]
    await soon(asyncio.gather(*flood, *rivals))
    assert len(begun) == 102
