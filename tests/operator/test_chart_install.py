"""`helm install` on a control plane of its own: for real, without nodes, so pods stay Pending."""

import base64
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography import x509

import chart
from chart import VALUE_SETS, HelmRefused, Json, helm, values_of
from cluster import tools
from cluster.control_plane import ControlPlane
from cluster.errors import KubectlFailed
from openapi_schemas import write_schemas
from weft.wire.tls import FILES, Tls

NAMESPACE = "weft-system"
RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted"}
KINDS = "deployments,statefulsets,services,serviceaccounts,poddisruptionbudgets,networkpolicies,roles,rolebindings"


@pytest.fixture(scope="module")
def plane() -> Iterator[ControlPlane]:
    """Without our CRDs: they come with the chart."""
    with ControlPlane() as made:
        for name in (NAMESPACE, "serving-a", "serving-b", "acme", "globex"):
            labels = {"metadata": {"name": name, "labels": RESTRICTED}}
            made.apply({"apiVersion": "v1", "kind": "Namespace", **labels})
        yield made


class Release:
    """A release named weft."""

    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane

    def run(self, verb: str, name: str, *flags: str) -> str:
        return helm(verb, "weft", chart.CHART, "-f", values_of(name), *self._where(), *flags)

    def uninstall(self) -> str:
        return helm("uninstall", "weft", "--wait", *self._where())

    def secrets(self, namespace: str = NAMESPACE) -> dict[str, dict[str, str]]:
        """Name -> data of the TLS secrets."""
        found = self._plane.get("secrets", "-n", namespace, "--field-selector=type=kubernetes.io/tls")
        return {obj["metadata"]["name"]: obj["data"] for obj in found["items"]}

    def _where(self) -> tuple[str, ...]:
        return (f"--kubeconfig={self._plane.kubeconfig}", f"--namespace={NAMESPACE}")


@pytest.fixture
def release(plane: ControlPlane) -> Iterator[Release]:
    release = Release(plane)
    yield release
    release.uninstall()


# The cert-manager set needs cert-manager's and the Prometheus operator's resources, which are not here.
HERE = [name for name in VALUE_SETS if name != "cert-manager"]


@pytest.mark.parametrize("name", HERE)
def test_a_value_set_installs(plane: ControlPlane, release: Release, name: str) -> None:
    release.run("install", name, "--dry-run=server")
    assert plane.get(KINDS, "-n", NAMESPACE, "-l", "app.kubernetes.io/instance=weft")["items"] == []
    notes = release.run("install", name)
    assert ("kubectl apply -f examples/quickstart" in notes) == (name == "dev")  # it has file: sources
    assert "kubectl apply -f" in notes
    made = [
        obj for obj in chart.objects(chart.render(name)) if "helm.sh/hook" not in obj["metadata"].get("annotations", {})
    ]
    content = json.dumps({"apiVersion": "v1", "kind": "List", "items": made})
    live = json.loads(plane.kubectl("get", "-f", "-", "-o", "json", stdin=content))["items"]
    assert {identity(obj) for obj in live} == {identity(obj) for obj in made}


def identity(obj: Json) -> tuple[str, str, str]:
    return obj["kind"], obj["metadata"].get("namespace", ""), obj["metadata"]["name"]


def test_controllers_make_every_pod_in_a_restricted_namespace(plane: ControlPlane, release: Release) -> None:
    release.run("install", "default")
    for selector, count in (("gateway", 2), ("operator", 2), ("scheduler", 1), ("depot", 1)):
        labels = f"app.kubernetes.io/component={selector}"
        plane.kubectl("wait", "pod", "-n", NAMESPACE, "-l", labels, "--for=create", "--timeout=30s")
        kind = "statefulset" if selector in ("scheduler", "depot") else "deployment"
        path = "--for=jsonpath={.status.replicas}=" + str(count)
        plane.kubectl("wait", kind, f"weft-{selector}", "-n", NAMESPACE, path, "--timeout=30s")


def test_an_upgrade_keeps_every_certificate(release: Release) -> None:
    release.run("install", "default")
    before = release.secrets()
    assert len(before) == 11
    release.run("upgrade", "default", "--set", "gateway.replicas=3")
    assert release.secrets() == before


