"""Who wrote what, from an API server's audit log (JSON lines, level Metadata or more)."""

import asyncio
import json
import os
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft_stage.errors import NotLogged

WAIT_S = 15.0
POLL_S = 0.05
LINE_MAX = 2**20  # bytes
READING = frozenset(("get", "list", "watch"))


@dataclass(frozen=True, slots=True)
class Writes:
    """What one client wrote. `by` counts requests by what they are, refused ones too.

    `refused`: how many of them were answered with 4xx or 5xx; None where nobody tells.
    """

    by: Counter[str]
    refused: int | None

    @property
    def total(self) -> int:
        return self.by.total()

    def __add__(self, later: "Writes") -> "Writes":
        refused = None if self.refused is None or later.refused is None else self.refused + later.refused
        return Writes(self.by + later.by, refused)


class AuditLog:
    """The growing file. `mark(name)` writes something that the log shows under the field manager `name`."""

    def __init__(self, path: Path, mark: Callable[[str], Awaitable[object]]) -> None:
        self._path, self._mark = path, mark
        self._read_to = _end_of_lines(path)

    async def writes(self, user_agent: str, namespace: str) -> Writes:
        """What that client wrote in that namespace since the last call (or the start), Leases aside.

        Raises NotLogged.
        """
        name = f"weft-bench-{secrets.token_hex(8)}"
        await self._mark(name)
        return counted(await self._until(f"fieldManager={name}"), user_agent, namespace)

    async def _until(self, mark: str) -> list[dict[str, Any]]:
        """The events before the one of the mark; the next call goes on behind it."""
        until, events = time.monotonic() + WAIT_S, list[dict[str, Any]]()
        while time.monotonic() < until:
            for event in self._more():
                if mark in event["requestURI"]:
                    return events
                events.append(event)
            await asyncio.sleep(POLL_S)
        raise NotLogged(f"{self._path} has no write of ours after {WAIT_S:.0f} s: is it this API server's audit log?")

    def _more(self) -> Iterator[dict[str, Any]]:
        with self._path.open("rb") as lines:
            lines.seek(self._read_to)
            for line in lines:
                if not line.endswith(b"\n"):  # half written
                    return
                self._read_to += len(line)
                yield json.loads(line)


def counted(events: list[dict[str, Any]], user_agent: str, namespace: str) -> Writes:
    """The finished writes of one client; who renews a Lease does not change anything."""
    by, refused = Counter[str](), 0
    for event in events:
        target = event.get("objectRef", {})
        if event["verb"] in READING or event["stage"] != "ResponseComplete":
            continue
        if event.get("userAgent") != user_agent or target.get("namespace") != namespace:
            continue
        if target.get("resource") == "leases":
            continue
        parts = (target.get("resource", ""), target.get("subresource", ""))
        by[f"{event['verb']} {'/'.join(part for part in parts if part)}"] += 1
        refused += event.get("responseStatus", {}).get("code", 0) >= 400
    return Writes(by, refused)


def _end_of_lines(path: Path) -> int:
    """Behind the last whole line: the server may just be writing another one."""
    with path.open("rb") as log:
        start = max(0, log.seek(0, os.SEEK_END) - LINE_MAX)
        log.seek(start)
        return start + log.read().rfind(b"\n") + 1
