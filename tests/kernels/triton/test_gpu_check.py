"""`make gpu-check` as a process: a test that kills, hangs or loses its device costs itself alone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness import gpu_check

SUITE = '''
import os, sys, threading
from types import SimpleNamespace
import pytest

pytestmark = pytest.mark.gpu


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
'''


def test_a_test_that_takes_its_process_with_it_leaves_the_others_their_results(tmp_path: Path) -> None:
    (tmp_path / "test_suite.py").write_text(SUITE)
    command = gpu_check.command(["-rA", str(tmp_path)], tmp_path / "temp", workers=1, test_s=2.0)
    plugins = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "xdist.plugin,pytest_timeout"}  # no other
    environment = {**os.environ, **plugins, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    said = done.stdout
    assert done.returncode == 1, said + done.stderr
    for test in ("kills", "hangs", "loses_the_device"):
        assert f"crashed while running 'test_suite.py::test_{test}'" in said, said
    assert "PASSED test_suite.py::test_passes" in said
    assert "FAILED test_suite.py::test_fails - assert (2 + 2) == 5" in said


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(gpu_check, "no_gpu", lambda: "there is no GPU")
    assert gpu_check.main([]) == 3
    assert "there is no GPU; `make test`" in capsys.readouterr().err


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(gpu_check, "no_gpu", lambda: "")
    monkeypatch.setattr(gpu_check, "NEEDED", ("sys", "no_such_package"))
    assert gpu_check.main([]) == 2
    assert "has no no_such_package" in capsys.readouterr().err
