"""ServingPool: a base model, the runners that serve it, and how requests are scheduled on them."""

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
    """The base model, and how it answers."""

    name: ModelName | None = None
    """The name that clients send as `model` to talk to the base model itself. It defaults to metadata.name."""
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
    """The address of the model as transformers writes it (safetensors): file:PATH below the depot's file root,
    pvc:CLAIM/PATH, hf:ORG/NAME, s3://BUCKET/PREFIX, oci://HOST/REPOSITORY:TAG or https://HOST/FOLDER. It cannot
    change: create another pool for another model."""
    tool_call_parser: ToolCallParserName | None = None
    """The form in which the model writes calls of tools, by vLLM's name. It defaults to the form that the model's
    chat template shows."""
    chat_template: PoolChatTemplateSource = PoolChatTemplateSource()
    """The choice of the chat template that renders the chats of the base model, and of adapters that have none of their
    own. status.chatTemplate shows what the model's files have, status.suppliedChatTemplate what the spec gives."""
    generation_defaults: Literal["Honour", "Ignore"] = "Honour"
    """Whether the defaults of sampling count that the model's generation_config.json sets: temperature, top_p, top_k,
    min_p, repetition_penalty and max_new_tokens. With Honour a request has them that does not say otherwise, as in
    vLLM. With Ignore it has those of the API. status.generationDefaults shows them."""
    max_output_tokens: Annotated[int, Field(strict=True, ge=1, le=1 << 20)] | None = None
    """The most tokens of one answer. A request for more is refused; one of a chat that gives no max_tokens may have as
    many. By default it is what the context holds beside the prompt. A pool with advanced.reservation max should set it,
    as every request reserves this number there."""


class LoRASettings(ApiModel):
    """What adapters may need of a runner."""

    max_rank: Annotated[int, Field(strict=True, ge=1, le=256)] = 64
    """The largest rank of any module of any adapter. An adapter beyond it is refused with reason RankTooLarge."""


PAGE_TOKENS = 16  # every kernel takes it, and a page of any real model holds the longest row of an adapter


MAX_RANKS = 64  # of a runner


class Parallelism(ApiModel):
    """Over how many processes a runner splits the model, tensor times pipeline; on GPUs each has one."""

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
    """The number of parts that each layer is split into, which makes steps faster. Heads, inner features and the
    vocabulary have to be divisible by it."""
    pipeline: Annotated[int, Field(strict=True, ge=1, le=64)] = 1
    """The number of stages that the layers are cut into, with as many batches in flight. It is for models that do
    not fit otherwise."""
    pods_per_runner: Annotated[int, Field(strict=True, ge=1, le=64)] = 1
    """The number of pods of one runner, which start and end together, so that a runner may span nodes. Each pod has
    an equal share of the processes and needs a GPU for each. Tensors travel between the pods unencrypted. A change
    replaces all runners at once."""


DISK_PATH_PATTERN = r"^(/[A-Za-z0-9_-][A-Za-z0-9._-]*)+$"


class Offload(ApiModel):
    """More model than memory: as many weights as fit deviceBytes stay in memory, and each step reads the others from
    diskPath while layers compute (FlexGen)."""

    device_bytes: Quantity
    """The memory of the engine of each rank, or of its GPU, for weights, KV pages, adapters and intermediate
    results. The pod needs about 1 Gi more for the process itself."""
    host_bytes: Quantity | None = None
    """The host memory beside deviceBytes: with a GPU it holds weights that are copied to the GPU as layers compute,
    and weights from the disk on their way there. Without a GPU both are one memory, and the sum counts."""
    disk_bytes: Quantity | None = None
    """The most bytes of packed weights on the disk, and the size limit of the pod's volume. By default there is no
    limit."""
    disk_path: Annotated[str, Field(pattern=DISK_PATH_PATTERN, max_length=255)]
    """The folder of the packed weights, on a file system with direct I/O. In a cluster a volume of the pod is
    mounted there; with `weft up` it is a folder of the machine."""
    weights: Literal["bf16", "int8", "int4"] = "bf16"
    """The format of the base model's weights: int8 halves and int4 quarters what is read, at some accuracy."""
    kv: Literal["bf16", "int4"] = "bf16"
    """The format of keys and values: int4 takes 0.28 of the bytes of bf16, at some accuracy, and needs heads whose
    size is a multiple of 32. Without a GPU attention is computed where they lie; with one they are copied to it."""


