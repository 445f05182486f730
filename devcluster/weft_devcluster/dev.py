"""A cluster for a person: `python -m weft_devcluster up` leaves a node running behind it, `down` ends it.

`up` starts `serve` in a session of its own and waits until that says ready on a pipe; `serve` holds the node until it
gets SIGTERM. What is known of it lies in `${XDG_STATE_HOME:-~/.local/state}/weft/dev-cluster`, beside the values that
the chart needs there and the folder below which its `file:` URIs are.
"""

import json
import os
import select
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import yaml

from weft_devcluster import tools
from weft_devcluster.errors import StartFailed
from weft_devcluster.machine import check_node
from weft_devcluster.node import Node
from weft_devcluster.python_pod import ROOT
from weft_devcluster.values import QUICKSTART, copy_sources, node_values

UP_S = 180.0
DOWN_S = 60.0
READY = b"ready"
STEPS = """\
# Kubernetes {version} on this machine: process {pid}, log {log}
export KUBECONFIG={kubeconfig}
export PATH={tools}:$PATH

# Weft on it; file: URIs are paths below {sources}
helm install weft {chart} -n weft-system --create-namespace --wait --values {values}
kubectl apply -f {quickstart}
kubectl wait --for=condition=Ready loraadapters --all -A --timeout=2m
kubectl -n weft-system port-forward svc/weft-gateway 8080:80"""


def up() -> None:
    """Start a cluster, or say that it is there. Raises StartFailed, ToolMissing."""
    if _pid() is None:
        check_node()
        _folder().mkdir(parents=True, exist_ok=True)
        _start()
    print(describe())


def down() -> None:
    """End the cluster, in order if it can, by force if it must: the kernel then takes the whole bag."""
    pid = _pid()
    if pid is None:
        print("no dev cluster is running")
        return
    ended = os.pidfd_open(pid)
    for number, limit_s in ((signal.SIGTERM, DOWN_S), (signal.SIGKILL, DOWN_S)):
        signal.pidfd_send_signal(ended, number)
        if select.select([ended], [], [], limit_s)[0]:
            print("the dev cluster is gone")
            return
    raise StartFailed(f"process {pid} does not end")


def describe() -> str:
    """Write what a person types next."""
    pid = _pid()
    if pid is None:
        return "no dev cluster is running: `make dev-cluster` starts one"
    return STEPS.format(
        version=tools.kubernetes(),
        pid=pid,
        log=_log(),
        kubeconfig=_kubeconfig(),
        tools=":".join(str(tools.path(name).parent) for name in ("kubectl", "helm")),
        sources=_sources(),
        chart=_from_here(ROOT / "charts" / "weft"),
        values=_values(),
        quickstart=_from_here(QUICKSTART),
    )


def serve(ready: int) -> None:
    """Hold a node until SIGTERM; writes to the file descriptor `ready` once it can be used."""
    stop = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, stop)
    with Node() as node:
        shutil.copyfile(node.kubeconfig, _kubeconfig())
        copy_sources(_sources())
        values = json.loads(json.dumps(node_values(_sources())))  # a tree: no anchors in the YAML
        _values().write_text(yaml.safe_dump(values, sort_keys=False))
        _state().write_text(json.dumps({"pid": os.getpid(), "folder": str(node.folder)}))
        os.write(ready, READY)
        os.close(ready)
        signal.sigwait(stop)
        _state().unlink(missing_ok=True)


def _start() -> None:
    reading, writing = os.pipe()
    with _log().open("wb") as log:
        command = [sys.executable, "-m", "weft_devcluster", "serve", str(writing)]
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=[writing], start_new_session=True
        )
    os.close(writing)
    with os.fdopen(reading, "rb", buffering=0) as said:
        in_time = select.select([said], [], [], UP_S)[0]
        if not in_time or said.read(len(READY)) != READY:  # an early end closes the pipe
            raise StartFailed(f"the dev cluster did not start ({_log()}):\n{_log().read_text()[-3000:]}")


def _from_here(path: Path) -> Path:
    """Write a path as a person would type it: relative where that is short."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _pid() -> int | None:
    """Find the process that holds the node, if it lives and is ours."""
    try:
        pid = int(json.loads(_state().read_text())["pid"])
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except FileNotFoundError:
        return None
    return pid if b"weft_devcluster" in words and b"serve" in words else None


def _folder() -> Path:
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    return state / "weft" / "dev-cluster"


def _state() -> Path:
    return _folder() / "state.json"


def _log() -> Path:
    return _folder() / "log"


def _kubeconfig() -> Path:
    return _folder() / "kubeconfig"


def _values() -> Path:
    return _folder() / "values.yaml"


def _sources() -> Path:
    return _folder() / "sources"
