"""The first thing that a newcomer types."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.ports import free_port
from harness.quickstart import DEMO
from harness.waiting import PATIENCE_S


def demo(data_dir: Path, port: int, *options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "weft_cli",
        "up",
        "--demo",
        "--exit",
        "--port",
        str(port),
        "--data-dir",
        str(data_dir),
        *options,
    ]
    environment = {**os.environ, "NO_COLOR": "1", "COLUMNS": "200", **variables}
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, env=environment, check=False)


# Without keys, other tests ask an open stack for the same texts (`test_one_stack`).
@pytest.mark.parametrize(
    "options", [pytest.param([], id="open", marks=pytest.mark.slow), pytest.param(["--auth"], id="keys")]
)
def test_the_demo_answers_right_for_every_model_and_stops_everything(tmp_path: Path, options: list[str]) -> None:
    done = demo(tmp_path / "d", free_port(), *options)
    assert done.returncode == 0, done.stdout + done.stderr
    for case in DEMO:
        assert case.model in done.stdout
    assert not (tmp_path / "d" / "stack.json").exists()


def test_without_a_compiler_and_an_index_one_sentence_ends_it_before_anything_starts(tmp_path: Path) -> None:
    bare = {"PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache"), "PIP_NO_INDEX": "1", "CXX": ""}
    done = demo(tmp_path / "d", free_port(), "--executor", "cpu", **bare)
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout == ""
    fetching, why = done.stderr.splitlines()
    assert "fetching one for this build" in fetching
    assert "nothing here can compute: there is no C++ compiler, and none can be fetched" in why
    assert why.endswith("install one, on Debian and Ubuntu with `apt install g++`")
    assert not (tmp_path / "d").exists()
