"""Desired state between registry, scheduler and gateways: pools, adapters, route table and statuses."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from itertools import islice
from operator import add, attrgetter
from typing import Annotated, Literal, NamedTuple, TypeVar

from weft.domain.adapter import MAX_VERSIONS, AdapterUid, AdapterVersion, Tier
from weft.domain.bounds import (
    MAX_DETAIL_CHARS,
    MAX_MODEL_CHARS,
    MAX_NAME_CHARS,
    Any32,
    Any64,
    Bound,
    Detail,
    Digest,
    EosTokens,
    Listed,
    ModelName,
    Namespace,
    Pages,
    PoolName,
    Rank,
    Runners,
    Seconds,
    SomeDigest,
    Text,
    Tokens,
)
from weft.domain.limits import LimitRule
from weft.domain.request import NO_DEFAULTS, SamplingDefaults

MAX_ENTRIES = 500  # of a kind in one message of routes: it keeps a gateway's event loop for 2 ms
# How models write calls of tools, by vLLM's names.
ToolCallParserName = Literal["hermes", "llama3_json", "mistral", "granite", "phi4_mini_json", "olmo3"]
V = TypeVar("V")
SomePool = Annotated[str, Bound(MAX_NAME_CHARS, 1, "a pool's name")]
RunnerName = Annotated[str, Bound(MAX_NAME_CHARS, 1, "a runner's name")]
KeyHash = Annotated[str, Bound(MAX_NAME_CHARS, 1, "a key's hash")]
_Tenant = Annotated[str, Bound(MAX_NAME_CHARS, 1, "a tenant")]
_Weight = Annotated[int, Bound(1000, 1, "a weight")]
TenantWeights = Annotated[tuple[tuple[_Tenant, _Weight], ...], Bound(256, subject="the number of weights")]
WholeSeconds = Annotated[float, Bound(1 << 31)]


@dataclass(frozen=True, slots=True)
class PoolRoute:
    """The part of a pool that a gateway knows. `max_context_tokens` 0: no runner has ever reported it."""

    name: SomePool  # "namespace/name"
    base_digest: Text = ""
    base_model_name: ModelName = ""
    max_context_tokens: Tokens = 0
    ready_runners: Any32 = 0
    shared_all: bool = False  # namespaces that may use the pool's base: all, or those listed
    shared_namespaces: Listed[Namespace] = ()
    tool_call_parser: Text = ""  # one of ToolCallParserName; "": as its chat template shows
    embeds_only: bool = False  # the base has no head
    max_output_tokens: Tokens = 0  # of an answer; 0: as many as the context holds
    sampling_defaults: SamplingDefaults = NO_DEFAULTS
    chat_template: Text = ""  # in place of the base's, as a Route's
    chat_template_fault: Detail = ""
    checks_drafts: bool = False  # all its Ready runners do; before the first one: not known, and true


_served_of = attrgetter(*(field.name for field in fields(PoolRoute)))


@dataclass(frozen=True, slots=True)
class PoolSpec(PoolRoute):
    """A pool as the registry declares it, with what gateways get. 0 for a duration: the receiver's own default."""

    max_queue: Any32 = 1000
    queue: Text = "fcfs"
    reservation: Text = "calibrated"
    created_unix_s: Any64 = 0
    min_runners: Runners = 0
    max_runners: Runners = 0  # 0: no bound is known
    idle_s: WholeSeconds = 0.0  # idle runners beyond those that are needed are released after this long
    drain_s: WholeSeconds = 0.0  # streams of a replaced or deleted digest run on this long
    consolidation: Text = "never"
    tenant_weights: TenantWeights = ()  # namespace, share; 1 for those that are not named
    slo_ttft_s: Seconds = 0.0  # objectives; 0: none
    slo_token_time_s: Seconds = 0.0
    slo_reject: bool = False  # who cannot get a token within `slo_ttft_s` is rejected at once
    phases: Text = "unified"  # "split": prompts on some runners, the tokens after them on others
    kv_across_classes: bool = False  # KV may go to a runner of another numerics class
    groups: Listed["PhaseGroups"] = ()  # split: counted apart; empty: runners are counted together
    generation: Any64 = 0  # of the object that this declares

    @property
    def has_slo(self) -> bool:
        """Whether attainment is measured."""
        return bool(self.slo_ttft_s or self.slo_token_time_s)

    def route(self, ready_runners: int, max_context_tokens: int, *, checks_drafts: bool = False) -> PoolRoute:
        """The part that gateways get while the pool has these runners; 0 tokens: none has reported, and the declared
        ones count."""
        served = PoolRoute(*_served_of(self))
        tokens = max_context_tokens or self.max_context_tokens
        return replace(served, ready_runners=ready_runners, max_context_tokens=tokens, checks_drafts=checks_drafts)

    @property
    def split(self) -> bool:
        """Whether the prompt phase and the token phase may run on different runners."""
        return self.phases == "split"


