"""What a test leaves to the garbage collector fails that test, and no other."""

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[2]

LEAKING = """
import socket

class Ring:
    def __init__(self):
        self.socket, self.itself = socket.socket(), self

def test_leaks():
    Ring()

def test_closes():
    with socket.socket():
        Ring().socket.close()

def test_keeps(kept=[]):
    kept.append(socket.socket())
"""


def test_a_test_that_leaves_a_socket_to_the_collector_fails(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("from harness.leaks import register as pytest_configure\n")
    (tmp_path / "test_it.py").write_text(LEAKING)
    words = ("-q", "-n0", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(tmp_path))
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", *words], env=os.environ | {"PYTHONPATH": str(TESTS)}, check=False,
        capture_output=True, text=True,
    )  # fmt: skip
    assert "ERROR at teardown of test_leaks" in ran.stdout, ran.stdout
    assert "3 passed, 1 error" in ran.stdout
    assert "expected everything closed at the test's end, got" in ran.stdout
    assert "unclosed <socket.socket" in ran.stdout
