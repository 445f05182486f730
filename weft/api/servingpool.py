"""ServingPool: a base model, its runners, and the scheduling of requests on them."""

import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PlainValidator, WithJsonSchema

from weft.api.chat_template import ChatTemplateStatus, PoolChatTemplateSource, SuppliedTemplateStatus
from weft.api.fields import (
    LABEL_PATTERN,
    PATTERN_HELP,
    ApiModel,
    DigestText,
    ModelName,
    NamespaceOrAll,
    ObjectName,
    Rule,
    Timestamp,
    TokenIds,
    Uri,
    unique_names,
)
from weft.api.meta import Conditions, Resource, is_empty
from weft.api.source import Artifact
from weft.api.template import GPU, MAX_POOL_RUNNERS, Quantity, RunnerGroup, RunnerTemplate, amount
from weft.domain.routes import ToolCallParserName

Count = Annotated[int, Field(strict=True, ge=0)]


class PoolModel(Artifact):
    """The base model, and settings of its answers."""

    name: ModelName | None = None
    """The name that clients send as `model` to use the base model itself. The default is metadata.name."""
    uri: Annotated[
        Uri,
        Field(
            json_schema_extra={
                "x-kubernetes-validations": [
                    {"rule": "self == oldSelf", "message": "cannot change; create another pool"}
                ]
            }
        ),
    ]
    """The address of the model in the format of transformers (safetensors): file:PATH below the depot's file root,
    pvc:CLAIM/PATH, hf:ORG/NAME, s3://BUCKET/PREFIX, oci://HOST/REPOSITORY:TAG or https://HOST/FOLDER. The address
    cannot change: create another pool for another model."""
    tool_call_parser: ToolCallParserName | None = None
    """The format of the model's tool calls, by vLLM's name. By default the format follows from the model's chat
    template."""
    chat_template: PoolChatTemplateSource = PoolChatTemplateSource()
    """The chat template for chats with the base model, and with adapters without a template. status.chatTemplate shows
    the template in the model's files. status.suppliedChatTemplate shows the template in the spec."""
    generation_defaults: Literal["Honour", "Ignore"] = "Honour"
    """Whether the sampling defaults in the model's generation_config.json apply: temperature, top_p, top_k, min_p,
    repetition_penalty and max_new_tokens. With Honour they apply to requests that leave a field out, as in vLLM. With
    Ignore the defaults of the API apply. status.generationDefaults shows them."""
    max_output_tokens: Annotated[int, Field(strict=True, ge=1, le=1 << 20)] | None = None
    """The maximum tokens of one answer. A request for more is refused. A chat without max_tokens may have this number.
    By default the context, less the prompt, is the limit. Set the field for a pool with advanced.reservation max: each
    request reserves this number."""


class LoRASettings(ApiModel):
    """Limits on the adapters of a runner."""

    max_rank: Annotated[int, Field(strict=True, ge=1, le=256)] = 64
    """The largest rank of any module of any adapter. An adapter with a larger rank is refused with reason
    RankTooLarge."""


PAGE_TOKENS = 16  # all kernels support it; a page of any real model holds the longest row of an adapter


MAX_RANKS = 64  # of a runner


