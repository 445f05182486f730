"""The bytes that a tokenizer's token strings stand for, as its tokenizer.json says."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class Decoding:
    """How a tokenizer's token strings become bytes (the part of its decoder that counts inside a text)."""

    byte_level: bool = False  # GPT-2's printable stand-ins for bytes
    byte_fallback: bool = False  # "<0xE2>"
    replaced: tuple[tuple[str, str], ...] = ()  # ("▁", " ")
    separator: str = ""  # before each token


class UnsupportedDecoder(ValueError):
    """The tokenizer's decoder is none that Weft supports."""


def decoding_of(decoder: Mapping[str, Any] | None) -> Decoding:
    """Read the `decoder` of a tokenizer.json.

    Known: ByteLevel, ByteFallback, Metaspace, Replace (of a string), Fuse, Strip, Sequence of these, and none (tokens
    are joined by a space). Raises UnsupportedDecoder, naming the type, for any other.
    """
    if decoder is None:
        return Decoding(separator=" ")
    return _fold(Decoding(), decoder)


def _fold(form: Decoding, decoder: Mapping[str, Any]) -> Decoding:
    match decoder:
        case {"type": "Sequence", "decoders": [*parts]}:
            for part in parts:
                form = _fold(form, part)
            return form
        case {"type": "ByteLevel"}:
            return replace(form, byte_level=True)
        case {"type": "ByteFallback"}:
            return replace(form, byte_fallback=True)
        case {"type": "Metaspace", "replacement": str(mark)}:
            return replace(form, replaced=(*form.replaced, (mark, " ")))
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
            return replace(form, replaced=(*form.replaced, (old, new)))
        case {"type": "Fuse" | "Strip"}:
            return form
        case _:
            raise UnsupportedDecoder(f"tokenizer decoder {decoder.get('type')!r} is not supported")


def token_bytes(token: str, form: Decoding) -> bytes:
    """The bytes that a token string stands for."""
    if form.byte_level:
        return _byte_level(token)
    for old, new in form.replaced:
        token = token.replace(old, new)
    if form.byte_fallback and (found := _BYTE_TOKEN.fullmatch(token)):
        return bytes([int(found[1], 16)])
    return (form.separator + token).encode()


def _byte_level(token: str) -> bytes:
    """Decode a byte-level token. One with a character outside the byte alphabet is an added token: its own text."""
    try:
        return bytes(map(_BYTE_OF.__getitem__, token))
    except KeyError:
        return token.encode()


def _byte_alphabet() -> dict[str, int]:
    """Make GPT-2's map: printable Latin-1 bytes stand for themselves, the other 68 for the code points from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
