"""ServingPool: a base model, the runners that serve it, and how requests are scheduled on them."""

import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from weft.api.fields import (
    LABEL_PATTERN,
    PATTERN_HELP,
    ApiModel,
    DigestText,
    Label,
    ModelName,
    Rule,
    Timestamp,
    Uri,
    unique_names,
)
from weft.api.meta import Conditions, Resource, is_empty
from weft.api.source import Artifact
from weft.api.template import GPU, MAX_RUNNERS, Quantity, RunnerGroup, RunnerTemplate, amount

PAGES, SEQUENCES, BATCH_TOKENS = 1024, 32, 512  # of a pool that does not offload, where they are unset
Count = Annotated[int, Field(strict=True, ge=0)]


class PoolModel(Artifact):
    """The base model."""

    name: ModelName | None = None
    """What clients send to talk to the base itself; metadata.name when unset."""
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
    """The model as transformers writes it (safetensors): file:PATH below the depot's file root, pvc:CLAIM/PATH,
    hf:ORG/NAME or s3://BUCKET/PREFIX. Immutable."""


class LoRASettings(ApiModel):
    """What adapters may need of a runner."""

    max_adapters: Annotated[int, Field(strict=True, ge=1, le=4096)] | None = None
    """The most adapters that are on the device of one runner at the same time; unset: as many as its pages hold beside
    the sequences. Many more can be served: they take turns."""
    max_rank: Annotated[int, Field(strict=True, ge=1, le=256)] = 64
    """The largest rank of any module of any adapter."""


class KVCache(ApiModel):
    """Key-value memory of one runner: pages x pageTokens tokens."""

    page_tokens: Annotated[int, Field(strict=True, ge=1, le=256)] = 16
    """Tokens in a page."""
    pages: Annotated[int, Field(strict=True, ge=1, le=1_048_576)] | None = None
    """Pages of one runner. Unset: 1024; of a pool that offloads, what the policy of its runners finds."""


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
    """Each layer in so many parts: heads, inner features and the vocabulary have to divide. Faster steps."""
    pipeline: Annotated[int, Field(strict=True, ge=1, le=64)] = 1
    """The layers in so many stages, with as many batches in flight. For models that do not fit otherwise."""
    pods_per_runner: Annotated[int, Field(strict=True, ge=1, le=64)] = 1
    """Pods of one runner, started and lost as one, so that it may span nodes; each has as many of the processes, and
    needs a GPU for each. Tensors go between them unencrypted. A change replaces all runners at once."""


DISK_PATH_PATTERN = r"^(/[A-Za-z0-9_-][A-Za-z0-9._-]*)+$"


class Offload(ApiModel):
    """More model than memory: weights that do not fit come from a disk while layers compute (FlexGen)."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "mode",
            "mode Auto needs deviceBytes and diskPath",
            "self.mode == 'Off' || (has(self.deviceBytes) && has(self.diskPath))",
            lambda offload: (
                offload.mode == "Off" or (offload.device_bytes is not None and offload.disk_path is not None)
            ),
        ),
    )

    mode: Literal["Off", "Auto"] = "Off"
    """Auto: as much of the weights as fits deviceBytes stays in memory, the rest is read from diskPath in each step."""
    device_bytes: Quantity | None = None
    """Memory of the engine, of each rank, or of its GPU: weights, KV pages, adapters and what steps work on. The pod
    needs about 1 Gi more for the process itself."""
    host_bytes: Quantity | None = None
    """Memory of the host beside that of the device: on a GPU for weights that are copied to it as layers compute, and
    for those from the disk on their way. Without a GPU the two are one memory: as much more of the same."""
    disk_bytes: Quantity | None = None
    """Most bytes of packed weights on the disk, and the size limit of the pod's volume; unset: no limit."""
    disk_path: Annotated[str, Field(pattern=DISK_PATH_PATTERN, max_length=255)] | None = None
    """Where they lie, on a file system with direct I/O: in a cluster a volume of the pod is mounted there, with weft up
    it is a folder of the machine."""
    weights: Literal["bf16", "int8", "int4"] = "bf16"
    """The format of the base's weights: int8 and int4 halve and quarter what is read, at some accuracy."""
    kv: Literal["bf16", "int4"] = "bf16"
    """The format of KV: int4 takes 0.28 of bf16's bytes, at some accuracy; heads are a multiple of 32 then."""
    cpu_attention: Literal["Off", "Auto"] = "Off"
    """Whether attention is computed on the host where KV lies there. Without a GPU it always is, and both are one."""
    sparse_attention: Literal["Off", "TopK"] = "Off"
    """TopK: a token attends to the best tenth of its keys, and their values alone are read, at some accuracy. Off on a
    machine where it was not measured to be a tenth faster."""