class Memory(ApiModel):
    """The memory of one runner."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(  # no minimum: an API server compares a whole number with its whole part
            "fraction",
            "fraction has to be at least 0.01",
            "!has(self.fraction) || self.fraction >= 0.01",
            lambda memory: memory.fraction is None or memory.fraction >= 0.01,
        ),
        Rule(
            "fraction",
            "fraction is for pools that do not offload: deviceBytes is the memory of one that does",
            "!has(self.fraction) || !has(self.offload)",
            lambda memory: memory.fraction is None or memory.offload is None,
        ),
    )

    fraction: Annotated[float, Field(strict=True, le=1)] | None = None
    """How much of all the memory of its GPU, or of its container, a runner may take for weights, adapters, steps and
    key-value pages together, as vLLM's gpu_memory_utilization: the pages are what the others leave of it. It defaults
    to 0.9. Without a GPU there are no more pages than maxSequences sequences of the model's context take, or 1024; a
    container without a limit of memory has 1024, and so have the processes of weft up unless this field is set. A
    runner that would not hold one sequence of the model's context ends at its start with KvCacheTooSmall, which
    Available then says."""
    offload: Offload | None = None
    """How the runners serve a model that is larger than their memory. Without it all weights are in memory."""


class EmptyDirCache(ApiModel):
    """A folder that comes and goes with the pod."""

    size_limit: Quantity | None = None
    """The most that the folder may hold; the kubelet evicts a pod beyond it. The pod then requests ephemeral-storage of
    this size and that of memory.offload.diskBytes, and is limited to 1Gi more, for logs and temporary files, unless its
    template's resources name ephemeral-storage. By default there is no limit."""


class ClaimCache(ApiModel):
    """A folder of a PersistentVolumeClaim."""

    claim_name: ObjectName
    """The name of the claim, in the pool's namespace, which the platform has to list as NAMESPACE/NAME (the chart's
    operator.modelCache.claims). Without the claim the pods do not start, and Available is False with reason
    Unschedulable."""


class HostPathCache(ApiModel):
    """A folder of the node."""

    path: Annotated[str, Field(pattern=DISK_PATH_PATTERN, max_length=255)]
    """The folder, which the platform has to list exactly so (the chart's operator.modelCache.hostPaths). It has to
    exist on each node and be writable for the runners' user (65532). Namespaces under the Pod Security levels baseline
    and restricted refuse such pods."""


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
    """A folder of each pod, which is empty when the pod starts."""
    persistent_volume_claim: ClaimCache | None = None
    """A folder that runners share: they lock each blob, so that one downloads it and the others take it. The claim has
    to be ReadWriteMany where its pods are on several nodes, of a file system that passes on flock's locks."""
    host_path: HostPathCache | None = None
    """A folder of the node, which all runners there share as those of a claim do, also those of other pools. With weft
    up it is any folder of the machine."""

    @property
    def is_shared(self) -> bool:
        """Whether runners share the folder."""
        return self.empty_dir is None


Weight = Annotated[int, Field(strict=True, ge=1, le=1000)]


