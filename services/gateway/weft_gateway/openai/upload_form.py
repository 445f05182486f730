"""A multipart form with one file, as it comes: the file's bytes pass through, none are kept."""

from collections.abc import AsyncGenerator, AsyncIterator

from weft.domain.batch import MAX_CHUNK_BYTES, MAX_FILENAME, Purpose
from weft.wire.multipart import FORM, FormError, Part, Piece, boundary_of, form_pieces
from weft_gateway.errors import BadRequest, ParameterError, TooLarge, UnsupportedMediaType

MAX_FIELD_BYTES = 256
FIELDS = ("file", "purpose")


class UploadForm:
    """Reads one form. `open` goes to the file's beginning, `chunks` from there to the form's end."""

    def __init__(self, content_type: str, body: AsyncIterator[bytes], max_bytes: int) -> None:
        """`max_bytes`: of the file. Raises UnsupportedMediaType."""
        boundary = boundary_of(content_type)
        if boundary is None:
            text = f"The body is declared as {content_type[:128] or 'nothing'!r}; send it as a form: {FORM}."
            raise UnsupportedMediaType(text)
        self._max_bytes, self._has_purpose = max_bytes, False
        self._pieces = _checked(form_pieces(boundary, body))

    async def open(self) -> str:
        """The file's name. Raises ApiError."""
        async for piece in self._pieces:
            assert isinstance(piece, Part), "what was before has been read"
            if piece.name == "file":
                return piece.filename[:MAX_FILENAME]
            await self._field(piece)
        raise ParameterError("file is required: the JSON lines.", param="file", code="missing_parameter")

    async def chunks(self) -> AsyncGenerator[bytes]:
        """The file's bytes. What follows it is checked before the end. Raises ApiError."""
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
        """Read and check a part that is no file."""
        if part.name != "purpose":
            text = f"The parameter {part.name[:64]} is not supported. Supported: {', '.join(FIELDS)}."
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


async def _checked(pieces: AsyncIterator[Piece]) -> AsyncGenerator[Piece]:
    """Raises BadRequest for what is no form."""
    try:
        async for piece in pieces:
            yield piece
    except FormError as error:
        raise BadRequest(f"The body is not a multipart form: {error}.", code="invalid_form") from error
