"""KEDA and the HPA that it makes scale a pool by the scheduler's gauge, as the documents say.

KEDA's operator and metrics adapter, Prometheus, the HPA controller, API server and scheduler are real programs; the
demand is a gateway's that starts nothing, and pods are played. `make test-long` builds the first three.
"""

import contextlib
import re
import signal
import urllib.request
from collections.abc import Generator, Iterator
from typing import Any

import pytest
import yaml

from harness.autoscalers.keda import keda
from harness.autoscalers.prometheus import prometheus
from harness.cluster.cluster import Cluster, needs_own, own_cluster
from harness.operator.demanding_gateway import DemandingGateway
from harness.operator.stage import Stage
from harness.quickstart import BASE, ROOT
from weft_devcluster.processes import free_ports

pytestmark = [pytest.mark.long, needs_own("starts KEDA beside the API server")]

POOL = "quickstart"
HPA = "system:serviceaccount:kube-system:horizontal-pod-autoscaler"
MAX_SEQUENCES = 4
DEMAND = 10  # requests: more than two runners of that


@pytest.fixture(scope="module")
def control_plane() -> Iterator[Cluster]:
    """One of its own: an API that a KEDA answered which is gone would stay in the way of other tests."""
    with own_cluster() as made:
        made.apply_crds()
        yield made


@pytest.fixture(scope="module")
def running(control_plane: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """The scheduler's metrics are behind its Service, at an address that KEDA finds by it."""
    (port,) = free_ports(1, control_plane.own_address)
    probes = f"{control_plane.own_address}:{port}"
    with (
        keda(control_plane, tmp_path_factory.mktemp("keda")),
        Stage(control_plane, tmp_path_factory.mktemp("stage"), probes) as made,
    ):
        control_plane.expose(made.namespace, "weft-scheduler", port, port)
        made.replica()
        yield made


@pytest.fixture(params=["metrics-api", "prometheus"])
def scaled_object(request: pytest.FixtureRequest, stage: Stage) -> Iterator[dict[str, Any]]:
    """The documented object, with the test's namespace and addresses in place of those of a release."""
    found, port = documented("kind: ScaledObject"), stage.scheduler_probes.rpartition(":")[2]
    found = found.replace("weft-system", stage.namespace).replace(":7401/", f":{port}/")
    if request.param == "metrics-api":
        yield yaml.safe_load(found)
        return
    by_prometheus = documented("type: prometheus").replace("weft-system", stage.namespace)
    with prometheus(stage.scheduler_probes, stage.folder) as address:
        by_prometheus = by_prometheus.replace("prometheus.monitoring.svc:9090", address)
        made = yaml.safe_load(found)
        made["spec"]["triggers"] = yaml.safe_load(by_prometheus)
        yield made


def documented(text: str) -> str:
    """Return the one YAML block of the documents with this text."""
    pages = [page.read_text() for page in (ROOT / "docs").rglob("*.md")]
    blocks = [block for page in pages for block in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)]
    (found,) = [block for block in blocks if text in block]
    return found


def gauge(stage: Stage) -> float:
    """Return what the scheduler says of the pool's demand."""
    with urllib.request.urlopen(f"http://{stage.scheduler_probes}/metrics", timeout=60) as answer:
        said = answer.read().decode()
    name = f'weft_scheduler_demanded_runners{{pool="{stage.namespace}/{POOL}"}} '
    return float(next(line.removeprefix(name) for line in said.splitlines() if line.startswith(name)))


def test_a_pool_follows_its_demand_and_stays_as_it_is_while_nobody_knows_it(
    stage: Stage, scaled_object: dict[str, Any]
) -> None:
    pool = f"{stage.namespace}/{POOL}"
    with stage.kubelet(), DemandingGateway(stage.scheduler, pool, BASE, stage.namespace) as gateway:
        stage.apply_pool(POOL, replicas=1, advanced={"maxSequences": MAX_SEQUENCES})
        stage.wait_for("servingpool", POOL, "Ready")
        with following(stage, scaled_object) as hpa:
            mark = stage.control_plane.mark()
            gateway.wanted(DEMAND)
            stage.wait_for_value("servingpool", POOL, "status.readyReplicas", 3)
            assert gauge(stage) == 3.0
            gateway.wanted(0)
            stage.wait_for_value("servingpool", POOL, "status.replicas", 1)
            assert stage.get("servingpool", POOL)["spec"]["replicas"] == 1

            gateway.wanted(DEMAND)
            stage.wait_for_value("servingpool", POOL, "status.readyReplicas", 3)
            stage.scheduler_process.pause()
            try:
                stage.wait_for("hpa", hpa, "ScalingActive", "False")
                assert stage.get("servingpool", POOL)["spec"]["replicas"] == 3
            finally:
                stage.scheduler_process.signal(signal.SIGCONT)
            writes = stage.control_plane.writes(mark)
            assert {one.user for one in writes if (one.resource, one.subresource) == ("servingpools", "scale")} == {HPA}


@contextlib.contextmanager
def following(stage: Stage, scaled_object: dict[str, Any]) -> Generator[str]:
    """The name of the HPA, which has a value of the metric; it is gone at the end."""
    stage.control_plane.apply(scaled_object)
    stage.wait_for("scaledobject", POOL, "Ready")
    hpa = stage.get("scaledobject", POOL)["status"]["hpaName"]
    stage.wait_for("hpa", hpa, "ScalingActive")
    yield hpa
    stage.kubectl("delete", "scaledobject", POOL)
    stage.control_plane.wait_until_gone("hpa", hpa, stage.namespace)
