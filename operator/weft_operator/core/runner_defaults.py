"""Defaults of the runner pods of an installation: set by the platform, the same for every pool.

In a cluster they are a YAML file rendered by the chart (`--runner-defaults`). The names in the file are the fields'
names in camelCase.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Json = Mapping[str, Any]

# What Pod Security calls "restricted".
POD_SECURITY: Json = {
    "runAsNonRoot": True,
    "runAsUser": 65532,
    "runAsGroup": 65532,
    "fsGroup": 65532,
    "seccompProfile": {"type": "RuntimeDefault"},
}
CONTAINER_SECURITY: Json = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "readOnlyRootFilesystem": True,
}


@dataclass(frozen=True, slots=True)
class SecurityContexts:
    """The security contexts of pod and container, as Kubernetes writes them."""

    pod: Json = field(default_factory=lambda: dict(POD_SECURITY))
    container: Json = field(default_factory=lambda: dict(CONTAINER_SECURITY))


@dataclass(frozen=True, slots=True)
class RunnerDefaults:
    """The parts of a runner pod outside of a pool's choice. Mappings and lists are as Kubernetes writes them."""

    image: str
    supervisor: str  # host:port
    depot: str  # URL
    image_pull_policy: str = ""  # "": the API server's default for this image
    image_pull_secrets: Sequence[str] = ()
    tls_secret: str = ""  # a Secret in the pool's namespace with tls.crt, tls.key and ca.crt; "": plain text
    command: Sequence[str] = ("python", "-m", "weft_runner")
    env: Sequence[Json] = ()
    volumes: Sequence[Json] = ()
    volume_mounts: Sequence[Json] = ()
    resources: Json = field(default_factory=dict[str, Any])  # of a pool without resources
    security_contexts: SecurityContexts = field(default_factory=SecurityContexts)
    pod_labels: Mapping[str, str] = field(default_factory=dict[str, str])
    pod_annotations: Mapping[str, str] = field(default_factory=dict[str, str])
    network_policies: bool = False  # pods may connect only if a policy lets them
    pools_at_a_time: int = 1  # pools with runners in replacement after a change of these defaults; 0: all
    executor: str = ""  # "": the runner chooses
    log_level: str = "INFO"
    log_format: str = "json"
