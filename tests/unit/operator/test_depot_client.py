"""The depot's client against a real HTTP server of the depot's form."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Route

from weft_operator.controller import DepotClient
from weft_operator.core import OperationStatus, ResolveRequest
from weft_operator.errors import DepotUnavailable

REQUEST = ResolveRequest("adapter", "file:a", "acme")


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
    answer = await client.resolve(REQUEST, lambda step: steps.append(step.state))
    return answer, steps


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


async def test_an_answer_that_comes_with_the_question_is_not_asked_for_again() -> None:
    finished = JSONResponse({"id": "op1", "state": "Fetched", "verdict": {"rank": 8}, "digest": "sha256:aa"})
    async with depot(post=finished) as (client, _):
        answer, steps = await resolve(client)
    assert (answer, steps) == (OperationStatus("Fetched", "sha256:aa", {"rank": 8}), [])


async def test_a_failure_carries_its_reason() -> None:
    async with depot({"state": "Failed", "reason": "NotFinite", "message": "NaN"}) as (client, _):
        answer, _ = await resolve(client)
    assert (answer.state, answer.reason, answer.message) == ("Failed", "NotFinite", "NaN")


async def test_a_refused_request_is_the_depots_word_on_the_source() -> None:
    refused = JSONResponse({"reason": "BadURI", "message": "no scheme"}, status_code=400)
    async with depot(post=refused) as (client, _):
        answer, _ = await resolve(client)
    assert (answer.state, answer.reason) == ("Failed", "BadURI")


FORGOTTEN = JSONResponse({"reason": "UnknownOperation", "message": "forgotten"}, status_code=404)
BUSY = JSONResponse({"reason": "Busy", "message": "try again"}, status_code=429)


@pytest.mark.parametrize("answer", [FORGOTTEN, PlainTextResponse("gone", status_code=404), BUSY])
async def test_an_operation_that_the_depot_forgot_says_nothing_about_the_source(answer: Any) -> None:
    async with depot(answer) as (client, _):
        with pytest.raises(DepotUnavailable):
            await resolve(client)


async def test_a_depot_that_is_busy_says_nothing_about_the_source() -> None:
    async with depot(post=BUSY) as (client, _):
        with pytest.raises(DepotUnavailable, match="try again"):
            await resolve(client)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (PlainTextResponse("Internal Server Error", status_code=500), "500: Internal Server Error"),
        (PlainTextResponse("\x1b]0;x", status_code=500), "x1b]0;x"),
        (PlainTextResponse("{", status_code=200), "200: {"),
        (PlainTextResponse("[" * 9_000, status_code=200), "200: [["),
        ({"no": "state"}, "no operation"),
        ({"state": "Odd"}, "no operation"),
        ({"state": "Fetched"}, "no operation"),
    ],
)
async def test_what_the_depot_fails_on_is_a_failure_of_that_object(answer: Any, says: str) -> None:
    async with depot(answer) as (client, _):
        found, _ = await resolve(client)
    assert (found.state, found.reason) == ("Failed", "ResolveFailed")
    assert says in found.message
    assert found.message.isprintable()


async def test_a_request_that_the_depot_fails_on_is_a_failure_of_that_object() -> None:
    async with depot(post=PlainTextResponse("Internal Server Error", status_code=500)) as (client, _):
        found, _ = await resolve(client)
    assert (found.state, found.reason) == ("Failed", "ResolveFailed")


async def test_a_list_to_keep_that_the_depot_fails_on_is_sent_again() -> None:
    async with depot(post=PlainTextResponse("Internal Server Error", status_code=500)) as (client, _):
        with pytest.raises(DepotUnavailable, match="500"):
            await client.retain(frozenset())


async def test_a_depot_that_is_not_there_is_unavailable() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        client = DepotClient(f"http://127.0.0.1:{nobody.getsockname()[1]}")
        with pytest.raises(DepotUnavailable, match="ConnectError"):
            await resolve(client)
        await client.aclose()


async def test_the_list_to_keep_is_sorted_and_complete() -> None:
    async with depot(post=JSONResponse({})) as (client, bodies):
        await client.retain(frozenset({"b", "a"}))
    assert bodies == [{"digests": ["a", "b"]}]


async def test_what_has_changed_is_asked_in_one_question() -> None:
    async with depot(post=JSONResponse({"changed": ["b"]})) as (client, bodies):
        assert await client.changed({"b", "a"}) == {"b"}
    assert bodies == [{"watches": ["a", "b"]}]


@pytest.mark.parametrize("answer", [{}, {"changed": "a"}, {"changed": [{}]}])
async def test_what_is_no_list_of_changes_is_no_answer(answer: dict[str, Any]) -> None:
    async with depot(post=JSONResponse(answer)) as (client, _):
        with pytest.raises(DepotUnavailable, match="no list of changes"):
            await client.changed({"a"})
