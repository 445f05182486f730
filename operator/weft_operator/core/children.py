"""The children of a pool in a cluster, as complete intents for server-side apply.

Each runner group has a Deployment. If a runner has several pods, each runner has a StatefulSet instead: its pods have
stable names, by a headless Service, and start and end together. The pool has a PodDisruptionBudget (how many runners a
drained node takes at a time) and a ServiceAccount without rights and without a token. The pool owns all of them, so
they are deleted with it.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from weft_operator.core.drift import with_spec_hash
from weft_operator.core.pod_template import TEMPLATE_HASH, make_pod_template
from weft_operator.core.resources import API_VERSION, Group, Meta, Object, PoolObject, Ref
from weft_operator.core.runner_config import make_runner_config
from weft_operator.core.runner_defaults import RunnerDefaults
from weft_operator.core.scaling import rollout_limits
from weft_operator.core.state import Child

Json = dict[str, Any]

MANAGER = "weft-operator"  # the field manager, and the value of the label managed-by
MANAGED_BY = "app.kubernetes.io/managed-by"
POOL_LABEL, GROUP_LABEL = "serving.weft.dev/pool", "serving.weft.dev/group"
RUNNER_LABEL, INDEX_LABEL = "serving.weft.dev/runner", "serving.weft.dev/runner-index"
RUNNER_KINDS = ("StatefulSet", "NetworkPolicy")  # the children of each runner with several pods
COMPONENT_LABEL, COMPONENT = "app.kubernetes.io/component", "runner"
MAX_CHILD_NAME_CHARS = 52  # a pod's name adds a hash and a random part to it, and is its host name: 63 at most
SHARED, RANKS = "runners", "ranks"
SHAPE_HASH, DEFAULTS_HASH = (
    "serving.weft.dev/shape",
    "serving.weft.dev/defaults",
)  # the two inputs of a runner's object


@dataclass(frozen=True, slots=True)
class Revision:
    """Hashes of the inputs of a pool's runners: the pool's part and the installation's part."""

    shape: str
    defaults: str
    pools_at_a_time: int

    @property
    def annotations(self) -> dict[str, str]:
        return {SHAPE_HASH: self.shape, DEFAULTS_HASH: self.defaults}


def revision_of(pool: PoolObject, base_digest: str, defaults: RunnerDefaults) -> Revision:
    return Revision(_hash((pool.shape, base_digest)), defaults_hash(defaults), defaults.pools_at_a_time)


def defaults_hash(defaults: RunnerDefaults) -> str:
    """Hash the installation's part of all runners."""
    return _hash(replace(defaults, pools_at_a_time=0))


def _hash(part: object) -> str:
    return hashlib.sha256(repr(part).encode()).hexdigest()


def template_hash(obj: Object) -> str:
    """Return the hash of the pod template of an object or a pod; empty: made by an older operator."""
    manifest = (obj.get("spec") or {}).get("template", obj)
    return str((manifest["metadata"].get("annotations") or {}).get(TEMPLATE_HASH, ""))


def make_children(
    pool: PoolObject, base_digest: str, defaults: RunnerDefaults, sizes: Mapping[str, int]
) -> list[Child]:
    """Make the children of the pool. `sizes`: runners of each group, by its name."""
    meta, limits = pool.meta, rollout_limits(pool, sum(sizes.values()))
    shared = child_name(meta.ref.name, SHARED)
    if pool.spec.parallelism.pods_per_runner > 1:
        children = [
            _child(meta, "v1", "Service", child_name(meta.ref.name, RANKS), {}, {"spec": _ranks_service(meta.ref)})
        ]
    else:
        children = [_deployment(pool, group, base_digest, defaults, sizes[group.name], limits) for group in pool.groups]
    return [
        _child(meta, "v1", "ServiceAccount", shared, {}, {"automountServiceAccountToken": False}),
        _child(meta, "policy/v1", "PodDisruptionBudget", shared, {}, {"spec": _budget(pool)}),
        *children,
    ]


def runner_children(
    pool: PoolObject, group: Group, base_digest: str, defaults: RunnerDefaults, index: int
) -> list[Child]:
    """Make the children of runner `index` of a group with several pods per runner."""
    meta, ref = pool.meta, pool.meta.ref
    name = child_name(ref.name, f"{group.name}-{index}")
    selecting = {**_selecting(ref), GROUP_LABEL: group.name, RUNNER_LABEL: name}
    labels = {GROUP_LABEL: group.name, RUNNER_LABEL: name, INDEX_LABEL: str(index)}
    service = child_name(ref.name, RANKS)
    split = pool.spec.parallelism
    template = make_pod_template(
        group, make_runner_config(pool, base_digest, group), defaults, labels={**_labels(ref), **labels},
        account=child_name(ref.name, SHARED), drain_s=pool.spec.drain_seconds,
        leader=f"{name}-0.{service}.{ref.namespace}.svc",
        pods=split.pods_per_runner, ranks_per_pod=split.tensor * split.pipeline // split.pods_per_runner,
    )  # fmt: skip
    spec = {
        "serviceName": service,
        "replicas": split.pods_per_runner,
        "podManagementPolicy": "Parallel",
        "updateStrategy": {"type": "OnDelete"},  # a part of the pods cannot serve: the whole set is replaced
        "revisionHistoryLimit": 2,
        "selector": {"matchLabels": selecting},
        "template": template,
    }
    notes = revision_of(pool, base_digest, defaults).annotations
    children = [_child(meta, "apps/v1", "StatefulSet", name, labels, {"spec": spec}, notes)]
    if defaults.network_policies:  # without other policies it would cut the pods off
        policy = {"spec": _ranks_policy(selecting)}
        children.append(_child(meta, "networking.k8s.io/v1", "NetworkPolicy", name, labels, policy))
    return children


