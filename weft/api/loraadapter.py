"""LoRAAdapter: a tenant's adapter, its source, and its pool."""

from typing import Annotated, Literal

from pydantic import Field

from weft.api.chat_template import ChatTemplateSource, ChatTemplateStatus, SuppliedTemplateStatus
from weft.api.fields import ApiModel, DigestText, DurationText, Label, ModelName, Timestamp, TokenIds, VersionName
from weft.api.meta import Conditions, Resource, is_empty
from weft.api.source import Artifact


class PoolRef(ApiModel):
    """The ServingPool of the adapter. An edit moves the adapter. The previous pool goes on serving until the new pool
    takes requests. It also goes on while the new pool refuses the adapter (Ready has reason UpdateFailed)."""

    name: Label
    """The name of the ServingPool."""
    namespace: Label | None = None
    """The namespace of the ServingPool. The default is the adapter's namespace. A pool in a different namespace has to
    list the adapter's namespace in its allowedNamespaces. Otherwise Accepted is False with reason NotPermitted."""


class AdapterSource(Artifact):
    """The adapter's files: adapter_config.json and adapter_model.safetensors, as PEFT writes them, and the tokenizer's
    configuration if training wrote it."""


class Canary(ApiModel):
    """A second content under the adapter's name, with a share of its requests."""

    source: AdapterSource
    """The canary's files. They are checked as spec.source is. A refused canary gets no request, and the condition
    CanaryPromoted has the reason."""
    version: VersionName | None = None
    """A name for the canary's content. Requests pin the content by `model@version`, regardless of the weight."""
    weight: Annotated[int, Field(strict=True, ge=1, le=100)]
    """The percentage of unpinned requests that the canary answers. Requests with a `user` (or `safety_identifier`) are
    divided by it, so that a user stays with one content. A larger weight takes no user from the canary."""
    max_error_percent: Annotated[int, Field(strict=True, ge=0, le=100)] = 5
    """The number of percentage points by which the canary's error rate may exceed the error rate of spec.source. Beyond
    it the canary is rolled back: it gets no more requests. 100: roll it back by hand only, by removing spec.canary."""
    min_requests: Annotated[int, Field(strict=True, ge=1, le=1_000_000)] = 20
    """The number of finished canary requests before it is rolled back or promoted."""
    promote_after: DurationText | None = None
    """The time that the canary has to serve without a rollback until it is promoted (for example 30m). Then it answers
    every request, although spec.source still names the previous content. Without it, promote by hand: set spec.source
    to the canary's source and remove spec.canary."""


class LoRAAdapterSpec(ApiModel):
    """The desired state. No controller of Weft writes it."""

    pool_ref: PoolRef
    """The ServingPool of the adapter."""
    base_model: ModelName | None = None
    """An assertion that the pool's base model has this name. Otherwise Accepted is False with reason BaseMismatch. Set
    it if training used a name that the pool does not know."""
    model_name: ModelName | None = None
    """The name that clients send as `model`. The default is <namespace>/<name>. If two adapters ask for the same name,
    the older adapter gets it. The newer adapter is refused with reason NameConflict."""
    source: AdapterSource
    """The adapter's files, adapter_config.json and adapter_model.safetensors."""
    chat_template: ChatTemplateSource = ChatTemplateSource()
    """The chat template for chats with the adapter. status.chatTemplate shows the template in its files.
    status.suppliedChatTemplate shows the template in the spec."""
    canary: Canary | None = None
    """A second content with a share of the requests until it is promoted or rolled back. Without it every unpinned
    request gets the content of spec.source."""
    max_rank: Annotated[int, Field(strict=True, ge=1, le=256)] | None = None
    """An assertion that no module has a larger rank. Otherwise Validated is False with reason RankTooLarge. The pool's
    lora.maxRank also applies."""
    pinned: Annotated[bool, Field(strict=True)] = False
    """Whether the adapter stays on the device of every runner of the pool, so that no request waits for a load. A pool
    with advanced.maxAdapters can pin at most one adapter less."""
    tier: Literal["Remote", "Disk", "Host"] = "Remote"
    """The minimum tier of the adapter on every ready runner. Host is memory and Disk is the runner's disk. With Remote
    a runner fetches the adapter when the first request names it."""
    version: VersionName | None = None
    """A name for the content of the source. Requests pin the content by `model@version`. The name belongs to the newest
    content published under it. Without a name a request pins a content by its digest: `model@sha256:...`."""
    revision_history_limit: Annotated[int, Field(strict=True, ge=0, le=100)] = 1
    """The number of earlier contents available to pinned requests. Older contents are dropped when their streams have
    ended, at the latest after the pool's drainSeconds."""


