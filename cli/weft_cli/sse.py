"""A reader of what a gateway sends: events of a stream, and refusals."""

import json
from dataclasses import dataclass
from typing import Any

from weft.domain.text import quoted


class BadEvent(ValueError):
    """A line of a stream that is no event of a chat completion. The message quotes it."""


@dataclass(frozen=True, slots=True)
class ServerSentEvent:
    """The content of an event of a chat completion. Empty for events without content."""

    text: str = ""
    reason: str | None = None  # why the answer ends here
    error: str = ""


class Lines:
    """A splitter of bytes into whole lines, ended as a stream's are: by CR LF or LF.

    httpx's own lines end at U+2028 and its like too, which stand as they are within JSON.
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[str]:
        """Take bytes and return complete lines. An incomplete line is never an event, even if the stream is cut."""
        *complete, self._rest = (self._rest + data).split(b"\n")
        return [line.removesuffix(b"\r").decode(errors="replace") for line in complete]


def event_of(line: str) -> ServerSentEvent:
    """Read the event of a line; an empty event for pings, blank lines and `[DONE]`. Raises BadEvent."""
    data = line.removeprefix("data:").strip() if line.startswith("data:") else ""
    if data in ("", "[DONE]"):
        return ServerSentEvent()
    try:
        return _event(json.loads(data))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadEvent(f"what is no event of a chat completion: {quoted(data, 200)}") from error


def _event(event: Any) -> ServerSentEvent:
    if error := event.get("error"):
        return ServerSentEvent(error=error if isinstance(error, str) else str(error["message"]))
    text, reason = "", None
    for choice in event.get("choices") or ():
        text += (choice.get("delta") or {}).get("content") or ""
        reason = choice.get("finish_reason") or reason
    return ServerSentEvent(text, reason)


def refusal_of(body: bytes, status: int) -> str:
    """Read status and message of a refusal."""
    try:
        return f"{status}: {json.loads(body)['error']['message']}"
    except (ValueError, KeyError, TypeError):
        return f"{status}: {body[:200].decode(errors='replace')}"
