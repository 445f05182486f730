"""The settings of a pool's pods available to its owner.

A pool's owner cannot set volumes, security contexts, service accounts or commands, nor annotations by which a container
runtime or an injector grants them. With them a pool would give access to a node's files or to foreign rights. The
platform sets them (`--runner-defaults` of the operator, the chart's values), and also the list of folders for
`modelCache`.
"""

import re
from collections.abc import Callable
from decimal import Decimal
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PlainValidator, WithJsonSchema

from weft.api.fields import ApiModel, Label, ObjectName, Rule, unique_names
from weft.api.pod_scheduling import ATOMIC, LABEL_KEY_PATTERN, Labels, Toleration, Unparsed

ENV_NAME_PATTERN = r"^[A-Za-z_.-][A-Za-z0-9_.-]*$"
IMAGE_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._:/@-]*$"
MAX_POOL_RUNNERS = 1024
GPU = "nvidia.com/gpu"  # the resource: a limit on it in the template means runners on GPUs
QUANTITY_PATTERN = r"^([0-9]+\.?[0-9]*|\.[0-9]+)([KMGTPE]i|[numkMGTPE]|[eE][-+]?[0-9]{1,2})?$"
RESERVED = ("serving.weft.dev/", "app.kubernetes.io/", "controller.kubernetes.io/")
OF_THE_NODE = (  # annotations by which runtimes and Istio lift confinement, or mount devices and volumes
    "cdi.k8s.io/", "container.apparmor.security.beta.kubernetes.io/", "io.katacontainers.", "io.kubernetes.cri-o.",
    "sidecar.istio.io/user",
)  # fmt: skip
_DECIMAL = {"n": -9, "u": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_BINARY = {"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40, "Pi": 50, "Ei": 60}
_BY_NAME: dict[str, Any] = {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]}


def amount(quantity: int | str) -> Decimal:
    """Return the number of a quantity (of QUANTITY_PATTERN)."""
    text = str(quantity)
    if text[-2:] in _BINARY:
        return Decimal(text[:-2]) * 2 ** _BINARY[text[-2:]]
    if text[-1:] in _DECIMAL:
        return Decimal(text[:-1]).scaleb(_DECIMAL[text[-1:]])
    return Decimal(text)


def _checked(value: object) -> int | str:
    number = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    if isinstance(value, int | str) and (number or (isinstance(value, str) and re.match(QUANTITY_PATTERN, value))):
        return value
    raise ValueError("expected a quantity, for example 2, 500m or 64Gi")


Quantity = Annotated[
    int | str,
    PlainValidator(_checked),
    WithJsonSchema({"x-kubernetes-int-or-string": True, "minimum": 0, "maxLength": 32, "pattern": QUANTITY_PATTERN}),
]
Amounts = Annotated[dict[str, Quantity], Field(max_length=16)]
Annotations = Annotated[dict[str, Annotated[str, Field(max_length=4096)]], Field(max_length=32)]


def _keys(field: str, entries: Callable[[Any], dict[str, str] | None]) -> Rule:
    def holds(value: Any) -> bool:
        return all(len(key) <= 317 and re.match(LABEL_KEY_PATTERN, key) for key in entries(value) or {})

    return Rule(
        field,
        "expected a label key: NAME or DOMAIN/NAME",
        f"!has(self.{field}) || self.{field}.all(key, size(key) <= 317 && key.matches(r'{LABEL_KEY_PATTERN}'))",
        holds,
    )


def _not_reserved(
    field: str, entries: Callable[[Any], dict[str, str] | None], prefixes: tuple[str, ...], owner: str
) -> Rule:
    def holds(value: Any) -> bool:
        return not any(key.startswith(prefixes) for key in entries(value) or {})

    reserved = " || ".join(f"key.startsWith('{prefix}')" for prefix in prefixes)
    return Rule(
        field,
        f"keys that begin with {', '.join(prefixes)} are {owner}",
        f"!has(self.{field}) || !self.{field}.exists(key, {reserved})",
        holds,
    )


class Resources(ApiModel):
    """The resources of a node available to a runner."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "requests",
            "requests may not be above limits",
            "!has(self.limits) || !has(self.requests) || self.requests.all(name, !(name in self.limits) || "
            "quantity(string(self.requests[name])).compareTo(quantity(string(self.limits[name]))) <= 0)",
            lambda resources: _is_within(resources.requests or {}, resources.limits or {}),
        ),
    )

    limits: Amounts | None = None
    """The maximum of each resource that the container may use. Accelerators are set here, for example nvidia.com/gpu:
    1."""
    requests: Amounts | None = None
    """The free amount of each resource that a node needs. The default is limits. It cannot exceed them."""


class EnvVar(ApiModel):
    """An environment variable. References to Secrets are not supported: runners do not log in anywhere."""

    name: Annotated[str, Field(pattern=ENV_NAME_PATTERN, max_length=255)]
    """The name of the variable."""
    value: Annotated[str, Field(max_length=4096)] = ""
    """The value of the variable, as plain text."""


class RunnerTemplate(ApiModel):
    """The pods of runners. The platform's settings apply to unset fields. The grace period follows drainSeconds."""

    rules: ClassVar[tuple[Rule, ...]] = (
        _keys("labels", lambda template: template.labels),
        _keys("annotations", lambda template: template.annotations),
        _keys("nodeSelector", lambda template: template.node_selector),
        _not_reserved("labels", lambda template: template.labels, RESERVED, "the operator's own"),
        _not_reserved("annotations", lambda template: template.annotations, RESERVED, "the operator's own"),
        _not_reserved("annotations", lambda template: template.annotations, OF_THE_NODE, "for the platform to set"),
        unique_names("env", lambda template: template.env),
        Rule(
            "priorityClassName",
            "classes that begin with system- are for the cluster: they preempt foreign pods",
            "!has(self.priorityClassName) || !self.priorityClassName.startsWith('system-')",
            lambda template: not (template.priority_class_name or "").startswith("system-"),
        ),
    )

    image: Annotated[str, Field(pattern=IMAGE_PATTERN, max_length=512)] | None = None
    """The runner's container image. The default is the platform's."""
    resources: Resources | None = None
    """The resources of one runner's container. The default is the platform's."""
    env: Annotated[tuple[EnvVar, ...], Field(max_length=64, json_schema_extra=_BY_NAME)] | None = None
    """The environment variables of the runner."""
    labels: Labels | None = None
    """The labels of the pods, in addition to the operator's labels."""
    annotations: Annotations | None = None
    """The annotations of the pods, in addition to the operator's annotations."""
    node_selector: Labels | None = None
    """The labels that a node needs to run the pods."""
    tolerations: Annotated[tuple[Toleration, ...], Field(max_length=32, json_schema_extra=ATOMIC)] | None = None
    """The taints tolerated by the pods."""
    affinity: Unparsed | None = None
    """The rules that attract the pods to nodes and to pods, or keep them apart, as in core/v1. The API server judges
    them before a runner is replaced. If it refuses them, Progressing is False with reason ChildRefused."""
    topology_spread_constraints: (
        Annotated[tuple[Unparsed, ...], Field(max_length=8, json_schema_extra=ATOMIC)] | None
    ) = None
    """The rules that spread the pods over zones or nodes, as in core/v1. The API server judges them as it does
    affinity. Without a labelSelector a rule counts the group's runners."""
    priority_class_name: ObjectName | None = None
    """The name of the pods' PriorityClass. The cluster's classes, with names that begin with system-, are refused."""
    runtime_class_name: ObjectName | None = None
    """The name of the pods' RuntimeClass."""


class RunnerGroup(ApiModel):
    """Runners of one kind of hardware. The sum of all groups is the pool's number of runners. Groups fill up in list
    order and empty in reverse, or follow their phases if phases are split."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "maxRunners",
            "maxRunners must be at least minRunners",
            "!has(self.maxRunners) || !has(self.minRunners) || self.maxRunners >= self.minRunners",
            lambda group: group.max_runners is None or group.max_runners >= group.min_runners,
        ),
    )

    name: Annotated[Label, Field(max_length=32)]
    """The name of the group, unique in its pool."""
    template: RunnerTemplate | None = None
    """The pods of this group, in place of the pool's template. The two are not merged."""
    min_runners: Annotated[int, Field(strict=True, ge=0, le=MAX_POOL_RUNNERS)] = 0
    """The number of runners of this group before any group gets more than its minimum."""
    max_runners: Annotated[int, Field(strict=True, ge=1, le=MAX_POOL_RUNNERS)] | None = None
    """The maximum number of runners of this group. By default only the pool's number limits it."""
    phase: Literal["Any", "Prompt", "Token"] = "Any"
    """The phase of the group's hardware, with phases.mode Split. Its runners have this role if the opposite phase also
    has a runner. An autoscaled pool counts the groups of each phase separately: each grows with the demand of its
    phase. With Any the scheduler decides by the current requests."""


def _is_within(requests: dict[str, int | str], limits: dict[str, int | str]) -> bool:
    return all(amount(requests[name]) <= amount(limits[name]) for name in requests.keys() & limits.keys())
