"""The depot's HTTP side: resolve, operations, uploads, changes, blobs, retain, probes."""

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any, TypeVar

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from weft.artifacts.depot_api import OperationStatus, ResolveRequest
from weft.artifacts.digest import parse_digest
from weft.artifacts.errors import ArtifactError, BadDigest, DepotFull, Refused, UnknownDigest
from weft.artifacts.fetch import MISMATCH_HEADER
from weft.domain.text import quoted
from weft.domain.turns import TenantSlots
from weft.hosts import refusal
from weft.leadership.errors import LeadershipLost
from weft.telemetry.logs import kv
from weft.telemetry.probes import Probes
from weft.telemetry.progress import ByteProgress
from weft.wire.multipart import FORM, FormError, boundary_of, form_pieces
from weft.wire.serving import heartbeat
from weft.wire.upload_rate import UploadTooSlow, at_least_rate
from weft_depot import metrics
from weft_depot.object_names import is_namespace
from weft_depot.requests import ChangedRequest, RetainRequest
from weft_depot.service import Depot, is_of_disk
from weft_depot.uploads import SCHEME

Body = TypeVar("Body")
log = logging.getLogger(__name__)
MAX_BODY_BYTES = 32 << 20
MAX_WAIT_S = 60.0
WATCH_S = 2.0  # between two checks of the sources of a waiting request
MAX_DOWNLOADS = 256  # of all runners; each holds a chunk, 64 MiB in total
MAX_UPLOADS = 32  # at the same time; a namespace has at most half of them
MAX_LISTED = 1000  # operations
CHUNK_BYTES = 256 << 10
JSON = "application/json"


class _BadRequest(Exception):
    """The request itself is wrong. `errors` names every field."""

    def __init__(self, *errors: str, status: int = 400, reason: str = "BadRequest") -> None:
        super().__init__("; ".join(errors))
        self.errors, self.status, self.reason = errors, status, reason


