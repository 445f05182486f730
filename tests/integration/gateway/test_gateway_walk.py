"""How a chat goes through the gateway up to its first token: in the page's order, and in few trips."""

import asyncio
from pathlib import Path
from types import FrameType

import pytest

import weft
import weft_gateway
from harness.walk import Call, callers, names_out_of_order, traced
from weft.wire.v1.runner_pb2 import Start

from .conftest import World

ROOTS = tuple(str(Path(str(package.__file__)).parent) for package in (weft_gateway, weft))
TESTS = str(Path(__file__).parents[2])
ASIDE = ("serve_stream", "_tick")  # peers that tests play, and what falls due meanwhile: on a busy machine, more
CHAT = {"model": "acme/upper", "messages": [{"role": "user", "content": "hello"}], "stream": True}


@pytest.fixture
async def chat_walk(world: World) -> list[Call]:
    """Calls of a streamed chat up to the chunk of its first token, without those of peers and timers.

    A coroutine that goes on is no call. What comes behind the chunk is about the next one.
    """
    calls, seen = list[Call](), dict[int, FrameType]()  # frames are kept, so that no two have one id

    def on_call(frame: FrameType, caller: FrameType) -> None:
        if id(frame) in seen or frame.f_code.co_filename.endswith(("_pb2.py", "_pb2_grpc.py")):
            return
        seen[id(frame)] = frame
        above = [one.f_code for one in callers(frame)]
        if not any(code.co_filename.startswith(TESTS) or code.co_name in ASIDE for code in above):
            calls.append(Call(frame.f_code, caller.f_code, 0))

    async def first_token() -> Start:
        start = await world.runner.next("start")
        world.runner.step(start, 0, world.tokens("hello")[:1])
        return start

    world.runner.autopilot = False
    async with world.http() as http:
        for _ in range(2):  # the first one opens the session, and imports what is imported late
            calls.clear()
            runner = asyncio.create_task(first_token())
            with traced(ROOTS, on_call):
                async with http.stream("POST", "/v1/chat/completions", json=CHAT) as response:
                    await anext(line async for line in response.aiter_lines() if '"content":"h' in line)
            assert runner.done()
            await world.settled()
    sent = max(index for index, call in enumerate(calls) if call.path.stem == "request_ids")
    return calls[: sent + 1]


async def test_the_page_tells_the_walk_of_a_chat_in_order(chat_walk: list[Call]) -> None:
    missing = names_out_of_order("A chat through the gateway", chat_walk)
    assert not missing, f"not called, or not in that place: {missing}"


async def test_a_chat_is_handled_in_four_trips(chat_walk: list[Call]) -> None:
    machine = [call for call in chat_walk if call.name == "gateway.Gateway.handle"]
    assert len(machine) == 4, "it is submitted in one trip; a prediction, an assignment and a token come in three"
