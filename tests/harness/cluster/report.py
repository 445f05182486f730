"""What a person looks at first when a test on a cluster has failed."""

import contextlib
from collections.abc import Sequence

from weft_devcluster.api import Api
from weft_devcluster.errors import Refused

QUIET = ("kube-system", "kube-public", "kube-node-lease")
LINES = 30


def report(api: Api, namespaces: Sequence[str] = ()) -> str:
    """Pods, warnings and the last lines of every container (of these namespaces), as text."""
    warnings = ["get", "events", "-A", "--field-selector=type=Warning", "--sort-by=.lastTimestamp"]
    parts = [_try(api, "get", "pods", "-A", "-o", "wide"), _try(api, *warnings)]
    with contextlib.suppress(Refused):  # the first part has told already that nobody answers
        for pod in api.get("pods")["items"]:
            name, namespace = pod["metadata"]["name"], pod["metadata"]["namespace"]
            if namespace in namespaces or not (namespaces or namespace in QUIET):
                logs = ["logs", name, "-n", namespace, "--all-containers", "--prefix", f"--tail={LINES}"]
                parts.append(f"--- {namespace}/{name}\n{_try(api, *logs)}")
    return "\n".join(parts)


def _try(api: Api, *arguments: str) -> str:
    try:
        return api.kubectl(*arguments, timeout_s=20.0)
    except Refused as error:
        return str(error)
