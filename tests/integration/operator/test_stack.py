"""`weft up` with the real components as processes, without a model: what starts, what stops, what stays behind."""

import fcntl
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from harness.ports import free_port
from harness.processes import started, tied
from harness.waiting import PATIENCE_S, wait_until

COMPONENTS = {"depot", "scheduler", "supervisor", "gateway", "predictor", "batch"}
MISSING = """
apiVersion: serving.weft.dev/v1alpha1
kind: ServingPool
metadata: {name: base}
spec: {model: {uri: "file:absent"}}
---
apiVersion: serving.weft.dev/v1alpha1
kind: LoRAAdapter
metadata: {name: upper}
spec: {poolRef: {name: base}, source: {uri: "file:upper"}}
"""


def command(data_dir: Path, port: int, *more: str) -> list[str]:
    return tied(sys.executable, "-m", "weft_cli", "up", "--data-dir", data_dir, "--port", str(port), *more)


@contextmanager
def up(data_dir: Path, port: int, *more: str) -> Iterator[subprocess.Popen[str]]:
    """A stack that serves, with `MISSING` among its objects; killed at the end if it still runs."""
    words = command(data_dir, port, *more)
    with started(*words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=1) as stack:
        tells_what_is_wrong(until_said(stack, "OpenAI API"))
        yield stack


def ended(data_dir: Path, port: int, *more: str) -> subprocess.CompletedProcess[str]:
    """One that ends by itself."""
    return subprocess.run(command(data_dir, port, *more), capture_output=True, text=True, check=False)


def until_said(stack: subprocess.Popen[str], text: str) -> str:
    """Read what it says until a line has this text."""
    assert stack.stdout is not None
    said: list[str] = []
    for line in stack.stdout:
        said.append(line)
        if text in line:
            return "".join(said)
    raise AssertionError(f"it ended without saying {text!r}:\n{''.join(said)}")


def described(data_dir: Path) -> dict[str, Any]:
    return json.loads((data_dir / "stack.json").read_text())


def pidfds(data_dir: Path) -> list[int]:
    """Open a pidfd of every component, once they are started."""
    wait_until(lambda: all(component["pid"] for component in components(data_dir).values()), "all have a process")
    return [os.pidfd_open(component["pid"]) for component in components(data_dir).values()]


def components(data_dir: Path) -> dict[str, Any]:
    return described(data_dir)["components"]


def all_end(watches: list[int]) -> bool:
    """Wait for the end of all these processes."""
    try:
        return all(select.select([watch], [], [], PATIENCE_S)[0] for watch in watches)
    finally:
        for watch in watches:
            os.close(watch)


def weft(data_dir: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "WEFT_DATA_DIR": str(data_dir)}
    words = tied(sys.executable, "-m", "weft_cli", *argv)
    return subprocess.run(words, capture_output=True, text=True, check=False, env=env)


@pytest.mark.slow
def test_a_stack_serves_mends_itself_and_leaves_nothing_whichever_way_it_ends(tmp_path: Path) -> None:
    """Three lives in one folder. What is wrong with its objects is told in each, and disturbs nothing."""
    data, port, manifests = tmp_path / "data", free_port(), tmp_path / "manifests"
    manifests.mkdir()
    (manifests / "all.yaml").write_text(MISSING)
    with up(data, port, "-f", str(manifests)) as stack:
        found = described(data)
        assert set(found["components"]) == COMPONENTS
        assert {component["phase"] for component in found["components"].values()} == {"Ready"}
        assert found["gateway"] == f"http://127.0.0.1:{port}"
        assert (data / "stack.json").stat().st_mode & 0o077 == 0
        stored = json.loads((data / "objects.json").read_text())["objects"]
        assert {obj["metadata"]["name"] for obj in stored} == {"base", "upper"}, "-f is on disk before anything starts"
        a_killed_component_comes_back_on_its_port(data, stack)
        watches = pidfds(data)
        nobody_else_can_reach_it(data, stack.pid)
        stack.kill()
        assert all_end(watches), "nothing of a killed controller is left"
    with up(data, port) as stack:
        assert weft(data, "status").returncode == 0
        watches = pidfds(data)
        stack.send_signal(signal.SIGTERM)
        assert stack.wait(PATIENCE_S) == 0
        assert all_end(watches)
    assert not (data / "stack.json").exists()
    assert weft(data, "status").returncode == 1
    done = ended(data, port, "--exit")
    assert done.returncode == 1
    tells_what_is_wrong(done.stderr)


def nobody_else_can_reach_it(data: Path, controller: int) -> None:
    """Assert that all its ports are on loopback, and that its folders are its user's."""
    for pid in (controller, *(component["pid"] for component in components(data).values())):
        ports = [port for port in psutil.Process(pid).net_connections("inet") if port.status == psutil.CONN_LISTEN]
        assert {port.laddr.ip.removeprefix("::ffff:") for port in ports} <= {"127.0.0.1"}
    for folder in (data, *(path for path in data.iterdir() if path.name in COMPONENTS)):
        assert folder.stat().st_mode & 0o077 == 0, folder


def tells_what_is_wrong(said: str) -> None:
    """Assert that `MISSING` is told by name and reason, also in a start that finds it in its folder."""
    assert "ServingPool default/base: SourceNotFound" in said
    assert "SchemeNotAllowed" not in said, "the file root of the first life is that of the next"
    assert "Traceback" not in said


def a_killed_component_comes_back_on_its_port(data: Path, stack: subprocess.Popen[str]) -> None:
    before = components(data)["scheduler"]
    os.kill(before["pid"], signal.SIGKILL)
    until_said(stack, "scheduler")  # ended, starts again
    until_said(stack, "ready")
    wait_until(lambda: components(data)["scheduler"]["pid"] not in (None, before["pid"]), "it is described")
    after = components(data)["scheduler"]
    for field in ("listen", "probes"):
        assert after[field] == before[field]


def test_a_port_in_use_is_exit_code_2_and_nothing_is_left(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = ended(tmp_path / "data", port)
    assert done.returncode == 2
    assert f"port {port} on 127.0.0.1 is in use" in done.stderr
    assert not (tmp_path / "data" / "stack.json").exists()


def test_a_data_directory_has_one_owner(tmp_path: Path) -> None:
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = ended(tmp_path, free_port())
    assert done.returncode == 2
    assert "is in use by another `weft up`" in done.stderr


def test_damaged_objects_stop_the_start_and_stay(tmp_path: Path) -> None:
    (tmp_path / "objects.json").write_text("{")
    done = ended(tmp_path, free_port())
    assert done.returncode == 2
    assert "is damaged" in done.stderr
    assert (tmp_path / "objects.json").read_text() == "{"


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_starting_ends_everything(tmp_path: Path, signum: signal.Signals) -> None:
    data = tmp_path / "data"
    with started(*command(data, free_port()), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as stack:
        until_said(stack, "ready")  # some component is up, others are not
        watches = pidfds(data)
        stack.send_signal(signum)
        stack.stdout.read()
        stack.wait(PATIENCE_S)
        assert all_end(watches)
