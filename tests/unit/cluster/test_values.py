"""The parts of a test cluster that are values: audit events, grants, networks, images, pages."""

import io
import json
import tarfile
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster import python_pod
from cluster.access import grants
from cluster.audit import AuditLog
from cluster.bag import BAGS, Network
from cluster.errors import ClusterError
from cluster.image import write_image
from cluster.summary import render, write_summary

INDICES = st.integers(0, BAGS - 1)


def event(**changes: Any) -> str:
    basic = {
        "auditID": "1",
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


def test_an_audit_event_is_read_with_its_field_manager(tmp_path: Path) -> None:
    (write,) = log(tmp_path, event()).since(0)
    assert (write.user, write.verb, write.resource, write.manager) == ("somebody", "patch", "pods", "weft-operator")
    assert write.accepted


@pytest.mark.parametrize(
    "changes",
    [{"responseStatus": {"code": 409}}, {"requestURI": "/api/v1/namespaces?dryRun=All"}],
    ids=["refused", "dry run"],
)
def test_what_did_not_change_the_store_is_not_accepted(tmp_path: Path, changes: dict[str, Any]) -> None:
    (write,) = log(tmp_path, event(**changes)).since(0)
    assert not write.accepted


def test_an_impersonated_user_is_the_one_who_wrote(tmp_path: Path) -> None:
    (write,) = log(tmp_path, event(impersonatedUser={"username": "other"})).since(0)
    assert write.user == "other"


def test_a_mark_hides_what_was_before_and_a_half_written_line_waits(tmp_path: Path) -> None:
    audit = log(tmp_path, event(auditID="old"))
    mark = audit.mark()
    with audit.path.open("a") as lines:
        lines.write(event(auditID="new") + event(auditID="half")[:20])
    assert [write.audit_id for write in audit.since(mark)] == ["new"]


def test_rights_are_bound_in_each_namespace_and_cluster_wide_only_when_asked() -> None:
    rules = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get"]}]
    made = grants("home", "it", {"home": rules, "away": rules}, ())
    kinds = [(item["kind"], item["metadata"].get("namespace")) for item in made]
    assert kinds == [
        ("ServiceAccount", "home"),
        ("Role", "home"),
        ("RoleBinding", "home"),
        ("Role", "away"),
        ("RoleBinding", "away"),
    ]
    assert [item["kind"] for item in grants("home", "it", {}, rules)[1:]] == ["ClusterRole", "ClusterRoleBinding"]


@given(INDICES, INDICES)
def test_networks_of_two_bags_do_not_meet(one: int, other: int) -> None:
    mine, theirs = Network(one), Network(other)
    apart = one != other
    assert (not mine.pods.overlaps(theirs.pods)) == apart
    assert (not mine.services.overlaps(theirs.services)) == apart
    assert (mine.node != theirs.node) == apart


@given(INDICES)
def test_the_parts_of_a_network_do_not_meet(index: int) -> None:
    network = Network(index)
    assert not network.pods.overlaps(network.services)
    for address in (network.machine, network.node):
        assert IPv4Address(address) not in network.pods
        assert IPv4Address(address) not in network.services
    assert len(network.cable) <= 15, "longer than an interface's name may be"


def test_an_image_has_the_program_and_every_name(tmp_path: Path) -> None:
    program, archive = tmp_path / "program", tmp_path / "image.tar"
    program.write_bytes(b"code")
    write_image(archive, program, ["weft.test/a:1", "weft.test/b:2"])
    with tarfile.open(archive) as outer:
        (manifest,) = json.load(_member(outer, "manifest.json"))
        layer = _member(outer, manifest["Layers"][0]).read()
    assert manifest["RepoTags"] == ["weft.test/a:1", "weft.test/b:2"]
    with tarfile.open(fileobj=io.BytesIO(layer)) as inner:
        assert inner.getmember("pause").mode == 0o755
        assert _member(inner, "pause").read() == b"code"


def _member(tar: tarfile.TarFile, name: str) -> io.BufferedReader:
    found = tar.extractfile(name)
    assert found is not None
    return found  # pyright: ignore[reportReturnType]


def test_python_pods_mount_each_place_once_and_read_only() -> None:
    made = python_pod.python_volumes()
    names = [volume["name"] for volume in made.volumes]
    assert len(set(names)) == len(names)
    assert all(mount["readOnly"] and mount["name"] in names for mount in made.mounts)
    assert all(len(name) <= 63 for name in names)
    at = [Path(mount["mountPath"]) for mount in made.mounts]
    assert any(Path(made.python).is_relative_to(place) for place in at)
    nested = [place for place in at for other in at if place != other and place.is_relative_to(other)]
    assert nested == []


REPORT = """<testsuites><testsuite>
<properties><property name="commit" value="abc"/><property name="date" value="2026-01-01"/>
<property name="machine" value="2 cores"/></properties>
<testcase classname="tests.cluster.test_node" name="test_it_runs" time="1.5"/>
<testcase classname="tests.cluster.test_node" name="test_it_fails" time="2"><failure message="no"/></testcase>
<testcase classname="tests.cluster.test_node" name="test_it_waits" time="0"><skipped message="no root"/></testcase>
</testsuite></testsuites>"""


def test_the_page_tells_every_test_of_the_report() -> None:
    page = render(REPORT)
    assert "1 passed, 1 failed, 1 skipped; 4 s in all. Commit abc, 2026-01-01, 2 cores." in page
    assert "| node: it fails | 2.0 | failed |" in page


def test_without_a_report_there_is_no_page(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="make test-cluster"):
        write_summary(tmp_path / "page.md", tmp_path / "none.xml")
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_was_skipped_is_not_told_as_one() -> None:
    with pytest.raises(ClusterError, match="did not start a node"):
        render("<testsuites><testsuite/></testsuites>")