class Parallelism(ApiModel):
    """The number of processes that a runner splits the model over: tensor times pipeline. On GPUs each process has a
    GPU."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "pipeline",
            "a runner has tensor times pipeline processes: at most 64",
            "self.tensor * self.pipeline <= 64",
            lambda parallelism: parallelism.tensor * parallelism.pipeline <= MAX_RANKS,
        ),
        Rule(
            "podsPerRunner",
            "every pod of a runner has as many processes: tensor times pipeline has to be a multiple of it",
            "self.tensor * self.pipeline % self.podsPerRunner == 0",
            lambda parallelism: parallelism.tensor * parallelism.pipeline % parallelism.pods_per_runner == 0,
        ),
    )

    tensor: Annotated[int, Field(strict=True, ge=1, le=64)] = 1
    """The number of parts of each layer. More parts make steps faster. Heads, inner features and the vocabulary have to
    be divisible by it."""
    pipeline: Annotated[int, Field(strict=True, ge=1, le=64)] = 1
    """The number of stages of the layers. As many batches are in flight. Use stages for models that do not fit
    otherwise."""
    pods_per_runner: Annotated[int, Field(strict=True, ge=1, le=64)] = 1
    """The number of pods of one runner, so that a runner may span nodes. They start and end together. Each pod has an
    equal share of the processes and needs a GPU for each process. Tensors travel between the pods unencrypted. A change
    replaces all runners at once."""


DISK_PATH_PATTERN = r"^(/[A-Za-z0-9_-][A-Za-z0-9._-]*)+$"


class Offload(ApiModel):
    """A model larger than memory. As many weights as fit into deviceBytes stay in memory. Each step reads the rest from
    diskPath while layers compute (FlexGen)."""

    device_bytes: Quantity
    """The memory of the engine of each rank, or of its GPU, for weights, KV pages, adapters and intermediate results.
    The pod needs about 1 Gi more for the process itself."""
    host_bytes: Quantity | None = None
    """The host memory in addition to deviceBytes. With a GPU it holds weights to copy to the GPU as layers compute, and
    weights on their way from the disk. Without a GPU both are one memory, and the sum counts."""
    disk_bytes: Quantity | None = None
    """The maximum bytes of packed weights on the disk, and the size limit of the pod's volume. The default is
    unlimited."""
    disk_path: Annotated[str, Field(pattern=DISK_PATH_PATTERN, max_length=255)]
    """The folder of the packed weights, on a file system with direct I/O. In a cluster a volume of the pod is mounted
    there. With `weft up` it is a folder of the machine."""
    weights: Literal["bf16", "int8", "int4"] = "bf16"
    """The format of the base model's weights. int8 halves and int4 quarters the bytes to read, at some loss of
    accuracy."""
    kv: Literal["bf16", "int4"] = "bf16"
    """The format of keys and values. int4 takes 0.28 of the bytes of bf16, at some loss of accuracy, and needs heads
    with a size of a multiple of 32. Without a GPU attention is computed in host memory. With a GPU keys and values are
    copied to the GPU."""


class Memory(ApiModel):
    """The memory of one runner."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(  # no minimum: an API server compares only the integer part of an integer value
            "fraction",
            "fraction has to be at least 0.01",
            "!has(self.fraction) || self.fraction >= 0.01",
            lambda memory: memory.fraction is None or memory.fraction >= 0.01,
        ),
        Rule(
            "fraction",
            "fraction is for pools that do not offload; deviceBytes is the memory of a pool that offloads",
            "!has(self.fraction) || !has(self.offload)",
            lambda memory: memory.fraction is None or memory.offload is None,
        ),
    )

    fraction: Annotated[float, Field(strict=True, le=1)] | None = None
    """The share of the memory of its GPU, or of its container, that a runner may use, as vLLM's gpu_memory_utilization.
    Weights, adapters and steps use it first, and KV pages get the rest. The default is 0.9. Without a GPU the number of
    pages is limited to maxSequences sequences of the model's context, or to 1024. A container without a memory limit
    has 1024 pages. The processes of weft up also have 1024, unless this field is set. A runner without room for one
    sequence of the model's context ends at its start, and Available has reason KvCacheTooSmall."""
    offload: Offload | None = None
    """The settings for a model larger than the memory of its runners. Without them all weights are in memory."""


class EmptyDirCache(ApiModel):
    """A folder with the lifetime of its pod."""

    size_limit: Quantity | None = None
    """The maximum size of the folder. The kubelet evicts a pod above it. The pod requests ephemeral-storage for the sum
    of this size and memory.offload.diskBytes. Its limit is 1Gi more, for logs and temporary files. If the template's
    resources name ephemeral-storage, they apply instead. The default is unlimited."""


class ClaimCache(ApiModel):
    """A folder of a PersistentVolumeClaim."""

    claim_name: ObjectName
    """The name of the claim, in the pool's namespace. The platform has to list it as NAMESPACE/NAME (the chart's
    operator.modelCache.claims). If the claim does not exist, the pods do not start, and Available is False with reason
    Unschedulable."""


class HostPathCache(ApiModel):
    """A folder of the node."""

    path: Annotated[str, Field(pattern=DISK_PATH_PATTERN, max_length=255)]
    """The folder. The platform has to list exactly this path (the chart's operator.modelCache.hostPaths). It has to
    exist on each node and be writable for the runners' user (65532). Namespaces under the Pod Security levels baseline
    and restricted refuse pods with host paths."""


