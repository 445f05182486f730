"""`weft up` with the real components as processes, without a model: what starts, what stops, what stays behind."""

import asyncio
import fcntl
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.integration

COMPONENTS = {"depot", "scheduler", "supervisor", "gateway", "predictor"}
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


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def command(data_dir: Path, port: int, *more: str) -> list[str]:
    return [sys.executable, "-m", "weft_cli", "up", "--data-dir", str(data_dir), "--port", str(port), *more]


@contextmanager
def up(data_dir: Path, port: int, *more: str) -> Iterator[subprocess.Popen[str]]:
    """A stack that serves; killed at the end if it still runs."""
    stack = subprocess.Popen(
        command(data_dir, port, *more), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=1
    )
    try:
        until_said(stack, "OpenAI API")
        yield stack
    finally:
        stack.kill()
        stack.wait()
        assert stack.stdout is not None
        stack.stdout.close()


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


def pidfds(stack: dict[str, Any]) -> list[int]:
    return [os.pidfd_open(component["pid"]) for component in stack["components"].values()]


def all_end(watches: list[int], within_s: float = 20.0) -> bool:
    """Wait for the end of all these processes."""
    left, until = list(watches), time.monotonic() + within_s
    while left and (pause_s := until - time.monotonic()) > 0:
        ended, _, _ = select.select(left, [], [], pause_s)
        left = [watch for watch in left if watch not in ended]
    for watch in watches:
        os.close(watch)
    return not left


def weft(data_dir: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "WEFT_DATA_DIR": str(data_dir)}
    return subprocess.run(
        [sys.executable, "-m", "weft_cli", *argv], capture_output=True, text=True, check=False, env=env
    )


def test_everything_starts_serves_and_ends_on_sigterm(tmp_path: Path) -> None:
    data, port = tmp_path / "data", free_port()
    with up(data, port) as stack:
        found = described(data)
        assert set(found["components"]) == COMPONENTS
        assert {component["phase"] for component in found["components"].values()} == {"Ready"}
        assert found["gateway"] == f"http://127.0.0.1:{port}"
        assert (data / "stack.json").stat().st_mode & 0o077 == 0
        assert weft(data, "status").returncode == 0
        watches = pidfds(found)
        stack.send_signal(signal.SIGTERM)
        assert stack.wait(30) == 0
        assert all_end(watches)
    assert not (data / "stack.json").exists()
    assert weft(data, "status").returncode == 1


def test_kill_9_of_the_controller_leaves_nothing_and_a_new_one_starts_in_the_same_place(tmp_path: Path) -> None:
    data, port = tmp_path / "data", free_port()
    with up(data, port) as stack:
        watches = pidfds(described(data))
        stack.kill()
        assert all_end(watches, 5)
    with up(data, port):
        assert weft(data, "status").returncode == 0


def test_a_killed_component_comes_back_on_its_port(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with up(data, free_port()) as stack:
        before = described(data)["components"]["scheduler"]
        os.kill(before["pid"], signal.SIGKILL)
        until_said(stack, "scheduler")  # ended, starts again
        until_said(stack, "ready")
        after = described(data)["components"]["scheduler"]
        for field in ("listen", "probes"):
            assert after[field] == before[field]


def test_bad_objects_are_told_with_their_reasons_and_exit_code_1(tmp_path: Path) -> None:
    manifests = tmp_path / "manifests"
    manifests.mkdir()
    (manifests / "all.yaml").write_text(MISSING)
    argv = command(tmp_path / "data", free_port(), "-f", str(manifests), "--exit")
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
    assert "SourceNotFound" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.returncode == 1


def test_a_start_without_manifests_waits_for_what_was_applied_before_in_the_same_folder(tmp_path: Path) -> None:
    manifests = tmp_path / "manifests"
    manifests.mkdir()
    (manifests / "all.yaml").write_text(MISSING)
    data = tmp_path / "data"
    for more in (["-f", str(manifests)], []):
        done = subprocess.run(
            command(data, free_port(), *more, "--exit"), capture_output=True, text=True, check=False, timeout=60
        )
        assert "ServingPool default/base: SourceNotFound" in done.stderr
        assert "SchemeNotAllowed" not in done.stderr
        assert done.returncode == 1


def test_a_port_in_use_is_exit_code_2_and_nothing_is_left(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        argv = command(tmp_path / "data", port)
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=30)
    assert done.returncode == 2
    assert f"port {port} on 127.0.0.1 is in use" in done.stderr
    assert not (tmp_path / "data" / "stack.json").exists()


def test_a_data_directory_has_one_owner(tmp_path: Path) -> None:
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        argv = command(tmp_path, free_port())
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=30)
    assert done.returncode == 2
    assert "is in use by another `weft up`" in done.stderr


def test_damaged_objects_stop_the_start_and_stay(tmp_path: Path) -> None:
    (tmp_path / "objects.json").write_text("{")
    done = subprocess.run(command(tmp_path, free_port()), capture_output=True, text=True, check=False, timeout=30)
    assert done.returncode == 2
    assert "is damaged" in done.stderr
    assert (tmp_path / "objects.json").read_text() == "{"


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_while_starting_ends_everything(tmp_path: Path, signum: signal.Signals) -> None:
    argv = command(tmp_path / "data", free_port())
    stack = await asyncio.create_subprocess_exec(
        *argv, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    assert stack.stdout is not None
    said = b""
    while b"ready" not in said:  # some component is up, others are not
        said += await stack.stdout.readline()
    watches = pidfds(described(tmp_path / "data"))
    stack.send_signal(signum)
    async with asyncio.timeout(20):
        await stack.stdout.read()
        await stack.wait()
    assert all_end(watches, 5)
