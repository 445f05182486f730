"""The pod of a runner: the pool's requirements in the form of this installation's pods.

Nothing in it depends on adapters: a new adapter is sent to runners, it never restarts a runner.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from math import ceil
from typing import Any

from weft.api.template import amount
from weft_operator.core.resources import Group, Object
from weft_operator.core.runner_defaults import RunnerDefaults
from weft_operator.core.state import RunnerConfig

Json = dict[str, Any]

# KV: of the pod's first process; further processes use the next ports
GRPC_PORT, PROBES_PORT, KV_PORT = 7400, 7401, 7402
RANKS_PORT = 7470
PORTS = {"grpc": GRPC_PORT, "probes": PROBES_PORT, "kv": KV_PORT}
DATA, CACHE, TLS = "/var/lib/weft", "/var/cache/weft", "/etc/weft/tls"
SHM_SIZE = "1Gi"
TEMPLATE_HASH = "serving.weft.dev/template"  # a pod's annotation: the hash of its template
STORAGE = "ephemeral-storage"
LOGS_BYTES = 1 << 30  # of ephemeral-storage in addition to the volumes: logs, temporary files
AFTER_DRAIN_S = 30  # beyond the pool's drain time, before a pod is killed


def make_pod_template(
    group: Group, launch: RunnerConfig, defaults: RunnerDefaults, *, labels: Mapping[str, str], account: str,
    drain_s: float, leader: str = "", pods: int = 1, ranks_per_pod: int = 1,
) -> Json:  # fmt: skip
    """Make the PodTemplateSpec of a group's Deployment or a runner's StatefulSet. `leader`: its first pod's name."""
    template = group.template
    metadata = {
        "labels": {**defaults.pod_labels, **(template.get("labels") or {}), **labels},
        "annotations": {**defaults.pod_annotations, **(template.get("annotations") or {})},
    }
    shared = {
        "serviceAccountName": account,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        # Process 1 of a namespace ignores signals without a handler: a runner deleted during its imports would stay
        # until it is killed. With a shared namespace, process 1 is the pod's sandbox.
        "shareProcessNamespace": True,
        "terminationGracePeriodSeconds": ceil(drain_s) + AFTER_DRAIN_S,
    }
    volumes, mounts = _launch_volumes(launch, ranks_per_pod)
    args = arguments(launch, defaults, leader, pods)
    volumes = _volumes(defaults, volumes)
    container = _container(template, args, defaults, volumes, mounts, ranks=bool(leader))
    made = {
        "metadata": _set_fields(metadata),
        "spec": {**shared, **_pod(template, container, defaults, volumes, labels)},
    }
    digest = hashlib.sha256(json.dumps(made, sort_keys=True).encode()).hexdigest()
    return {**made, "metadata": {**made["metadata"], "annotations": {**metadata["annotations"], TEMPLATE_HASH: digest}}}


def _launch_volumes(launch: RunnerConfig, ranks_per_pod: int) -> tuple[list[Json], list[Json]]:
    """Make the volumes requested by the pool, and their mounts. A site's volume replaces the pool's by name.

    Offloaded weights end with the pod, and the next pod packs them again.
    """
    cache, offload = launch.model_cache, launch.memory.offload
    folder = cache.empty_dir if cache else None
    volumes, mounts = [_empty_dir("data", folder.size_limit if folder else None)], list[Json]()
    if cache and cache.is_shared:
        source = cache.to_dict()
        if "hostPath" in source:
            source["hostPath"]["type"] = "Directory"
        volumes.append({"name": "model-cache", **source})
        mounts.append({"name": "model-cache", "mountPath": CACHE})
    if offload is not None:
        limit = None if offload.disk_bytes is None else int(amount(offload.disk_bytes)) * ranks_per_pod
        volumes.append(_empty_dir("offload", limit))
        mounts.append({"name": "offload", "mountPath": offload.disk_path})
    return volumes, mounts


def _empty_dir(name: str, size: int | str | None) -> Json:
    return {"name": name, "emptyDir": {} if size is None else {"sizeLimit": str(int(amount(size)))}}


def _resources(resources: Object, volumes: list[Json]) -> Json:
    """Add the node disk of the pod's volumes, unless the resources name it themselves."""
    folders = [volume["emptyDir"] for volume in volumes if "emptyDir" in volume]
    sizes = [folder["sizeLimit"] for folder in folders if "sizeLimit" in folder and "medium" not in folder]
    requests, limits = resources.get("requests") or {}, resources.get("limits") or {}
    if not sizes or STORAGE in requests or STORAGE in limits:
        return _set_fields(resources)
    total = sum(int(amount(size)) for size in sizes)
    return {
        **_set_fields(resources),
        "requests": {**requests, STORAGE: str(total)},
        "limits": {**limits, STORAGE: str(total + LOGS_BYTES)},
    }


