"""What GPU code may import: it runs from a checkout where torch and Triton are, and little else."""

import subprocess
import sys

ABSENT = (
    "weft.api", "weft.artifacts", "weft.store", "weft.telemetry", "weft.wire", "grpc", "google", "fastapi", "kopf",
    "pydantic", "typer", "rich", "httpx", "scipy", "transformers", "peft",
)  # fmt: skip
MODULES = ("weft_bench.gpu", "weft_runner.shell.engine", "weft_runner.model.cuda.executor")
SHOW = f"import sys, {', '.join(MODULES)}; print(*sys.modules)"


def test_gpu_code_imports_neither_the_wire_nor_any_library_of_the_control_plane():
    shown = subprocess.run([sys.executable, "-c", SHOW], capture_output=True, text=True, check=True).stdout.split()
    assert {*MODULES} <= {*shown}
    assert not {*shown}.intersection(ABSENT)
