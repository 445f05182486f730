"""Pools that follow demand: by the built-in autoscaler, and by a real HPA through the aggregated metrics API."""

import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.cluster.api import is_so
from harness.cluster.certificates import Authority, Pair
from harness.cluster.errors import Refused
from harness.operator.demanding_gateway import DemandingGateway
from harness.operator.stage import Replica, Stage, until
from harness.ports import free_port
from harness.quickstart import BASE
from harness.waiting import PATIENCE_S

ROOT = "/apis/external.metrics.k8s.io/v1beta1"
SERVICE, API = "weft-operator", "v1beta1.external.metrics.k8s.io"


@pytest.fixture(scope="module")
def replica(running: Stage) -> Iterator[Replica]:
    """One whose metrics API is registered, and believed to be there."""
    control_plane, port = running.control_plane, free_port()
    folder, ca_bundle = running.certificates(f"{SERVICE}.{running.namespace}.svc", control_plane.own_address)
    address = f"{control_plane.own_address}:{port}"
    made = running.replica(metrics_api=address, webhook_tls_dir=folder)
    made.metrics_api = address
    control_plane.expose(running.namespace, SERVICE, port)
    control_plane.apply(
        {
            "apiVersion": "apiregistration.k8s.io/v1",
            "kind": "APIService",
            "metadata": {"name": API},
            "spec": {
                "group": "external.metrics.k8s.io",
                "version": "v1beta1",
                "service": {"namespace": running.namespace, "name": SERVICE, "port": 443},
                "caBundle": ca_bundle,
                "groupPriorityMinimum": 100,
                "versionPriority": 100,
            },
        }
    )
    control_plane.wait_until("apiservice", API, "", is_so("Available"), "is available")
    yield made
    control_plane.kubectl("delete", "apiservice", API)


@pytest.fixture(autouse=True)
def _it_works(replica: Replica) -> None:
    assert replica.running


def values(stage: Stage, metric: str, selector: str = "") -> dict[str, str]:
    query = f"?labelSelector={selector}" if selector else ""
    path = f"{ROOT}/namespaces/{stage.namespace}/{metric}{query}"
    items = json.loads(stage.control_plane.kubectl("get", "--raw", path))["items"]
    return {item["metricLabels"]["pool"]: item["value"] for item in items}


def status_of(replica: Replica, stage: Stage, client: Pair | None, user: str = "somebody") -> int | str:
    """The answer to somebody who comes past the API server; the name of the TLS error where there is none."""
    context = ssl.create_default_context(cafile=str(stage.folder / "serving" / "ca.crt"))
    if client is not None:
        context.load_cert_chain(client.crt, client.key)
    request = urllib.request.Request(
        f"https://{replica.metrics_api}{ROOT}", headers={"X-Remote-User": user} if user else {}
    )
    try:
        with urllib.request.urlopen(request, context=context, timeout=PATIENCE_S) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code
    except (urllib.error.URLError, OSError):
        return "no TLS"


def test_only_the_front_proxy_is_answered_and_kubectl_through_it(
    stage: Stage, replica: Replica, tmp_path: Path
) -> None:
    front_proxy = stage.control_plane.front_proxy
    good = front_proxy.issue("good", "front-proxy-client")
    other_name = front_proxy.issue("other", "somebody-else")
    foreign = Authority(tmp_path, "foreign").issue("foreign", "front-proxy-client")
    assert status_of(replica, stage, good) == 200
    assert status_of(replica, stage, good, user="") == 401
    assert status_of(replica, stage, None) == 401
    assert status_of(replica, stage, other_name) == 403
    assert status_of(replica, stage, foreign) == "no TLS"

    names = json.loads(stage.control_plane.kubectl("get", "--raw", ROOT))["resources"]
    assert "weft_pool_demand_runners" in {resource["name"] for resource in names}
    with pytest.raises(Refused, match="no metric"):
        values(stage, "weft_pool_mood")
    nobody = stage.control_plane.service_account(stage.namespace, "nobody")
    with pytest.raises(Refused, match="orbidden"):  # the API server in front has judged
        stage.control_plane.kubectl("get", "--raw", f"{ROOT}/namespaces/x/weft_pool_demand_runners", by=nobody)


