"""The test cluster itself: what other tests rely on when they say "the API server did"."""

import json

import pytest

from harness.cluster.cluster import Cluster, needs_own
from harness.cluster.owner import kill_owner
from weft_devcluster.errors import Refused

CONFIG_MAPS = [{"apiGroups": [""], "resources": ["configmaps"], "verbs": ["create", "patch"]}]


@pytest.mark.usefixtures("audited")
def test_the_audit_log_has_who_wrote_what_and_what_was_refused(control_plane: Cluster, namespace: str) -> None:
    writer = control_plane.service_account(namespace, "writer", CONFIG_MAPS)
    thing = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "thing", "namespace": namespace}}
    mark = control_plane.mark()
    control_plane.kubectl("apply", "--server-side", "-f", "-", stdin=json.dumps(thing), by=writer)
    with pytest.raises(Refused, match="cannot delete resource"):
        control_plane.kubectl("delete", "configmap", "thing", "-n", namespace, by=writer)
    control_plane.apply(thing, dry_run=True)

    writes = control_plane.writes(mark, user=writer.user)
    assert [(write.verb, write.resource, write.name, write.accepted) for write in writes] == [
        ("patch", "configmaps", "thing", True),
        ("delete", "configmaps", "thing", False),
    ]
    (dry,) = control_plane.writes(mark, user="admin")
    assert (dry.dry_run, dry.accepted) == (True, False)
    end = control_plane.mark()
    assert [*control_plane.writes(end, user=writer.user), *control_plane.writes(end, user="admin")] == []


@needs_own("is of our own control plane")
def test_nothing_survives_a_test_run_that_is_killed() -> None:
    assert len(kill_owner("control_plane", "ControlPlane", "[process.pid for process in made.processes]")) == 3
