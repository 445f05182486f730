"""gRPC's handlers of forks are off in every process of ours: they crash in the child of a process with threads."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["weft_gateway.main", "weft_operator.local.processes", "weft_cli.main"])
def test_they_are_off(module: str) -> None:
    code = (
        f"import {module}, os, sys; assert 'grpc' not in sys.modules or os.environ['GRPC_ENABLE_FORK_SUPPORT'] == '0'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
