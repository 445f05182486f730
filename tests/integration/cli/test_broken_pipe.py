"""Whoever reads a command's output may leave before its end: `weft logs gateway | head`."""

import os
import subprocess
import sys
from typing import Any

import pytest

from harness.processes import tied
from harness.waiting import PATIENCE_S


def run_unread(*arguments: str, errors_too: bool = False) -> subprocess.CompletedProcess[bytes]:
    """Python with output that nobody reads any more from the first byte on, and that is buffered as usual."""
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as unread:
        return subprocess.run(
            tied(sys.executable, *arguments),
            env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
            stdin=subprocess.DEVNULL,
            stdout=unread,
            stderr=unread if errors_too else subprocess.PIPE,
            timeout=PATIENCE_S,
            check=False,
        )


@pytest.mark.parametrize("words", [["get", "runners"], ["status"], ["logs"], ["logs", "depot"], ["get", "--help"]])
def test_a_reader_that_leaves_ends_the_command_in_silence(controller: Any, words: list[str]) -> None:
    controller.do(lambda: controller.log.write(b"one line\n"))
    ended = run_unread("-m", "weft_cli", *words)
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_what_is_written_at_the_very_end_fails_in_silence_too() -> None:
    """A command that leaves its text in the stream's buffer: only the last flush meets the closed pipe."""
    ended = run_unread(
        "-c",
        "import sys, weft_cli.main as command\n"
        "command._commands = lambda **_: lambda *_, **__: print('text')\n"
        "sys.exit(command.main(['status']))",
    )
    assert (ended.returncode, ended.stderr) == (0, b"")


@pytest.mark.parametrize(
    ("words", "code"), [(["status", "--data-dir", "/nonexistent"], 1), (["get", "nothing"], 2), (["get", "--wrong"], 2)]
)
def test_a_failure_is_one_even_if_nobody_reads_of_it(words: list[str], code: int) -> None:
    assert run_unread("-m", "weft_cli", *words, errors_too=True).returncode == code