class Fairness(ApiModel):
    """Shares of the namespaces whose requests wait: the one that was served least by its weight is next
    (virtual token counter, OSDI 2024), and the queue's order holds inside a namespace."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "weights",
            f"no namespace; {PATTERN_HELP[LABEL_PATTERN]}",
            f"!has(self.weights) || self.weights.all(key, size(key) <= 63 && key.matches(r'{LABEL_PATTERN}'))",
            lambda fairness: all(len(key) <= 63 and re.fullmatch(LABEL_PATTERN, key) for key in fairness.weights or {}),
        ),
    )

    weights: Annotated[dict[str, Weight], Field(max_length=256)] | None = None
    """The shares of namespaces relative to each other. A namespace that is not named has 1."""


class ServiceLevelObjectives(ApiModel):
    """Within what times requests should be answered."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "admission",
            "admission Reject needs ttftMs: without it no request comes too late",
            "self.admission == 'Queue' || has(self.ttftMs)",
            lambda slo: slo.admission == "Queue" or slo.ttft_ms is not None,
        ),
    )

    ttft_ms: Annotated[int, Field(strict=True, ge=1, le=3_600_000)] | None = None
    """The most milliseconds from a request's arrival to its first token. Autoscaling asks for enough runners to
    keep it."""
    token_time_ms: Annotated[int, Field(strict=True, ge=1, le=60_000)] = 100
    """The most milliseconds between two tokens of a running sequence. Prompts are processed in chunks that keep it,
    and a runner takes no more sequences than its measured steps allow for it. People read a token each 187 ms (S3)."""
    admission: Literal["Queue", "Reject"] = "Queue"
    """What happens to a request that would wait longer than ttftMs by the estimate. With Reject it is answered 429
    at once, with a retry-after. With Queue it waits."""


class Advanced(ApiModel):
    """Choices that the defaults make well for nearly every pool. They may change or go in a later release without being
    served beside their successors."""

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
    """The order in which waiting requests get a runner. With fcfs the first that came is first. With s3 the largest
    predicted memory that fits is first. With shortest the shortest expected answer is first, aged so that it waits
    for no more than three times the backlog that it found, and for none that arrived ten minutes after it."""
    reservation: Literal["calibrated", "constant", "max", "paged", "pooled", "s3"] = "calibrated"
    """The memory that is reserved for an answer. calibrated reserves the predicted p90 of its length, s3 the edge
    of the predicted bucket, constant the p90 of the pool's answers, max the request's max_tokens. paged reserves
    nothing: a page is taken when it is needed. pooled does as paged on the runner, and admits as many requests as
    are expected to fit together, with a margin for their sum."""
    consolidation: Literal["autoscaled", "always", "never"] = "never"
    """When requests of a lightly loaded runner migrate to fuller ones, so that the runner becomes idle (Punica,
    section 5.3). autoscaled means while the pool has more runners than minReplicas, always means also where no
    runner can be released. While no runner is to come, full batches also grow by what makes steps a tenth slower
    before a lightly loaded runner grows. By default requests stay: an autoscaled pool gives its runners back as soon
    without, and its first tokens come earlier."""
    max_queue: Annotated[int, Field(strict=True, ge=1, le=1_000_000)] = 1000
    """The most requests that wait. A request beyond it is answered 429 with a computed retry-after, unless its
    namespace has less than its share of the waiting requests."""
    max_sequences: Annotated[int, Field(strict=True, ge=1, le=1024)] | None = None
    """The most sequences in one batch of one runner. By default a runner on a GPU takes 256 to 1024, by the memory
    that weights leave, and one without 32; for a pool that offloads, the policy of its runners decides, up to this
    number."""
    max_batch_tokens: Annotated[int, Field(strict=True, ge=1, le=65_536)] | None = None
    """The most tokens of one iteration of one runner; longer prompts are processed in chunks. By default a runner on
    a GPU takes 2048 to 8192, by the memory that weights leave, and one without 512; for a pool that offloads, the
    policy of its runners decides."""
    max_adapters: Annotated[int, Field(strict=True, ge=1, le=4096)] | None = None
    """The most adapters that are on the device of one runner at the same time. It defaults to as many as the
    runner's pages hold beside its sequences. More adapters than this can be served: they take turns."""
    kv_pages: Annotated[int, Field(strict=True, ge=1, le=1_048_576)] | None = None
    """The number of key-value pages of one runner, of 16 tokens each. A number is taken as it is, whatever
    memory.fraction says, and bounds the context where it holds less than the model's. By default memory.fraction
    decides; for a pool that offloads, the policy of its runners. status.kvCache has the number that they found."""
    kv_across_classes: Annotated[bool, Field(strict=True)] = False
    """Whether KV may go to a runner of another numerics class, which computes in another order of sums or
    precision. The text may then differ from that of one runner. The metric weft_scheduler_hand_offs_total counts
    it."""
    sparse_attention: Literal["Off", "TopK"] = "Off"
    """Whether a token of a pool that offloads attends to the best tenth of its keys only (TopK), so that only their
    values are read, at some accuracy. A machine on which it was not measured to be a tenth faster does not use it."""
    speculation: Literal["Suffix", "Off"] = "Suffix"
    """Whether runners draft what an answer may go on with, from its own text and from the latest answers of its
    namespace with its adapter, and check a draft in one step (Suffix). Answers are the same to the bit. It is used
    where a runner computes a step of several tokens with the bits of single ones: on CPUs, in one process. Off keeps
    no answers, and the time of an answer then says nothing of what the same namespace was answered before."""


