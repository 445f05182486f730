"""What an HTTP request brings: its caller, its body within bounds of size and time, its query, its model call."""

import asyncio
import contextlib
import time
import zlib
from collections.abc import AsyncGenerator, Collection, Iterable, Mapping
from functools import partial
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from weft_gateway import exact_json
from weft_gateway.core.routes import Principal
from weft_gateway.errors import (
    BadRequest,
    BodyTimeout,
    ClientDisconnected,
    ParameterError,
    TooLarge,
    UnsupportedMediaType,
    from_failure,
)
from weft_gateway.hints import ignored_header
from weft_gateway.openai.call import JSON, Call, ModelEndpoint, T
from weft_gateway.openai.prepare import submit
from weft_gateway.openai.spans import RequestTrace
from weft_gateway.shell.app_state import AppState
from weft_gateway.shell.auth import Action, authenticate, check_scope
from weft_gateway.shell.request_ids import Ids
from weft_gateway.shell.turnstile import THREAD_BYTES

BODY_SECONDS = 30.0  # for a client to send its body
MAX_ID_CHARS = 256
TURN = 500  # entries of a list that are written at once: 3 ms
E = TypeVar("E")


async def completion(endpoint: ModelEndpoint[T], state: AppState, request: Request) -> Response:
    """Hold the request while there is no route table, check it, and hand it to the scheduler. Raises ApiError."""
    ids: Ids = request.state.ids
    call = None
    try:
        await state.manager.arrive(ids.request_id)
        call = Call(ids, principal_of(state, request, Action.INFER), time.time_ns() // 1_000_000)
        request.state.call, call.is_gone = call, request.is_disconnected
        if state.tracer and (span := state.tracer.begin(request.headers, call.arrived_unix_ms)):
            call.trace = RequestTrace(span, endpoint.operation)
        if failure := state.machine.admission.refusal(state.manager.clock()):
            raise from_failure(failure)
        return await submit(state, endpoint, call, await json_body(state, request, call.principal.tenant))
    except BaseException as error:
        state.manager.client_gone(ids.request_id)
        if call and call.trace:
            call.trace.refused(call.model or call.named_model, error)
        raise


async def caller_of(state: AppState, request: Request, action: Action) -> Principal:
    """Return the caller, once there is a route table: a new process holds its first requests.

    Raises Unauthorized, PermissionDenied, ServiceUnavailable, Overloaded.
    """
    if not state.machine.routes.is_known:
        request_id = request.state.ids.request_id
        try:
            await state.manager.arrive(request_id)
        finally:
            state.manager.client_gone(request_id)  # it needs nothing more
    return principal_of(state, request, action)


def principal_of(state: AppState, request: Request, action: Action) -> Principal:
    """Authenticate by `Authorization: Bearer KEY`, or Anthropic's `x-api-key`.

    Raises Unauthorized, PermissionDenied, ServiceUnavailable.
    """
    authorization, key = request.headers.get("authorization"), request.headers.get("x-api-key")
    bearer = authorization or (key and f"Bearer {key}")
    principal = authenticate(bearer, state.machine.routes, auth=state.settings.auth, tokens=state.tokens)
    check_scope(principal, action)
    return principal


async def tenant_of(state: AppState, request: Request) -> str:
    """Return the namespace of a caller of files and batches; "" without keys. Raises ApiError."""
    action = Action.READ if request.method in ("GET", "HEAD") else Action.WRITE
    return (await caller_of(state, request, action)).tenant


def no_foreign_page(request: Request) -> None:
    """A form can be sent by any page that a person has open, without asking first. Raises BadRequest."""
    if request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        raise BadRequest("A page of another site may not send this.", code="permission_denied", status=403)


async def in_turns(entries: Iterable[E]) -> AsyncGenerator[E]:
    """Yield the entries of a possibly long list. After TURN entries other requests get their turn."""
    for index, entry in enumerate(entries, start=1):
        if index % TURN == 0:
            await asyncio.sleep(0)
        yield entry


def json_response(value: dict[str, Any], ignored: Collection[str] = ()) -> Response:
    """Write an answer. `ignored`: the hints of the request that were ignored."""
    return Response(exact_json.dumps(value), media_type=JSON, headers=ignored_header(ignored))


async def json_body(state: AppState, request: Request, tenant: str) -> bytes:
    """The whole body within bounds of size and time, gzip unpacked at the tenant's turn.

    Raises UnsupportedMediaType, TooLarge, BodyTimeout, BadRequest.
    """
    _check_json(request)
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding not in ("identity", "gzip", ""):
        raise UnsupportedMediaType(f"The body is encoded as {coding[:64]!r}; gzip is taken, or no encoding.")
    limit = state.settings.max_body_bytes
    body = await _body(state, request, tenant)
    return await state.turns.encode(tenant, partial(_unpacked, body, limit)) if coding == "gzip" else body


def _unpacked(body: bytes, limit: int) -> bytes:
    """Raises TooLarge before more than `limit` bytes are there, BadRequest."""
    unpacker = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
    try:
        unpacked = unpacker.decompress(body, limit + 1)
    except zlib.error as error:
        raise BadRequest(f"The body is declared as gzip and is not: {error}.", code="invalid_body") from error
    if len(unpacked) > limit:
        raise TooLarge(f"The body is larger than {limit} bytes when it is unpacked.")
    if not unpacker.eof or unpacker.unused_data:
        raise BadRequest("The body is declared as gzip and is not one whole gzip stream.", code="invalid_body")
    return unpacked


def _check_json(request: Request) -> None:
    """A foreign page's form or plain text is sent without asking first; JSON makes its browser ask. Raises 415."""
    content_type = request.headers.get("content-type", "")
    if content_type.partition(";")[0].strip().lower() != JSON:
        raise UnsupportedMediaType(
            f"The body is declared as {content_type[:128] or 'nothing'!r}; send the header `Content-Type: {JSON}`."
        )


async def _body(state: AppState, request: Request, tenant: str) -> bytes:
    """Read the body within bounds of size and time. A long body is read in pieces, in the tenant's turns.

    Raises TooLarge, BodyTimeout, BadRequest.
    """
    limit = state.settings.max_body_bytes
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise TooLarge(f"The body is larger than {limit} bytes.")
    body = bytearray()
    async with receiving(BODY_SECONDS, f"The body did not arrive within {BODY_SECONDS:g} s."):
        async for chunk in request.stream():
            if len(chunk) > THREAD_BYTES:  # of who does not take it no more is read
                await state.turns.take(tenant, partial(body.extend, chunk))
            else:
                body += chunk
            if len(body) > limit:
                raise TooLarge(f"The body is larger than {limit} bytes.")
    return bytes(body)


@contextlib.asynccontextmanager
async def receiving(seconds: float, late: str) -> AsyncGenerator[None]:
    """Bound the time for a client to send. Raises BodyTimeout, and ClientDisconnected where it goes away."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        raise BodyTimeout(late) from error
    except ClientDisconnect as error:
        raise ClientDisconnected from error


class Query:
    """The query of a list with these parameters. Unknown parameters are refused by name."""

    def __init__(self, request: Request, *names: str) -> None:
        """Raises ParameterError."""
        self._params = request.query_params
        for name in self._params:
            if name not in names:
                text = f"The parameter {name[:64]} is not supported. Supported: {', '.join(names)}."
                raise ParameterError(text, param=name[:64], code="unsupported_parameter")

    def after_id(self) -> str:
        """Return an id: the list goes on behind it. Raises ParameterError."""
        after_id = self._params.get("after", "")
        if len(after_id) > MAX_ID_CHARS:
            raise ParameterError("after: is not an id.", param="after")
        return after_id

    def limit(self, default: int, maximum: int) -> int:
        """Return how many are asked for. Raises ParameterError."""
        text = self._params.get("limit", str(default))
        if not (text.isascii() and text.isdigit() and len(text) <= 9 and 1 <= int(text) <= maximum):
            raise ParameterError(f"limit: must be a number from 1 to {maximum}.", param="limit")
        return int(text)

    def one_of(self, name: str, values: Mapping[str, E]) -> E | None:
        """Return what a word means; None: it is not given. Raises ParameterError."""
        text = self._params.get(name)
        if text is None:
            return None
        if text not in values:
            raise ParameterError(f"{name}: must be one of {', '.join(values)}.", param=name)
        return values[text]


def listed(data: list[dict[str, Any]], has_more: bool) -> dict[str, Any]:
    """Write one page of a list, with its end."""
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
    return {"object": "list", "data": data, **ends, "has_more": has_more}
