"""The parts of a test cluster that are values: audit events, networks."""

import json
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from weft_devcluster.bag import BAGS, Network
from weft_stage.audit import AuditLog

INDICES = st.integers(0, BAGS - 1)


def event(**changes: Any) -> str:
    basic = {
        "auditID": "1",
        "stage": "ResponseComplete",
        "verb": "patch",
        "requestURI": "/api/v1/namespaces/a/pods/b?fieldManager=weft-operator&force=true",
        "user": {"username": "somebody"},
        "objectRef": {"resource": "pods", "namespace": "a", "name": "b"},
        "responseStatus": {"code": 200},
        "stageTimestamp": "2026-01-01T00:00:00Z",
    }
    return json.dumps({**basic, **changes}) + "\n"


def log(tmp_path: Path, content: str) -> AuditLog:
    path = tmp_path / "audit.jsonl"
    path.write_text(content)
    return AuditLog(path)


def test_an_audit_event_tells_who_wrote_and_what_was_accepted(tmp_path: Path) -> None:
    refused = event(responseStatus={"code": 409}, auditID="refused")
    dry = event(requestURI="/api/v1/namespaces?dryRun=All", auditID="dry")
    other = event(impersonatedUser={"username": "other"}, auditID="other")
    first, *rest = log(tmp_path, event() + refused + dry + other).since(0)
    assert (first.user, first.verb, first.resource, first.manager) == ("somebody", "patch", "pods", "weft-operator")
    assert first.accepted
    assert [(write.audit_id, write.user, write.accepted) for write in rest] == [
        ("refused", "somebody", False),
        ("dry", "somebody", False),
        ("other", "other", True),
    ]


def test_a_mark_hides_what_was_before_and_a_half_written_line_waits(tmp_path: Path) -> None:
    audit = log(tmp_path, event(auditID="old"))
    mark = audit.mark()
    with audit.path.open("a") as lines:
        lines.write(event(auditID="new") + event(auditID="half")[:20])
    assert [write.audit_id for write in audit.since(mark)] == ["new"]


@given(INDICES, INDICES)
def test_networks_of_two_bags_do_not_meet(one: int, other: int) -> None:
    mine, theirs = Network(one), Network(other)
    apart = one != other
    assert (not mine.pods.overlaps(theirs.pods)) == apart
    assert (not mine.services.overlaps(theirs.services)) == apart
    assert (mine.node != theirs.node) == apart
    assert not mine.pods.overlaps(theirs.services)
