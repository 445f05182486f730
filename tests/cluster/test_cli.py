"""`weft` against the chart in a cluster: objects by the Kubernetes API, peers under mutual TLS and the gateway through
port-forwards that it opens by itself."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.installation import NAMESPACE, Installation
from harness.quickstart import QUICKSTART
from harness.waiting import PATIENCE_S
from weft_devcluster import tools

Weft = Callable[..., str]
FORWARD = (
    {"apiGroups": [""], "resources": ["pods", "services"], "verbs": ["get", "list"]},
    {"apiGroups": [""], "resources": ["pods/portforward"], "verbs": ["create", "get"]},
)
ADMIN_SECRET = {"apiGroups": [""], "resources": ["secrets"], "resourceNames": ["weft-admin-tls"], "verbs": ["get"]}
OBJECTS = {"apiGroups": ["serving.weft.dev"], "resources": ["loraadapters"], "verbs": ["get", "list", "watch"]}
LOGS = {"apiGroups": [""], "resources": ["pods/log"], "verbs": ["get"]}


@pytest.fixture(scope="module")
def run(installation: Installation) -> Callable[..., "subprocess.CompletedProcess[str]"]:
    """Runs a command on the installation's cluster, as the owner of a kubeconfig."""
    kubectl = tools.client("kubectl").parent
    env = {**os.environ, "PATH": f"{kubectl}:{os.environ['PATH']}", "NO_COLOR": "1"}

    def with_kubeconfig(kubeconfig: Path, *argv: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "weft_cli", *argv, "--kubeconfig", str(kubeconfig)]
        return subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=3 * PATIENCE_S)

    return with_kubeconfig


@pytest.fixture(scope="module")
def weft(installation: Installation, run: Callable[..., "subprocess.CompletedProcess[str]"]) -> Weft:
    """Runs a command as the cluster's admin; its output."""

    def as_admin(*argv: str) -> str:
        done = run(installation.plane.kubeconfig, *argv)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return as_admin


def test_an_adapters_runner_and_tier_are_shown(installation: Installation, weft: Weft) -> None:
    pods = installation.names("runner")
    assert weft("chat", "acme/upper", "hello there", "--temperature", "0") == "HELLO THERE\n"
    described = weft("describe", "lora", "upper", "-n", "acme")
    assert "Published" in described
    runner, tier, *_ = described.partition("On runners:")[2].splitlines()[2].split()
    assert (runner in pods, tier) == (True, "device")
    assert [line.split()[0] for line in weft("get", "runners").splitlines()[1:]] == pods
    assert pods[0] in weft("describe", "spool", "quickstart", "-n", NAMESPACE)


def test_keys_limits_and_usage_are_the_supervisors(weft: Weft) -> None:
    assert weft("key", "create", "-n", "acme", "--note", "of the test").startswith("weft-")
    key_id = next(line.split()[0] for line in weft("key", "list").splitlines() if line.endswith("of the test"))
    weft("limit", "set", "--key", key_id, "requests-per-minute=60")
    assert f"key/{key_id}" in weft("limit", "list")
    assert weft("key", "revoke", key_id) == f"key/{key_id} revoked\n"
    assert weft("usage", "--csv").startswith("namespace,model,requests")


def test_top_status_and_logs(installation: Installation, weft: Weft) -> None:
    top = weft("top", "--once", "--interval", "0.1")
    assert top.startswith("1 of 1 runners ready")
    assert f"{NAMESPACE}/quickstart" in top
    assert {line.split()[0] for line in weft("status").splitlines()[3:]} >= {"gateway", "scheduler", "supervisor"}
    assert "gateway" in weft("logs").splitlines()
    assert installation.names("gateway")[0] in weft("logs", "gateway", "--tail", "1")


def test_a_push_goes_through_the_gateway_and_the_kubernetes_api(weft: Weft, tmp_path: Path) -> None:
    digest = weft("push", "pushed", str(QUICKSTART / "adapters/upper"), "-n", "acme",
                  "--pool", f"{NAMESPACE}/quickstart", "--version", "first").strip()  # fmt: skip
    assert digest in weft("get", "lora", "pushed", "-n", "acme", "-o", "wide")
    assert weft("delete", "lora", "pushed", "-n", "acme") == "loraadapter/pushed deleted\n"


@pytest.mark.parametrize(
    ("rights", "commands"),
    [
        (FORWARD, [["chat", "acme/upper", "hi"], ["status"]]),
        ((*FORWARD, ADMIN_SECRET), [["key", "list"], ["get", "runners"], ["top", "--once", "--interval", "0.1"]]),
        ((*FORWARD, LOGS), [["logs", "gateway"]]),
        ((*FORWARD, OBJECTS), [["get", "lora", "-n", NAMESPACE]]),
    ],
    ids=["gateway", "supervisor", "logs", "objects"],
)
def test_the_documented_rights_are_enough(
    installation: Installation,
    run: Callable[..., "subprocess.CompletedProcess[str]"],
    rights: tuple[dict[str, list[str]], ...],
    commands: list[list[str]],
) -> None:
    name = f"person-{len(rights)}-{rights[-1]['resources'][0].replace('/', '-')}"
    person = installation.plane.service_account(NAMESPACE, name, rights)
    for command in commands:
        done = run(person.kubeconfig, *command)
        assert done.returncode == 0, done.stderr


def test_who_may_not_ask_the_supervisor_sees_an_adapter_all_the_same(
    installation: Installation, run: Callable[..., "subprocess.CompletedProcess[str]"]
) -> None:
    tenant = installation.plane.service_account("acme", "tenant", (OBJECTS,))
    done = run(tenant.kubeconfig, "describe", "lora", "upper", "-n", "acme")
    assert (done.returncode, done.stderr) == (0, "")
    assert "Published" in done.stdout
    assert "not known: pods is forbidden" in done.stdout
