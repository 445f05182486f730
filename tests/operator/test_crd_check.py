"""An operator before CustomResourceDefinitions of another version: it names what they lack, and goes on."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.cluster.cluster import needs_own, own_cluster
from harness.operator.stage import Stage, until
from weft.api.crd import crds
from weft.leadership.lease_api import load_configuration
from weft_operator.kubernetes import PATH, KubeApi, missing_fields


async def test_the_definitions_of_this_version_are_whole_and_the_operator_may_read_that(stage: Stage) -> None:
    api = KubeApi(await load_configuration(str(stage.access.kubeconfig)))
    try:
        assert missing_fields(await api.request("GET", PATH)) == []
    finally:
        await api.aclose()


@pytest.fixture
def older(tmp_path: Path) -> Iterator[Stage]:
    """A cluster whose definitions lack two fields."""
    with own_cluster() as control_plane:
        for crd in crds().values():
            fields = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
            fields["spec"]["properties"].pop("drainSeconds", None)
            fields["status"]["properties"].pop("versions", None)
            control_plane.apply(crd)
        for crd in crds():
            name = crd.removesuffix(".yaml")
            control_plane.kubectl("wait", "--for=condition=Established", f"crd/{name}", "--timeout=60s")
        with Stage(control_plane, tmp_path) as stage, stage.kubelet():
            yield stage


@needs_own("gives the API server CRDs that lack fields")
def test_fields_that_the_cluster_lacks_are_named_once_counted_and_stop_nothing(older: Stage) -> None:
    replica = older.replica()
    until(lambda: replica.metric("weft_operator_crd_missing_fields") == 2, "both fields are counted")
    older.apply_pool()
    older.apply_adapter("upper", "file:adapters/upper")
    older.wait_for("loraadapter", "upper", "Ready")
    lines = [line for line in replica.said().splitlines() if "CustomResourceDefinitions lack fields" in line]
    assert len(lines) == 1
    assert "ServingPool.spec.drainSeconds" in lines[0]
    assert "LoRAAdapter.status.versions" in lines[0]