class ModelCache(ApiModel):
    """The folder in which runners keep the files of the base model and of adapters."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "emptyDir",
            "name exactly one of emptyDir, persistentVolumeClaim and hostPath",
            "[has(self.emptyDir), has(self.persistentVolumeClaim), has(self.hostPath)].filter(one, one).size() == 1",
            lambda cache: [cache.empty_dir, cache.persistent_volume_claim, cache.host_path].count(None) == 2,
        ),
    )

    empty_dir: EmptyDirCache | None = None
    """A folder of each pod. It is empty when the pod starts."""
    persistent_volume_claim: ClaimCache | None = None
    """A folder shared by runners. They lock each blob, so that each blob is downloaded once. The claim has to be
    ReadWriteMany if its pods run on several nodes. Its file system has to support flock's locks across nodes."""
    host_path: HostPathCache | None = None
    """A folder of the node, shared by all its runners as with a claim, including runners of further pools. With weft up
    it is any folder of the machine."""

    @property
    def is_shared(self) -> bool:
        """Whether runners share the folder."""
        return self.empty_dir is None


Weight = Annotated[int, Field(strict=True, ge=1, le=1000)]


class Fairness(ApiModel):
    """Shares of the namespaces with waiting requests. The namespace with the least service, divided by its weight, is
    next (virtual token counter, OSDI 2024). The queue's order applies within a namespace."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "weights",
            f"no namespace; {PATTERN_HELP[LABEL_PATTERN]}",
            f"!has(self.weights) || self.weights.all(key, size(key) <= 63 && key.matches(r'{LABEL_PATTERN}'))",
            lambda fairness: all(len(key) <= 63 and re.fullmatch(LABEL_PATTERN, key) for key in fairness.weights or {}),
        ),
    )

    weights: Annotated[dict[str, Weight], Field(max_length=256)] | None = None
    """The shares of namespaces relative to each other. A namespace without an entry has 1."""


class ServiceLevelObjectives(ApiModel):
    """Target times for answers to requests."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "admission",
            "admission Reject needs ttftMs: without it no request comes too late",
            "self.admission == 'Queue' || has(self.ttftMs)",
            lambda slo: slo.admission == "Queue" or slo.ttft_ms is not None,
        ),
    )

    ttft_ms: Annotated[int, Field(strict=True, ge=1, le=3_600_000)] | None = None
    """The maximum milliseconds from the arrival of a request to its first token. Autoscaling asks for enough runners to
    keep it."""
    token_time_ms: Annotated[int, Field(strict=True, ge=1, le=60_000)] = 100
    """The maximum milliseconds between two tokens of a running sequence. Prompts are processed in chunks that keep it.
    A runner takes only as many sequences as its measured steps allow. People read a token each 187 ms (S3)."""
    admission: Literal["Queue", "Reject"] = "Queue"
    """The action for a request with an estimated wait longer than ttftMs. With Reject it is answered 429 at once, with
    a retry-after. With Queue it waits."""