class PublishedContent(ApiModel):
    """A present or past content of the adapter on the current base model."""

    digest: DigestText
    """The digest of the content."""
    name: VersionName | None = None
    """The name given by spec.version when the content was published."""
    rank: Annotated[int, Field(strict=True, ge=1)] | None = None
    """The largest rank of any module."""
    size_bytes: Annotated[int, Field(strict=True, ge=0)] | None = None
    """The bytes of all files of the content."""
    eos_token_ids: TokenIds | None = None
    """The tokens that end an answer, in addition to the base model's."""
    chat_template: ChatTemplateStatus | None = None
    """The chat template in use with from: Auto."""
    base_digest: DigestText | None = None
    """The digest of the base model that the content was validated against."""
    publish_time: Timestamp
    """The time at which the content was first published."""


class CanaryStatus(ApiModel):
    """The state of the canary. Counts are updated at most twice a minute."""

    phase: Literal["Pending", "Failed", "Progressing", "Promoted", "RolledBack"]
    """The phase. Pending until the content is fetched and the adapter is served. Failed if its source is refused.
    Progressing while it gets its share. Then Promoted or RolledBack until its source has a new content."""
    digest: DigestText | None = None
    """The digest of the canary's content."""
    name: VersionName | None = None
    """The name given by spec.canary.version to the content."""
    rank: Annotated[int, Field(strict=True, ge=1)] | None = None
    """The largest rank of any module."""
    size_bytes: Annotated[int, Field(strict=True, ge=0)] | None = None
    """The bytes of all files of the content."""
    eos_token_ids: TokenIds | None = None
    """The tokens that end an answer, in addition to the base model's."""
    chat_template: ChatTemplateStatus | None = None
    """The chat template in use with from: Auto."""
    base_digest: DigestText | None = None
    """The digest of the base model that the content was validated against."""
    start_time: Timestamp | None = None
    """The time at which the content began to get its share."""
    update_time: Timestamp | None = None
    """The time of the last update of the counts."""
    requests: Annotated[int, Field(strict=True, ge=0)] = 0
    """The number of finished canary requests."""
    failed_requests: Annotated[int, Field(strict=True, ge=0)] = 0
    """The number of failed canary requests."""
    stable_requests: Annotated[int, Field(strict=True, ge=0)] = 0
    """The number of finished requests to the content of spec.source since startTime."""
    stable_failed_requests: Annotated[int, Field(strict=True, ge=0)] = 0
    """The number of failed requests to the content of spec.source since startTime."""


class LoRAAdapterStatus(ApiModel):
    """The observed state."""

    observed_generation: Annotated[int, Field(strict=True, ge=0)] | None = None
    """The metadata.generation described by the status."""
    digest: DigestText | None = None
    """The digest of the content in service."""
    pool: Annotated[str, Field(max_length=127)] | None = None
    """The `namespace/name` of the ServingPool that the content was validated for."""
    base_digest: DigestText | None = None
    """The digest of the base model that the content was validated against."""
    rank: Annotated[int, Field(strict=True, ge=1)] | None = None
    """The largest rank of any module."""
    alpha: float | None = None
    """The lora_alpha of the adapter's configuration."""
    target_modules: Annotated[tuple[str, ...], Field(max_length=64)] | None = None
    """The projections changed by the adapter."""
    size_bytes: Annotated[int, Field(strict=True, ge=0)] | None = None
    """The bytes of all files of the content."""
    dtype: str | None = None
    """The data type of the adapter's weights."""
    eos_token_ids: TokenIds | None = None
    """The tokens that end an answer of the adapter, from its tokenizer_config.json or special_tokens_map.json, in
    addition to the base model's."""
    chat_template: ChatTemplateStatus | None = None
    """The chat template of the content, if spec.chatTemplate leaves the choice to its files."""
    supplied_chat_template: SuppliedTemplateStatus | None = None
    """The chat template given by spec.chatTemplate, in place of the template in the files."""
    model_name: str | None = None
    """The name that clients send as `model`."""
    unavailable_runners: Annotated[int, Field(strict=True, ge=0)] | None = None
    """The number of ready runners of the pool that do not serve the content: they have not received it yet, or failed
    to load it."""
    versions: Annotated[
        tuple[PublishedContent, ...],
        Field(
            max_length=101,
            exclude_if=lambda value: not value,
            json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["digest"]},
        ),
    ] = ()
    """The content in service, then the earlier contents available to pinned requests, newest first."""
    canary: CanaryStatus | None = None
    """The state of spec.canary."""
    conditions: Conditions = ()
    """The conditions Accepted, Validated, Fetched, ChatTemplate, Ready and, with spec.canary, CanaryPromoted.
    ChatTemplate is False if chats are refused; completions go on."""


class LoRAAdapter(Resource):
    """A LoRA adapter served by a ServingPool. Ready when validated, fetched and in the route table."""

    kind: Literal["LoRAAdapter"] = "LoRAAdapter"
    spec: LoRAAdapterSpec
    status: Annotated[LoRAAdapterStatus, Field(exclude_if=is_empty)] = LoRAAdapterStatus()
