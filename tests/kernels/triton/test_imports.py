"""What GPU code and its tests may import: they run from a checkout where torch and Triton are, and little else."""

import os
import subprocess
import sys

ABSENT = (
    "weft.api", "weft.store", "weft.telemetry", "weft.wire", "grpc", "google.protobuf", "fastapi", "kopf", "pydantic",
    "typer", "rich", "transformers", "peft", "pytest_asyncio",
)  # fmt: skip
SHOW = """
import pytest, sys
sys.modules["grpc"] = sys.modules["google.protobuf"] = None
code = pytest.main(["--collect-only", "-qq", "-m", "gpu", "-p", "no:asyncio", "tests/kernels/triton"])
assert code == 0, code
import weft_bench.gpu_peft, weft_bench.gpu_slots, weft_bench.gpu_steps, weft_bench.gpu_streams
print(*(name for name, module in sys.modules.items() if module is not None))
"""


def test_gpu_code_imports_neither_the_wire_nor_any_library_of_the_control_plane() -> None:
    """What `make gpu-check` collects, and what `make gpu-bench` measures with."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", SHOW], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    shown = done.stdout.split()
    assert "weft_runner.model.cuda.executor" in shown
    assert not {*shown}.intersection(ABSENT)