class Advanced(ApiModel):
    """Settings with a good default for nearly every pool. A later release may change or remove a setting without a
    period of support for both forms."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "maxBatchTokens",
            "maxBatchTokens must be at least maxSequences: each sequence adds a token an iteration",
            "!has(self.maxBatchTokens) || !has(self.maxSequences) || self.maxBatchTokens >= self.maxSequences",
            lambda advanced: (
                None in (limits := (advanced.max_batch_tokens, advanced.max_sequences)) or limits[0] >= limits[1]
            ),
        ),
    )

    queue: Literal["fcfs", "s3", "shortest"] = "fcfs"
    """The order of waiting requests. fcfs is first come, first served. s3 takes the request with the largest predicted
    memory that fits. shortest takes the shortest expected answer. Its aging limits a wait to three times the backlog at
    arrival. A request never waits for arrivals more than ten minutes later."""
    reservation: Literal["calibrated", "constant", "max", "paged", "pooled", "s3"] = "calibrated"
    """The memory to reserve for an answer. calibrated reserves the predicted p90 of its length, and s3 the edge of the
    predicted bucket. constant reserves the p90 of the pool's answers, and max the request's max_tokens. paged reserves
    nothing: a page is taken when it is needed. pooled does as paged on the runner. It admits as many requests as are
    expected to fit together, with a margin for their sum."""
    consolidation: Literal["autoscaled", "always", "never"] = "never"
    """When requests of a lightly loaded runner migrate to fuller ones, so that the runner becomes idle (Punica, section
    5.3). With autoscaled they migrate while the pool has more runners than minReplicas. With always they migrate even
    if the pool cannot release a runner. While the pool starts no runner, full batches also grow, up to steps a tenth
    slower, before a lightly loaded runner grows. By default requests stay: an autoscaled pool releases its runners as
    soon without, and first tokens come earlier."""
    max_queue: Annotated[int, Field(strict=True, ge=1, le=1_000_000)] = 1000
    """The maximum number of waiting requests. A further request is answered 429 with a computed retry-after, unless its
    namespace has less than its share of the waiting requests."""
    max_sequences: Annotated[int, Field(strict=True, ge=1, le=1024)] | None = None
    """The maximum number of sequences in one batch of one runner. The default on a GPU is 256 to 1024, by the memory
    left by the weights, and 32 without a GPU. For a pool that offloads, the policy of its runners decides, up to this
    number."""
    max_batch_tokens: Annotated[int, Field(strict=True, ge=1, le=65_536)] | None = None
    """The maximum tokens of one iteration of one runner. Longer prompts are processed in chunks. The default on a GPU
    is 2048 to 8192, by the memory left by the weights, and 512 without a GPU. For a pool that offloads, the policy of
    its runners decides."""
    max_adapters: Annotated[int, Field(strict=True, ge=1, le=4096)] | None = None
    """The maximum number of adapters on the device of one runner at the same time. By default the runner's pages
    decide, after room for its sequences. A pool can serve more adapters: they take turns."""
    kv_pages: Annotated[int, Field(strict=True, ge=1, le=1_048_576)] | None = None
    """The number of key-value pages of one runner, of 16 tokens each. An explicit number applies regardless of
    memory.fraction. It limits the context if it holds less than the model's. By default memory.fraction decides. For a
    pool that offloads, the policy of its runners decides. status.kvCache has the actual number."""
    kv_across_classes: Annotated[bool, Field(strict=True)] = False
    """Whether KV may go to a runner of another numerics class, with a different order of sums or precision. The text
    may then differ from the text of one runner. The metric weft_scheduler_hand_offs_total counts hand-offs."""
    sparse_attention: Literal["Off", "TopK"] = "Off"
    """Whether a token of a pool that offloads attends only to the best tenth of its keys (TopK). Only their values are
    read, at some loss of accuracy. A machine uses it only if a measurement shows a tenth more speed."""
    speculation: Literal["Suffix", "Off"] = "Suffix"
    """Whether runners draft the continuation of an answer and check a draft in one step (Suffix). Drafts come from the
    answer itself, and from the latest answers of its namespace with its adapter. Answers are the same to the bit.
    Runners speculate only if a step of several tokens gives the bits of single steps: on CPUs, in one process. Off
    keeps no answers. Then the time of an answer says nothing about earlier answers of the namespace."""


def _bound(value: object) -> int | str:
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_POOL_RUNNERS:
        return value
    if isinstance(value, str) and re.fullmatch(r"(100|[1-9]?[0-9])%", value):
        return value
    raise ValueError(f"expected a number of runners: write 0 to {MAX_POOL_RUNNERS}, or 0% to 100%")


Bound = Annotated[
    int | str,
    PlainValidator(_bound),
    WithJsonSchema(
        {
            "x-kubernetes-int-or-string": True,
            "minimum": 0,
            "maximum": MAX_POOL_RUNNERS,
            "maxLength": 4,
            "pattern": r"^(100|[1-9]?[0-9])%$",
        }
    ),
]


NONE = "(self.{0} == 0 || self.{0} == '0%')"


class Rollout(ApiModel):
    """How runners with a new template replace older runners."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "maxUnavailable",
            "maxUnavailable and maxSurge are both 0: no runner could be replaced",
            f"!({NONE.format('maxUnavailable')} && {NONE.format('maxSurge')})",
            lambda rollout: (
                {rollout.max_unavailable, rollout.max_surge} & {0, "0%"} != {rollout.max_unavailable, rollout.max_surge}
            ),
        ),
    )

    max_unavailable: Bound = 1
    """The maximum number of runners missing during a replacement: a number, or a percentage of the desired runners,
    rounded down. If it and maxSurge both round to 0, one runner is replaced at a time. Of several groups, one is
    replaced at a time. A group waits until all runners of the previous group are ready, and Progressing says so. Until
    the first new runner is ready, no further runner is replaced. Write the previous template to roll back."""
    max_surge: Bound = 0
    """The maximum number of additional runners during a replacement: a number, or a percentage of the desired runners,
    rounded up. They need additional accelerators. Runners of several pods (podsPerRunner) and the processes of weft up
    are replaced without additional runners."""


