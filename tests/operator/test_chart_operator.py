"""The operator as the chart starts it: its arguments, rights, site, certificates, Service, webhook and APIService.

The process runs on this machine instead of in a pod: addresses and paths are moved, and it gets a kubeconfig with the
token of the chart's ServiceAccount. The API server reaches it through the chart's own Service.
"""

import base64
import re
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness import bad_manifests, chart
from harness.chart import Json, arguments_of, objects, one
from harness.cluster.cluster import OURS, Cluster, needs_own
from harness.waiting import PATIENCE_S
from weft_devcluster.errors import Refused
from weft_devcluster.processes import Process, free_ports, wait_until

pytestmark = needs_own("has a webhook for the objects of all namespaces")

NAMESPACE = chart.NAMESPACE
PORTS = {"probes": 7401, "webhook": 9443}


@pytest.fixture(scope="module")
def plane(control_plane: Cluster) -> Iterator[Cluster]:
    """Without whatever the release brings afterwards: its webhook, which fails closed, stops what other tests do."""
    control_plane.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
    yield control_plane
    control_plane.empty(NAMESPACE, OURS)
    control_plane.delete_namespace(NAMESPACE)


@pytest.fixture(scope="module")
def release() -> list[Json]:
    """The render whose operator runs. One replica is enough: the other tests have several."""
    return objects(chart.render("default", "--set", "crds.install=false"))


@pytest.fixture(scope="module")
def operator(plane: Cluster, release: list[Json], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """Running, ready, and behind the chart's Service."""
    folder = tmp_path_factory.mktemp("operator")
    actual = dict(zip(PORTS, free_ports(len(PORTS), plane.own_address), strict=True))
    applied = [obj for obj in release if obj["kind"] not in ("Deployment", "StatefulSet", "Pod", "Service")]
    plane.apply(*map(patient, applied))
    plane.apply(*service(one(release, "Service", "weft-operator"), plane.own_address, actual))
    kubeconfig = plane.token_of(NAMESPACE, "weft-operator").kubeconfig
    arguments = moved(arguments_of(release, "operator"), folder, plane.own_address, actual)
    unpack(release, folder)
    command = [sys.executable, "-m", "weft_operator.kubernetes", *arguments]
    process = Process("operator", command, folder, {"KUBECONFIG": str(kubeconfig)})
    try:
        wait_until(lambda: ready(process, plane.own_address, actual["probes"]), "the operator is ready")
        yield process
    finally:
        process.end()
        plane.delete(*applied)


def patient(obj: Json) -> Json:
    """The API server's patience with the webhook is longer here: the machine may be slow."""
    hooks = [{**hook, "timeoutSeconds": 30} for hook in obj.get("webhooks", ())]
    return {**obj, "webhooks": hooks} if hooks else obj


def service(chart_service: Json, address: str, actual: dict[str, int]) -> list[Json]:
    """The chart's Service, led to this machine: without pods, its endpoints are written down."""
    spec = {"ports": chart_service["spec"]["ports"]}
    named = [{"name": port["name"], "port": actual[port["targetPort"]]} for port in spec["ports"]]
    meta = {"name": "weft-operator", "namespace": NAMESPACE}
    slice_meta = {**meta, "labels": {"kubernetes.io/service-name": "weft-operator"}}
    endpoints = [{"addresses": [address], "conditions": {"ready": True}}]
    return [
        {"apiVersion": "v1", "kind": "Service", "metadata": meta, "spec": spec},
        {"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "metadata": slice_meta, "addressType": "IPv4"}
        | {"ports": named, "endpoints": endpoints},
    ]


def moved(arguments: list[str], folder: Path, address: str, actual: dict[str, int]) -> list[str]:
    """Paths below `folder`, ports to those that are free here."""
    out: list[str] = []
    for argument in arguments:
        argument = argument.replace("=/etc/weft", f"={folder}/etc/weft")
        for name, port in PORTS.items():
            argument = argument.replace(f"=0.0.0.0:{port}", f"={address}:{actual[name]}")
        out.append(argument)
    return out


def unpack(release: list[Json], folder: Path) -> None:
    """The files that the pod's volumes show."""
    (container,) = one(release, "Deployment", "weft-operator")["spec"]["template"]["spec"]["containers"]
    volumes = one(release, "Deployment", "weft-operator")["spec"]["template"]["spec"]["volumes"]
    for mount in container["volumeMounts"]:
        (volume,) = [volume for volume in volumes if volume["name"] == mount["name"]]
        target = folder / mount["mountPath"].lstrip("/")
        if "secret" in volume:
            data = one(release, "Secret", volume["secret"]["secretName"])["data"]
            files = {name: base64.b64decode(content) for name, content in data.items()}
        else:
            data = one(release, "ConfigMap", volume["configMap"]["name"])["data"] if "configMap" in volume else {}
            files = {name: content.encode() for name, content in data.items()}
        target.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (target / name).write_bytes(content)


def ready(process: Process, address: str, port: int) -> bool:
    process.check()
    try:
        with urllib.request.urlopen(f"http://{address}:{port}/readyz", timeout=PATIENCE_S) as answer:
            return answer.status == 200
    except (OSError, urllib.error.HTTPError):
        return False


def pool(name: str, model: str) -> Json:
    return bad_manifests.pool(name, NAMESPACE, model={"uri": "hf:org/model", "name": model})


def test_the_operator_leads_under_the_charts_rights(plane: Cluster, operator: Process) -> None:
    wait_until(lambda: "leading" in operator.log_path.read_text(), "it leads")
    assert plane.get("lease", "weft-operator", NAMESPACE)["spec"]["holderIdentity"]


def test_the_api_server_asks_the_webhook_and_believes_its_certificate(plane: Cluster, operator: Process) -> None:
    plane.apply(pool("first", "llama"))

    def is_asked() -> bool:
        """A moment after it was told of the configuration."""
        try:
            plane.apply(pool("second", "llama"), dry_run=True)
        except Refused:
            return True
        return False

    wait_until(is_asked, "the API server asks the webhook")
    with pytest.raises(Refused, match=r"(?s)denied the request.*NameConflict"):
        plane.apply(pool("second", "llama"))
    plane.apply(pool("third", "mistral"))


def test_nothing_was_refused(plane: Cluster, operator: Process) -> None:
    """After it has started, led, planned for two pools and told their statuses."""

    def told() -> bool:
        operator.check()
        return bool(plane.get("servingpools", "third", NAMESPACE).get("status", {}).get("conditions"))

    wait_until(told, "the pool's status is told")
    without_times = re.sub(r":\d\d\.\d{3}", "", operator.log_path.read_text())  # whose milliseconds may be 403
    assert re.findall(r".*(?:\b403\b|[Ff]orbidden).*", without_times) == []
