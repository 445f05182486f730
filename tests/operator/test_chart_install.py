"""`helm install` on a control plane of its own: for real, without nodes, so pods stay Pending.

The first test has an API server without our CRDs; they come with the chart, and stay when its release goes.
"""

import base64
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from cryptography import x509

from harness import bad_manifests, chart
from harness.chart import OTHERS_SETS, VALUE_SETS, HelmRefused, Json, helm, values_of
from harness.cluster.cluster import Cluster, needs_own, own_cluster
from harness.operator.stage import Stage, until
from harness.waiting import PATIENCE_S
from weft.api.conversion import convert
from weft.wire.tls import FILES, Tls
from weft_devcluster.errors import Refused
from weft_devcluster.values import merged

pytestmark = needs_own("begins with an API server that does not have our CRDs")

NAMESPACE = "weft-system"
RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted"}
APART = ("gpu-pools",)  # whose pools are not in the release's namespace
NO_WEBHOOK = ("--set", "admission.enabled=false")
CRDS = chart.ROOT / "crds"
GATEWAY = f"deployment/weft-gateway --namespace={NAMESPACE}".split()
BEFORE = "app.kubernetes.io/component=gateway-before"


@pytest.fixture(scope="module")
def plane() -> Iterator[Cluster]:
    """Without our CRDs: they come with the chart."""
    with own_cluster() as made:
        for name in (NAMESPACE, "serving-a", "serving-b", "acme", "globex", "initech"):
            labels = {"metadata": {"name": name, "labels": RESTRICTED}}
            made.apply({"apiVersion": "v1", "kind": "Namespace", **labels})
        yield made


class Release:
    """A release named weft."""

    def __init__(self, plane: Cluster) -> None:
        self._plane = plane

    def run(self, verb: str, name: str, *flags: str) -> str:
        return self.of(chart.CHART, verb, name, *flags)

    def of(self, folder: Path, verb: str, name: str, *flags: str) -> str:
        patience = f"--timeout={PATIENCE_S:.0f}s"
        return self.helm(verb, "weft", folder, "-f", values_of(name), patience, *flags)

    @property
    def forced(self) -> tuple[str, ...]:
        """The flag of Helm 4 that takes fields which somebody else has set. Helm 3 asks nobody."""
        return ("--force-conflicts",) if chart.helm_major() > 3 else ()

    def apply_crds(self) -> None:
        """Apply the definitions as docs/upgrade.md says."""
        ours = ("--server-side", "--force-conflicts", "--field-manager=helm")
        self._plane.kubectl("apply", *ours, "-f", CRDS)

    def helm(self, *arguments: str | Path) -> str:
        where = (f"--kubeconfig={self._plane.kubeconfig}", f"--namespace={NAMESPACE}")
        return helm(*arguments, *where, env=self._plane.environment)

    def secrets(self, namespace: str = NAMESPACE) -> dict[str, dict[str, str]]:
        """Name -> data of the TLS secrets."""
        found = self._plane.get("secrets", namespace=namespace, fields="type=kubernetes.io/tls")
        return {obj["metadata"]["name"]: obj["data"] for obj in found["items"]}


@pytest.fixture(scope="module")
def release(plane: Cluster) -> Release:
    return Release(plane)


def pool(name: str) -> Json:
    return bad_manifests.pool(name, NAMESPACE, model={"uri": "hf:org/model"})


def test_definitions_of_kubectl_become_the_releases_and_change_with_it(
    plane: Cluster, release: Release, tmp_path: Path
) -> None:
    plane.kubectl("apply", "-f", CRDS)
    plane.wait("--for=condition=Established", "-f", CRDS)
    with pytest.raises(HelmRefused, match="invalid ownership metadata"):
        release.run("install", "default", *NO_WEBHOOK)
    release.run("install", "default", "--take-ownership", *NO_WEBHOOK)
    newer = shutil.copytree(chart.CHART, tmp_path / "newer")
    for path in (newer / "files" / "crds").glob("*.yaml"):
        path.write_text(path.read_text().replace("Whether it serves.", "Whether it serves now."))
    release.apply_crds()
    release.of(newer, "upgrade", "default", *NO_WEBHOOK)
    (version,) = plane.get("crds", "servingpools.serving.weft.dev")["spec"]["versions"]
    assert "Whether it serves now." in {column["description"] for column in version["additionalPrinterColumns"]}
    release.helm("uninstall", "weft", "--wait")
    plane.kubectl("delete", "-f", CRDS)


