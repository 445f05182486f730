"""`make gpu-check`: the tests marked `gpu` on this machine's GPU, from a checkout with nothing of ours installed.

    python -m harness.gpu_check [pytest's options]

It is pytest in several processes, since compiling takes most of the time. A kernel may hang its process (pytest-timeout
ends it from another thread: the test waits inside of CUDA), kill it, or make its device unusable (harness.gpu_session):
in each case pytest-xdist reports the test and runs the others in a new process. pytest-forked could not do that, as a
CUDA context does not survive a fork; with `--dist=loadfile` xdist waits for ever for the file of a process that ended.

Examples of properties are the same in each run, and not shrunk: for each smaller one a kernel would be compiled.

Exit codes: pytest's (0: all passed, 1: not), 2 a package is missing, 3 there is no GPU; 128 and the signal's number on
SIGINT and SIGTERM, after what is known by then.
"""

import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from harness import processes
from weft_bench.figures import gpu

ROOT = Path(__file__).parents[2]
SIGNALS = (signal.SIGINT, signal.SIGTERM)
NEEDED = (*gpu.NEEDED, "hypothesis", "pytest", "pytest_timeout", "xdist")
WORKER_BYTES = 5 << 30  # of a device: a context, and the largest test (a head's int4 weights beside the same in fp32)
TEST_S = 240.0  # a test that compiles a lot, beside others that do
EXAMPLES = 16  # of a property: each may need a kernel of its own
PROPERTIES = ("--hypothesis-profile=verdict", "--hypothesis-seed=0")


def main(arguments: Sequence[str]) -> int:
    if reason := gpu.no_gpu():
        print(f"{reason}; `make test` runs these tests under Triton's interpreter", file=sys.stderr)
        return gpu.NO_GPU
    if said := gpu.missing(NEEDED):
        print(said, file=sys.stderr)
        return gpu.MISSING
    # Offloaded weights are read past the page cache: the folder has to be on a disk, which /tmp may not be.
    with tempfile.TemporaryDirectory(prefix=".gpu-check-", dir=ROOT) as folder:
        given = ["tests/kernels/triton", *PROPERTIES, *arguments]
        return run(command(given, Path(folder) / "tests", workers(len(os.sched_getaffinity(0)), gpu.device_bytes())))


def workers(cores: int, memory: int) -> int:
    """Return how many processes compile and compute beside each other; `memory`: the device's, in bytes."""
    return max(1, min(cores, memory // WORKER_BYTES))


def run(command: Sequence[str], cwd: Path = ROOT) -> int:
    """Run pytest, and say how long it took. A signal is passed on, as it may have come to this process alone."""
    began = time.monotonic()
    environment = {"WEFT_TEST_EXAMPLES": str(EXAMPLES), **os.environ, "TRITON_INTERPRET": "0"}
    pytest = processes.start(*command, cwd=cwd, env=environment, start_new_session=True)
    usual = {each: signal.signal(each, lambda number, _: pytest.send_signal(number)) for each in SIGNALS}
    try:
        code = pytest.wait()
    finally:
        for each, handler in usual.items():
            signal.signal(each, handler)
        with contextlib.suppress(ProcessLookupError):  # the processes of one that was interrupted
            os.killpg(pytest.pid, signal.SIGKILL)
    print(f"gpu-check took {time.monotonic() - began:.0f} s", flush=True)
    return code


def command(arguments: Sequence[str], basetemp: Path, workers: int, test_s: float = TEST_S) -> list[str]:
    """Return pytest over the tests marked `gpu`, in `workers` processes, with `test_s` seconds for a test."""
    return [
        sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", "-p", "harness.gpu_session",
        f"--numprocesses={workers}", "--dist=load", "--maxschedchunk=1", f"--timeout={test_s:g}",
        "--timeout-method=thread", f"--basetemp={basetemp}", *arguments,
    ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
