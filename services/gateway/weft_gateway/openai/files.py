"""`/v1/files`: what batches read and write. The bytes stream through, to and from the batch service."""

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from weft.domain.batch import MAX_CHUNK_BYTES, MAX_FILE_BYTES, MAX_FILENAME, NewFile, Page, Purpose, StoredFile
from weft.wire.multipart import FORM, FormError, Part, boundary_of, form_pieces
from weft.wire.upload_rate import UploadTooSlow, at_least_rate
from weft_gateway.errors import BadRequest, BodyTimeout, ParameterError, TooLarge, UnsupportedMediaType
from weft_gateway.openai import http_requests
from weft_gateway.openai.http_requests import (
    Query,
    caller_of,
    json_response,
    listed,
    no_foreign_page,
    receiving,
    tenant_of,
)
from weft_gateway.shell.app_state import AppState
from weft_gateway.shell.auth import Action
from weft_gateway.tolerance import advice

UPLOAD_SECONDS = 900.0  # for a whole file
FORM_BYTES = 64 << 10  # of a form beside its file
MAX_LIMIT = 10_000  # of a list, as OpenAI's
MAX_FIELD_BYTES = 256
FIELDS = ("file", "purpose")
_CONTENT_HEADERS = {"x-content-type-options": "nosniff", "cache-control": "no-store"}


async def upload_file(state: AppState, request: Request) -> Response:
    """Upload JSON lines: a form with `file` and `purpose`, which is `batch`."""
    namespace = await tenant_of(state, request)
    no_foreign_page(request)
    if (encoding := request.headers.get("content-encoding", "identity")).lower() != "identity":
        raise UnsupportedMediaType(f"The body is encoded as {encoding[:32]!r}; send it as it is.")
    limit = MAX_FILE_BYTES
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit + FORM_BYTES:
        raise TooLarge(f"The file is larger than {limit} bytes.")
    form = UploadForm(request.headers.get("content-type", ""), body_pieces(request), limit)
    try:
        async with receiving(UPLOAD_SECONDS, f"The file did not arrive within {UPLOAD_SECONDS:g} s."):
            new = NewFile(namespace, await form.open(), Purpose.BATCH)
            return json_response(_file(await state.batch.upload(new, form.chunks())))
    except FormError as error:
        raise BadRequest(f"The body is not a multipart form: {error}.", code="invalid_form") from error


async def list_files(state: AppState, request: Request) -> Response:
    """This caller's files, the newest first."""
    namespace = await tenant_of(state, request)
    query = Query(request, "after", "limit", "order", "purpose")
    purpose = query.one_of("purpose", {one.value: one for one in Purpose})
    oldest_first = query.one_of("order", {"asc": True, "desc": False})
    page = Page(namespace, query.limit(MAX_LIMIT, MAX_LIMIT), query.after_id(), purpose, bool(oldest_first))
    files, has_more = await state.batch.files(page)
    return json_response(listed([_file(file) for file in files], has_more))


async def one_file(state: AppState, request: Request) -> Response:
    """Answer with the description of a file."""
    namespace = await tenant_of(state, request)
    return json_response(_file(await state.batch.file(namespace, request.path_params["file_id"])))


async def file_content(state: AppState, request: Request) -> Response:
    """The bytes of a file, as they are stored."""
    namespace = (await caller_of(state, request, Action.CONTENT)).tenant
    file = await state.batch.file(namespace, request.path_params["file_id"])
    chunks = state.batch.read(namespace, file.file_id)
    first = await anext(chunks, b"")  # a file that has gone meanwhile is refused with its status
    headers = _CONTENT_HEADERS | {
        "content-length": str(file.bytes),
        "content-disposition": f'attachment; filename="{file.file_id}.jsonl"',
    }
    return StreamingResponse(_joined(first, chunks), headers=headers, media_type="application/octet-stream")