def test_an_operator_that_comes_before_its_crds_waits_for_them_and_then_works(
    plane: Cluster, release: Release, tmp_path: Path
) -> None:
    with Stage(plane, tmp_path) as stage:
        replica = stage.replica(wait=False)
        until(lambda: "CustomResourceDefinitions" in replica.get("/readyz")[1], "it says what it waits for")
        assert replica.get("/healthz")[0] == 200
        release.run("install", "default", *NO_WEBHOOK)
        until(lambda: replica.get("/readyz")[0] == 200, "it is ready")
        stage.apply_pool()
        stage.wait_for("servingpool", "base", "Fetched")


def test_pools_and_adapters_outlive_the_release(plane: Cluster, release: Release) -> None:
    if "weft" not in release.helm("list", "--short"):
        release.run("install", "default", *NO_WEBHOOK)
    plane.apply(pool("kept"))
    release.helm("uninstall", "weft", "--wait")
    assert plane.get("servingpools", "kept", NAMESPACE)["metadata"]["name"] == "kept"
    plane.empty(NAMESPACE, ("servingpools",))


@pytest.fixture(scope="module")
def others(plane: Cluster) -> None:
    """The CRDs of cert-manager, the Prometheus operator and the Gateway API."""
    chart.create_others(plane)


@pytest.mark.parametrize("name", sorted(VALUE_SETS, key=OTHERS_SETS.__contains__))  # those that need no others first
def test_the_api_server_takes_every_object_of_a_value_set(
    plane: Cluster, release: Release, name: str, request: pytest.FixtureRequest
) -> None:
    """Strictly: an unknown field is refused, as is what admission or validation does not let pass."""
    if name in OTHERS_SETS:
        request.getfixturevalue("others")
    shown = release.run("install", name, "--dry-run=server")
    *manifests, notes = re.split(r"^(?:HOOKS|MANIFEST|NOTES):$", shown, flags=re.MULTILINE)[1:]
    made = chart.objects("\n---\n".join(manifests))
    assert "kubectl apply -f" in notes
    assert ("kubectl apply -f examples/quickstart" in notes) == (name == "dev"), "it has file: sources"
    assert ("give pools a namespace of their own" in notes) == (name not in APART)
    assert len(made) > 20
    refused = {"Pod"} if name == "dev" else set[str]()  # with a folder of the node, in a namespace that is restricted
    plane.apply(*(obj for obj in made if obj["kind"] not in refused), dry_run=True)
    if name == "default":
        wrong = json.loads(json.dumps(chart.one(made, "Service", "weft-scheduler")))
        wrong["spec"]["publishNotReadyAddress"] = True
        with pytest.raises(Refused, match="publishNotReadyAddress"):
            plane.apply(wrong, dry_run=True)


# ------------------------------------------------------------------------------------------------ one that is installed


@pytest.fixture(scope="module")
def installed(release: Release) -> Release:
    """The default values. CRDs that an earlier release left are taken in again."""
    release.run("upgrade", "default", "--install", "--reset-values")
    return release


def test_what_helm_renders_is_there(plane: Cluster, installed: Release) -> None:
    made = [*yaml.safe_load_all(installed.helm("get", "manifest", "weft"))]
    for obj in made:
        plane.get(f"{obj['kind']}.{obj['apiVersion']}", obj["metadata"]["name"], obj["metadata"].get("namespace", ""))
    assert {identity(obj) for obj in made} == {
        identity(obj)
        for obj in chart.objects(chart.render("default"))
        if "helm.sh/hook" not in obj["metadata"].get("annotations", {})
    }


def identity(obj: Json) -> tuple[str, str, str]:
    return obj["kind"], obj["metadata"].get("namespace", ""), obj["metadata"]["name"]


