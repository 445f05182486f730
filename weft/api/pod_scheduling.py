"""Where a runner's pod may run: Kubernetes' own fields, with Kubernetes' own names and meaning (core/v1)."""

from typing import Annotated, Any, Literal

from pydantic import Field

from weft.api.fields import ApiModel

LABEL_KEY_PATTERN = r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$"
LABEL_VALUE_PATTERN = r"^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$"

ATOMIC: dict[str, Any] = {"x-kubernetes-list-type": "atomic"}
_ATOMIC_16: Any = Field(max_length=16, json_schema_extra=ATOMIC)

LabelKey = Annotated[str, Field(pattern=LABEL_KEY_PATTERN, max_length=317)]
LabelValue = Annotated[str, Field(pattern=LABEL_VALUE_PATTERN, max_length=63)]
Labels = Annotated[dict[str, LabelValue], Field(max_length=32)]
Weight = Annotated[int, Field(strict=True, ge=1, le=100)]
Values = Annotated[tuple[LabelValue, ...], Field(max_length=64)]
Keys = Annotated[tuple[LabelKey, ...], _ATOMIC_16]


class Toleration(ApiModel):
    """A taint of nodes that the pod puts up with."""

    key: LabelKey | None = None
    """Of the taint; unset with operator Exists: every taint."""
    operator: Literal["Equal", "Exists"] = "Equal"
    """How the value is compared."""
    value: LabelValue | None = None
    """Of the taint, with operator Equal."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Of the taint; unset: every effect."""
    toleration_seconds: Annotated[int, Field(strict=True, ge=0, le=86_400)] | None = None
    """How long a NoExecute taint is put up with; unset: for ever."""


class NodeRequirement(ApiModel):
    """What a node's label or field has to be."""

    key: LabelKey
    """Of the node's label."""
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt"]
    """How it is compared."""
    values: Values | None = None
    """What it is compared with: some for In and NotIn, one number for Gt and Lt, none for the others."""


Requirements = Annotated[tuple[NodeRequirement, ...], _ATOMIC_16]


class NodeTerm(ApiModel):
    """Requirements that hold all together."""

    match_expressions: Requirements | None = None
    """On labels of the node."""
    match_fields: Requirements | None = None
    """On fields of the node (metadata.name)."""


class NodeSelector(ApiModel):
    """Nodes that meet at least one term."""

    node_selector_terms: Annotated[tuple[NodeTerm, ...], Field(min_length=1, max_length=16, json_schema_extra=ATOMIC)]
    """One of them has to hold."""


class PreferredNode(ApiModel):
    """Nodes that are liked, and how much."""

    weight: Weight
    """How much, 1 to 100."""
    preference: NodeTerm
    """Which nodes."""


class NodeAffinity(ApiModel):
    """Which nodes, by their labels."""

    required_during_scheduling_ignored_during_execution: NodeSelector | None = None
    """Nodes that are possible at all."""
    preferred_during_scheduling_ignored_during_execution: Annotated[tuple[PreferredNode, ...], _ATOMIC_16] | None = None
    """Nodes that are better than others."""


class LabelRequirement(ApiModel):
    """What a pod's label has to be."""

    key: LabelKey
    """Of the label."""
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist"]
    """How it is compared."""
    values: Values | None = None
    """What it is compared with, for In and NotIn."""


class LabelSelector(ApiModel):
    """Pods by their labels; everything has to hold."""

    match_labels: Labels | None = None
    """Labels with exactly these values."""
    match_expressions: Annotated[tuple[LabelRequirement, ...], _ATOMIC_16] | None = None
    """Further requirements."""


class PodTerm(ApiModel):
    """Near which pods, and what near means."""

    topology_key: LabelKey
    """The node label whose equal values mean near, for example kubernetes.io/hostname."""
    label_selector: LabelSelector | None = None
    """Which pods."""
    namespaces: Annotated[tuple[LabelValue, ...], _ATOMIC_16] | None = None
    """Of which namespaces; the pool's own when unset."""
    namespace_selector: LabelSelector | None = None
    """Of which namespaces, by their labels."""
    match_label_keys: Keys | None = None
    """Labels whose value is to be that of the pod itself."""
    mismatch_label_keys: Keys | None = None
    """Labels whose value is to be another than that of the pod itself."""


class PreferredPod(ApiModel):
    """Nearness that is liked, and how much."""

    weight: Weight
    """How much, 1 to 100."""
    pod_affinity_term: PodTerm
    """Near which pods."""


class PodAffinity(ApiModel):
    """Near which pods (or, as podAntiAffinity, far from which)."""

    required_during_scheduling_ignored_during_execution: Annotated[tuple[PodTerm, ...], _ATOMIC_16] | None = None
    """Nearness without which the pod does not run."""
    preferred_during_scheduling_ignored_during_execution: Annotated[tuple[PreferredPod, ...], _ATOMIC_16] | None = None
    """Nearness that is better."""


class Affinity(ApiModel):
    """Which nodes, near which pods, and far from which."""

    node_affinity: NodeAffinity | None = None
    """Which nodes, by their labels."""
    pod_affinity: PodAffinity | None = None
    """Near which pods."""
    pod_anti_affinity: PodAffinity | None = None
    """Far from which pods."""


class TopologySpread(ApiModel):
    """How evenly pods are spread."""

    topology_key: LabelKey
    """The node label whose values are the places, for example topology.kubernetes.io/zone."""
    max_skew: Annotated[int, Field(strict=True, ge=1, le=1024)] = 1
    """How many more pods one place may have than another."""
    when_unsatisfiable: Literal["DoNotSchedule", "ScheduleAnyway"] = "ScheduleAnyway"
    """What happens where it cannot be kept."""
    label_selector: LabelSelector | None = None
    """Which pods count; the runners of the group when unset."""
    match_label_keys: Keys | None = None
    """Labels whose value is to be that of the pod itself."""
    min_domains: Annotated[int, Field(strict=True, ge=1, le=1024)] | None = None
    """The least number of places, with DoNotSchedule."""
    node_affinity_policy: Literal["Honor", "Ignore"] | None = None
    """Whether nodes that nodeAffinity and nodeSelector rule out count as places; Honor when unset."""
    node_taints_policy: Literal["Honor", "Ignore"] | None = None
    """Whether nodes with taints that are not tolerated count as places; Ignore when unset."""
