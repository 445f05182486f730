"""Who wrote what: an API server's audit log (JSON lines, level Metadata or more), read back as values."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

READING = frozenset(("get", "list", "watch"))


@dataclass(frozen=True, slots=True)
class Write:
    """One writing request that reached the API server, also a refused one (`code` >= 400) and a dry run.

    `end`: the position in the log behind it, a mark.
    """

    at: str
    user: str
    agent: str
    verb: str
    group: str
    resource: str
    subresource: str
    namespace: str
    name: str
    code: int
    manager: str
    dry_run: bool
    audit_id: str
    end: int

    @property
    def accepted(self) -> bool:
        """Return whether the write got past the checks and was not a dry run: the store has seen it."""
        return self.code < 400 and not self.dry_run


class AuditLog:
    """The growing file. A mark is a position in it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def mark(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0

    def since(self, mark: int) -> Iterator[Write]:
        """Yield the writes whose answer was finished after the mark, in the order of their ends."""
        with self.path.open("rb") as lines:
            lines.seek(max(mark - 1, 0))
            mark = max(mark - 1, 0) + (len(lines.readline()) if mark else 0)  # the mark may lie in a half-written line
            for line in lines:
                mark += len(line)
                event = json.loads(line) if line.endswith(b"\n") else {}  # the last one may be half written
                if event.get("stage") == "ResponseComplete" and event["verb"] not in READING:
                    yield _write(event, mark)


def _write(event: dict[str, Any], end: int) -> Write:
    target = event.get("objectRef", {})
    query = parse_qs(urlsplit(event["requestURI"]).query)
    return Write(
        at=event["stageTimestamp"],
        user=event.get("impersonatedUser", event["user"])["username"],
        agent=event.get("userAgent", ""),
        verb=event["verb"],
        group=target.get("apiGroup", ""),
        resource=target.get("resource", ""),
        subresource=target.get("subresource", ""),
        namespace=target.get("namespace", ""),
        name=target.get("name", ""),
        code=event.get("responseStatus", {}).get("code", 0),
        manager=query.get("fieldManager", [""])[0],
        dry_run="dryRun" in query,
        audit_id=event["auditID"],
        end=end,
    )