def build_app(
    depot: Depot, probes: Probes | None = None, *, on_failure: Callable[[], None] = lambda: None
) -> Starlette:
    """Return the ASGI application of a depot. Its probes are part of it unless they have a separate port.

    `on_failure`: called when housekeeping has ended by an exception, which is in the log.
    """
    downloads, uploads = asyncio.Semaphore(MAX_DOWNLOADS), TenantSlots(MAX_UPLOADS)

    async def resolve(request: Request) -> Response:
        wait_s = _wait_s(request)
        operation_id = depot.submit(await _body(request, ResolveRequest.parse))
        if operation_id is None:
            return _busy("resolve", 429, "too many resolves wait; try again later")
        status = await depot.wait(operation_id, wait_s, for_end=True) if wait_s else None
        if status is not None and status.finished:  # most sources have not changed: a single round trip is enough
            return JSONResponse(_to_json(operation_id, status))
        return JSONResponse({"operation": operation_id}, 202)

    async def operation(request: Request) -> Response:
        operation_id: str = request.path_params["id"]
        status = await depot.wait(operation_id, _wait_s(request))
        unknown = {"reason": "UnknownOperation", "message": "forgotten or never started"}
        return JSONResponse(_to_json(operation_id, status)) if status else JSONResponse(unknown, 404)

    async def operations(_: Request) -> Response:
        return JSONResponse({"operations": [_progress(*job) for job in depot.under_way(MAX_LISTED)]})

    async def blob(request: Request) -> Response:
        digest = parse_digest(request.path_params["digest"])
        if downloads.locked():
            return _busy("blob", 503, "too many downloads; try again")
        if request.headers.get(MISMATCH_HEADER) and depot.suspect(digest):
            return _busy("blob", 503, "the blob is being verified; try again")
        try:
            path = depot.store.path(digest)
            return _BlobResponse(path, digest, await asyncio.to_thread(path.stat), downloads)
        except FileNotFoundError as error:
            if depot.is_coming_back(digest):
                return _busy("blob", 503, "the blob was damaged and is being fetched again; try again")
            raise UnknownDigest(digest, "this blob folder") from error

    async def retain(request: Request) -> Response:
        body = await _body(request, RetainRequest.model_validate_json)
        try:
            return JSONResponse({"removed": await depot.retain(body.digests)})
        except LeadershipLost as error:
            return _busy("retain", 503, f"another depot acts: {error}")

    async def upload(request: Request) -> Response:
        namespace = request.query_params.get("namespace", "")
        if not is_namespace(namespace):
            raise _BadRequest(f"namespace: {quoted(namespace, 80)} is not a valid namespace")
        boundary = boundary_of(request.headers.get("content-type", ""))
        if boundary is None:
            raise _BadRequest(f"the body is not a form; send it as {FORM}", status=415, reason="NotForm")
        if not uploads.take(namespace):
            return _busy("upload", 503, "too many uploads; try again when an upload of this namespace has ended")
        try:
            manifest = await depot.upload(namespace, form_pieces(boundary, at_least_rate(request.stream())))
        except FormError as error:
            raise _BadRequest(f"the body is not a form: {error}") from error
        except UploadTooSlow as error:
            return JSONResponse({"reason": "UploadTooSlow", "message": str(error)}, 408, {"connection": "close"})
        except ArtifactError as error:
            status = 422 if isinstance(error, Refused) else 507 if isinstance(error, DepotFull) else 503
            return JSONResponse({"reason": str(error.reason), "message": error.message}, status)
        finally:
            uploads.give(namespace)
        if manifest is None:
            return _busy("upload", 429, "too many operations wait; try again later")
        uri = f"{SCHEME}:{manifest.digest}"
        return JSONResponse({"digest": manifest.digest, "uri": uri, "sizeBytes": manifest.size_bytes}, 201)

    async def changed(request: Request) -> Response:
        wait_s, loop = _wait_s(request), asyncio.get_running_loop()
        body, deadline = await _body(request, ChangedRequest.model_validate_json), loop.time() + wait_s
        while not (watches := await depot.changed(body.watches)) and loop.time() + WATCH_S <= deadline:
            if await _left_within(request, WATCH_S):
                break
        return JSONResponse({"changed": watches})

    return Starlette(
        routes=[
            Route("/v1/resolve", resolve, methods=["POST"]),
            Route("/v1/operations", operations, methods=["GET"]),
            Route("/v1/operations/{id}", operation, methods=["GET"]),
            Route("/v1/blobs/{digest}", blob, methods=["GET", "HEAD"]),
            Route("/v1/uploads", upload, methods=["PUT"]),
            Route("/v1/retain", retain, methods=["POST"]),
            Route("/v1/changed", changed, methods=["POST"]),
            *([] if probes else _PROBES),
        ],
        exception_handlers={
            _BadRequest: _bad_request,
            ArtifactError: _artifact_error,
            OSError: _disk_error,
            ClientDisconnect: _on_absent,
        },
        lifespan=lambda _: _housekeeping(depot, probes, on_failure),
    )