def _bound(value: object) -> int | str:
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_POOL_RUNNERS:
        return value
    if isinstance(value, str) and re.fullmatch(r"(100|[1-9]?[0-9])%", value):
        return value
    raise ValueError(f"no number of runners; write 0 to {MAX_POOL_RUNNERS}, or 0% to 100%")


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
    """How runners are replaced by ones of another template."""

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
    """The most runners of the pool that are missing while runners are replaced, a number or a percentage of the wanted
    ones, rounded down. One is replaced where it and maxSurge come to 0. Of several groups one is replaced at a time; a
    group waits until all runners of the one before it are ready, and Progressing says so. As long as the first new
    runner is not ready, no other one is replaced; writing the template that was there before takes it back."""
    max_surge: Bound = 0
    """The most runners beyond the wanted ones while runners are replaced, a number or a percentage of the wanted ones,
    rounded up. They need accelerators of their own. Runners of several pods (podsPerRunner) and the processes of weft
    up are replaced without any."""


class DisruptionBudget(ApiModel):
    """How evictions of runners are bounded, as the drain of a node asks for them."""

    max_unavailable: Annotated[int, Field(strict=True, ge=0, le=MAX_POOL_RUNNERS)] = 1
    """The most ready runners of the pool that evictions may take away at a time; the pool's PodDisruptionBudget has
    it. With 0 the API server refuses to evict a ready runner, and the operator moves it: as soon as its node is
    unschedulable, another runner is started elsewhere, and the first one is stopped once the other one is ready. That
    needs room for one runner more; without it the drain of the node waits. Runners of several pods need at least 1."""


class Phases(ApiModel):
    """Whether prompts and the tokens after them are computed by runners of their own (Splitwise)."""

    mode: Literal["Unified", "Split"] = "Unified"
    """Whether runners of their own compute prompts (Splitwise). With Unified each runner computes prompts in chunks
    beside its running sequences. With Split one runner computes a prompt and sends its KV to another, which
    computes the tokens after the first, so that no prompt delays another request's tokens. While requests wait some
    runners do both, but for one of each phase; a runner that is alone always does. Split needs runners that can send
    KV to each other."""


