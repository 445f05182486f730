"""What every replica does: it judges admission, leader or not; it says why it cannot start."""

from typing import Any

from harness.operator.stage import Stage, until
from harness.ports import free_port
from weft_devcluster.errors import Refused

WEBHOOK = "weft-replica-test"


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
                    "timeoutSeconds": 30,
                }
            ],
        }
    )


def test_a_replica_that_does_not_lead_judges_admission_by_what_the_cluster_has(stage: Stage) -> None:
    leader = stage.replica()
    until(lambda: leader.leads, "the first leads")
    host, port = stage.control_plane.own_address, free_port()
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
        except Refused as error:
            return "belongs to" in str(error)
        stage.kubectl("delete", "loraadapter", "second")
        return False

    until(refused, "the conflict is refused by the webhook")
    assert not judge.leads
    stage.apply_adapter("third", "file:adapters/upper")
    stage.control_plane.kubectl("delete", "validatingwebhookconfiguration", WEBHOOK)


def test_what_cannot_start_says_why_and_ends_with_2(running: Stage) -> None:
    wrong: dict[str, dict[str, Any]] = {
        "BadRunnerDefaults": {"runner-defaults": "/absent/runner-defaults.yaml"},
        "NoCluster": {"kubeconfig": "/absent/kubeconfig"},
        "TlsUnusable": {"tls_dir": "/absent"},
    }
    started = {told: running.replica(wait=False, **flags) for told, flags in wrong.items()}
    for told, replica in started.items():
        assert replica.ended() == 2
        assert told in replica.said()
        assert "Traceback" not in replica.said()


def test_rights_that_are_missing_are_reported_by_readiness(running: Stage) -> None:
    nobody = running.control_plane.service_account(running.namespace, "nobody")
    replica = running.replica(wait=False, by=nobody)
    until(lambda: "cannot list resource" in replica.get("/readyz")[1], "it says which right is missing")
    replica.stop()