def test_a_pool_goes_to_zero_and_from_zero_straight_to_what_is_wanted(stage: Stage) -> None:
    autoscaling = {"minReplicas": 0, "maxReplicas": 3, "idleSeconds": 2, "wakeSeconds": 60}
    with (
        stage.kubelet(),
        DemandingGateway(stage.scheduler, f"{stage.namespace}/base", BASE, stage.namespace) as gateway,
    ):
        stage.apply_pool(autoscaling=autoscaling, scheduler={"maxSequences": 4})
        stage.wait_for("servingpool", "base", "Fetched")
        stage.wait_for_value("servingpool", "base", "status.desiredReplicas", 0)
        spec = stage.get("servingpool", "base")["spec"]
        mark = stage.control_plane.mark()
        gateway.wanted(40)
        stage.wait_for_value("servingpool", "base", "status.readyReplicas", 3)
        raised = [write for write in stage.writes(mark) if write == "patch deployments/ base-runners 200"]
        gateway.wanted(0)
        stage.wait_for_value("servingpool", "base", "status.replicas", 0)
        stage.wait_for("servingpool", "base", "Available", "False")
        assert stage.condition("servingpool", "base", "Available")["reason"] == "ScaledToZero"
        assert stage.get("servingpool", "base")["spec"] == spec, "the operator never writes spec"
    assert len(raised) <= 2, "one to wake, one to what is wanted: not one by one"


def test_an_hpa_drives_a_pool_from_one_runner_to_three_and_back(stage: Stage) -> None:
    scheduler = {"maxSequences": 4}
    stage.apply_pool(replicas=1, scheduler=scheduler)
    with (
        stage.kubelet(),
        DemandingGateway(stage.scheduler, f"{stage.namespace}/base", BASE, stage.namespace) as gateway,
    ):
        stage.wait_for("servingpool", "base", "Available")
        metric = {"name": "weft_pool_demand_runners", "selector": {"matchLabels": {"pool": "base"}}}
        target = {"type": "AverageValue", "averageValue": "1"}
        stage.control_plane.apply(
            {
                "apiVersion": "autoscaling/v2",
                "kind": "HorizontalPodAutoscaler",
                "metadata": {"name": "base", "namespace": stage.namespace},
                "spec": {
                    "scaleTargetRef": {
                        "apiVersion": "serving.weft.dev/v1alpha1", "kind": "ServingPool", "name": "base",
                    },
                    "minReplicas": 1,
                    "maxReplicas": 3,
                    "metrics": [{"type": "External", "external": {"metric": metric, "target": target}}],
                },
            }
        )  # fmt: skip
        gateway.wanted(40)
        stage.wait_for_value("servingpool", "base", "spec.replicas", 3)
        stage.wait_for_value("servingpool", "base", "status.readyReplicas", 3)
        gateway.wanted(0)
        stage.wait_for_value("servingpool", "base", "spec.replicas", 1)
        stage.wait_for_value("servingpool", "base", "status.replicas", 1)
        stage.kubectl("delete", "hpa", "base")


def test_while_the_scheduler_is_away_there_are_no_values(stage: Stage) -> None:
    until(lambda: values(stage, "weft_pool_demand_runners") == {}, "no pool is known")
    stage.scheduler_process.stop()

    def refused() -> bool:
        try:
            values(stage, "weft_pool_demand_runners")
        except Refused as error:
            return "the scheduler is away" in str(error)
        return False

    until(refused, "503 with its reason")
    stage.start_scheduler()
    until(lambda: not refused(), "it is back")
