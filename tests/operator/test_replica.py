"""What every replica does: it waits for its CRDs, it judges admission, leader or not; it says why it cannot start."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.control_plane import ControlPlane
from cluster.errors import KubectlFailed
from tests.operator.stage import Replica, Stage, until

WEBHOOK = "weft-replica-test"


@pytest.fixture
def stage(control_plane: ControlPlane, namespace: str, tmp_path: Path) -> Iterator[Stage]:
    with Stage(control_plane, namespace, tmp_path) as made:
        yield made
        control_plane.kubectl("delete", "validatingwebhookconfiguration", WEBHOOK, "--ignore-not-found")


def webhook(stage: Stage, ca_bundle: str, port: int) -> None:
    """The API server asks our replica about adapters of this test's namespace."""
    stage.control_plane.expose(stage.namespace, "weft-operator", port)
    selector = {"matchLabels": {"kubernetes.io/metadata.name": stage.namespace}}
    service = {"namespace": stage.namespace, "name": "weft-operator", "path": "/loraadapter"}
    rule = {"apiGroups": ["serving.weft.dev"], "apiVersions": ["v1alpha1"], "resources": ["loraadapters"]}
    stage.control_plane.apply(
        {
            "apiVersion": "admissionregistration.k8s.io/v1",
            "kind": "ValidatingWebhookConfiguration",
            "metadata": {"name": WEBHOOK},
            "webhooks": [
                {
                    "name": "loraadapters.serving.weft.dev",
                    "clientConfig": {"service": service, "caBundle": ca_bundle},
                    "rules": [{**rule, "operations": ["CREATE", "UPDATE"]}],
                    "namespaceSelector": selector,
                    "sideEffects": "None",
                    "admissionReviewVersions": ["v1"],
                    "timeoutSeconds": 2,
                }
            ],
        }
    )


def test_a_replica_that_does_not_lead_judges_admission_by_what_the_cluster_has(stage: Stage) -> None:
    leader = stage.replica()
    until(lambda: leader.leads, "the first leads")
    host, port = stage.control_plane.own_address, stage.port()
    folder, ca_bundle = stage.certificates(f"weft-operator.{stage.namespace}.svc")
    judge = stage.replica(webhook=f"{host}:{port}", webhook_tls_dir=folder)
    stage.apply_pool()
    stage.apply_adapter("first", "file:adapters/upper")
    stage.wait_for("loraadapter", "first", "Accepted")
    webhook(stage, ca_bundle, port)

    def refused() -> bool:
        """Until the API server has taken in whom to ask, it asks nobody."""
        try:
            stage.apply_adapter("second", "file:adapters/upper", model_name=f"{stage.namespace}/first")
        except KubectlFailed as error:
            return "belongs to" in str(error)
        stage.kubectl("delete", "loraadapter", "second")
        return False

    until(refused, "the conflict is refused by the webhook")
    assert not judge.leads
    stage.apply_adapter("third", "file:adapters/upper")


def test_an_operator_that_comes_before_its_crds_waits_for_them_and_then_works(tmp_path: Path) -> None:
    with ControlPlane() as bare, Stage(bare, bare.create_namespace(), tmp_path) as stage:
        replica = stage.replica(wait=False)
        until(lambda: "CustomResourceDefinitions" in replica.get("/readyz")[1], "it says what it waits for")
        assert replica.get("/healthz")[0] == 200
        bare.apply_crds()
        until(lambda: replica.get("/readyz")[0] == 200, "it is ready")
        stage.apply_pool()
        stage.wait_for("servingpool", "base", "Fetched")


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ({"site": "/absent/site.yaml"}, "BadSite"),
        ({"kubeconfig": "/absent/kubeconfig"}, "NoCluster"),
        ({"tls_dir": "/absent"}, "TlsUnusable"),
    ],
)
def test_what_cannot_start_says_why_and_ends_with_2(stage: Stage, flags: dict[str, str], told: str) -> None:
    replica: Replica = stage.replica(wait=False, **flags)
    assert replica.ended() == 2
    assert told in replica.said()
    assert "Traceback" not in replica.said()


def test_rights_that_are_missing_are_told_by_readiness(stage: Stage) -> None:
    nobody = stage.control_plane.service_account(stage.namespace, "nobody")
    replica = stage.replica(wait=False, kubeconfig=nobody.kubeconfig)
    until(lambda: "cannot list resource" in replica.get("/readyz")[1], "it says which right is missing")