Weight = Annotated[int, Field(strict=True, ge=1, le=1000)]


class Fairness(ApiModel):
    """How the namespaces whose requests wait share the pool."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "weights",
            f"no namespace; {PATTERN_HELP[LABEL_PATTERN]}",
            f"!has(self.weights) || self.weights.all(key, size(key) <= 63 && key.matches(r'{LABEL_PATTERN}'))",
            lambda fairness: all(len(key) <= 63 and re.fullmatch(LABEL_PATTERN, key) for key in fairness.weights or {}),
        ),
    )

    mode: Literal["Tenant", "None"] = "Tenant"
    """Tenant: the namespace that was served least is next (virtual token counter, OSDI 2024), and the queue's order
    holds inside it. None: the queue's order holds for all requests, whosever they are."""
    weights: Annotated[dict[str, Weight], Field(max_length=256)] | None = None
    """Shares of namespaces relative to each other; 1 for those that are not named."""


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
    """Milliseconds from a request's arrival to its first token. Autoscaling wants runners enough for it."""
    token_time_ms: Annotated[int, Field(strict=True, ge=1, le=60_000)] = 100
    """Milliseconds from token to token of each running sequence: prompts are processed in chunks that keep to it, and
    a runner takes no more sequences than its measured steps allow for it. S3's reader needs a token each 187."""
    admission: Literal["Queue", "Reject"] = "Queue"
    """Reject: a request that by estimate waits longer than ttftMs is answered 429 at once, with a retry-after. Queue:
    it waits."""


class SchedulingSpec(ApiModel):
    """Who runs where, and when."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "maxBatchTokens",
            "maxBatchTokens must be at least maxSequences: each sequence adds a token an iteration",
            f"(has(self.maxBatchTokens) ? self.maxBatchTokens : {BATCH_TOKENS}) >= "
            f"(has(self.maxSequences) ? self.maxSequences : {SEQUENCES})",
            lambda scheduler: (scheduler.max_batch_tokens or BATCH_TOKENS) >= (scheduler.max_sequences or SEQUENCES),
        ),
    )

    placement: Literal["punica"] = "punica"
    """The runner with the largest working set that can take the request (Punica, section 5.1)."""
    queue: Literal["fcfs", "s3", "shortest"] = "fcfs"
    """The order in which waiting requests get a runner. fcfs: first come, first served. s3: the largest predicted
    memory that fits first. shortest: the shortest expected answer first, aged by agingSeconds."""
    aging_seconds: Annotated[int, Field(strict=True, ge=0, le=86_400)] = 600
    """With queue shortest: a request is passed by none that arrived more than this after it, nor more than three times
    the backlog that it found. 0 is fcfs."""
    starvation_bound: Annotated[int, Field(strict=True, ge=0, le=1_000_000)] | None = None
    """How often younger requests may pass a waiting one before its runners drain for it. Default: the scheduler's own
    (32). With queue shortest only passes out of its order count; agingSeconds bounds the others."""
    fairness: Fairness = Fairness()
    """How the namespaces whose requests wait share the pool."""
    reservation: Literal["calibrated", "constant", "max", "paged", "pooled", "s3"] = "calibrated"
    """Memory reserved for an answer. calibrated: the predicted p90 of its length. s3: the edge of the predicted bucket.
    constant: the p90 of the pool's answers. max: max_tokens. paged: nothing, a page whenever one is needed. pooled: as
    paged on the runner, and as many are admitted as are expected to fit together, with a margin for their sum."""
    consolidation: Literal["autoscaled", "always", "never"] = "autoscaled"
    """When requests of a lightly loaded runner migrate to fuller ones, so that it becomes idle (Punica, section 5.3).
    autoscaled: while the pool has more runners than minReplicas. always: also where no runner can be released. While
    none is to come, full batches also grow by what makes steps a tenth slower before a lightly loaded one grows."""
    consolidation_seconds: Annotated[int, Field(strict=True, ge=1, le=3600)] = 10
    """At most one runner is emptied in this time; sequences that should end within it are left alone."""
    prefetch: Literal["forecast", "never"] = "never"
    """Whether adapters that requests will probably name soon, by the times of their earlier ones, come to the disks of
    runners before that. forecast: beside requests, as far as the disk has room to spare."""
    max_sequences: Annotated[int, Field(strict=True, ge=1, le=1024)] | None = None
    """Sequences in one batch of one runner. Unset: 32; of a pool that offloads, what the policy of its runners finds,
    for which a number here is the most."""
    max_batch_tokens: Annotated[int, Field(strict=True, ge=1, le=65_536)] | None = None
    """Tokens of one iteration of one runner; longer prompts are processed in chunks. Unset: 512; of a
    pool that offloads as maxSequences."""
    max_prefills: Annotated[int, Field(strict=True, ge=1, le=1024)] = 4
    """Prompts that one iteration of one runner works on, within maxBatchTokens; in a pool that offloads as many as that
    allows. 1 is Punica's."""
    max_queue: Annotated[int, Field(strict=True, ge=1, le=1_000_000)] = 1000
    """Requests that may wait; more are answered 429 with a computed retry-after. A namespace that has less than its
    share of them waiting is still accepted."""
    max_moves: Annotated[int, Field(strict=True, ge=1, le=1000)] = 8
    """Changes of the runner of one request before it fails; NoRoom and preemption do not count."""


