"""The local API: HTTP on a unix socket, with the API server's verbs, errors and watch.

| path | |
|---|---|
| `POST /v1/apply` | an object, as in a manifest -> `{"result", "object"}`; a `List`: see below. |
| `POST /v1/delete` | a `List` of objects; only kind, namespace and name count. |
| `GET /v1/{plural}[?namespace=]` | `{"items", "resourceVersion"}` |
| `GET, DELETE /v1/{plural}/{namespace}/{name}` | the object |
| `GET /v1/watch[?resourceVersion=]` | `{"type", "object"}` a line, without end; 410: list again. |
| `GET /v1/logs/{component}[?tail=][&follow=1]` | text: the last `tail` lines (default: all kept), then new lines |
| `GET /v1/stack` | addresses, states |

An answer to a change is given when the change is on disk. Errors are `Status` objects. A `List` is a single change for
the disk: `{"kind": "List", "items": [...]}` -> `{"items": [...]}`, for each object a `{"result"}` or an `{"error"}`.
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from weft.domain.strict_json import JsonError, parse_object
from weft.domain.text import quoted
from weft.wire.quiet_server import QuietServer
from weft_operator.core.resources import Kind, Object, Ref
from weft_operator.errors import Expired, LocalApiError, LocalBadRequest, LocalNotFound
from weft_operator.local import sockets
from weft_operator.local.logs import LogFile
from weft_operator.local.objects import ObjectStore, Result
from weft_operator.local.persistence import Durable

PLURALS: dict[str, Kind] = {"loraadapters": "LoRAAdapter", "servingpools": "ServingPool"}
KINDS: dict[str, Kind] = {kind: kind for kind in PLURALS.values()}
LIST = "List"
MAX_OBJECT_BYTES = 1 << 20
CLOSE_S = 1
WHOLE_NUMBER = re.compile("[0-9]{1,18}")

Admit = Callable[[Object, Callable[[Ref], Object | None]], Object]


class LocalApi:
    """The handlers. `admit` turns a manifest into the object to store, or raises Invalid."""

    def __init__(
        self,
        store: ObjectStore,
        durable: Durable,
        *,
        admit: Admit,
        logs: Mapping[str, LogFile],
        describe: Callable[[], Mapping[str, Any]],
    ) -> None:
        self._store, self._durable, self._admit, self._logs, self._describe = store, durable, admit, logs, describe

    def app(self) -> Starlette:
        """The ASGI application."""
        routes = [
            Route("/v1/apply", self._apply, methods=["POST"]),
            Route("/v1/delete", self._delete_list, methods=["POST"]),
            Route("/v1/watch", self._watch),
            # `path`: a name with a slash is answered like a missing name.
            Route("/v1/logs/{component:path}", self._log),
            Route("/v1/stack", self._stack),
            Route("/v1/{plural}", self._list),
            Route("/v1/{plural}/{namespace}/{name:path}", self._get),
            Route("/v1/{plural}/{namespace}/{name:path}", self._delete, methods=["DELETE"]),
        ]
        return Starlette(routes=routes, exception_handlers={LocalApiError: _refused})

    async def _apply(self, request: Request) -> Response:
        body = await _body(request)
        if body.get("kind") == LIST:
            return await self._for_each(body, lambda obj: self._applied(obj)[0])
        result, obj = self._applied(body)
        await self._durable.committed()
        return JSONResponse({"result": result, "object": obj})

    def _applied(self, obj: Object) -> tuple[Result, Object]:
        return self._store.apply(self._admit(obj, self._store.find))

    async def _delete_list(self, request: Request) -> Response:
        def deleted(obj: Object) -> str:
            self._store.delete(_ref_of(obj))
            return "deleted"

        return await self._for_each(await _body(request), deleted)

    async def _for_each(self, body: Object, change: Callable[[Object], str]) -> Response:
        """Change every object of a list. A refused object does not stop the next objects."""
        answers: list[Object] = []
        for obj in _items(body):
            try:
                answers.append({"result": change(obj)})
            except LocalApiError as error:
                answers.append({"error": error.body()})
            await asyncio.sleep(0)  # others have their turn
        await self._durable.committed()
        return JSONResponse({"items": answers})

    async def _list(self, request: Request) -> Response:
        items = self._store.objects(_kind(request), request.query_params.get("namespace"))
        return JSONResponse({"items": items, "resourceVersion": str(self._store.version)})

    async def _get(self, request: Request) -> Response:
        return JSONResponse(self._store.get(_ref(request)))

    async def _delete(self, request: Request) -> Response:
        obj = self._store.delete(_ref(request))
        await self._durable.committed()
        return JSONResponse(obj)

    async def _watch(self, request: Request) -> Response:
        version = _whole_number(request, "resourceVersion", self._store.version)
        self._store.require_remembered(version)
        return StreamingResponse(_event_lines(self._store, version), media_type="application/x-ndjson")

    async def _log(self, request: Request) -> Response:
        name = request.path_params["component"]
        if name not in self._logs:
            raise LocalNotFound(f"unknown component {name!r}; expected: {', '.join(sorted(self._logs))}")
        tail = _whole_number(request, "tail", 0) if "tail" in request.query_params else None
        follow = request.query_params.get("follow") in ("1", "true")
        return StreamingResponse(_log_bytes(self._logs[name], tail, follow), media_type="text/plain; charset=utf-8")

    async def _stack(self, request: Request) -> Response:  # noqa: ARG002 (starlette's form)
        return JSONResponse(self._describe())


async def serve(api: LocalApi, path: Path) -> None:
    """Serve the local API on its unix socket, until cancelled."""
    sock = sockets.listen(path)
    config = uvicorn.Config(
        api.app(),
        log_config=None,
        access_log=False,
        lifespan="off",
        date_header=False,
        timeout_graceful_shutdown=CLOSE_S,
    )
    server = _Server(config)
    try:
        await server.serve(sockets=[sock])
    finally:
        sock.close()


class _Server(QuietServer):
    """A server without signal handlers: its caller handles signals."""

    def capture_signals(self) -> Any:
        return nullcontext()


async def _event_lines(store: ObjectStore, version: int) -> AsyncIterator[bytes]:
    try:
        async for event in store.watch(version):
            yield json.dumps({"type": event.type, "object": event.object}).encode() + b"\n"
    except Expired as error:  # the client was too slow: it has to list again
        yield json.dumps({"type": "ERROR", "object": error.body()}).encode() + b"\n"


async def _log_bytes(logfile: LogFile, tail: int | None, follow: bool) -> AsyncIterator[bytes]:
    with logfile.follow() as news:  # before the tail is read, so no line is lost in between
        yield "".join(f"{line}\n" for line in logfile.tail(tail)).encode()
        while follow and (data := await news.get()) is not None:
            yield data


async def _body(request: Request) -> Object:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_OBJECT_BYTES:
            raise LocalBadRequest(f"an object has at most {MAX_OBJECT_BYTES} bytes")
    try:
        return parse_object(bytes(body), max_bytes=MAX_OBJECT_BYTES)
    except JsonError as error:
        raise LocalBadRequest(f"the body is not JSON of an object: {error}") from error


def _items(body: Object) -> list[Object]:
    items = body.get("items")
    if body.get("kind") != LIST or not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise LocalBadRequest(f"the body is not a {LIST} of objects")
    return items


def _ref_of(obj: Object) -> Ref:
    """Return the object named by a deletion."""
    kind, metadata = KINDS.get(str(obj.get("kind"))), obj.get("metadata")
    if kind is None or not isinstance(metadata, dict):
        raise LocalBadRequest(f"{quoted(obj.get('kind'))} is not a kind of deletable object")
    return Ref(kind, str(metadata.get("namespace")), str(metadata.get("name")))


def _kind(request: Request) -> Kind:
    plural = request.path_params["plural"]
    if plural not in PLURALS:
        raise LocalNotFound(f"unknown resource {plural!r}; expected: {', '.join(PLURALS)}")
    return PLURALS[plural]


def _ref(request: Request) -> Ref:
    return Ref(_kind(request), request.path_params["namespace"], request.path_params["name"])


def _whole_number(request: Request, name: str, default: int) -> int:
    text = request.query_params.get(name)
    if text is None:
        return default
    if not WHOLE_NUMBER.fullmatch(text):
        raise LocalBadRequest(f"{name} is {quoted(text)}, not a whole number of at most 18 digits")
    return int(text)


async def _refused(request: Request, error: Exception) -> Response:  # noqa: ARG001 (starlette's form)
    assert isinstance(error, LocalApiError)
    return JSONResponse(error.body(), status_code=error.code)