class Autoscaling(ApiModel):
    """Runners by demand: as many as waiting and running requests need, at once and not one by one."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "maxReplicas",
            "maxReplicas must be at least minReplicas",
            "self.maxReplicas >= self.minReplicas",
            lambda scaling: scaling.max_replicas >= scaling.min_replicas,
        ),
    )

    min_replicas: Annotated[int, Field(strict=True, ge=0, le=MAX_POOL_RUNNERS)] = 1
    """The least number of runners. With 0 there is none while there are no requests; the gateway holds the first
    request until a runner is ready, for as long as the platform says (gateway.holdSeconds)."""
    max_replicas: Annotated[int, Field(strict=True, ge=1, le=MAX_POOL_RUNNERS)]
    """The largest number of runners."""
    idle_seconds: Annotated[int, Field(strict=True, ge=1, le=86_400)] = 60
    """The seconds that runners stay without work before some are given back."""


class ServingPoolSpec(ApiModel):
    """The desired state. No controller of Weft writes it."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "autoscaling",
            "replicas and autoscaling exclude each other; leave one of them out",
            "!(has(self.replicas) && has(self.autoscaling))",
            lambda spec: spec.replicas is None or spec.autoscaling is None,
        ),
        Rule(
            "runnerGroups",
            "the groups' minRunners add up to more than autoscaling.maxReplicas",
            "!has(self.autoscaling) || !has(self.runnerGroups) || "
            "self.runnerGroups.map(group, has(group.minRunners) ? group.minRunners : 0).sum() "
            "<= self.autoscaling.maxReplicas",
            lambda spec: spec.autoscaling is None or _least(spec) <= spec.autoscaling.max_replicas,
        ),
        Rule(
            "runnerGroups",
            "the groups' maxRunners add up to less than autoscaling.maxReplicas",
            "!has(self.autoscaling) || !has(self.runnerGroups) || size(self.runnerGroups) == 0 || "
            "self.runnerGroups.exists(group, !has(group.maxRunners)) || "
            "self.runnerGroups.map(group, group.maxRunners).sum() >= self.autoscaling.maxReplicas",
            lambda spec: spec.autoscaling is None or _most(spec) >= spec.autoscaling.max_replicas,
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
            "with phases.mode Split all groups have the same phase: nobody is left for the other one",
            "self.phases.mode == 'Unified' || !has(self.runnerGroups) || size(self.runnerGroups) == 0 || "
            "!(self.runnerGroups.all(group, has(group.phase) && group.phase == 'Prompt') || "
            "self.runnerGroups.all(group, has(group.phase) && group.phase == 'Token'))",
            lambda spec: spec.phases.mode == "Unified" or _for_both(spec),
        ),
        Rule(
            "memory.offload",
            "ranks of a tensor split do not offload: split by parallelism.pipeline, each stage has a budget of its own",
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
    """The base model that the pool serves."""
    replicas: Annotated[int, Field(strict=True, ge=0, le=MAX_POOL_RUNNERS)] | None = None
    """The number of runners, set by people or by an autoscaler through /scale; no controller of Weft writes it. It
    excludes autoscaling. With neither there is one runner."""
    autoscaling: Autoscaling | None = None
    """The bounds of the built-in autoscaler, which follows demand. It excludes replicas."""
    template: RunnerTemplate | None = None
    """The pods of the runners, for groups without a template of their own. The platform's settings hold for what is
    unset."""
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
    """The bounds of the adapters that a runner serves."""
    slo: ServiceLevelObjectives | None = None
    """The times within which requests should be answered. status.slo has the share that met them. Without it no
    attainment is measured."""
    fairness: Fairness | None = None
    """How the namespaces whose requests wait share the pool."""
    phases: Phases = Phases()
    """Whether runners of their own compute prompts and the tokens after them."""
    parallelism: Parallelism = Parallelism()
    """How one runner splits the model over processes. The template's resources have a GPU for each process of a
    pod."""
    memory: Memory = Memory()
    """The memory of one runner, and how it serves a model that is larger."""
    model_cache: ModelCache | None = None
    """The folder in which runners keep the files of the base model and of adapters. In a cluster the platform lists the
    folders of nodes and the claims that pools may name, by default none: others are refused with VolumeNotAllowed. In a
    folder that they share nothing is removed that a living runner uses, and what none uses only until a fifth of the
    disk is free, what was used longest ago first. By default it is an emptyDir without a limit. A change replaces the
    runners."""
    rollout: Rollout = Rollout()
    """How runners are replaced when the pool changes. When what the installation gives all runners changes (a new
    version), pools are replaced one after the other, those in order first, unless the platform allows more at a
    time."""
    disruption_budget: DisruptionBudget = DisruptionBudget()
    """How evictions of runners are bounded, as the drain of a node asks for them."""
    paused: Annotated[bool, Field(strict=True)] = False
    """Whether runners stay as they are: none is started, replaced, scaled or stopped while it is true, whatever else
    the spec says. What runs goes on serving, also adapters that are added. Progressing is Unknown with reason
    Paused."""
    drain_seconds: Annotated[int, Field(strict=True, ge=1, le=3600)] = 300
    """The seconds that streams of a replaced or deleted adapter, or of a runner that ends, may take to finish. The
    pod of a runner has 30 s more to end."""
    allowed_namespaces: Annotated[tuple[NamespaceOrAll, ...], Field(max_length=256)] | None = None
    """The namespaces, beside the pool's own, whose adapters the pool serves and that may call its base model. An entry
    "*" stands for every namespace."""
    advanced: Advanced = Advanced()
    """The choices that the defaults make well for nearly every pool. They are subject to change."""


class LastScale(ApiModel):
    """The newest change of the wanted number of runners."""

    time: Timestamp
    """The time of the decision."""
    from_: Annotated[Count, Field(alias="from")]
    """The number of runners that were desired before."""
    to: Count
    """The number of runners that are desired since."""
    reason: Annotated[str, Field(max_length=1024)]
    """The reason of the decision, for people."""


class AdapterCounts(ApiModel):
    """Adapters that refer to the pool."""

    total: Annotated[int, Field(strict=True, ge=0)] = 0
    """The number of adapters that refer to the pool."""
    ready: Annotated[int, Field(strict=True, ge=0)] = 0
    """The number of adapters that clients can call."""


Percent = Annotated[int, Field(strict=True, ge=0, le=100)]


class SloStatus(ApiModel):
    """Percent of the requests finished in about five minutes that met the objectives; written once a minute at most."""

    attained_percent: Percent
    """The percentage of requests that met both objectives."""
    ttft_percent: Percent
    """The percentage of requests that met ttftMs."""
    token_time_percent: Percent
    """The percentage of requests that met tokenTimeMs."""


class WantedStatus(ApiModel):
    """Wanted runners by the phase of their groups."""

    prompt: Count
    """The number of runners of groups for prompts."""
    token: Count
    """The number of runners of groups for the tokens after the first."""
    any: Count
    """The number of runners of groups for any phase."""


class PhasesStatus(ApiModel):
    """Runners by what they compute; written when there are more or fewer, else once a minute at most."""

    prompt: Count
    """The number of runners that compute prompts."""
    token: Count
    """The number of runners that compute the tokens after the first."""
    mixed: Count
    """The number of runners that compute both."""
    message: Annotated[str, Field(max_length=1024)] = ""
    """The reason for these numbers, for people."""
    wanted: WantedStatus | None = None
    """The desiredReplicas by the phase of their groups, where an autoscaled pool has groups for a phase."""


class KVCacheStatus(ApiModel):
    """The key-value memory that runners have."""

    pages: Count
    """The number of pages of the ready runner with the fewest, as advanced.kvPages gives it or as it was found."""


class GenerationDefaults(ApiModel):
    """What a request has that does not say."""

    temperature: float | None = None
    """The temperature."""
    top_p: float | None = None
    """The share of the probability that is sampled from."""
    top_k: Annotated[int, Field(strict=True, ge=-1)] | None = None
    """The number of the likeliest tokens that are sampled from. 0 and -1 mean all of them."""
    min_p: float | None = None
    """The share of the likeliest token's probability that a token needs."""
    repetition_penalty: float | None = None
    """The penalty of the tokens of prompt and answer."""
    max_tokens: Annotated[int, Field(strict=True, ge=1)] | None = None
    """The most tokens of an answer, max_new_tokens in the file."""


class ServingPoolStatus(ApiModel):
    """The observed state."""

    observed_generation: Annotated[int, Field(strict=True, ge=0)] | None = None
    """The metadata.generation that the status describes."""
    base_digest: DigestText | None = None
    """The digest of the base model that is served."""
    architecture: Annotated[str, Field(max_length=64)] | None = None
    """The architecture of the base model, as its config.json names it. One without a head, as MistralModel, serves
    embeddings alone."""
    eos_token_ids: TokenIds | None = None
    """The tokens that end an answer, as the model's generation_config.json, config.json and tokenizer name them."""
    generation_defaults: GenerationDefaults | None = None
    """The defaults of sampling that the model's generation_config.json sets, whether they count or not."""
    chat_template: ChatTemplateStatus | None = None
    """The chat template of the base model's files."""
    supplied_chat_template: SuppliedTemplateStatus | None = None
    """The chat template that spec.model.chatTemplate gives, in place of that of the files."""
    max_context_tokens: Count | None = None
    """The number of positions of the base model, which bounds prompt and answer together; the pages of runners may
    bound them further."""
    kv_cache: KVCacheStatus | None = None
    """The key-value memory of one runner, as its runners reported it last."""
    desired_replicas: Count | None = None
    """The number of runners that are desired now."""
    replicas: Count | None = None
    """The number of runners that exist."""
    ready_replicas: Count | None = None
    """The number of runners that take requests."""
    selector: Annotated[str, Field(max_length=512)] | None = None
    """The label selector of the runners' pods, which /scale reports to autoscalers."""
    last_scale: LastScale | None = None
    """The newest change of the desired number of runners."""
    adapters: AdapterCounts | None = None
    """The number of adapters that refer to the pool."""
    slo: SloStatus | None = None
    """The share of requests that met spec.slo."""
    phases: PhasesStatus | None = None
    """The runners by role, with phases.mode Split."""
    conditions: Conditions = ()
    """The conditions Accepted, Fetched, ChatTemplate, Available, Progressing and Ready. ChatTemplate: the chat
    template that counts renders; while it is False chats are refused and completions go on. Available: at least
    one runner serves. Ready: every wanted runner serves, or none is wanted."""


class ServingPool(Resource):
    """Runners that share one base model and serve its adapters."""

    kind: Literal["ServingPool"] = "ServingPool"
    spec: ServingPoolSpec
    status: Annotated[ServingPoolStatus, Field(exclude_if=is_empty)] = ServingPoolStatus()

    @property
    def immutables(self) -> dict[str, object]:
        return {"spec.model.uri": self.spec.model.uri}


def _within_memory(spec: ServingPoolSpec) -> bool:
    """Whether the memory of an offload pool is within the container's limit, where both are known. Host bytes count
    against it, and device bytes unless the device is a GPU."""
    limits = (spec.template.resources.limits if spec.template and spec.template.resources else None) or {}
    offload = spec.memory.offload
    if offload is None or "memory" not in limits:
        return True
    device = 0 if GPU in limits else amount(offload.device_bytes)
    return device + amount(offload.host_bytes or 0) <= amount(limits["memory"])


def _least(spec: Any) -> int:
    return sum(group.min_runners for group in spec.runner_groups or ())


def _for_both(spec: Any) -> bool:
    phases = {group.phase for group in spec.runner_groups or ()}
    return phases not in ({"Prompt"}, {"Token"})


def _most(spec: Any) -> int:
    groups = spec.runner_groups or ()
    unbounded = not groups or any(group.max_runners is None for group in groups)
    return MAX_POOL_RUNNERS if unbounded else sum(group.max_runners for group in groups)