@dataclass(frozen=True, slots=True)
class Route:
    """A served name and its content. `versions`: further contents of the adapter, for pins.

    A version with a weight is the canary: it answers that percentage of the requests that pin none.
    """

    model_name: ModelName
    namespace: Namespace  # the adapter's; the pool's for a base model
    pool: PoolName
    digest: Digest  # "" for the base
    rank: Rank = 0
    uid: Text = ""
    created_unix_s: Any64 = 0
    version: Text = ""  # the name of the content; "" for none
    versions: Annotated[tuple[AdapterVersion, ...], Bound(MAX_VERSIONS)] = ()
    eos_token_ids: EosTokens = ()  # the adapter's own, beside the base's
    own_chat_template: bool = False  # chats are rendered by the one among the adapter's files
    chat_template: Text = ""  # digest of the artifact of the one that the spec gives instead; "": none
    chat_template_fault: Detail = ""  # the spec gives one that could not be read: why; chats are refused


_routed_of = attrgetter(*(field.name for field in fields(Route)))


@dataclass(frozen=True, slots=True)
class AdapterSpec(Route):
    """An adapter as the registry declares it; without a digest it is not served, for `reason` (of weft.api.reasons).

    `versions`: its canary, then earlier contents, the newest first, which are loaded on demand.
    """

    bytes: Any64 = 0
    pinned: bool = False
    tier: Tier = Tier.UNSPECIFIED  # the least that a Ready runner holds it in; UNSPECIFIED and REMOTE: on demand
    reason: Text = ""
    message: Detail = ""
    generation: Any64 = 0  # of the object's spec that this follows from

    @property
    def route(self) -> Route:
        """The part of the adapter that gateways get."""
        return Route(*_routed_of(self))

    @property
    def contents(self) -> "tuple[AdapterSpec, ...]":
        """Return the present content and the further contents, each as a separate adapter.

        No earlier content is held. A canary is never pinned (slots are counted without it), but is in host memory where
        the adapter is pinned.
        """
        canary_tier = Tier.HOST if self.pinned else self.tier
        other_fields = (
            replace(
                self, digest=v.digest, rank=v.rank, bytes=v.bytes, pinned=False,
                tier=canary_tier if v.weight else Tier.UNSPECIFIED, versions=(),
            )
            for v in self.versions
            if v.digest != self.digest
        )  # fmt: skip
        return (self, *other_fields) if self.digest else ()

    @property
    def canary(self) -> AdapterVersion | None:
        """The content that gets a share of the requests."""
        return next((v for v in self.versions if v.weight and v.digest != self.digest), None)

    @property
    def held(self) -> bool:
        """Whether every Ready runner of its pool holds it; the others load it when a request names it."""
        return self.pinned or self.tier in (Tier.DISK, Tier.HOST)


@dataclass(frozen=True, slots=True)
class RegistryHello:
    """A registry's stream is open. `term`: of the operator's leadership; 0 if there is only one.

    None: the stream has sent nothing, and may only listen to statuses.
    """

    term: int | None = 0


@dataclass(frozen=True, slots=True)
class RegistryChange:
    """Desired state: a complete snapshot, or what changed since."""

    snapshot: bool
    pools: Listed[PoolSpec] = ()
    adapters: Listed[AdapterSpec] = ()
    removed_pools: Listed[SomePool] = ()
    removed_adapters: Listed[AdapterUid] = ()  # uids
    term: Any64 = 0
    version: Any64 = 0


class GroupPhase(Enum):
    """The phase that a runner group's hardware is for."""

    PROMPT = "prompt"
    TOKEN = "token"  # noqa: S105 (the tokens after the first one)
    ANY = "any"


class PhaseGroups(NamedTuple):
    """The runner groups of a pool for one phase."""

    phase: GroupPhase
    min_runners: Runners = 0  # before any group gets more than its minimum
    max_runners: Runners = 0  # 0: no bound


class PhaseCounts(NamedTuple):
    """The numbers of runners for prompts, for the tokens after them, and for both."""

    prompt: Runners = 0
    token: Runners = 0
    any: Runners = 0