class Phases(ApiModel):
    """Whether prompts and the tokens after them are computed by runners of their own (Splitwise)."""

    mode: Literal["Unified", "Split"] = "Unified"
    """Unified: each runner does both, prompts in chunks beside running sequences. Split: one runner computes a prompt
    and sends its KV to another, which computes the tokens after the first, so that a prompt delays nobody's tokens; a
    runner alone does both. For Split several runners have to be able to send KV to each other."""
    min_prompt: Annotated[int, Field(strict=True, ge=0, le=MAX_RUNNERS)] = 1
    """Split: so many runners compute prompts alone, whatever waits; others may do both for a while. With the default a
    pool of two keeps one for each phase; 0: under load every runner may do both, as in Unified."""
    min_token: Annotated[int, Field(strict=True, ge=0, le=MAX_RUNNERS)] = 1
    """Split: so many runners compute the tokens after the first alone: no prompt ever runs beside those."""
    kv_across_classes: Annotated[bool, Field(strict=True)] = False
    """Whether KV may go to a runner that computes in another order of sums or precision, as on other hardware: the text
    may then differ from that of one runner. Counted in weft_scheduler_hand_offs_total."""


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

    min_replicas: Annotated[int, Field(strict=True, ge=0, le=MAX_RUNNERS)] = 1
    """Never fewer runners. 0: none while there are no requests; the gateway holds the first until a runner is ready."""
    max_replicas: Annotated[int, Field(strict=True, ge=1, le=MAX_RUNNERS)]
    """Never more runners."""
    idle_seconds: Annotated[int, Field(strict=True, ge=1, le=86_400)] = 60
    """How long runners stay without work before some are given back."""
    wake_seconds: Annotated[int, Field(strict=True, ge=1, le=3600)] = 300
    """How long the gateway holds a request for a pool without runners."""


