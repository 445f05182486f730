"""The aggregated metrics API behind a real API server; a real HPA that drives a pool by it."""

import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.certificates import Authority, Pair
from cluster.control_plane import ControlPlane
from cluster.errors import KubectlFailed
from quickstart import BASE
from tests.operator.demanding_gateway import DemandingGateway
from tests.operator.stage import Replica, Stage, until

ROOT = "/apis/external.metrics.k8s.io/v1beta1"
SERVICE = "weft-operator"


@pytest.fixture
def stage(control_plane: ControlPlane, namespace: str, tmp_path: Path) -> Iterator[Stage]:
    with Stage(control_plane, namespace, tmp_path) as made:
        yield made
        control_plane.kubectl("delete", "apiservice", "v1beta1.external.metrics.k8s.io", "--ignore-not-found")


def serving(stage: Stage) -> Replica:
    """A replica whose metrics API is registered, and believed to be there."""
    control_plane = stage.control_plane
    port = stage.port()
    folder, ca_bundle = stage.certificates(f"{SERVICE}.{stage.namespace}.svc", control_plane.own_address)
    replica = stage.replica(metrics_api=f"{control_plane.own_address}:{port}", webhook_tls_dir=folder)
    replica.metrics_api = f"{control_plane.own_address}:{port}"
    control_plane.expose(stage.namespace, SERVICE, port)
    control_plane.apply(
        {
            "apiVersion": "apiregistration.k8s.io/v1",
            "kind": "APIService",
            "metadata": {"name": "v1beta1.external.metrics.k8s.io"},
            "spec": {
                "group": "external.metrics.k8s.io",
                "version": "v1beta1",
                "service": {"namespace": stage.namespace, "name": SERVICE, "port": 443},
                "caBundle": ca_bundle,
                "groupPriorityMinimum": 100,
                "versionPriority": 100,
            },
        }
    )
    control_plane.kubectl(
        "wait", "--for=condition=Available", "apiservice/v1beta1.external.metrics.k8s.io", "--timeout=30s"
    )
    return replica


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
        with urllib.request.urlopen(request, context=context, timeout=5) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code
    except (urllib.error.URLError, OSError):
        return "no TLS"


def test_only_the_front_proxy_is_answered_and_kubectl_through_it(stage: Stage, tmp_path: Path) -> None:
    replica = serving(stage)
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
    with pytest.raises(KubectlFailed, match="no metric"):
        values(stage, "weft_pool_mood")
    nobody = stage.control_plane.service_account(stage.namespace, "nobody")
    with pytest.raises(KubectlFailed, match="orbidden"):  # the API server in front has judged
        stage.control_plane.kubectl("get", "--raw", f"{ROOT}/namespaces/x/weft_pool_demand_runners", by=nobody)


def test_while_the_scheduler_is_away_there_are_no_values(stage: Stage) -> None:
    serving(stage)
    assert values(stage, "weft_pool_demand_runners") == {}
    stage.scheduler_process.stop()

    def refused() -> bool:
        try:
            values(stage, "weft_pool_demand_runners")
        except KubectlFailed as error:
            return "the scheduler is away" in str(error)
        return False

    until(refused, "503 with its reason")


def test_an_hpa_drives_a_pool_from_one_runner_to_three_and_back(stage: Stage) -> None:
    serving(stage)
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
        stage.wait_for_value("servingpool", "base", ".spec.replicas", 3, timeout_s=60)
        stage.wait_for_value("servingpool", "base", ".status.readyReplicas", 3)
        gateway.wanted(0)
        stage.wait_for_value("servingpool", "base", ".spec.replicas", 1, timeout_s=60)
        stage.wait_for_value("servingpool", "base", ".status.replicas", 1)
        stage.kubectl("delete", "hpa", "base")