class SloAttainment(NamedTuple):
    """Percent of the requests finished in about the last five minutes that met the pool's objectives."""

    attained: Annotated[int, Bound(100, subject="a percentage")]  # both
    ttft: Annotated[int, Bound(100, subject="a percentage")]
    token_time: Annotated[int, Bound(100, subject="a percentage")]


class RoleCounts(NamedTuple):
    """The numbers of runners by role, of a pool that splits phases, and why; renewed at most once a minute."""

    prompt: Runners
    token: Runners
    mixed: Runners
    why: Text = ""


@dataclass(frozen=True, slots=True)
class PoolStatus:
    """A report of the scheduler about a pool, when it changed."""

    ready_runners: Any32
    wanted_runners: Any32 = 0  # within the pool's bounds
    victims: Listed[RunnerName] = ()  # names of the runners that should go, the first one first
    observed_generation: Any64 = 0  # of the PoolSpec that this answers; 0: runners may not have reported yet
    slo: SloAttainment | None = None  # None: no objectives, or no request yet; it changes once a minute at most
    roles: RoleCounts | None = None  # None: phases are not split
    wanted: PhaseCounts | None = None  # `wanted_runners` by the phase of their groups; None: not counted apart
    kv_pages: Pages = 0  # of the Ready runner with the fewest in all; 0: there was none yet
    pool: SomePool = ""


class CanaryCounts(NamedTuple):
    """Requests that ended while a canary was served, since this scheduler has known both contents."""

    digest: SomeDigest  # of the canary
    requests: Any64 = 0
    failed: Any64 = 0
    stable_requests: Any64 = 0
    stable_failed: Any64 = 0


@dataclass(frozen=True, slots=True)
class AdapterStatus:
    """A report of the scheduler about an adapter, when it changed, and once every gateway has applied its route.

    Readers subtract `unavailable_runners` from the pool's `ready_runners`: one more runner changes one status, the
    pool's, and not that of each adapter.
    """

    digest: Digest
    routed: bool
    unavailable_runners: Any32 = 0  # of the Ready ones: they have not got it yet, or failed to load it
    load_errors: Listed[Annotated[str, Bound(2 * MAX_DETAIL_CHARS, cut=True)]] = ()  # "runner: reason"
    load_failed: bool = False  # there are load errors, and no Ready runner serves it
    removed: bool = False  # the last one of a removed adapter: it is not routed, and no Ready runner has it
    canary: CanaryCounts | None = None  # None: it has none
    observed_generation: Any64 = 0  # of the AdapterSpec that this answers
    uid: AdapterUid = ""


class KeyScope(Enum):
    """The scope of an API key."""

    INFERENCE = "inference"  # everything in its namespace
    READ_ONLY = "read-only"  # lists of models, files and batches, metrics; no prompt and no answer
    METRICS = "metrics"  # metrics and status of its namespace
    PLATFORM = "platform"  # lists of models, metrics and status of every namespace; adapters of a local stack


@dataclass(frozen=True, slots=True)
class Unserved:
    """An adapter that is declared and not served: the reason of its condition Ready, and the message."""

    uid: Text
    namespace: Namespace
    model_name: ModelName
    pool: PoolName
    reason: Text
    message: Detail


@dataclass(frozen=True, slots=True)
class KeyRoute:
    """The hash of an API key and the namespace it authenticates."""

    key_hash: KeyHash  # hex SHA-256
    namespace: Namespace  # "" with scope PLATFORM
    key_id: Text  # public prefix, for logs
    scope: KeyScope = KeyScope.INFERENCE
    # Names, or patterns with * and ?; none: every model of the namespace.
    models: Listed[Annotated[str, Bound(MAX_MODEL_CHARS, 1, "a key's model")]] = ()
    expires_unix_ms: Any64 = 0  # 0: never
    limits: Listed[LimitRule] = ()  # its own and its namespace's


def limits_entry(namespace: str) -> str:
    """The key of the entry that has the limits of a namespace, for callers who have no key of their own."""
    return f"namespace/{namespace}"


@dataclass(frozen=True, slots=True)
class Keys:
    """All API keys. `version`: grows with every change in the store; 0: of a supervisor that confirms nothing."""

    keys: Listed[KeyRoute]
    version: Any64 = 0


@dataclass(frozen=True, slots=True)
class KeysConfirmed:
    """A supervisor has read the store: it has the keys of this version, which were sent before."""

    version: Any64


