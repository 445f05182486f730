"""LoRAAdapter: a tenant's adapter, where it comes from, and the pool that serves it."""

from typing import Annotated, Literal

from pydantic import Field

from weft.api.chat_template import ChatTemplateSource, ChatTemplateStatus, SuppliedTemplateStatus
from weft.api.fields import ApiModel, DigestText, DurationText, Label, ModelName, Timestamp, TokenIds, VersionName
from weft.api.meta import Conditions, Resource, is_empty
from weft.api.source import Artifact


class PoolRef(ApiModel):
    """The ServingPool that serves the adapter. An edit moves the adapter: the pool before it goes on serving until the
    new one takes requests, and for as long as the new one refuses the adapter (Ready has reason UpdateFailed)."""

    name: Label
    """The name of the ServingPool."""
    namespace: Label | None = None
    """The namespace of the ServingPool. It defaults to the adapter's own. A pool of another namespace has to allow
    this one in its allowedNamespaces; otherwise Accepted is False with reason NotPermitted."""


class AdapterSource(Artifact):
    """The place of the adapter's files: adapter_config.json and adapter_model.safetensors, as PEFT writes them, and the
    configuration of its tokenizer where training wrote it."""


class Canary(ApiModel):
    """A second content under the adapter's name, which gets a share of its requests."""

    source: AdapterSource
    """The place of the canary's files. It is checked as spec.source is; one that is refused gets no request, and the
    condition CanaryPromoted says why."""
    version: VersionName | None = None
    """A name for the canary's content, by which requests pin it whatever the weight: `model@version`."""
    weight: Annotated[int, Field(strict=True, ge=1, le=100)]
    """The percentage of the requests without a pin that the canary answers. Requests that name a `user` (or
    `safety_identifier`) are divided by it, so that a user stays with one content; a larger weight takes nobody from
    the canary."""
    max_error_percent: Annotated[int, Field(strict=True, ge=0, le=100)] = 5
    """The canary is rolled back (it gets no more requests) once its requests fail more often than those of
    spec.source by more than this number of percentage points. 100: it is rolled back by hand only, by removing
    spec.canary."""
    min_requests: Annotated[int, Field(strict=True, ge=1, le=1_000_000)] = 20
    """The number of the canary's requests that have to end before it is rolled back or promoted."""
    promote_after: DurationText | None = None
    """How long the canary has to serve without being rolled back until it is promoted (for example 30m): it answers
    every request then, though spec.source names the content before. Without it the canary is promoted by hand: set
    spec.source to the canary's source and remove spec.canary."""


class LoRAAdapterSpec(ApiModel):
    """The desired state. No controller of Weft writes it."""

    pool_ref: PoolRef
    """The ServingPool that serves the adapter."""
    base_model: ModelName | None = None
    """An assertion that the pool's base model has this name; otherwise Accepted is False with reason BaseMismatch.
    It is needed where training knew the base by a name that the pool's model does not go by."""
    model_name: ModelName | None = None
    """The name that clients send as `model`. It defaults to <namespace>/<name>. Where two adapters ask for one
    name, the older one has it and the other is refused with reason NameConflict."""
    source: AdapterSource
    """The place of the adapter's files, adapter_config.json and adapter_model.safetensors."""
    chat_template: ChatTemplateSource = ChatTemplateSource()
    """The choice of the chat template that renders the chats of the adapter. status.chatTemplate shows what its files
    have, status.suppliedChatTemplate what the spec gives."""
    canary: Canary | None = None
    """A second content that gets a share of the requests until it is promoted or rolled back. Without it every
    request without a pin gets the content of spec.source."""
    max_rank: Annotated[int, Field(strict=True, ge=1, le=256)] | None = None
    """An assertion that no module has a larger rank; otherwise Validated is False with reason RankTooLarge. The
    pool's lora.maxRank bounds it too."""
    pinned: Annotated[bool, Field(strict=True)] = False
    """Whether the adapter stays on the device of every runner of the pool, so that no request waits until it is
    loaded. A pool with advanced.maxAdapters can pin one adapter less than that."""
    tier: Literal["Remote", "Disk", "Host"] = "Remote"
    """The tier in which every ready runner keeps the adapter at least: Host is memory, Disk is the runner's disk,
    Remote means that a runner fetches it when the first request names it."""
    version: VersionName | None = None
    """A name for the content of the source, by which requests pin it: `model@version`. It belongs to the newest
    content that was published under it. Without a name a request pins a content by its digest: `model@sha256:...`."""
    revision_history_limit: Annotated[int, Field(strict=True, ge=0, le=100)] = 1
    """The number of earlier contents that are served to requests that pin them. Older ones are dropped when their
    streams have ended, at the latest after the pool's drainSeconds."""


