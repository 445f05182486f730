"""A multipart form with one file, as it comes: the file's bytes pass through, none are kept."""

from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from weft.domain.batch import Purpose
from weft.wire.codec.batch import MAX_CHUNK_BYTES, MAX_FILENAME
from weft_gateway.errors import BadRequest, ParameterError, TooLarge, UnsupportedMediaType

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

FORM = b"multipart/form-data"
MAX_FIELD_BYTES = 256
FIELDS = ("file", "purpose")


@dataclass(frozen=True, slots=True)
class Part:
    """The beginning of a part."""

    name: str
    filename: str


Piece = Part | bytes | None  # a part begins, some of its bytes, it ends


class UploadForm:
    """Reads one form. `open` goes to the file's beginning, `chunks` from there to the form's end."""

    def __init__(self, content_type: str, body: AsyncIterator[bytes], max_bytes: int) -> None:
        """`max_bytes`: of the file. Raises UnsupportedMediaType."""
        kind, options = parse_options_header(content_type)
        if kind != FORM or not (boundary := options.get(b"boundary")):
            text = f"The body is declared as {content_type[:128] or 'nothing'!r}; send it as a form: {FORM.decode()}."
            raise UnsupportedMediaType(text)
        self._max_bytes, self._has_purpose = max_bytes, False
        self._pieces = _pieces(boundary, body)

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


async def _pieces(boundary: bytes, body: AsyncIterator[bytes]) -> AsyncGenerator[Piece]:
    """What the parser finds, as the body comes. Raises BadRequest."""
    found = _Found()
    try:
        parser = MultipartParser(boundary, found.callbacks())
        async for chunk in body:
            parser.write(chunk)
            pieces, found.pieces = found.pieces, []
            for piece in pieces:
                yield piece
    except FormParserError as error:
        raise BadRequest(f"The body is not a multipart form: {error}.", code="invalid_form") from error
    if not found.ended:
        raise BadRequest("The form ends before its last boundary.", code="invalid_form")


class _Found:
    """What the parser's callbacks gather."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self.ended = False
        self._field, self._value, self._disposition = b"", b"", b""

    def callbacks(self) -> "MultipartCallbacks":
        return {
            "on_part_begin": self._begin,
            "on_header_field": self._on_field,
            "on_header_value": self._on_value,
            "on_header_end": self._on_header,
            "on_headers_finished": self._on_headers,
            "on_part_data": self._on_data,
            "on_part_end": lambda: self.pieces.append(None),
            "on_end": self._on_end,
        }

    def _begin(self) -> None:
        self._disposition = b""

    def _on_field(self, data: bytes, start: int, end: int) -> None:
        self._field += data[start:end]

    def _on_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _on_header(self) -> None:
        if self._field.lower() == b"content-disposition":
            self._disposition = self._value
        self._field = self._value = b""

    def _on_headers(self) -> None:
        _, options = parse_options_header(self._disposition)
        name, filename = options.get(b"name", b""), options.get(b"filename", b"")
        self.pieces.append(Part(name.decode(errors="replace"), filename.decode(errors="replace")))

    def _on_data(self, data: bytes, start: int, end: int) -> None:
        self.pieces.append(data[start:end])

    def _on_end(self) -> None:
        self.ended = True