class DisruptionBudget(ApiModel):
    """Limits on evictions of runners, as requested by the drain of a node."""

    max_unavailable: Annotated[int, Field(strict=True, ge=0, le=MAX_POOL_RUNNERS)] = 1
    """The maximum number of ready runners of the pool that evictions may remove at a time. It is the limit of the
    pool's PodDisruptionBudget. With 0 the API server refuses to evict a ready runner, and the operator moves the
    runner. When its node becomes unschedulable, a second runner is started on another node. Once the second is ready,
    the first is stopped. Without room for the second runner the drain of the node waits. Runners of several pods need
    at least 1."""


class Phases(ApiModel):
    """Whether dedicated runners compute prompts and later tokens (Splitwise)."""

    mode: Literal["Unified", "Split"] = "Unified"
    """Whether dedicated runners compute prompts (Splitwise). With Unified each runner computes prompts in chunks along
    with its running sequences. With Split one runner computes a prompt and sends its KV to a second runner, which
    computes the tokens after the first. Then no prompt delays another request's tokens. While requests wait, some
    runners compute both, except one of each phase. A single runner always computes both. Split needs runners that can
    send KV to each other."""


class Autoscaling(ApiModel):
    """Runners by demand: as many as waiting and running requests need, added all at once."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "maxReplicas",
            "maxReplicas must be at least minReplicas",
            "self.maxReplicas >= self.minReplicas",
            lambda scaling: scaling.max_replicas >= scaling.min_replicas,
        ),
    )

    min_replicas: Annotated[int, Field(strict=True, ge=0, le=MAX_POOL_RUNNERS)] = 1
    """The minimum number of runners. With 0 all runners stop without requests. The gateway holds the first request
    until a runner is ready, at most for the platform's gateway.holdSeconds."""
    max_replicas: Annotated[int, Field(strict=True, ge=1, le=MAX_POOL_RUNNERS)]
    """The maximum number of runners."""
    idle_seconds: Annotated[int, Field(strict=True, ge=1, le=86_400)] = 60
    """The seconds that runners stay without work before the pool releases some."""


