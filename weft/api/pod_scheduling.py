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
    """The key of the taint. Without it, operator Exists tolerates every taint."""
    operator: Literal["Equal", "Exists"] = "Equal"
    """How the value is compared: Equal needs an equal value, Exists takes any."""
    value: LabelValue | None = None
    """The value of the taint, with operator Equal."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """The effect of the taint. Without it every effect is tolerated."""
    toleration_seconds: Annotated[int, Field(strict=True, ge=0, le=86_400)] | None = None
    """The seconds for which a NoExecute taint is tolerated. Without it there is no bound."""


class NodeRequirement(ApiModel):
    """What a node's label or field has to be."""

    key: LabelKey
    """The key of the node's label, or the name of its field."""
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt"]
    """How the label's value is compared with values."""
    values: Values | None = None
    """The values to compare with: one or more for In and NotIn, one number for Gt and Lt, none for the others."""


Requirements = Annotated[tuple[NodeRequirement, ...], _ATOMIC_16]


class NodeTerm(ApiModel):
    """Requirements that hold all together."""

    match_expressions: Requirements | None = None
    """The requirements on labels of the node."""
    match_fields: Requirements | None = None
    """The requirements on fields of the node (metadata.name)."""


class NodeSelector(ApiModel):
    """Nodes that meet at least one term."""

    node_selector_terms: Annotated[tuple[NodeTerm, ...], Field(min_length=1, max_length=16, json_schema_extra=ATOMIC)]
    """The terms, at least one of which has to hold."""


class PreferredNode(ApiModel):
    """Nodes that are liked, and how much."""

    weight: Weight
    """The weight of the preference, from 1 to 100."""
    preference: NodeTerm
    """The nodes that are preferred."""


class NodeAffinity(ApiModel):
    """Which nodes, by their labels."""

    required_during_scheduling_ignored_during_execution: NodeSelector | None = None
    """The nodes that the pod may run on."""
    preferred_during_scheduling_ignored_during_execution: Annotated[tuple[PreferredNode, ...], _ATOMIC_16] | None = None
    """The nodes that the pod should run on, by weight."""


class LabelRequirement(ApiModel):
    """What a pod's label has to be."""

    key: LabelKey
    """The key of the label."""
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist"]
    """How the label's value is compared with values."""
    values: Values | None = None
    """The values to compare with, for In and NotIn."""


class LabelSelector(ApiModel):
    """Pods by their labels; everything has to hold."""

    match_labels: Labels | None = None
    """The labels and the values that they have to have."""
    match_expressions: Annotated[tuple[LabelRequirement, ...], _ATOMIC_16] | None = None
    """The further requirements on labels."""


class PodTerm(ApiModel):
    """Near which pods, and what near means."""

    topology_key: LabelKey
    """The node label whose equal values mean the same place, for example kubernetes.io/hostname."""
    label_selector: LabelSelector | None = None
    """The labels of the pods that the term is about."""
    namespaces: Annotated[tuple[LabelValue, ...], _ATOMIC_16] | None = None
    """The namespaces of the pods that the term is about. They default to the pool's own."""
    namespace_selector: LabelSelector | None = None
    """The labels of the namespaces of the pods that the term is about."""
    match_label_keys: Keys | None = None
    """The keys of labels whose values have to equal those of the incoming pod."""
    mismatch_label_keys: Keys | None = None
    """The keys of labels whose values have to differ from those of the incoming pod."""


class PreferredPod(ApiModel):
    """Nearness that is liked, and how much."""

    weight: Weight
    """The weight of the preference, from 1 to 100."""
    pod_affinity_term: PodTerm
    """The pods that the preference is about."""


class PodAffinity(ApiModel):
    """Near which pods (or, as podAntiAffinity, far from which)."""

    required_during_scheduling_ignored_during_execution: Annotated[tuple[PodTerm, ...], _ATOMIC_16] | None = None
    """The terms that have to hold for the pod to run on a node."""
    preferred_during_scheduling_ignored_during_execution: Annotated[tuple[PreferredPod, ...], _ATOMIC_16] | None = None
    """The terms that should hold, by weight."""


class Affinity(ApiModel):
    """Which nodes, near which pods, and far from which."""

    node_affinity: NodeAffinity | None = None
    """The rules about nodes, by their labels."""
    pod_affinity: PodAffinity | None = None
    """The rules that attract the pod to other pods."""
    pod_anti_affinity: PodAffinity | None = None
    """The rules that keep the pod away from other pods."""


class TopologySpread(ApiModel):
    """How evenly pods are spread."""

    topology_key: LabelKey
    """The node label whose values are the places, for example topology.kubernetes.io/zone."""
    max_skew: Annotated[int, Field(strict=True, ge=1, le=1024)] = 1
    """The largest difference between the numbers of pods of two places."""
    when_unsatisfiable: Literal["DoNotSchedule", "ScheduleAnyway"] = "ScheduleAnyway"
    """Whether a pod that would break the constraint waits (DoNotSchedule) or runs anyway (ScheduleAnyway)."""
    label_selector: LabelSelector | None = None
    """The labels of the pods that count. They default to those of the group's runners."""
    match_label_keys: Keys | None = None
    """The keys of labels whose values have to equal those of the incoming pod."""
    min_domains: Annotated[int, Field(strict=True, ge=1, le=1024)] | None = None
    """The least number of places, with DoNotSchedule."""
    node_affinity_policy: Literal["Honor", "Ignore"] | None = None
    """Whether nodes that nodeAffinity and nodeSelector exclude count as places. It defaults to Honor: they do not."""
    node_taints_policy: Literal["Honor", "Ignore"] | None = None
    """Whether nodes with taints that are not tolerated count as places. It defaults to Ignore: they do."""
