"""Completion in a real bash: the script that `weft --show-completion` prints, and what it completes."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness.processes import tied
from weft_cli.main import main

COMPLETE = """
eval "$(weft --show-completion bash)"
read -ra COMP_WORDS <<<"$1"
COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
_weft_completion weft
printf '%s\\n' "${COMPREPLY[@]}"
"""


def completed(line: str) -> list[str]:
    """What bash offers for the last word of a line."""
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    argv = tied("bash", "-c", COMPLETE, "bash", line)
    return subprocess.run(argv, env=environment, capture_output=True, text=True, check=True).stdout.split()


def test_subcommands_options_and_kinds_are_completed() -> None:
    assert completed("weft desc") == ["describe"]
    assert "--context" in completed("weft get lora --")
    assert completed("weft get lora") == ["loraadapters", "loraadapter", "lora"]


@pytest.mark.slow
def test_names_are_completed_from_the_stack(
    controller: Any, manifests: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["apply", "-f", str(manifests)]) == 0
    capfd.readouterr()
    assert completed("weft describe lora -n acme u") == ["upper"]
    assert completed("weft get lora -A l") == ["lower"]
    assert completed("weft describe spool b") == ["base"]
    assert completed("weft get runners x") == []


def test_without_a_stack_nothing_is_completed_and_nothing_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEFT_DATA_DIR", str(tmp_path))
    assert completed("weft describe lora u") == []
