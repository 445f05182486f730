"""`weft` against a real API server, through the real kubectl. Only pods are absent: port-forwards to them fail, and are
tested on a node (tests/cluster/test_cli.py)."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.bad_manifests import adapter, pool
from harness.cluster.cluster import Cluster
from harness.processes import started
from harness.waiting import wait_until
from weft_cli.main import main
from weft_devcluster import tools
from weft_devcluster.access import Access

UPPER = {"poolRef": {"name": "base"}, "source": {"uri": "file:upper"}}
CONDITION = {"status": "True", "observedGeneration": 1, "lastTransitionTime": "2026-01-02T03:04:05Z", "message": ""}
LABELS = {"app.kubernetes.io/part-of": "weft", "app.kubernetes.io/component": "supervisor"}


@pytest.fixture
def cluster(control_plane: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """kubectl is on the PATH, and its current context is the test's API server."""
    monkeypatch.setenv("PATH", f"{tools.path('kubectl').parent}:{os.environ['PATH']}")
    monkeypatch.setenv("KUBECONFIG", str(control_plane.kubeconfig))
    monkeypatch.setenv("NO_COLOR", "1")


@pytest.fixture
def manifests(namespace: str, tmp_path: Path) -> Path:
    """A pool and an adapter."""
    folder = tmp_path / "manifests"
    folder.mkdir()
    wishes = pool("base", namespace, model={"uri": "file:model"}), adapter("upper", namespace, **UPPER)
    for obj in wishes:
        (folder / f"{obj['kind']}.json").write_text(json.dumps(obj))
    return folder