async def delete_file(state: AppState, request: Request) -> Response:
    """Delete a file. The input of a batch that has not ended stays: 409."""
    namespace = await tenant_of(state, request)
    file = await state.batch.delete_file(namespace, request.path_params["file_id"])
    return json_response({"id": file.file_id, "object": "file", "deleted": True})


def _file(file: StoredFile) -> dict[str, Any]:
    return {
        "id": file.file_id,
        "object": "file",
        "bytes": file.bytes,
        "created_at": file.created_unix_s,
        "expires_at": None,
        "filename": file.filename,
        "purpose": file.purpose.value,
        "status": "processed",
        "status_details": None,
    }


async def body_pieces(request: Request) -> AsyncGenerator[bytes]:
    """The body as it comes, no part of it late and none slow. Raises BodyTimeout."""
    stream, seconds = at_least_rate(request.stream()), http_requests.BODY_SECONDS
    late = f"Nothing of the file arrived for {seconds:g} s."
    while True:
        try:
            async with receiving(seconds, late):
                chunk = await anext(stream, None)
        except UploadTooSlow as error:
            raise BodyTimeout(f"The upload is too slow: {error}.", code="upload_too_slow") from error
        if chunk is None:
            return
        yield chunk


async def _joined(first: bytes, chunks: AsyncIterator[bytes]) -> AsyncGenerator[bytes]:
    yield first
    async for chunk in chunks:
        yield chunk


class UploadForm:
    """Reads a form with one file as it comes. `open` goes to the file's beginning, `chunks` from there to the end."""

    def __init__(self, content_type: str, body: AsyncIterator[bytes], max_bytes: int) -> None:
        """`max_bytes`: of the file. Raises UnsupportedMediaType."""
        boundary = boundary_of(content_type)
        if boundary is None:
            text = f"The body is declared as {content_type[:128] or 'nothing'!r}; send it as a form: {FORM}."
            raise UnsupportedMediaType(text)
        self._max_bytes, self._has_purpose = max_bytes, False
        self._pieces = form_pieces(boundary, body)

    async def open(self) -> str:
        """Return the file's name. Raises ApiError, FormError."""
        async for piece in self._pieces:
            assert isinstance(piece, Part), "what was before has been read"
            if piece.name == "file":
                return piece.filename[:MAX_FILENAME]
            await self._field(piece)
        raise ParameterError("file is required: the JSON lines.", param="file", code="missing_parameter")

    async def chunks(self) -> AsyncGenerator[bytes]:
        """Yield the file's bytes. What follows it is checked before the end. Raises ApiError, FormError."""
        size = 0
        async for piece in self._pieces:
            if isinstance(piece, bytes):
                size += len(piece)
                if size > self._max_bytes:
                    raise TooLarge(f"The file is larger than {self._max_bytes} bytes.")
                for start in range(0, len(piece), MAX_CHUNK_BYTES):
                    yield piece[start : start + MAX_CHUNK_BYTES]
            elif piece and piece.name == "file":
                raise ParameterError("file: the form has two; an upload is one.", param="file")
            elif piece:
                await self._field(piece)
        if not self._has_purpose:
            raise ParameterError("purpose is required.", param="purpose", code="missing_parameter")

    async def _field(self, part: Part) -> None:
        """Read and check a field of the form."""
        if part.name != "purpose":
            remedy = advice(part.name.partition("[")[0])
            refusal = ": ".join(filter(None, [f"The parameter {part.name[:64]} is not supported", remedy]))
            text = f"{refusal}. Supported: {', '.join(FIELDS)}."
            raise ParameterError(text, param=part.name[:64], code="unsupported_parameter")
        value = b""
        while (piece := await anext(self._pieces)) is not None:
            assert isinstance(piece, bytes), "a part ends before another begins"
            value += piece
            if len(value) > MAX_FIELD_BYTES:
                break
        if value != Purpose.BATCH.value.encode():
            given = value[:MAX_FIELD_BYTES].decode(errors="replace")
            text = f"purpose: files are for batches here; it must be {Purpose.BATCH.value!r}, not {given!r}."
            raise ParameterError(text, param="purpose")
        self._has_purpose = True
