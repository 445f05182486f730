"""A reader of multipart forms as they come: the bytes of their parts pass through, none are kept."""

from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

FORM = "multipart/form-data"


class FormError(ValueError):
    """A body is not a valid multipart form."""


@dataclass(frozen=True, slots=True)
class Part:
    """The beginning of a part."""

    name: str
    filename: str


Piece = Part | bytes | None  # a part begins, some of its bytes, it ends


def boundary_of(content_type: str) -> bytes | None:
    """Read the separator of the parts; None: the content type is no form's."""
    kind, options = parse_options_header(content_type)
    return options.get(b"boundary") or None if kind == FORM.encode() else None


async def form_pieces(boundary: bytes, body: AsyncIterator[bytes]) -> AsyncGenerator[Piece]:
    """Yield what the parser finds, as the body comes. Raises FormError."""
    part = _Found()
    try:
        parser = MultipartParser(boundary, part.callbacks())
        async for chunk in body:
            parser.write(chunk)
            pieces, part.pieces = part.pieces, []
            for piece in pieces:
                yield piece
    except FormParserError as error:
        raise FormError(str(error)) from error
    if not part.ended:
        raise FormError("it ends before its last boundary")


class _Found:
    """A collector of what the parser's callbacks give."""

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