class ServingPoolSpec(ApiModel):
    """The desired state. No controller of Weft writes it."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "autoscaling",
            "replicas and autoscaling exclude each other; remove replicas or autoscaling",
            "!(has(self.replicas) && has(self.autoscaling))",
            lambda spec: spec.replicas is None or spec.autoscaling is None,
        ),
        Rule(
            "runnerGroups",
            "the groups' minRunners add up to more than autoscaling.maxReplicas",
            "!has(self.autoscaling) || !has(self.runnerGroups) || "
            "self.runnerGroups.map(group, has(group.minRunners) ? group.minRunners : 0).sum() "
            "<= self.autoscaling.maxReplicas",
            lambda spec: spec.autoscaling is None or _minimum(spec) <= spec.autoscaling.max_replicas,
        ),
        Rule(
            "runnerGroups",
            "the groups' maxRunners add up to less than autoscaling.maxReplicas",
            "!has(self.autoscaling) || !has(self.runnerGroups) || size(self.runnerGroups) == 0 || "
            "self.runnerGroups.exists(group, !has(group.maxRunners)) || "
            "self.runnerGroups.map(group, group.maxRunners).sum() >= self.autoscaling.maxReplicas",
            lambda spec: spec.autoscaling is None or _maximum(spec) >= spec.autoscaling.max_replicas,
        ),
        unique_names("runnerGroups", lambda spec: spec.runner_groups),
        Rule(
            "phases",
            "mode Split needs a runner for each phase: autoscaling.maxReplicas has to be at least 2",
            "self.phases.mode == 'Unified' || !has(self.autoscaling) || self.autoscaling.maxReplicas >= 2",
            lambda spec: (
                spec.phases.mode == "Unified" or spec.autoscaling is None or spec.autoscaling.max_replicas >= 2
            ),
        ),
        Rule(
            "runnerGroups",
            "with phases.mode Split all groups have the same phase: add a group for the missing phase",
            "self.phases.mode == 'Unified' || !has(self.runnerGroups) || size(self.runnerGroups) == 0 || "
            "!(self.runnerGroups.all(group, has(group.phase) && group.phase == 'Prompt') || "
            "self.runnerGroups.all(group, has(group.phase) && group.phase == 'Token'))",
            lambda spec: spec.phases.mode == "Unified" or _for_both(spec),
        ),
        Rule(
            "memory.offload",
            "ranks of a tensor split do not offload: split by parallelism.pipeline, with a budget for each stage",
            "!has(self.memory.offload) || self.parallelism.tensor == 1",
            lambda spec: spec.memory.offload is None or spec.parallelism.tensor == 1,
        ),
        Rule(
            "rollout.maxUnavailable",
            "runners of several pods are replaced in place: maxUnavailable has to be above 0",
            f"self.parallelism.podsPerRunner == 1 || !{NONE.format('rollout.maxUnavailable')}",
            lambda spec: spec.parallelism.pods_per_runner == 1 or spec.rollout.max_unavailable not in (0, "0%"),
        ),
        Rule(
            "disruptionBudget.maxUnavailable",
            "runners of several pods are not moved before an eviction: maxUnavailable has to be above 0",
            "self.parallelism.podsPerRunner == 1 || self.disruptionBudget.maxUnavailable > 0",
            lambda spec: spec.parallelism.pods_per_runner == 1 or spec.disruption_budget.max_unavailable > 0,
        ),
        Rule(
            "advanced.sparseAttention",
            "sparseAttention is for pools that offload: set memory.offload too",
            "self.advanced.sparseAttention == 'Off' || has(self.memory.offload)",
            lambda spec: spec.advanced.sparse_attention == "Off" or spec.memory.offload is not None,
        ),
        Rule(
            "memory.offload",
            "deviceBytes and hostBytes are above the template's limit of memory: the runner would be killed",
            "!has(self.memory.offload) || !has(self.template) || !has(self.template.resources) || "
            "!has(self.template.resources.limits) || !('memory' in self.template.resources.limits) || "
            "('nvidia.com/gpu' in self.template.resources.limits ? quantity('0') : "
            "quantity(string(self.memory.offload.deviceBytes))).add(has(self.memory.offload.hostBytes) ? "
            "quantity(string(self.memory.offload.hostBytes)) : quantity('0')).compareTo("
            "quantity(string(self.template.resources.limits['memory']))) <= 0",
            lambda spec: spec.memory.offload is None or _within_memory(spec),
        ),
    )

    model: PoolModel
    """The base model of the pool."""
    replicas: Annotated[int, Field(strict=True, ge=0, le=MAX_POOL_RUNNERS)] | None = None
    """The number of runners, set by people or by an autoscaler through /scale. No controller of Weft writes it. It
    excludes autoscaling. Without both fields there is one runner."""
    autoscaling: Autoscaling | None = None
    """The limits of the built-in autoscaler, which follows demand. It excludes replicas."""
    template: RunnerTemplate | None = None
    """The pods of the runners, for groups without a template. The platform's settings apply to unset fields."""
    runner_groups: (
        Annotated[
            tuple[RunnerGroup, ...],
            Field(
                max_length=8,
                json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
            ),
        ]
        | None
    ) = None
    """The groups of runners, for several kinds of hardware. By default there is one group, named runners."""
    lora: LoRASettings = LoRASettings()
    """The limits on the adapters of a runner."""
    slo: ServiceLevelObjectives | None = None
    """The target times for answers to requests. status.slo has the share of requests within them. Without targets,
    attainment is not measured."""
    fairness: Fairness | None = None
    """How namespaces with waiting requests share the pool."""
    phases: Phases = Phases()
    """Whether dedicated runners compute prompts and the tokens after them."""
    parallelism: Parallelism = Parallelism()
    """How one runner splits the model over processes. The template's resources have a GPU for each process of a pod."""
    memory: Memory = Memory()
    """The memory of one runner, and the settings for a larger model."""
    model_cache: ModelCache | None = None
    """The folder in which runners keep the files of the base model and of adapters. In a cluster the platform lists the
    folders of nodes and the claims that pools may name, by default none. A volume outside the list is refused with
    VolumeNotAllowed. In a shared folder, files in use by a living runner stay. Unused files are removed, least recently
    used first, only until a fifth of the disk is free. The default is an emptyDir without a limit. A change replaces
    the runners."""
    rollout: Rollout = Rollout()
    """How runners are replaced when the pool changes. A change of the installation's settings for all runners (a new
    version) also replaces them. Then pools are replaced one after another, pools in order first, unless the platform
    allows more at a time."""
    disruption_budget: DisruptionBudget = DisruptionBudget()
    """The limits on evictions of runners, as requested by the drain of a node."""
    paused: Annotated[bool, Field(strict=True)] = False
    """Whether runners stay as they are. While it is true no runner is started, replaced, scaled or stopped, regardless
    of the rest of the spec. Running runners keep serving, including newly added adapters. Progressing is Unknown with
    reason Paused."""
    drain_seconds: Annotated[int, Field(strict=True, ge=1, le=3600)] = 300
    """The seconds that streams of a replaced or deleted adapter, or of an ending runner, may take to finish. The pod of
    a runner has 30 s more to end."""
    allowed_namespaces: Annotated[tuple[NamespaceOrAll, ...], Field(max_length=256)] | None = None
    """The namespaces, in addition to the pool's namespace, with access to the pool. The pool serves their adapters, and
    they may call its base model. An entry "*" stands for every namespace."""
    advanced: Advanced = Advanced()
    """The settings with a good default for nearly every pool. They are subject to change."""


