"""Benchmarks that need an API server, on a control plane of their own."""

import subprocess
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from weft_devcluster.control_plane import ControlPlane


def bench_operator(arguments: Sequence[str]) -> int:
    """Run `weft bench operator` against level (a), with its audit log; returns the command's exit code."""
    weft = Path(sysconfig.get_path("scripts")) / "weft"
    with ControlPlane() as made:
        made.apply_crds()
        command = [weft, "bench", "operator", "--kubeconfig", made.kubeconfig, "--audit-log", made.audit_log]
        return subprocess.run([*command, *arguments], check=False).returncode
