"""Structured logs on the standard library's `logging`, one format for every process.

An event is a short text plus key-values: `log.info("sequence admitted", extra=kv(request_id=r, adapter=d))`.
`text` is for people (a line with `key=value` pairs), `json` for collectors (one object a line). Nothing is logged per
token at INFO. Keys used everywhere: `request_id`, `adapter`, `pool`, `runner`, `epoch`.
"""

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any

from weft.domain.text import sanitize

REQUEST_LOGGERS = ("httpx2", "uvicorn.access")  # a line for each request at INFO: only for DEBUG


def kv(**fields: object) -> dict[str, dict[str, object]]:
    """Key-values of a log event, kept apart from the attributes of `LogRecord`."""
    return {"kv": fields}


def configure(component: str, *, level: str = "INFO", fmt: str = "text") -> None:
    """Send the whole process's logs to standard error. `fmt` is "text" or "json"."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(component) if fmt == "json" else TextFormatter(component))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    least = logging.getLogger().level
    for name in REQUEST_LOGGERS:
        logging.getLogger(name).setLevel(max(least, logging.WARNING) if least > logging.DEBUG else logging.NOTSET)


class _Formatter(logging.Formatter):
    def __init__(self, component: str) -> None:
        super().__init__()
        self._component = component

    def _trace(self, record: logging.LogRecord) -> str:
        if not record.exc_info:
            return ""
        lines = self.formatException(record.exc_info).split("\n")
        return "".join(f"\n{sanitize(line)}" for line in lines)


class TextFormatter(_Formatter):
    """`12:00:00.123 INFO  runner  sequence admitted  request_id=r1 adapter=sha256:ab`"""

    def format(self, record: logging.LogRecord) -> str:
        day_s, ms = int(record.created) % 86400, int(record.created % 1 * 1000)  # strftime takes 15 us
        stamp = f"{day_s // 3600:02}:{day_s // 60 % 60:02}:{day_s % 60:02}.{ms:03}"
        pairs = " ".join(f"{k}={_plain(v)}" for k, v in _fields(record).items())
        line = f"{stamp} {record.levelname:<7} {self._component:<10} {sanitize(record.getMessage())}  {pairs}".rstrip()
        return line + self._trace(record)


class JsonFormatter(_Formatter):
    """One JSON object a line: ts, level, component, logger, event, then the key-values."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "ts": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "component": self._component,
            "logger": record.name,
            "event": record.getMessage(),
            **_fields(record),
        }
        if trace := self._trace(record):
            entry["exception"] = trace.strip()
        return json.dumps(entry, default=str)


def _fields(record: logging.LogRecord) -> dict[str, object]:
    fields: dict[str, object] = getattr(record, "kv", {})
    return fields


def _plain(value: object) -> str:
    text = str(value)
    return json.dumps(text) if " " in text or '"' in text or not text.isprintable() else text
