"""APIKeys against a real API server and a real supervisor: a Secret appears, its key is in force, and ends with it."""

import base64
import contextlib
import hashlib
import json

import grpc
import httpx2
import pytest

from harness.operator.stage import Stage, until
from harness.waiting import PATIENCE_S
from weft.wire.v1 import supervisor_pb2 as pb
from weft.wire.v1.supervisor_pb2_grpc import AdminStub


@pytest.fixture
def stage(stage: Stage) -> Stage:
    """With an operator that looks after the APIKeys of the stage's namespace."""
    if not stage.replicas or not stage.replicas[-1].running:
        stage.replica(supervisor=stage.supervisor, key_namespaces=stage.namespace)
    return stage


def in_force(stage: Stage) -> dict[str, pb.KeyInfo]:
    """Return the keys by id, as the supervisor has them."""
    with grpc.insecure_channel(stage.supervisor) as channel:
        listed = AdminStub(channel).ListKeys(pb.ListKeysRequest(), timeout=10.0, wait_for_ready=True).keys
    return {key.key_id: key for key in listed if not key.revoked}


def text_of(stage: Stage, secret: str) -> str:
    return base64.b64decode(stage.get("secret", secret)["data"]["key"]).decode()


def ready_id(stage: Stage, name: str) -> str:
    stage.wait_for("apikey", name, "Ready")
    return stage.get("apikey", name)["status"]["keyID"]


def test_a_key_lives_and_ends_with_its_secret_and_its_object(stage: Stage) -> None:
    stage._apply("APIKey", "ci", {"models": ["acme/*"], "limits": {"concurrent": 4}})  # pyright: ignore[reportPrivateUsage]
    first = ready_id(stage, "ci")
    secret = stage.get("secret", "ci")
    assert (secret["type"], secret["immutable"]) == ("Opaque", True)
    assert secret["metadata"]["ownerReferences"][0]["name"] == "ci"
    key = in_force(stage)[first]
    assert (key.namespace, list(key.models), key.note) == (stage.namespace, ["acme/*"], f"APIKey {stage.namespace}/ci")
    plain = text_of(stage, "ci")
    assert len(plain) >= 32

    # in place: the same key, other rights
    stage.kubectl("patch", "apikey", "ci", "--type=merge", "-p", json.dumps({"spec": {"scope": "Metrics"}}))
    until(lambda: in_force(stage)[first].scope == pb.KEY_SCOPE_METRICS, "the scope is changed")
    assert text_of(stage, "ci") == plain

    stage.kubectl("delete", "secret", "ci")
    until(lambda: first not in in_force(stage), "the key is revoked")
    stage.wait_until("apikey", "ci", lambda obj: obj["status"].get("keyID") not in (None, first), "has a fresh key")
    assert text_of(stage, "ci") != plain

    stage.kubectl("delete", "apikey", "ci")  # waits for the finalizer
    assert not in_force(stage)
    until(lambda: "ci" not in stage.names("secret"), "the Secret went with it")
    said = "".join(replica.said() for replica in stage.replicas) + stage.kubectl("get", "events", "-o", "yaml")
    assert plain not in said
    assert hashlib.sha256(plain.encode()).hexdigest() not in said


def test_a_secret_of_the_tenants_is_followed(stage: Stage) -> None:
    stage.kubectl("create", "secret", "generic", "mine", f"--from-literal=token={'x' * 40}")
    stage._apply("APIKey", "brought", {"secretRef": {"name": "mine", "key": "token"}})  # pyright: ignore[reportPrivateUsage]
    first = ready_id(stage, "brought")
    changed = base64.b64encode(b"y" * 40).decode()
    stage.kubectl("patch", "secret", "mine", "--type=merge", "-p", json.dumps({"data": {"token": changed}}))
    until(lambda: first not in in_force(stage) and len(in_force(stage)) == 1, "the other key is in force")
    short = base64.b64encode(b"y" * 31).decode()
    stage.kubectl("patch", "secret", "mine", "--type=merge", "-p", json.dumps({"data": {"token": short}}))
    stage.wait_for("apikey", "brought", "Ready", "False")
    assert stage.condition("apikey", "brought", "Ready")["reason"] == "SecretInvalid"
    assert not in_force(stage)
    stage.kubectl("delete", "secret", "mine")
    stage.wait_until(
        "apikey", "brought", lambda obj: obj["status"]["conditions"][0]["reason"] == "SecretMissing", "tells it"
    )


def test_a_key_whose_finalizer_was_taken_off_while_no_operator_ran_is_revoked_by_the_next_one(stage: Stage) -> None:
    stage._apply("APIKey", "forced", {})  # pyright: ignore[reportPrivateUsage]
    first = ready_id(stage, "forced")
    stage.replicas[-1].stop()
    stage.delete("apikey", "forced")
    stage.kubectl("patch", "apikey", "forced", "--type=merge", "-p", json.dumps({"metadata": {"finalizers": []}}))
    assert first in in_force(stage)
    stage.replica(supervisor=stage.supervisor, key_namespaces=stage.namespace)
    until(lambda: not in_force(stage), "the key is revoked")


@pytest.mark.parametrize(
    ("spec", "field", "says"),
    [
        ({"scope": "Platform"}, "spec.scope", "Unsupported value"),
        ({"expiresAt": "2126-01-01T00:00:00Z", "expiresAfter": "1h"}, "spec.expiresAfter", "either expiresAt or"),
        ({"expiresAfter": "1s"}, "spec.expiresAfter", "at least 60s"),
        ({"secretRef": {"name": "a"}, "secretName": "b"}, "spec.secretName", "either secretName"),
        ({"secretRef": {"name": "a"}, "expiresAfter": "1h"}, "spec.expiresAfter", "with secretRef"),
        ({"models": ["a b"]}, "spec.models[0]", "should match"),
        ({"limits": {"concurrent": 0}}, "spec.limits.concurrent", "greater than or equal to 1"),
    ],
)
def test_a_key_that_no_tenant_may_have_is_refused_by_the_api_server(
    stage: Stage, spec: dict[str, object], field: str, says: str
) -> None:
    with pytest.raises(Exception, match=r"(?s).*") as refused:
        stage._apply("APIKey", "wrong", spec)  # pyright: ignore[reportPrivateUsage]
    assert field in str(refused.value)
    assert says in str(refused.value)


def test_a_gateway_takes_a_declared_key_until_its_secret_changes_or_it_is_deleted(stage: Stage) -> None:
    url, first, second = stage.gateway(), "g" * 40, "h" * 40  # of no other test: a revoked key stays revoked
    stage.kubectl("create", "secret", "generic", "mine", f"--from-literal=key={first}")
    stage._apply("APIKey", "brought", {"secretRef": {"name": "mine"}})  # pyright: ignore[reportPrivateUsage]

    def status(key: str) -> int:
        with contextlib.suppress(httpx2.ConnectError):
            return ask(key)
        return 0

    def ask(key: str) -> int:
        headers = {"authorization": f"Bearer {key}"}
        return httpx2.get(f"{url}/v1/models", headers=headers, trust_env=False, timeout=PATIENCE_S).status_code

    until(lambda: status(first) == 200, "the key is taken")
    assert status(second) == 401
    changed = base64.b64encode(second.encode()).decode()
    stage.kubectl("patch", "secret", "mine", "--type=merge", "-p", json.dumps({"data": {"key": changed}}))
    until(lambda: (status(first), status(second)) == (401, 200), "the other key is taken in its place")
    stage.kubectl("delete", "apikey", "brought")
    until(lambda: status(second) == 401, "the key is refused")