class LastScale(ApiModel):
    """The newest change of the desired number of runners."""

    time: Timestamp
    """The time of the decision."""
    from_: Annotated[Count, Field(alias="from")]
    """The desired number of runners before the change."""
    to: Count
    """The desired number of runners after the change."""
    reason: Annotated[str, Field(max_length=1024)]
    """The reason of the decision, for people."""


class AdapterCounts(ApiModel):
    """The numbers of adapters of the pool."""

    total: Annotated[int, Field(strict=True, ge=0)] = 0
    """The number of adapters referring to the pool."""
    ready: Annotated[int, Field(strict=True, ge=0)] = 0
    """The number of adapters available to clients."""


Percent = Annotated[int, Field(strict=True, ge=0, le=100)]


class SloStatus(ApiModel):
    """The percentages of requests within the objectives, among requests finished in about the last five minutes. They
    are written at most once a minute."""

    attained_percent: Percent
    """The percentage of requests within both objectives."""
    ttft_percent: Percent
    """The percentage of requests within ttftMs."""
    token_time_percent: Percent
    """The percentage of requests within tokenTimeMs."""


class WantedStatus(ApiModel):
    """The desired runners by the phase of their groups."""

    prompt: Count
    """The number of runners of groups for prompts."""
    token: Count
    """The number of runners of groups for the tokens after the first."""
    any: Count
    """The number of runners of groups for any phase."""


class PhasesStatus(ApiModel):
    """The number of runners by role. It is written when the total changes, and otherwise at most once a minute."""

    prompt: Count
    """The number of runners computing prompts."""
    token: Count
    """The number of runners computing the tokens after the first."""
    mixed: Count
    """The number of runners computing both phases."""
    message: Annotated[str, Field(max_length=1024)] = ""
    """The reason for the numbers, for people."""
    wanted: WantedStatus | None = None
    """The desiredReplicas by the phase of their groups, if an autoscaled pool has groups for a phase."""


class KVCacheStatus(ApiModel):
    """The key-value memory of the runners."""

    pages: Count
    """The smallest number of pages of any ready runner, from advanced.kvPages or as measured by the runner."""


