"""What a gateway sends, as a client reads it: events of a stream, and refusals."""

import json
from typing import Any


def event_of(line: str) -> dict[str, Any]:
    """The JSON of one line of a stream; empty for pings, blank lines and `[DONE]`."""
    data = line.removeprefix("data: ") if line.startswith("data: ") else ""
    return json.loads(data) if data.startswith("{") else {}


def refusal_of(body: bytes, status: int) -> str:
    """Status and message of an answer that is none."""
    try:
        return f"{status}: {json.loads(body)['error']['message']}"
    except (ValueError, KeyError, TypeError):
        return f"{status}: {body[:200].decode(errors='replace')}"
