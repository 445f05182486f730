"""What a person looks at first when a test on a cluster has failed."""

import contextlib

from harness.cluster.control_plane import ControlPlane
from harness.cluster.errors import Refused

QUIET = ("kube-system", "kube-public", "kube-node-lease")
LINES = 30


def report(control_plane: ControlPlane) -> str:
    """Pods, warnings and the last lines of every container, as text."""
    warnings = ["get", "events", "-A", "--field-selector=type=Warning", "--sort-by=.lastTimestamp"]
    parts = [_try(control_plane, "get", "pods", "-A", "-o", "wide"), _try(control_plane, *warnings)]
    with contextlib.suppress(Refused):  # the first part has told already that nobody answers
        for pod in control_plane.get("pods")["items"]:
            name, namespace = pod["metadata"]["name"], pod["metadata"]["namespace"]
            if namespace not in QUIET:
                logs = ["logs", name, "-n", namespace, "--all-containers", "--prefix", f"--tail={LINES}"]
                parts.append(f"--- {namespace}/{name}\n{_try(control_plane, *logs)}")
    return "\n".join(parts)


def _try(control_plane: ControlPlane, *arguments: str) -> str:
    try:
        return control_plane.kubectl(*arguments, timeout_s=20.0)
    except Refused as error:
        return str(error)
