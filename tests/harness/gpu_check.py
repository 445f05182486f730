"""`make gpu-check`: the tests marked `gpu` on this machine's GPU, from a checkout with nothing of ours installed.

    python -m harness.gpu_check [pytest's options]

It is pytest in several processes, since compiling takes most of the time. A kernel may hang its process (pytest-timeout
ends it from another thread: the test waits inside of CUDA), kill it, or make its device unusable (harness.lost_device):
in each case pytest-xdist reports the test and runs the others in a new process. pytest-forked could not do that, as a
CUDA context does not survive a fork; with `--dist=loadfile` xdist waits for ever for the file of a process that ended.

Exit codes: pytest's (0: all passed, 1: not), 2 a package is missing, 3 there is no GPU.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from weft_bench import gpu
from weft_bench.gpu import MISSING, NO_GPU, missing, no_gpu

ROOT = Path(__file__).parents[2]
NEEDED = (*gpu.NEEDED, "hypothesis", "pytest", "pytest_timeout", "xdist")
WORKERS = 8
TEST_S = 240.0  # a test that compiles a lot, beside seven others that do


def main(arguments: Sequence[str]) -> int:
    if reason := no_gpu():
        print(f"{reason}; `make test` runs these tests under Triton's interpreter", file=sys.stderr)
        return NO_GPU
    if said := missing(NEEDED):
        print(said, file=sys.stderr)
        return MISSING
    # Offloaded weights are read past the page cache: the folder has to be on a disk, which /tmp may not be.
    with tempfile.TemporaryDirectory(prefix=".gpu-check-", dir=ROOT) as folder:
        given = command(["tests/kernels/triton", *arguments], Path(folder) / "tests")
        return subprocess.run(given, cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "0"}, check=False).returncode


def command(arguments: Sequence[str], basetemp: Path, workers: int = WORKERS, test_s: float = TEST_S) -> list[str]:
    """pytest over the tests marked `gpu`, in so many processes, with so many seconds for a test."""
    workers = min(workers, os.cpu_count() or 1)
    return [
        sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", "-p", "harness.lost_device",
        f"--numprocesses={workers}", "--dist=load", f"--timeout={test_s:g}", "--timeout-method=thread",
        f"--basetemp={basetemp}", *arguments,
    ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
