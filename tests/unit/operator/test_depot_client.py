"""The depot's client against a real HTTP server of the depot's form."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Route

from weft.artifacts.depot_api import ResolveRequest
from weft_operator.controller import DepotClient
from weft_operator.core import OperationStatus
from weft_operator.errors import DepotUnavailable

REQUEST = ResolveRequest("adapter", "file:a", "acme")
FAILED = partial(OperationStatus, "Failed", None, None)
NO_LISTS: list[Any] = [{}, {"changed": "a"}, {"changed": [{}]}]


class Server(uvicorn.Server):
    def capture_signals(self) -> Any:
        return nullcontext()


@asynccontextmanager
async def depot(*answers: Any, post: Any = None) -> AsyncIterator[tuple[DepotClient, list[Any]]]:
    """A depot that gives these answers to the polls of its one operation."""
    left, bodies = list(answers), list[Any]()

    async def on_post(request: HttpRequest) -> Any:
        bodies.append(await request.json())
        return post or JSONResponse({"operation": "op1"}, status_code=202)

    async def on_get(request: HttpRequest) -> Any:
        answer = left.pop(0)
        return answer if not isinstance(answer, dict) else JSONResponse({"id": "op1", **answer})

    routes = [
        Route("/v1/resolve", on_post, methods=["POST"]),
        Route("/v1/retain", on_post, methods=["POST"]),
        Route("/v1/changed", on_post, methods=["POST"]),
        Route("/v1/operations/op1", on_get),
    ]
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        config = uvicorn.Config(Starlette(routes=routes), log_config=None, lifespan="off")
        serving = asyncio.create_task(Server(config).serve(sockets=[sock]))
        client = DepotClient(f"http://127.0.0.1:{sock.getsockname()[1]}")
        sock.listen()
        try:
            yield client, bodies
        finally:
            await client.aclose()
            serving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await serving


async def resolve(client: DepotClient) -> tuple[OperationStatus, list[str]]:
    steps: list[str] = []
    return (await client.resolve(REQUEST, lambda step: steps.append(step.state))), steps


async def test_an_operation_is_followed_to_its_end_and_each_step_is_reported_once() -> None:
    verdict = {"rank": 8}
    answers = (
        {"state": "Pending"},
        {"state": "Validated", "verdict": verdict},
        {"state": "Validated", "verdict": verdict},
        {"state": "Fetched", "verdict": verdict, "digest": "sha256:aa"},
    )
    async with depot(*answers) as (client, bodies):
        answer, steps = await resolve(client)
    assert answer == OperationStatus("Fetched", "sha256:aa", verdict)
    assert steps == ["Pending", "Validated"]
    assert bodies == [REQUEST.body()]


FETCHED = {"state": "Fetched", "verdict": {"rank": 8}, "digest": "sha256:aa"}
BROKEN = PlainTextResponse("Internal Server Error", status_code=500)
FORGOTTEN = JSONResponse({"reason": "UnknownOperation", "message": "forgotten"}, status_code=404)
BUSY = JSONResponse({"reason": "Busy", "message": "try again"}, status_code=429)


@pytest.mark.parametrize(
    ("post", "answers", "found"),
    [
        # an answer that comes with the question is not asked for again
        (JSONResponse({"id": "op1", **FETCHED}), [], OperationStatus("Fetched", "sha256:aa", {"rank": 8})),
        (None, [{"state": "Failed", "reason": "NotFinite", "message": "NaN"}], FAILED("NotFinite", "NaN")),
        (JSONResponse({"reason": "BadURI", "message": "no"}, status_code=400), [], FAILED("BadURI", "no")),
    ],
)
async def test_the_depots_word_on_a_source_comes_whole(post: Any, answers: list[Any], found: OperationStatus) -> None:
    async with depot(*answers, post=post) as (client, _):
        assert await resolve(client) == (found, [])


@pytest.mark.parametrize(
    ("post", "answers", "ask", "says"),
    [
        (None, [FORGOTTEN], resolve, "forgotten"),
        (None, [PlainTextResponse("gone", status_code=404)], resolve, "gone"),
        (None, [BUSY], resolve, "try again"),
        (BUSY, [], resolve, "try again"),
        (BROKEN, [], lambda client: client.retain(frozenset()), "500"),  # it is sent again
        *(
            (JSONResponse(said), [], lambda client: client.changed({"a"}, 0), "not a list of changes")
            for said in NO_LISTS
        ),
    ],
)
async def test_what_says_nothing_about_a_source(post: Any, answers: list[Any], ask: Any, says: str) -> None:
    async with depot(*answers, post=post) as (client, _):
        with pytest.raises(DepotUnavailable, match=says):
            await ask(client)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (BROKEN, "500: Internal Server Error"),
        (PlainTextResponse("\x1b]0;x", status_code=500), "x1b]0;x"),
        (PlainTextResponse("{", status_code=200), "200: {"),
        (PlainTextResponse("[" * 9_000, status_code=200), "200: [["),
        ({"no": "state"}, "not an operation"),
        ({"state": "Odd"}, "not an operation"),
        ({"state": "Fetched"}, "not an operation"),
        (None, "500: Internal Server Error"),
    ],
)
async def test_what_the_depot_fails_on_is_a_failure_of_that_object(answer: Any, says: str) -> None:
    """None: it fails on the question."""
    async with depot(answer, post=None if answer else BROKEN) as (client, _):
        found, _ = await resolve(client)
    assert (found.state, found.reason) == ("Failed", "ResolveFailed")
    assert says in found.message
    assert found.message.isprintable()


async def test_a_depot_that_is_not_there_is_unavailable() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        client = DepotClient(f"http://127.0.0.1:{nobody.getsockname()[1]}")
        with pytest.raises(DepotUnavailable, match="ConnectError"):
            await resolve(client)
        await client.aclose()


async def test_lists_are_sorted_and_sent_whole() -> None:
    async with depot(post=JSONResponse({"changed": ["b"]})) as (client, bodies):
        await client.retain(frozenset({"b", "a"}))
        assert await client.changed({"b", "a"}, 0.0) == {"b"}
    assert bodies == [{"digests": ["a", "b"]}, {"watches": ["a", "b"]}]
