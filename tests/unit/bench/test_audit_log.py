"""Counting writes in an audit log that grows."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from weft_bench import audit_log
from weft_bench.audit_log import AuditLog, counted
from weft_bench.errors import NotLogged

OPERATOR, OURS = "weft-operator", "ours"


def event(verb: str, resource: str, *, agent: str = OPERATOR, code: int = 200, **more: Any) -> dict[str, Any]:
    target = {"resource": resource, "namespace": more.get("namespace", OURS)}
    if "sub" in more:
        target["subresource"] = more["sub"]
    return {
        "stage": more.get("stage", "ResponseComplete"),
        "verb": verb,
        "userAgent": agent,
        "objectRef": target,
        "responseStatus": {"code": code},
        "requestURI": more.get("uri", "/api"),
    }


def test_writes_of_one_client_are_counted_by_what_they_are() -> None:
    wrote = counted(
        [
            event("update", "loraadapters", sub="status"),
            event("update", "loraadapters", sub="status", code=409),
            event("patch", "loraadapters"),
            event("patch", "loraadapters", agent="weft-bench"),
            event("get", "loraadapters"),
            event("update", "leases"),
            event("patch", "loraadapters", namespace="another"),
            event("patch", "loraadapters", stage="RequestReceived"),
        ],
        OPERATOR,
        OURS,
    )
    assert wrote.by == Counter({"update loraadapters/status": 2, "patch loraadapters": 1})
    assert (wrote.total, wrote.refused) == (3, 1)


class Server:
    """What an API server does to its audit log."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def logs(self, *events: dict[str, Any], half: str = "") -> None:
        with self._path.open("a") as log:
            log.writelines(json.dumps(event) + "\n" for event in events)
            log.write(half)

    async def mark(self, name: str) -> None:
        uri = f"/api/v1/namespaces/ours?fieldManager={name}"
        self.logs(event("patch", "namespaces", agent="weft-bench", uri=uri))


@pytest.fixture
def server(tmp_path: Path) -> Server:
    made = Server(tmp_path / "audit.jsonl")
    made.logs(event("delete", "pods"))  # before our time
    return made


async def test_each_call_counts_what_came_since_the_one_before(server: Server, tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "audit.jsonl", server.mark)
    server.logs(event("create", "events"))
    assert (await log.writes(OPERATOR, OURS)).by == Counter({"create events": 1})
    assert (await log.writes(OPERATOR, OURS)).total == 0
    server.logs(event("patch", "pods"), event("patch", "pods"))
    assert (await log.writes(OPERATOR, OURS)).by == Counter({"patch pods": 2})


async def test_a_line_that_is_half_written_is_read_once_it_is_whole(server: Server, tmp_path: Path) -> None:
    line = json.dumps(event("create", "events"))
    server.logs(half=line[:20])

    async def finish_and_mark(name: str) -> None:
        server.logs(half=line[20:] + "\n")
        await server.mark(name)

    log = AuditLog(tmp_path / "audit.jsonl", finish_and_mark)
    assert (await log.writes(OPERATOR, OURS)).by == Counter({"create events": 1})


async def test_a_log_that_never_shows_our_own_write_is_an_error(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def unseen(name: str) -> None:
        server.logs(event("patch", "namespaces", agent="weft-bench", uri=f"/elsewhere?x={name}"))

    monkeypatch.setattr(audit_log, "WAIT_S", 0.05)
    with pytest.raises(NotLogged, match=r"audit\.jsonl"):
        await AuditLog(tmp_path / "audit.jsonl", unseen).writes(OPERATOR, OURS)