def test_controllers_make_every_pod_in_a_restricted_namespace(plane: Cluster, installed: Release) -> None:
    for component, count in (("gateway", 2), ("operator", 2), ("scheduler", 1), ("depot", 1)):
        kind = "statefulset" if component in ("scheduler", "depot") else "deployment"
        plane.wait_until(
            kind,
            f"weft-{component}",
            NAMESPACE,
            lambda found, count=count: found.get("status", {}).get("replicas") == count,
            f"has {count} pods",
        )


def test_an_upgrade_keeps_certificates_and_signs_what_it_adds_by_one_ca(installed: Release, tmp_path: Path) -> None:
    before = installed.secrets()
    assert len(before) == 12
    more = "gateway.replicas=3,poolNamespaces={weft-system,serving-a}"
    installed.run("upgrade", "default", "--set", more)
    assert installed.secrets() == before
    added = installed.secrets("serving-a")
    assert set(added) == {"weft-runner-tls"}
    assert added["weft-runner-tls"]["ca.crt"] == before["weft-ca"]["tls.crt"]
    for name in FILES:
        (tmp_path / name).write_bytes(base64.b64decode(added["weft-runner-tls"][name]))
    Tls(tmp_path, "runner")


def test_a_lost_certificate_and_one_in_the_last_third_of_its_life_are_made_anew_and_no_other(
    plane: Cluster, installed: Release
) -> None:
    before = installed.secrets()
    plane.kubectl("delete", "secret", "weft-depot-tls", "-n", NAMESPACE)
    annotation = "serving.weft.dev/renew-after=1"
    plane.kubectl("annotate", "--overwrite", "secret", "weft-gateway-tls", "-n", NAMESPACE, annotation)
    installed.run("upgrade", "default", "--reset-values", *installed.forced)
    after = installed.secrets()
    changed = {name for name in before if after[name] != before[name]}
    assert changed == {"weft-depot-tls", "weft-gateway-tls"}
    for name in changed:
        assert after[name]["ca.crt"] == before[name]["ca.crt"]
        assert serial(after[name]) != serial(before[name])


def serial(data: dict[str, str]) -> int:
    return x509.load_pem_x509_certificate(base64.b64decode(data["tls.crt"])).serial_number