def test_what_an_upgrade_adds_is_signed_by_the_same_ca(release: Release, tmp_path: Path) -> None:
    release.run("install", "default")
    before = release.secrets()
    release.run("upgrade", "default", "--set", "poolNamespaces={weft-system,serving-a}")
    added = release.secrets("serving-a")
    assert set(added) == {"weft-runner-tls"}
    assert added["weft-runner-tls"]["ca.crt"] == before["weft-ca"]["tls.crt"]
    for name in FILES:
        (tmp_path / name).write_bytes(base64.b64decode(added["weft-runner-tls"][name]))
    Tls(tmp_path, "runner")
    assert release.secrets() == before


def test_a_lost_certificate_is_made_anew_and_no_other(plane: ControlPlane, release: Release) -> None:
    release.run("install", "default")
    before = release.secrets()
    plane.kubectl("delete", "secret", "weft-depot-tls", "-n", NAMESPACE)
    release.run("upgrade", "default")
    after = release.secrets()
    assert {name for name in before if after[name] != before[name]} == {"weft-depot-tls"}
    assert after["weft-depot-tls"]["ca.crt"] == before["weft-depot-tls"]["ca.crt"]


def test_a_certificate_in_the_last_third_of_its_life_is_renewed_by_an_upgrade(
    plane: ControlPlane, release: Release
) -> None:
    release.run("install", "default")
    before = release.secrets()
    annotation = "serving.weft.dev/renew-after=1"
    plane.kubectl("annotate", "--overwrite", "secret", "weft-gateway-tls", "-n", NAMESPACE, annotation)
    release.run("upgrade", "default")
    after = release.secrets()
    assert {name for name in before if after[name] != before[name]} == {"weft-gateway-tls"}
    serials = [x509.load_pem_x509_certificate(base64.b64decode(data["weft-gateway-tls"]["tls.crt"])).serial_number
               for data in (before, after)]  # fmt: skip
    assert serials[0] != serials[1]


def test_pools_and_adapters_outlive_the_release(plane: ControlPlane, release: Release) -> None:
    release.run("install", "default", "--set", "admission.enabled=false")
    pool = {"metadata": {"name": "kept", "namespace": NAMESPACE}, "spec": {"model": {"uri": "hf:org/model"}}}
    plane.apply({"apiVersion": "serving.weft.dev/v1alpha1", "kind": "ServingPool", **pool})
    release.uninstall()
    assert plane.get("servingpools", "kept", "-n", NAMESPACE)["metadata"]["name"] == "kept"
    release.run("install", "default")  # and the kept CRDs are taken in again
    plane.empty(NAMESPACE, ("servingpools",))


def test_another_release_does_not_take_the_crds_over(release: Release) -> None:
    release.run("install", "default")
    with pytest.raises(HelmRefused, match="cannot be imported into the current release"):
        helm("install", "second", chart.CHART, *release._where())  # pyright: ignore[reportPrivateUsage]


def test_admission_fails_closed_for_our_objects_and_touches_no_others(plane: ControlPlane, release: Release) -> None:
    """No operator runs here, so whoever is asked does not answer."""
    release.run("install", "default")
    pool = {"metadata": {"name": "refused", "namespace": NAMESPACE}, "spec": {"model": {"uri": "hf:org/model"}}}
    with pytest.raises(KubectlFailed, match=r"failed calling webhook.*servingpools\.serving\.weft\.dev"):
        plane.apply({"apiVersion": "serving.weft.dev/v1alpha1", "kind": "ServingPool", **pool})
    plane.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "free", "namespace": NAMESPACE}})


def test_kubeconform_takes_every_render(plane: ControlPlane, tmp_path: Path) -> None:
    """With schemas made of what this API server publishes; unknown fields and kinds are errors."""
    schemas = write_schemas(plane.kubectl("get", "--raw", "/openapi/v2"), tmp_path / "schemas")
    location = str(schemas) + "/{{.ResourceKind}}{{.KindSuffix}}.json"
    elsewhere = "Certificate,Issuer,PodMonitor"
    command = [
        tools.path("kubeconform"),
        "-strict",
        "-summary",
        f"-skip={elsewhere}",
        f"-schema-location={location}",
        "-",
    ]

    def conform(text: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, input=text, capture_output=True, text=True, check=False)

    for name in VALUE_SETS:
        done = conform(chart.render(name))
        assert done.returncode == 0, f"{name}: {done.stdout}{done.stderr}"
        assert "Valid: 0" not in done.stdout
    wrong = conform(chart.render("default").replace("publishNotReadyAddresses:", "publishNotReadyAddress:"))
    assert wrong.returncode == 1
    assert "publishNotReadyAddress" in wrong.stdout