def arguments(launch: RunnerConfig, defaults: RunnerDefaults, leader: str = "", pods: int = 1) -> list[str]:
    """Make the flags of `python -m weft_runner` in a pod. `$(POD_IP)` and the like are filled in by the kubelet."""
    ranks = {"host": f"$(POD_INDEX)/{pods}", "leader": f"{leader}:{RANKS_PORT}"}
    flags = {
        "listen": f"0.0.0.0:{GRPC_PORT}",
        "advertise": f"$(POD_IP):{GRPC_PORT}",
        "probes": f"0.0.0.0:{PROBES_PORT}",
        "kv-listen": f"0.0.0.0:{KV_PORT}",
        "name": "$(POD_NAME)",
        "supervisor": defaults.supervisor,
        "depot": defaults.depot,
        "data-dir": DATA,
        "model-cache": CACHE if launch.model_cache and launch.model_cache.is_shared else "",
        **dict(launch.flags),
        **(ranks if leader else {}),
        "tls-dir": TLS if defaults.tls_secret else "",
        "executor": defaults.executor,
        "log-level": defaults.log_level,
        "log-format": defaults.log_format,
    }
    return [word for flag, value in flags.items() if value != "" for word in (f"--{flag}", str(value))]


def _pod(
    template: Object, container: Json, defaults: RunnerDefaults, volumes: list[Json], labels: Mapping[str, str]
) -> Json:  # fmt: skip
    chosen = ("nodeSelector", "tolerations", "affinity", "priorityClassName", "runtimeClassName")
    return _set_fields(
        {
            "securityContext": dict(defaults.security_contexts.pod),
            "imagePullSecrets": [{"name": name} for name in defaults.image_pull_secrets],
            "containers": [container],
            "volumes": volumes,
            **{name: template.get(name) for name in chosen},
            "topologySpreadConstraints": [
                {"labelSelector": {"matchLabels": dict(labels)}, **constraint}
                for constraint in template.get("topologySpreadConstraints") or ()
            ],
        }
    )


def _container(
    template: Object, args: list[str], defaults: RunnerDefaults, volumes: list[Json], mounts: list[Json], *, ranks: bool
) -> Json:  # fmt: skip
    """Make the runner's container. `ranks`: the runner has several pods."""
    return _set_fields(
        {
            "name": "runner",
            "image": template.get("image") or defaults.image,
            "imagePullPolicy": defaults.image_pull_policy,
            "command": list(defaults.command),
            "args": args,
            "env": _env(template, defaults, ranks=ranks),
            "ports": [_port(name, port) for name, port in PORTS.items()],
            "resources": _resources(template.get("resources") or defaults.resources, volumes),
            "securityContext": dict(defaults.security_contexts.container),
            "volumeMounts": _mounts(defaults, mounts),
            "terminationMessagePolicy": "FallbackToLogsOnError",  # a pool's condition has a runner's last words
            # /healthz answers while the base is fetched and loaded: the three probes tell three things apart.
            "startupProbe": _probe("/healthz", period_s=2, failures=60),
            "livenessProbe": _probe("/healthz", period_s=10, failures=6),
            "readinessProbe": _probe("/readyz", period_s=2, failures=3),
        }
    )


def _env(template: Object, defaults: RunnerDefaults, *, ranks: bool) -> list[Json]:
    """Join the environment. Later variables win; the operator's variables cannot be replaced."""
    index = {"fieldRef": {"fieldPath": "metadata.labels['apps.kubernetes.io/pod-index']"}}
    environment: list[Json] = [
        {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        *([{"name": "POD_INDEX", "valueFrom": index}] if ranks else []),
    ]
    return _by_name("name", ({"name": "HOME", "value": "/tmp"},), defaults.env, template.get("env") or (), environment)  # noqa: S108 (of the pod)


def _volumes(defaults: RunnerDefaults, launch: list[Json]) -> list[Json]:
    """Join the volumes. `launch`: the pool's volumes, the data directory first."""
    volumes: list[Json] = [
        launch[0],
        {"name": "tmp", "emptyDir": {}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": SHM_SIZE}},
    ]
    tls = [{"name": "tls", "secret": {"secretName": defaults.tls_secret}}] if defaults.tls_secret else []
    return _by_name("name", volumes, tls, launch[1:], defaults.volumes)


def _mounts(defaults: RunnerDefaults, launch: list[Json]) -> list[Json]:
    mounts: list[Json] = [
        {"name": "data", "mountPath": DATA},
        {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108 (of the pod)
        {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108
    ]
    tls = [{"name": "tls", "mountPath": TLS, "readOnly": True}] if defaults.tls_secret else []
    return _by_name("mountPath", launch, mounts, tls, defaults.volume_mounts)


def _by_name(key: str, *lists: Iterable[Mapping[str, Any]]) -> list[Json]:
    """Join lists by name. The last entry of a name counts."""
    joined = {item[key]: dict(item) for items in lists for item in items}
    return list(joined.values())


def _port(name: str, port: int) -> Json:
    return {"name": name, "containerPort": port, "protocol": "TCP"}


def _probe(path: str, *, period_s: int, failures: int) -> Json:
    get = {"path": path, "port": "probes"}
    return {"httpGet": get, "periodSeconds": period_s, "timeoutSeconds": 5, "failureThreshold": failures}


def _set_fields(fields: Mapping[str, Any]) -> Json:
    """Drop empty fields: an API server drops them too."""
    return {name: value for name, value in fields.items() if value not in (None, "", [], (), {})}
