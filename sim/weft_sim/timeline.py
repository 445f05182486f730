"""A run as a Chrome trace: open the file in chrome://tracing or https://ui.perfetto.dev."""

import json
from collections.abc import Mapping
from pathlib import Path


class Timeline:
    """Spans of work and of requests, and instants. Times are virtual seconds."""

    def __init__(self) -> None:
        self._events: list[dict[str, object]] = []
        self._processes: dict[str, int] = {}

    def span(self, process: str, name: str, start_s: float, seconds: float, **arguments: object) -> None:
        """Something that a process did."""
        self._add(process, name, "X", start_s, arguments, dur=seconds * 1e6)

    def instant(self, process: str, name: str, at_s: float, **arguments: object) -> None:
        self._add(process, name, "i", at_s, arguments, s="p")

    def begin(self, process: str, key: str, name: str, at_s: float, **arguments: object) -> None:
        """Begin an interval that may overlap others of its kind: a request, or a state of a request."""
        self._add(process, name, "b", at_s, arguments, cat="request", id=key)

    def end(self, process: str, key: str, name: str, at_s: float, **arguments: object) -> None:
        self._add(process, name, "e", at_s, arguments, cat="request", id=key)

    def write(self, path: Path) -> None:
        names = [
            {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
            for name, pid in self._processes.items()
        ]
        path.write_text(json.dumps({"traceEvents": [*names, *self._events], "displayTimeUnit": "ms"}))

    def _add(
        self, process: str, name: str, phase: str, at_s: float, arguments: Mapping[str, object], **fields: object
    ) -> None:
        pid = self._processes.setdefault(process, len(self._processes) + 1)
        event = {"ph": phase, "name": name, "pid": pid, "tid": 1, "ts": round(at_s * 1e6, 3), **fields}
        self._events.append({**event, "args": dict(arguments)} if arguments else event)
