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
