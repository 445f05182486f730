"""Checks of texts and numbers from peers, whose refusals name the field."""

from weft.domain.bounds import MAX_NAME_CHARS
from weft.wire.errors import PeerError


def check_text(value: str, what: str, most: int = MAX_NAME_CHARS) -> str:
    """Check that a text has at most `most` characters. Raises PeerError."""
    if len(value) > most:
        raise PeerError(f"{what} has {len(value)} characters, at most {most} are allowed")
    return value


def check_non_empty(value: str, what: str, most: int = MAX_NAME_CHARS) -> str:
    """Check that a text is not empty and has at most `most` characters. Raises PeerError."""
    if 0 < len(value) <= most:
        return value
    if not value:
        raise PeerError(f"{what} is empty")
    return check_text(value, what, most)


def check_number(value: int, what: str, most: int, least: int = 0) -> int:
    """Check that a number is within `least`..`most`. Raises PeerError."""
    if not least <= value <= most:
        raise PeerError(f"{what} is {value}, not within {least}..{most}")
    return value
