"""`make gpu-check` as a process: a test that kills, hangs or loses its device costs itself alone."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness import gpu_check, gpu_session, processes

SUITE = '''
import os, sys, threading
from types import SimpleNamespace
import pytest

pytestmark = pytest.mark.gpu
held = []


def test_kills():
    os.abort()


def test_hangs():
    threading.Event().wait()


def lost():
    raise RuntimeError("an illegal memory access was encountered")


def test_loses_the_device():
    """The module that it imports in place of torch says so from now on."""
    sys.modules["torch"] = SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: True, synchronize=lost))


def test_passes():
    assert "torch" not in sys.modules


def test_fails():
    assert 2 + 2 == 5


def test_holds_memory():
    usual = SimpleNamespace(is_initialized=lambda: True, synchronize=lambda: None, empty_cache=held.clear)
    sys.modules["torch"] = SimpleNamespace(cuda=usual)
    held.append("a tensor")


def test_finds_none_held():
    assert not held
'''
# pytest-xdist begins the third test when it has the second one's report
INTERRUPTED = """
import pytest

pytestmark = pytest.mark.gpu


def test_fails():
    assert 2 + 2 == 5


def test_passes():
    pass


def test_waits():
    open("begun", "w").close()
    open("begun").read()


def test_is_not_begun():
    pass
"""
GIGABYTE = 1 << 30


def test_a_test_that_takes_its_process_with_it_leaves_the_others_their_results(tmp_path: Path) -> None:
    (tmp_path / "test_suite.py").write_text(SUITE)
    command = gpu_check.command(["-rA", str(tmp_path)], tmp_path / "temp", workers=1, test_s=2.0)
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False)
    said = done.stdout
    assert done.returncode == 1, said + done.stderr
    for test in ("kills", "hangs", "loses_the_device"):
        assert f"crashed while running 'test_suite.py::test_{test}'" in said, said
    for test in ("passes", "finds_none_held"):
        assert f"PASSED test_suite.py::test_{test}" in said
    assert "FAILED test_suite.py::test_fails - assert (2 + 2) == 5" in said


@pytest.mark.parametrize("number", gpu_check.SIGNALS)
def test_when_interrupted_it_says_what_has_failed(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "test_suite.py").write_text(INTERRUPTED)
    os.mkfifo(tmp_path / "begun")
    command = gpu_check.command([str(tmp_path)], tmp_path / "temp", workers=1)
    code = f"from pathlib import Path; from harness import gpu_check; exit(gpu_check.run({command}, Path()))"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with processes.started(sys.executable, "-c", code, cwd=tmp_path, env=environment(), **pipes) as process:
        (tmp_path / "begun").read_text()
        process.send_signal(number)
        said, _ = process.communicate()
    assert process.returncode == 128 + number, said
    assert "FAILED test_suite.py::test_fails" in said
    assert "assert (2 + 2) == 5" in said
    assert "interrupted: 1 failed, 1 passed" in said
    assert "gpu-check took" in said


def test_what_kernels_run_in_comes_before_the_kernels() -> None:
    """If time ends, it is them that are left."""
    names = ["test_attention", "test_engine", "test_executor", "test_graphs", "test_int4", "test_loading", "test_lora"]
    items: list[Any] = [SimpleNamespace(path=Path(f"{name}.py")) for name in names]
    gpu_session.pytest_collection_modifyitems(items)
    first = ["test_engine", "test_graphs", "test_executor", "test_loading"]
    assert [item.path.stem for item in items] == [*first, "test_attention", "test_int4", "test_lora"]


@pytest.mark.parametrize(
    ("cores", "memory", "expected"),
    [
        (16, 80 * GIGABYTE, 16),
        (16, 139 * GIGABYTE, 16),
        (16, 24 * GIGABYTE, 4),
        (4, 80 * GIGABYTE, 4),
        (1, GIGABYTE, 1),
    ],
)
def test_processes_have_a_core_and_their_share_of_the_device(cores: int, memory: int, expected: int) -> None:
    assert gpu_check.workers(cores, memory) == expected


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(gpu_check.gpu, "no_gpu", lambda: "there is no GPU")
    assert gpu_check.main([]) == 3
    assert "there is no GPU; `make test`" in capsys.readouterr().err


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(gpu_check.gpu, "no_gpu", lambda: "")
    monkeypatch.setattr(gpu_check, "NEEDED", ("sys", "no_such_package"))
    assert gpu_check.main([]) == 2
    assert "has no no_such_package" in capsys.readouterr().err


def environment() -> dict[str, str]:
    """Run a pytest with the plugins that a GPU machine has."""
    plugins = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "xdist.plugin,pytest_timeout"}
    return {**os.environ, **plugins, "PYTHONPATH": os.pathsep.join(sys.path)}