@contextlib.asynccontextmanager
async def _housekeeping(depot: Depot, probes: Probes | None, on_failure: Callable[[], None]) -> AsyncGenerator[None]:
    def ended(task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.critical("housekeeping has ended", exc_info=error)
            on_failure()

    tasks = [asyncio.create_task(depot.run()), *([asyncio.create_task(heartbeat(probes))] if probes else [])]
    for task in tasks:
        task.add_done_callback(ended)
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await asyncio.to_thread(depot.close)


class _BlobResponse(FileResponse):
    """A blob or ranges of it. At most `MAX_DOWNLOADS` of them read and send at the same time."""

    chunk_size = CHUNK_BYTES

    def __init__(self, path: Path, digest: str, stat: os.stat_result, downloads: asyncio.Semaphore) -> None:
        headers = {"etag": f'"{digest}"', "cache-control": "public, max-age=31536000, immutable"}
        super().__init__(path, headers=headers, media_type="application/octet-stream", stat_result=stat)
        self._downloads = downloads

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def counted(message: Message) -> None:
            nonlocal begun
            await send(message)
            begun = True
            metrics.BLOB_BYTES_SENT.inc(len(message.get("body", b"")))

        async with self._downloads:
            try:
                await super().__call__(scope, receive, counted)
            except OSError as error:
                if not begun or not is_of_disk(error):
                    raise
                # The server ends the connection, as the body is incomplete, and the client asks for the rest.
                log.error("a blob cannot be read", extra=kv(path=self.path, error=error))


async def _body(request: Request, parse: Callable[[bytes], Body]) -> Body:
    """Read a JSON body. Other types are refused: a web page may send them anywhere, but JSON only after a preflight
    request."""
    media_type = request.headers.get("content-type", "")
    if media_type.partition(";")[0].strip().lower() != JSON:
        problem = f"Content-Type is {quoted(media_type)}, it has to be {JSON}"
        raise _BadRequest(problem, status=415, reason="NotJson")
    raw = bytearray()
    async for chunk in request.stream():
        raw += chunk
        if len(raw) > MAX_BODY_BYTES:
            raise _BadRequest(f"the body has more than {MAX_BODY_BYTES} bytes")
    try:
        return parse(bytes(raw))
    except ValidationError as error:
        errors = [(".".join(map(str, e["loc"])) or "body", e["msg"]) for e in error.errors(include_url=False)]
        raise _BadRequest(*(f"{field}: {message}" for field, message in errors)) from error


async def _left_within(request: Request, seconds: float) -> bool:
    """Wait for a number of seconds. Return True early if the client of a request whose body is read has left."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            return (await request.receive())["type"] == "http.disconnect"
    return False


def _wait_s(request: Request) -> float:
    text = request.query_params.get("wait_s", "0")
    try:
        wait_s = float(text)
    except ValueError as error:
        raise _BadRequest(f"wait_s: {text[:40]!r} is not a number of seconds") from error
    if not wait_s >= 0:
        raise _BadRequest("wait_s: below 0")
    return min(wait_s, MAX_WAIT_S)


def _to_json(operation_id: str, status: OperationStatus) -> dict[str, Any]:
    """Return the operation in the form of the API, without fields that are not set yet."""
    fields = {"id": operation_id, "state": status.state, "verdict": status.verdict, "digest": status.digest}
    fields |= {"watch": status.watch, "reason": status.reason or None, "message": status.message or None}
    fields |= {"retryAfterSeconds": status.retry_after_s or None}
    return {name: value for name, value in fields.items() if value is not None}


def _progress(operation_id: str, request: ResolveRequest, progress: ByteProgress) -> dict[str, Any]:
    activity, done, total = progress.now
    sizes = {"doing": activity or "waiting", "doneBytes": done, "totalBytes": total}
    return {"id": operation_id, "kind": request.kind, "uri": request.uri, "namespace": request.namespace, **sizes}


def _busy(call: str, status: int, message: str) -> JSONResponse:
    metrics.TURNED_AWAY.labels(call).inc()
    return JSONResponse({"reason": "Busy", "message": message}, status, {"retry-after": "1"})


def refuse_host(_: Scope, host: str) -> Response:
    """Answer a web page of a foreign site whose host name leads to this server."""
    return JSONResponse({"reason": "HostNotAllowed", "message": refusal(host)}, 403)


async def _on_absent(_: Request, __: Exception) -> Response:
    """Answer a client that left within its body. It is not an error of the depot, and nobody reads the answer."""
    return Response(status_code=400)


async def _bad_request(_: Request, error: Exception) -> Response:
    assert isinstance(error, _BadRequest)
    return JSONResponse({"reason": error.reason, "message": str(error), "errors": error.errors}, error.status)


async def _artifact_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ArtifactError)
    status = 400 if isinstance(error, BadDigest) else 404 if isinstance(error, UnknownDigest) else 500
    return JSONResponse({"reason": str(error.reason), "message": error.message}, status)


async def _disk_error(_: Request, error: Exception) -> Response:
    if not is_of_disk(error):
        raise error
    log.error("the disk fails", extra=kv(error=error))
    message = f"the depot's disk fails: {error.strerror or error}"
    return JSONResponse({"reason": "DiskFailed", "message": message}, 503, {"retry-after": "1"})


async def _ok(_: Request) -> Response:
    return PlainTextResponse("ok\n")


async def _metrics(_: Request) -> Response:
    return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)


_PROBES = [Route("/healthz", _ok), Route("/readyz", _ok), Route("/metrics", _metrics)]