class AllowedNamespaces(ApiModel):
    """Whose adapters the pool serves, and who may call its base model."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "names",
            "names is given with from: List, and only then",
            "self.from == 'List' ? has(self.names) && size(self.names) > 0 : !has(self.names)",
            lambda allowed: (allowed.from_ == "List") == bool(allowed.names),
        ),
    )

    from_: Annotated[Literal["Same", "All", "List"], Field(alias="from")] = "Same"
    """Same: the pool's own namespace. All: every namespace. List: the pool's own and those in names."""
    names: Annotated[tuple[Label, ...], Field(max_length=256)] | None = None
    """Namespaces, with from: List."""


class ServingPoolSpec(ApiModel):
    """What is wanted. Never written by a controller."""

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
            "self.runnerGroups.map(group, group.minRunners).sum() <= self.autoscaling.maxReplicas",
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
            "minPrompt and minToken add up to more than autoscaling.maxReplicas",
            "self.phases.mode == 'Unified' || !has(self.autoscaling) || "
            "self.phases.minPrompt + self.phases.minToken <= self.autoscaling.maxReplicas",
            lambda spec: spec.phases.mode == "Unified" or spec.autoscaling is None or _fits(spec),
        ),
        Rule(
            "runnerGroups",
            "with phases.mode Split all groups have the same phase: nobody is left for the other one",
            "self.phases.mode == 'Unified' || !has(self.runnerGroups) || size(self.runnerGroups) == 0 || "
            "!(self.runnerGroups.all(group, group.phase == 'Prompt') || "
            "self.runnerGroups.all(group, group.phase == 'Token'))",
            lambda spec: spec.phases.mode == "Unified" or _for_both(spec),
        ),
        Rule(
            "offload",
            "ranks of a tensor split do not offload: split by parallelism.pipeline, each stage has a budget of its own",
            "!has(self.offload) || self.offload.mode == 'Off' || self.parallelism.tensor == 1",
            lambda spec: not _offloads(spec) or spec.parallelism.tensor == 1,
        ),
        Rule(
            "offload",
            "deviceBytes and hostBytes are above the template's limit of memory: the runner would be killed",
            "!has(self.offload) || self.offload.mode == 'Off' || !has(self.offload.deviceBytes) || "
            "!has(self.template) || !has(self.template.resources) || !has(self.template.resources.limits) || "
            "!('memory' in self.template.resources.limits) || "
            "('nvidia.com/gpu' in self.template.resources.limits ? quantity('0') : "
            "quantity(string(self.offload.deviceBytes))).add(has(self.offload.hostBytes) ? "
            "quantity(string(self.offload.hostBytes)) : quantity('0')).compareTo("
            "quantity(string(self.template.resources.limits['memory']))) <= 0",
            lambda spec: not _offloads(spec) or _within_memory(spec),
        ),
    )

    model: PoolModel
    """The base model."""
    replicas: Annotated[int, Field(strict=True, ge=0, le=MAX_RUNNERS)] | None = None
    """Runners. Written by people, or by an autoscaler through /scale; never by a default. Not with autoscaling."""
    autoscaling: Autoscaling | None = None
    """Runners by demand. Not with replicas; with neither there is one runner."""
    template: RunnerTemplate | None = None
    """The pods of runners, for groups without a template of their own. What is unset is the platform's."""
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
    """Runners on several kinds of hardware; one group named runners when unset."""
    lora: LoRASettings = LoRASettings()
    """What adapters may need of a runner."""
    kv_cache: KVCache = KVCache()
    """Key-value memory of one runner."""
    parallelism: Parallelism = Parallelism()
    """How one runner splits the model; the template's resources have a GPU for each process of a pod."""
    offload: Offload | None = None
    """More model than memory: weights that do not fit come from a disk. Unset: all are in memory."""
    phases: Phases = Phases()
    """Whether prompts and the tokens after them are computed by runners of their own."""
    scheduler: SchedulingSpec = SchedulingSpec()
    """Who runs where, and when."""
    slo: ServiceLevelObjectives | None = None
    """Within what times requests should be answered; status.slo has how many were. Unset: no attainment is measured."""
    drain_seconds: Annotated[int, Field(strict=True, ge=1, le=3600)] = 300
    """How long streams of a replaced or deleted adapter may finish; the pod of a runner has 30 s more to end."""
    allowed_namespaces: AllowedNamespaces = AllowedNamespaces()
    """Whose adapters the pool serves."""


class LastScale(ApiModel):
    """The newest change of the wanted number of runners."""

    time: Timestamp
    """When it was decided."""
    from_: Annotated[Count, Field(alias="from")]
    """Runners wanted before."""
    to: Count
    """Runners wanted from then on."""
    reason: Annotated[str, Field(max_length=1024)]
    """Why."""