def is_adoptable(obj: Object, pool: Meta) -> bool:
    """Whether an object may become this pool's: the pool controls it, or its labels name the pool and nobody does."""
    metadata = obj["metadata"]
    controller = next((owner for owner in metadata.get("ownerReferences") or () if owner.get("controller")), None)
    if controller is not None:
        return bool(controller["uid"] == pool.uid)
    labels = metadata.get("labels") or {}
    return (labels.get(MANAGED_BY), labels.get(POOL_LABEL)) == (MANAGER, pool.ref.name)


def child_names(pool: PoolObject) -> set[str]:
    """Return the names of the pool's children, except children of runners with several pods (RUNNER_KINDS)."""
    return {child_name(pool.meta.ref.name, part) for part in (SHARED, RANKS, *(group.name for group in pool.groups))}


def child_name(pool: str, part: str) -> str:
    """Make the name `POOL-PART`: unique, at most 52 characters, with a letter first (as Services need).

    A name that breaks a rule gets a hash of both parts: pool a-b with group c is not pool a with group b-c.
    """
    plain = f"{pool}-{part}"
    if len(plain) <= MAX_CHILD_NAME_CHARS and "-" not in part and plain[0].isalpha():
        return plain
    digest = hashlib.sha256(f"{pool}/{part}".encode()).hexdigest()[:8]
    head = plain if plain[0].isalpha() else f"pool-{plain}"
    return f"{head[: MAX_CHILD_NAME_CHARS - 9].rstrip('-')}-{digest}"


def selector(pool: Ref) -> str:
    """The label selector of a pool's pods, as the scale subresource has it."""
    return ",".join(f"{name}={value}" for name, value in _selecting(pool).items())


def group_labels(pool: Ref, group: str) -> dict[str, str]:
    """The labels of a group's pods; a Deployment selects by them, so they never change."""
    return {**_labels(pool), GROUP_LABEL: group}


def _deployment(
    pool: PoolObject, group: Group, base_digest: str, defaults: RunnerDefaults, size: int, limits: tuple[int, int]
) -> Child:
    """Make a group's Deployment. `limits`: maxUnavailable and maxSurge. Accelerators are scarce: by default an old pod
    leaves before a new pod starts.
    """
    meta, labels = pool.meta, group_labels(pool.meta.ref, group.name)
    account = child_name(meta.ref.name, SHARED)
    spec = {
        "replicas": size,
        "selector": {"matchLabels": {**_selecting(meta.ref), GROUP_LABEL: group.name}},
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": limits[1], "maxUnavailable": limits[0]}},
        "revisionHistoryLimit": 2,
        "template": make_pod_template(
            group,
            make_runner_config(pool, base_digest, group),
            defaults,
            labels=labels,
            account=account,
            drain_s=pool.spec.drain_seconds,
        ),
    }
    group_label = {GROUP_LABEL: group.name}
    name, notes = child_name(meta.ref.name, group.name), revision_of(pool, base_digest, defaults).annotations
    return _child(meta, "apps/v1", "Deployment", name, group_label, {"spec": spec}, notes)


def _ranks_service(pool: Ref) -> Json:
    """Make the Service that names pods. Ranks find the first pod before it is ready."""
    return {"clusterIP": "None", "selector": _selecting(pool), "publishNotReadyAddresses": True}


def _ranks_policy(selecting: Mapping[str, str]) -> Json:
    """Make the policy that lets pods of a runner reach each other at any port, for tensors."""
    peers = [{"podSelector": {"matchLabels": dict(selecting)}}]
    return {
        "podSelector": {"matchLabels": dict(selecting)},
        "policyTypes": ["Ingress", "Egress"],
        "ingress": [{"from": peers}],
        "egress": [{"to": peers}],
    }


def _budget(pool: PoolObject) -> Json:
    # A runner that is not ready serves no requests: it must not keep a node from being drained.
    return {
        "maxUnavailable": pool.spec.disruption_budget.max_unavailable,
        "selector": {"matchLabels": _selecting(pool.meta.ref)},
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
    }


def _child(
    meta: Meta, api_version: str, kind: str, name: str, labels: Mapping[str, str], rest: Json,
    annotations: Mapping[str, str] | None = None,
) -> Child:  # fmt: skip
    owner = {
        "apiVersion": API_VERSION,
        "kind": "ServingPool",
        "name": meta.ref.name,
        "uid": meta.uid,
        "controller": True,
    }
    metadata = {
        "name": name,
        "namespace": meta.ref.namespace,
        "labels": {**_labels(meta.ref), **labels},
        "ownerReferences": [owner],
        **({"annotations": dict(annotations)} if annotations else {}),
    }
    manifest = with_spec_hash({"apiVersion": api_version, "kind": kind, "metadata": metadata, **rest})
    return Child(kind, meta.ref.namespace, name, manifest)


def _selecting(pool: Ref) -> dict[str, str]:
    return {POOL_LABEL: pool.name, COMPONENT_LABEL: COMPONENT}


def _labels(pool: Ref) -> dict[str, str]:
    return {MANAGED_BY: MANAGER, **_selecting(pool)}