class PublishedContent(ApiModel):
    """A content that the adapter has, or has had, on the present base model."""

    digest: DigestText
    """The digest of the content."""
    name: VersionName | None = None
    """The name that spec.version gave the content when it was published."""
    rank: Annotated[int, Field(strict=True, ge=1)] | None = None
    """The largest rank of any module."""
    size_bytes: Annotated[int, Field(strict=True, ge=0)] | None = None
    """The bytes of all files of the content."""
    eos_token_ids: TokenIds | None = None
    """The tokens that end an answer of the content, beside those of the base model."""
    chat_template: ChatTemplateStatus | None = None
    """The chat template that counts where the choice is Auto."""
    base_digest: DigestText | None = None
    """The digest of the base model that the content was validated against."""
    publish_time: Timestamp
    """The time at which the content was first published."""


class CanaryStatus(ApiModel):
    """What has become of the canary. Counts are renewed at most twice a minute."""

    phase: Literal["Pending", "Failed", "Progressing", "Promoted", "RolledBack"]
    """The phase: Pending until the content has been fetched and the adapter is served, Failed where its source is
    refused, Progressing while it gets its share, then Promoted or RolledBack until its source has another content."""
    digest: DigestText | None = None
    """The digest of the canary's content."""
    name: VersionName | None = None
    """The name that spec.canary.version gave the content."""
    rank: Annotated[int, Field(strict=True, ge=1)] | None = None
    """The largest rank of any module."""
    size_bytes: Annotated[int, Field(strict=True, ge=0)] | None = None
    """The bytes of all files of the content."""
    eos_token_ids: TokenIds | None = None
    """The tokens that end an answer of the content, beside those of the base model."""
    chat_template: ChatTemplateStatus | None = None
    """The chat template that counts where the choice is Auto."""
    base_digest: DigestText | None = None
    """The digest of the base model that the content was validated against."""
    start_time: Timestamp | None = None
    """The time since which the content gets its share."""
    update_time: Timestamp | None = None
    """The time at which the counts were renewed."""
    requests: Annotated[int, Field(strict=True, ge=0)] = 0
    """The number of the canary's requests that have ended."""
    failed_requests: Annotated[int, Field(strict=True, ge=0)] = 0
    """The number of those that failed."""
    stable_requests: Annotated[int, Field(strict=True, ge=0)] = 0
    """The number of requests to the content of spec.source that have ended meanwhile."""
    stable_failed_requests: Annotated[int, Field(strict=True, ge=0)] = 0
    """The number of those that failed."""


class LoRAAdapterStatus(ApiModel):
    """The observed state."""

    observed_generation: Annotated[int, Field(strict=True, ge=0)] | None = None
    """The metadata.generation that the status describes."""
    digest: DigestText | None = None
    """The digest of the content that is served."""
    pool: Annotated[str, Field(max_length=127)] | None = None
    """The `namespace/name` of the ServingPool that the content was validated for."""
    base_digest: DigestText | None = None
    """The digest of the base model that the content was validated against."""
    rank: Annotated[int, Field(strict=True, ge=1)] | None = None
    """The largest rank of any module."""
    alpha: float | None = None
    """The lora_alpha of the adapter's configuration."""
    target_modules: Annotated[tuple[str, ...], Field(max_length=64)] | None = None
    """The projections that the adapter changes."""
    size_bytes: Annotated[int, Field(strict=True, ge=0)] | None = None
    """The bytes of all files of the content."""
    dtype: str | None = None
    """The data type of the adapter's weights."""
    eos_token_ids: TokenIds | None = None
    """The tokens that end an answer of the adapter, as its own tokenizer_config.json or special_tokens_map.json names
    them, beside those of the base model."""
    chat_template: ChatTemplateStatus | None = None
    """The chat template of the content, where spec.chatTemplate leaves the choice to its files."""
    supplied_chat_template: SuppliedTemplateStatus | None = None
    """The chat template that spec.chatTemplate gives, in place of that of the files."""
    model_name: str | None = None
    """The name that clients send as `model`."""
    unavailable_runners: Annotated[int, Field(strict=True, ge=0)] | None = None
    """The number of ready runners of the pool that do not serve the content: they have not received it yet, or
    failed to load it."""
    versions: Annotated[
        tuple[PublishedContent, ...],
        Field(
            max_length=101,
            exclude_if=lambda value: not value,
            json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["digest"]},
        ),
    ] = ()
    """The content that is served, then the earlier ones that requests may pin, the newest first."""
    canary: CanaryStatus | None = None
    """The state of spec.canary."""
    conditions: Conditions = ()
    """The conditions Accepted, Validated, Fetched, ChatTemplate, Ready and, with spec.canary, CanaryPromoted.
    ChatTemplate is False where chats are refused; completions go on."""


class LoRAAdapter(Resource):
    """A LoRA adapter served by a ServingPool. Ready when validated, fetched and in the route table."""

    kind: Literal["LoRAAdapter"] = "LoRAAdapter"
    spec: LoRAAdapterSpec
    status: Annotated[LoRAAdapterStatus, Field(exclude_if=is_empty)] = LoRAAdapterStatus()
