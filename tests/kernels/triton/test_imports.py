"""What GPU code may import: it runs from a checkout where torch and Triton are, and little else."""

import os
import subprocess
import sys

import pytest

ABSENT = (
    "weft",
    "grpc",
    "google",
    "fastapi",
    "kopf",
    "pydantic",
    "typer",
    "rich",
    "httpx",
    "scipy",
    "transformers",
    "peft",
)
SHOW = "import {module}, sys; print(*sorted({{name.partition('.')[0] for name in sys.modules}}))"


@pytest.mark.parametrize("module", ["weft_runner.model.cuda", "weft_runner.engine", "weft_bench.gpu"])
def test_it_imports_neither_the_wire_nor_any_library_of_the_control_plane(module):
    command = [sys.executable, "-c", SHOW.format(module=module)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ, timeout=60)
    assert not set(done.stdout.split()).intersection(ABSENT)