def test_an_upgrade_refuses_while_pools_are_of_an_earlier_form_and_says_what_to_do(
    plane: Cluster, installed: Release
) -> None:
    name = "servingpools.serving.weft.dev"
    today = yaml.safe_load((CRDS / f"{name}.yaml").read_text())
    earlier = json.loads(json.dumps(today))
    spec = earlier["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    spec["properties"]["scheduler"] = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    plane.apply(earlier)
    plane.kubectl("delete", "validatingwebhookconfiguration", "weft-weft-system")  # its operator has no pod
    obj = pool("earlier")
    obj["spec"]["scheduler"] = {"queue": "s3"}
    until(lambda: "scheduler" in plane.apply(obj, dry_run=True)[0]["spec"], "the definition is in effect")
    plane.apply(obj)
    with pytest.raises(
        HelmRefused, match=r"(?s)weft-system/earlier is of an earlier form.*weft convert -f -.*deployment/weft-operator"
    ):
        installed.run("upgrade", "default")
    plane.apply(today)
    plane.apply(dict(convert(obj).obj))
    installed.run("upgrade", "default")
    assert plane.get("servingpools", "earlier", NAMESPACE)["spec"]["advanced"]["queue"] == "s3"
    plane.empty(NAMESPACE, ("servingpools",))


def test_helm_4_names_what_kubectl_has_changed_and_takes_it_back_when_forced(
    plane: Cluster, installed: Release
) -> None:
    installed.run("upgrade", "default", "--reset-values")
    plane.kubectl("scale", *GATEWAY, "--replicas=4")
    if installed.forced:
        with pytest.raises(HelmRefused, match=r'conflict with "kubectl" with subresource "scale".*\.spec\.replicas'):
            installed.run("upgrade", "default", "--reset-values")
        assert replicas(plane) == 4
    installed.run("upgrade", "default", "--reset-values", *installed.forced)
    assert replicas(plane) == 2


def replicas(plane: Cluster) -> int:
    return plane.get("deployments", "weft-gateway", NAMESPACE)["spec"]["replicas"]


def test_gateways_that_begin_to_scale_are_never_fewer(plane: Cluster, installed: Release) -> None:
    """Run the commands of docs/upgrade.md, for Helm 4 and for Helm 3."""
    installed.run("upgrade", "default", "--reset-values", "--set", "gateway.replicas=5")
    plane.wait_until("deployment", "weft-gateway", NAMESPACE, lambda found: pods_of(found) == 5, "has 5 pods")

    def scale(least: int) -> None:
        values = f"gateway.autoscaling.enabled=true,gateway.autoscaling.minReplicas={least}"
        installed.run("upgrade", "default", "--reset-values", "--set", values)

    def has(count: int) -> None:
        plane.wait_until("deployment", "weft-gateway", NAMESPACE, lambda found: pods_of(found) == count, f"has {count}")

    mark = plane.mark()
    if not installed.forced:
        with pytest.raises(HelmRefused, match=r"leave 1 of 5 gateways.*gateways-that-scale"):
            scale(5)
        plane.kubectl("delete", *GATEWAY, "--cascade=orphan")
        selected = ("--selector=app.kubernetes.io/component=gateway", f"--namespace={NAMESPACE}")
        plane.kubectl("label", "replicaset", *selected, "--overwrite", BEFORE)
    scale(5)
    has(5)
    assert [write for write in plane.writes(mark) if (write.verb, write.resource) == ("delete", "pods")] == []
    plane.kubectl("delete", "replicaset", f"--selector={BEFORE}", f"--namespace={NAMESPACE}")
    scale(7)
    has(7)  # the autoscaler has changed it
    scale(6)
    assert replicas(plane) == 7
    for _ in range(2):  # the autoscaler may act once more before Helm deletes it
        installed.run("upgrade", "default", "--reset-values", *installed.forced)
    assert replicas(plane) == 2


def pods_of(deployment: Json) -> int:
    return deployment.get("status", {}).get("replicas", 0)


def test_an_upgrade_refuses_while_pools_mount_what_the_values_do_not_list_and_says_which_value_to_set(
    plane: Cluster, installed: Release
) -> None:
    plane.kubectl("delete", "validatingwebhookconfiguration", "weft-weft-system")  # its operator has no pod
    folder, claim = {"hostPath": {"path": "/srv/a"}}, {"persistentVolumeClaim": {"claimName": "c"}}
    for name, cache in {"a": folder, "b": claim, "e": {"emptyDir": {}}}.items():
        plane.apply(merged(pool(name), {"spec": {"model": {"name": name}, "modelCache": cache}}))
    plane.apply(bad_manifests.pool("a", "acme", modelCache={"hostPath": {"path": "/srv/elsewhere"}}))  # has no pods
    listed: Json = {"hostPaths": ["/srv/x"], "claims": []}
    with pytest.raises(HelmRefused) as refused:
        installed.run("upgrade", "default", "--set-json", f"operator.modelCache={json.dumps(listed)}")
    said = re.search(
        r"does not list: (.+?)\. Give them emptyDir.*?\n *operator:\n *(modelCache: .+)", str(refused.value)
    )
    assert said is not None, str(refused.value)
    wanted = yaml.safe_load(said[2])["modelCache"]
    assert sorted(said[1].split(", ")) == ["/srv/a", "weft-system/c"]
    assert wanted == {"hostPaths": ["/srv/x", "/srv/a"], "claims": ["weft-system/c"]}
    installed.run("upgrade", "default", "--set-json", f"operator.modelCache={json.dumps(wanted)}")
    for namespace in (NAMESPACE, "acme"):
        plane.empty(namespace, ("servingpools",))
    installed.run("upgrade", "default", "--reset-values")


def test_another_release_does_not_take_the_crds_over(installed: Release) -> None:
    with pytest.raises(HelmRefused, match="cannot be imported into the current release"):
        installed.helm("install", "second", chart.CHART)


def test_admission_fails_closed_for_our_objects_and_touches_no_others(plane: Cluster, installed: Release) -> None:
    """No operator runs here, so whoever is asked does not answer."""
    with pytest.raises(Refused, match=r"failed calling webhook.*servingpools\.serving\.weft\.dev"):
        plane.apply(pool("refused"))
    plane.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "free", "namespace": NAMESPACE}})