class GenerationDefaults(ApiModel):
    """The sampling values for requests without a value."""

    temperature: float | None = None
    """The temperature."""
    top_p: float | None = None
    """The cumulative probability of the tokens to sample from."""
    top_k: Annotated[int, Field(strict=True, ge=-1)] | None = None
    """The number of the likeliest tokens to sample from. 0 and -1 mean all of them."""
    min_p: float | None = None
    """The minimum probability of a token, as a share of the likeliest token's probability."""
    repetition_penalty: float | None = None
    """The penalty for tokens of the prompt and the answer."""
    max_tokens: Annotated[int, Field(strict=True, ge=1)] | None = None
    """The maximum tokens of an answer, max_new_tokens in the file."""


class ServingPoolStatus(ApiModel):
    """The observed state."""

    observed_generation: Annotated[int, Field(strict=True, ge=0)] | None = None
    """The metadata.generation described by the status."""
    base_digest: DigestText | None = None
    """The digest of the base model in service."""
    architecture: Annotated[str, Field(max_length=64)] | None = None
    """The architecture of the base model, as its config.json names it. A model without a head, as MistralModel, serves
    only embeddings."""
    eos_token_ids: TokenIds | None = None
    """The tokens that end an answer, from the model's generation_config.json, config.json and tokenizer."""
    generation_defaults: GenerationDefaults | None = None
    """The sampling defaults in the model's generation_config.json, whether they apply or not."""
    chat_template: ChatTemplateStatus | None = None
    """The chat template of the base model's files."""
    supplied_chat_template: SuppliedTemplateStatus | None = None
    """The chat template given by spec.model.chatTemplate, in place of the template in the files."""
    max_context_tokens: Count | None = None
    """The number of positions of the base model. It limits prompt and answer together. The pages of runners may limit
    them further."""
    kv_cache: KVCacheStatus | None = None
    """The key-value memory of one runner, as last reported by the runners."""
    desired_replicas: Count | None = None
    """The current desired number of runners."""
    replicas: Count | None = None
    """The number of existing runners."""
    ready_replicas: Count | None = None
    """The number of runners ready for requests."""
    selector: Annotated[str, Field(max_length=512)] | None = None
    """The label selector of the runners' pods. /scale reports it to autoscalers."""
    last_scale: LastScale | None = None
    """The newest change of the desired number of runners."""
    adapters: AdapterCounts | None = None
    """The number of adapters referring to the pool."""
    slo: SloStatus | None = None
    """The share of requests within spec.slo."""
    phases: PhasesStatus | None = None
    """The runners by role, with phases.mode Split."""
    conditions: Conditions = ()
    """The conditions Accepted, Fetched, ChatTemplate, Available, Progressing and Ready. ChatTemplate: the chat template
    in use renders. While it is False chats are refused and completions go on. Available: at least one runner serves.
    Ready: every desired runner serves, or none is desired."""


class ServingPool(Resource):
    """A base model, its runners, and the adapters that they serve."""

    kind: Literal["ServingPool"] = "ServingPool"
    spec: ServingPoolSpec
    status: Annotated[ServingPoolStatus, Field(exclude_if=is_empty)] = ServingPoolStatus()

    @property
    def immutables(self) -> dict[str, object]:
        return {"spec.model.uri": self.spec.model.uri}


def _within_memory(spec: ServingPoolSpec) -> bool:
    """Return whether the memory of a pool that offloads is within the container's limit, if both are known. Host bytes
    count, and device bytes unless the device is a GPU."""
    limits = (spec.template.resources.limits if spec.template and spec.template.resources else None) or {}
    offload = spec.memory.offload
    if offload is None or "memory" not in limits:
        return True
    device = 0 if GPU in limits else amount(offload.device_bytes)
    return device + amount(offload.host_bytes or 0) <= amount(limits["memory"])


def _minimum(spec: Any) -> int:
    return sum(group.min_runners for group in spec.runner_groups or ())


def _for_both(spec: Any) -> bool:
    phases = {group.phase for group in spec.runner_groups or ()}
    return phases not in ({"Prompt"}, {"Token"})


def _maximum(spec: Any) -> int:
    groups = spec.runner_groups or ()
    unbounded = not groups or any(group.max_runners is None for group in groups)
    return MAX_POOL_RUNNERS if unbounded else sum(group.max_runners for group in groups)