@dataclass(frozen=True, slots=True)
class Routes:
    """The route table (`full`), or what changed between `base_version` and `version`.

    Entries replace those of the same name. Versions grow across restarts too: the scheduler's term is in their upper
    32 bits. A gateway whose version is not `base_version` answers ResyncRoutes. `more`: the change goes on in the next
    message; what a full table does not name is removed with its last one.
    """

    version: Any64
    full: bool
    base_version: Any64 = 0
    routes: Listed[Route] = ()
    removed_models: Listed[Text] = ()
    pools: Listed[PoolRoute] = ()
    removed_pools: Listed[Text] = ()
    keys: Listed[KeyRoute] = ()
    removed_keys: Listed[Text] = ()  # hashes
    keys_known: bool = False  # False until a supervisor has sent its keys
    unserved: Listed[Unserved] = ()
    removed_unserved: Listed[Text] = ()  # uids
    more: bool = False

    def parts(self, max_entries: int = MAX_ENTRIES) -> Iterator["Routes"]:
        """Split the change into messages of at most `max_entries` entries of each kind."""
        entries = (
            "routes", "removed_models", "pools", "removed_pools", "keys", "removed_keys", "unserved",
            "removed_unserved",
        )  # fmt: skip
        longest = max(len(getattr(self, name)) for name in entries)
        part = self
        for start in range(0, longest, max_entries):
            cut = {name: getattr(self, name)[start : start + max_entries] for name in entries}
            part = replace(part, **cut, more=start + max_entries < longest)
            yield part
            part = replace(part, full=False, base_version=self.version)
        if not longest:
            yield self


@dataclass(frozen=True, slots=True)
class RoutesApplied:
    """Every request that a gateway submits from now on is of this version of the route table, or a newer one."""

    version: Any64


@dataclass(frozen=True, slots=True)
class ResyncRoutes:
    """Send the full route table."""


class RoutesGap(Exception):
    """A change of the route table does not follow the table that is there."""


@dataclass(slots=True)
class RouteBook:
    """The route table as its changes gave it. Applying a change costs what the change carries."""

    version: int = 0
    keys_known: bool = False
    routes: dict[str, Route] = field(default_factory=dict[str, Route])
    pools: dict[str, PoolRoute] = field(default_factory=dict[str, PoolRoute])
    keys: dict[str, KeyRoute] = field(default_factory=dict[str, KeyRoute])
    unserved: dict[str, Unserved] = field(default_factory=dict[str, Unserved])  # by uid
    _named: tuple[int, ...] | None = None  # entries of each kind that a full table, not whole yet, has named

    def apply(self, change: Routes) -> tuple[dict[str, Route], dict[str, PoolRoute], dict[str, Unserved]]:
        """Apply a change. Returns the routes, the rows of pools and the unserved adapters that are replaced or removed.

        A full table replaces the entries one by one, and removes the others with its last part: 100,000 routes that are
        freed at once stop the process for 30 ms. Raises RoutesGap, which leaves the book as it was.
        """
        named = len(change.routes), len(change.pools), len(change.keys), len(change.unserved)
        if change.full:
            self._named = named
        elif change.base_version != self.version:
            raise RoutesGap(f"a change from version {change.base_version} on, at version {self.version}")
        elif self._named is not None:
            self._named = tuple(map(add, self._named, named))
        self.version = change.version
        sizes: Sequence[int | None] = (None,) * len(named)
        if not change.more:
            self.keys_known, self._named, sizes = change.keys_known, None, self._named or sizes
        keys = {key.key_hash: key for key in change.keys}
        _update(self.keys, keys, change.removed_keys, sizes[2])
        routes = {route.model_name: route for route in change.routes}
        pools = {pool.name: pool for pool in change.pools}
        unserved = {entry.uid: entry for entry in change.unserved}
        return (
            _update(self.routes, routes, change.removed_models, sizes[0]),
            _update(self.pools, pools, change.removed_pools, sizes[1]),
            _update(self.unserved, unserved, change.removed_unserved, sizes[3]),
        )


def _update(table: dict[str, V], new: dict[str, V], removed: Sequence[str], size: int | None) -> dict[str, V]:
    """Replace and remove entries of `table`, and return those. `size`: keep only the latest `size` entries."""
    old_entries = {name: table.pop(name) for name in (*removed, *new) if name in table}
    table.update(new)  # at the end
    if size is not None:
        for name in list(islice(table, max(0, len(table) - size))):
            old_entries[name] = table.pop(name)
    return old_entries