def weft(capfd: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = main([*argv, "--context", "weft-test"])
    out, err = capfd.readouterr()
    return code, out, err


@pytest.fixture
def applied(cluster: None, manifests: Path, namespace: str, capfd: pytest.CaptureFixture[str]) -> Path:
    code, out, err = weft(capfd, "apply", "-f", str(manifests))
    assert (code, err) == (0, "")
    assert sorted(out.splitlines()) == [
        f"loraadapter/upper ({namespace}) created",
        f"servingpool/base ({namespace}) created",
    ]
    return manifests


@pytest.mark.parametrize("wide", [(), ("-o", "wide")])
@pytest.mark.parametrize("kind", ["lora", "spool"])
def test_weft_prints_the_table_of_kubectl(
    applied: Path,
    namespace: str,
    control_plane: Cluster,
    capfd: pytest.CaptureFixture[str],
    kind: str,
    wide: tuple[str, ...],
) -> None:
    digest = "sha256:" + "0" * 64
    ready = [{**CONDITION, "type": one, "reason": "Published"} for one in ("Accepted", "Fetched", "Validated", "Ready")]
    set_status(control_plane, namespace, "loraadapter", "upper", digest=digest, rank=8, modelName="upper",
               unavailableRunners=0, canary={"phase": "Progressing"}, conditions=ready)  # fmt: skip
    available = [{**CONDITION, "type": "Available", "reason": "RunnersReady"}]
    slo = {"attainedPercent": 98, "ttftPercent": 99, "tokenTimePercent": 99}
    set_status(control_plane, namespace, "servingpool", "base", slo=slo, baseDigest=digest, desiredReplicas=3,
               readyReplicas=2, adapters={"total": 5, "ready": 4},
               phases={"prompt": 1, "token": 1, "mixed": 0}, conditions=available)  # fmt: skip
    code, out, err = weft(capfd, "get", kind, "-n", namespace, *wide)
    assert (code, err) == (0, "")
    shown, printed = (text.splitlines() for text in (out, control_plane.kubectl("get", kind, "-n", namespace, *wide)))
    assert [line.split()[:-1] for line in shown] == [line.split()[:-1] for line in printed]  # without the age
    assert shown[0].split()[-1] == printed[0].split()[-1] == "AGE"


def set_status(control_plane: Cluster, namespace: str, kind: str, name: str, **status: Any) -> None:
    patch = json.dumps({"status": {"observedGeneration": 1, **status}})
    control_plane.kubectl("patch", kind, name, "-n", namespace, "--subresource=status", "--type=merge", "-p", patch)


def test_objects_are_applied_again_described_and_deleted(
    applied: Path, namespace: str, control_plane: Cluster, capfd: pytest.CaptureFixture[str]
) -> None:
    assert weft(capfd, "apply", "-f", str(applied))[1].count("unchanged") == 2
    path = applied / "LoRAAdapter.json"
    path.write_text(path.read_text().replace("file:upper", "file:b"))
    assert f"loraadapter/upper ({namespace}) configured" in weft(capfd, "apply", "-f", str(applied))[1]
    assert control_plane.get("loraadapter", "upper", namespace)["spec"]["source"]["uri"] == "file:b"
    code, out, _ = weft(capfd, "describe", "lora", "upper", "-n", namespace, "--system-namespace", namespace)
    assert code == 0
    assert "uri: file:b" in out
    assert f"not known: there is no Weft in namespace {namespace}" in out
    assert weft(capfd, "delete", "-f", str(applied))[:2] == (0, "loraadapter/upper deleted\nservingpool/base deleted\n")
    code, _, err = weft(capfd, "describe", "lora", "upper", "-n", namespace)
    assert code == 1
    assert '"upper" not found' in err


def test_what_the_api_server_refuses_is_said_in_its_words(
    applied: Path, namespace: str, capfd: pytest.CaptureFixture[str]
) -> None:
    path = applied / "ServingPool.json"
    path.write_text(path.read_text().replace("file:model", "file:other"))
    code, out, err = weft(capfd, "apply", "-f", str(path))
    assert (code, out) == (2, "")
    assert "spec.model.uri" in err
    assert weft(capfd, "get", "lora", "x", "-n", namespace)[2].startswith("weft: there is no loraadapter 'x'")


def test_a_tenant_of_one_namespace_watches_it(applied: Path, namespace: str, control_plane: Cluster) -> None:
    rules = [{"apiGroups": ["serving.weft.dev"], "resources": ["loraadapters"], "verbs": ["get", "list", "watch"]}]
    where = ("-n", namespace, "--kubeconfig", control_plane.service_account(namespace, "tenant", rules).kubeconfig)
    argv = (sys.executable, "-m", "weft_cli", "get", "lora", "-w", *where)
    with started(*argv, stdout=subprocess.PIPE, text=True) as watching:
        first = [watching.stdout.readline() for _ in range(2)]
        ready = [{**CONDITION, "type": "Ready", "reason": "Published"}]
        set_status(control_plane, namespace, "loraadapter", "upper", modelName="upper", conditions=ready)
        later = watching.stdout.readline()
    assert [line.split()[0] for line in first] == ["NAME", "upper"]
    assert later.split()[:5] == ["upper", "base", "upper", "True", "Published"]


def test_the_namespace_is_the_contexts_own(
    applied: Path, namespace: str, control_plane: Cluster, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = json.loads(control_plane.kubeconfig.read_text())
    config["contexts"][0]["context"]["namespace"] = namespace
    (tmp_path / "config").write_text(json.dumps(config))
    assert main(["get", "lora", "--kubeconfig", str(tmp_path / "config")]) == 0
    assert capfd.readouterr().out.splitlines()[1].startswith("upper ")


def test_as_a_plugin_of_kubectl_it_is_about_the_current_context(applied: Path, namespace: str) -> None:
    assert kubectl("weft", "get", "lora", "-n", namespace).splitlines()[1].startswith("upper ")


def test_kubectl_completes_its_plugin(applied: Path, namespace: str) -> None:
    assert kubectl("__complete", "weft", "desc").split()[:2] == ["describe", ":4"]
    assert kubectl("__complete", "weft", "describe", "lora", "-n", namespace, "").split()[:2] == ["upper", ":4"]


def kubectl(*arguments: str) -> str:
    """With this environment's plugins on the PATH."""
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(["kubectl", *arguments], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="setpriv of util-linux ties children to their parent")
def test_kubectl_ends_with_a_killed_command(applied: Path, namespace: str) -> None:
    argv = (sys.executable, "-m", "weft_cli", "get", "lora", "-n", namespace, "-w", "--context", "weft-test")
    with started(*argv, stdout=subprocess.PIPE, text=True) as watching:
        watching.stdout.readline()
        [child] = Path(f"/proc/{watching.pid}/task/{watching.pid}/children").read_text().split()
        assert "kubectl" in Path(f"/proc/{child}/cmdline").read_text()
        watching.kill()
        watching.wait()
        wait_until(lambda: not Path(f"/proc/{child}/exe").exists(), "kubectl has ended")


def test_a_context_that_is_not_there_is_named(cluster: None, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["get", "lora", "-A", "--context", "nowhere"]) == 1
    assert 'context "nowhere" does not exist' in capfd.readouterr().err


def test_without_kubectl_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["get", "lora", "--context", "any"]) == 1
    assert capfd.readouterr().err.startswith("weft: kubectl is not installed\n      commands on a cluster need kubectl")


@pytest.fixture
def supervisor(control_plane: Cluster, namespace: str) -> Iterator[str]:
    """A supervisor's Service and pod as the chart makes them; the pod runs, by its status, and answers nothing."""
    metadata = {"namespace": namespace, "labels": LABELS}
    container = {"name": "supervisor", "image": "weft:none", "args": ["--tls-dir=/etc/weft/tls"]}
    control_plane.apply(
        {"apiVersion": "v1", "kind": "Pod", "metadata": {**metadata, "name": "weft-supervisor-0"},
         "spec": {"containers": [container], "terminationGracePeriodSeconds": 0}},
        {"apiVersion": "v1", "kind": "Service", "metadata": {**metadata, "name": "weft-supervisor"},
         "spec": {"ports": [{"name": "grpc", "port": 7400}], "selector": LABELS}},
    )  # fmt: skip
    patch = json.dumps({"status": {"phase": "Running"}})
    control_plane.kubectl("patch", "pod", "weft-supervisor-0", "-n", namespace, "--subresource=status", "-p", patch)
    yield namespace
    control_plane.kubectl("delete", "pod,service", "--all", "-n", namespace, "--now")


def test_a_secret_that_may_not_be_read_is_named_with_what_to_do(
    cluster: None, supervisor: str, control_plane: Cluster, capfd: pytest.CaptureFixture[str]
) -> None:
    rules = [{"apiGroups": [""], "resources": ["pods", "services"], "verbs": ["list"]}]
    tenant: Access = control_plane.service_account(supervisor, "tenant", rules)
    assert main(["key", "list", "--kubeconfig", str(tenant.kubeconfig), "--system-namespace", supervisor]) == 1
    err = capfd.readouterr().err
    assert f"Secret {supervisor}/weft-admin-tls gives none" in err
    assert "cannot get resource" in err
    assert "--tls-dir" in err


def test_a_port_forward_that_fails_says_why(
    cluster: None, supervisor: str, control_plane: Cluster, capfd: pytest.CaptureFixture[str]
) -> None:
    data = dict.fromkeys(("ca.crt", "tls.crt", "tls.key"), "eA==")
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "weft-admin-tls", "namespace": supervisor}}
    control_plane.apply({**secret, "data": data})
    code, out, err = weft(capfd, "key", "list", "--system-namespace", supervisor)
    assert (code, out) == (1, "")
    assert "weft: kubectl port-forward: " in err


def test_status_lists_the_pods_and_fails_while_one_is_not_ready(
    cluster: None, supervisor: str, control_plane: Cluster, capfd: pytest.CaptureFixture[str]
) -> None:
    gateway = {"metadata": {"name": "weft-gateway", "namespace": supervisor,
                            "labels": {**LABELS, "app.kubernetes.io/component": "gateway"}}}  # fmt: skip
    control_plane.apply({"apiVersion": "v1", "kind": "Service", **gateway, "spec": {"ports": [{"port": 80}]}})
    code, out, err = weft(capfd, "status", "--system-namespace", supervisor)
    assert code == 1
    assert ["supervisor", "weft-supervisor-0", "False", "Running", "0"] in [line.split() for line in out.splitlines()]
    assert "not every component is ready" in err
