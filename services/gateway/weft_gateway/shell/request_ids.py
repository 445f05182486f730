"""Request ids: the client's `x-request-id` where it is valid, made unique inside Weft, returned on every answer."""

import re
import secrets
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from weft_gateway.shell.app_state import AppState

MAX_ID_CHARS = 128  # of a request id anywhere: what the store keeps
_UNIQUE_BYTES = 8
MAX_N = 128  # answers to one prompt
MAX_PROMPTS = 2048  # of one request
_INDEX_CHARS = len(f".{MAX_PROMPTS - 1}/{MAX_N - 1}")
MAX_CLIENT_ID_CHARS = MAX_ID_CHARS - 1 - 2 * _UNIQUE_BYTES - _INDEX_CHARS  # the random part and the indices follow
_FIT = re.compile(rb"[A-Za-z0-9][A-Za-z0-9._:/-]{0,%d}" % (MAX_CLIENT_ID_CHARS - 1))


@dataclass(frozen=True, slots=True)
class Ids:
    """`client_request_id` goes back to the client; `request_id` is unique: the ids of two clients cannot collide."""

    client_request_id: str
    request_id: str


class ResponseHeaders:
    """Pure ASGI: every HTTP answer, errors included, carries `x-request-id`; `request.state.ids` are the request's.

    Once the process stops, every answer asks the client to come back on another connection. A slash at the end of a
    path is left out: behind a proxy that ends TLS, a redirect would send the client to http://. A HEAD request is
    routed as GET; uvicorn, which keeps the method, sends no body.
    """

    def __init__(self, app: ASGIApp, state: AppState) -> None:
        self._app, self._state = app, state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        ids = ids_of(dict(scope["headers"]).get(b"x-request-id", b""))
        scope.setdefault("state", {})["ids"] = ids
        if len(scope["path"]) > 1:
            scope["path"] = scope["path"].removesuffix("/")
        if scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                stopping = self._state.stopping or self._state.machine.admission.draining
                close = [(b"connection", b"close")] if stopping else []
                header = (b"x-request-id", ids.client_request_id.encode())
                message["headers"] = [*message.get("headers", []), header, *close]
            await send(message)

        return await self._app(scope, receive, send_with_headers)


def drawn_ids() -> Ids:
    """Draw the ids of a request without a client's id."""
    drawn = f"req-{secrets.token_hex(16)}"
    return Ids(drawn, drawn)


def ids_of(header: bytes) -> Ids:
    """Return a request's ids by its `x-request-id`. A missing, too long or malformed id is replaced."""
    if not _FIT.fullmatch(header):
        return drawn_ids()
    text = header.decode()
    return Ids(text, f"{text}-{secrets.token_hex(_UNIQUE_BYTES)}")
