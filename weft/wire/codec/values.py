"""Checks of texts and numbers from peers, whose refusals name the field."""

from weft.domain.bounds import MAX_NAME_CHARS
from weft.wire.errors import PeerError


def check_text(value: str, subject: str, max_chars: int = MAX_NAME_CHARS) -> str:
    """Check that a text has at most `max_chars` characters. Raises PeerError."""
    if len(value) > max_chars:
        raise PeerError(f"{subject} has {len(value)} characters, at most {max_chars} are allowed")
    return value


def check_non_empty(value: str, subject: str, max_chars: int = MAX_NAME_CHARS) -> str:
    """Check that a text is not empty and has at most `max_chars` characters. Raises PeerError."""
    if 0 < len(value) <= max_chars:
        return value
    if not value:
        raise PeerError(f"{subject} is empty")
    return check_text(value, subject, max_chars)


def check_number(value: int, subject: str, maximum: int, minimum: int = 0) -> int:
    """Check that a number is within `minimum`..`maximum`. Raises PeerError."""
    if not minimum <= value <= maximum:
        raise PeerError(f"{subject} is {value}, not within {minimum}..{maximum}")
    return value