class AdapterCounts(ApiModel):
    """Adapters that refer to the pool."""

    total: Annotated[int, Field(strict=True, ge=0)] = 0
    """All of them."""
    ready: Annotated[int, Field(strict=True, ge=0)] = 0
    """Those that clients can call."""


Percent = Annotated[int, Field(strict=True, ge=0, le=100)]


class SloStatus(ApiModel):
    """Percent of the requests finished in about five minutes that met the objectives; written once a minute at most."""

    attained_percent: Percent
    """Both objectives."""
    ttft_percent: Percent
    """ttftMs."""
    token_time_percent: Percent
    """tokenTimeMs."""


class WantedStatus(ApiModel):
    """Wanted runners by the phase of their groups."""

    prompt: Count
    """Of groups for prompts."""
    token: Count
    """Of groups for the tokens after the first one."""
    any: Count
    """Of groups for any phase."""


class PhasesStatus(ApiModel):
    """Runners by what they compute; written when there are more or fewer, else once a minute at most."""

    prompt: Count
    """Prompts."""
    token: Count
    """The tokens after the first one."""
    mixed: Count
    """Both."""
    message: Annotated[str, Field(max_length=1024)] = ""
    """Why they are so many."""
    wanted: WantedStatus | None = None
    """desiredReplicas by the phase of their groups, where an autoscaled pool has groups for a phase."""


class ServingPoolStatus(ApiModel):
    """What is observed."""

    observed_generation: Annotated[int, Field(strict=True, ge=0)] | None = None
    """The generation that the status is about."""
    base_digest: DigestText | None = None
    """The identity of the base model that is served."""
    max_context_tokens: Count | None = None
    """The base model's positions: prompt and answer together have no more; kvCache may bound them further."""
    desired_replicas: Count | None = None
    """Runners wanted now."""
    replicas: Count | None = None
    """Runners there are."""
    ready_replicas: Count | None = None
    """Runners that take requests."""
    selector: Annotated[str, Field(max_length=512)] | None = None
    """The labels of the runners' pods, as /scale reports them to autoscalers."""
    last_scale: LastScale | None = None
    """The newest change of the wanted number of runners."""
    adapters: AdapterCounts | None = None
    """Adapters that refer to the pool."""
    slo: SloStatus | None = None
    """Requests that met spec.slo."""
    phases: PhasesStatus | None = None
    """Runners by role, with phases.mode Split."""
    conditions: Conditions = ()
    """Accepted, Fetched, Available, Progressing."""


class ServingPool(Resource):
    """Runners that share one base model and serve its adapters."""

    kind: Literal["ServingPool"] = "ServingPool"
    spec: ServingPoolSpec
    status: Annotated[ServingPoolStatus, Field(exclude_if=is_empty)] = ServingPoolStatus()

    @property
    def immutables(self) -> dict[str, object]:
        return {"spec.model.uri": self.spec.model.uri}


def _offloads(spec: ServingPoolSpec) -> bool:
    return spec.offload is not None and spec.offload.mode == "Auto"


def _within_memory(spec: ServingPoolSpec) -> bool:
    """Where both are known. The host's bytes are of the same memory, the device's unless it is a GPU."""
    limits = (spec.template.resources.limits if spec.template and spec.template.resources else None) or {}
    offload = spec.offload
    if offload is None or offload.device_bytes is None or "memory" not in limits:
        return True
    device = 0 if GPU in limits else amount(offload.device_bytes)
    return device + amount(offload.host_bytes or 0) <= amount(limits["memory"])


def _least(spec: Any) -> int:
    return sum(group.min_runners for group in spec.runner_groups or ())


def _fits(spec: Any) -> bool:
    return bool(spec.phases.min_prompt + spec.phases.min_token <= spec.autoscaling.max_replicas)


def _for_both(spec: Any) -> bool:
    phases = {group.phase for group in spec.runner_groups or ()}
    return phases not in ({"Prompt"}, {"Token"})


def _most(spec: Any) -> int:
    groups = spec.runner_groups or ()
    unbounded = not groups or any(group.max_runners is None for group in groups)
    return MAX_RUNNERS if unbounded else sum(group.max_runners for group in groups)
