"""Registry (the operator, or the controller of `weft up`) <-> scheduler."""

from collections.abc import Sequence
from typing import Any

from weft.domain.adapter import AdapterSpec, AdapterVersion, Tier
from weft.domain.routes import (
    AdapterStatus,
    CanaryCounts,
    GroupPhase,
    PhaseCounts,
    PhaseGroups,
    PoolSpec,
    PoolStatus,
    RegistryChange,
    RoleCounts,
    SloAttainment,
)
from weft.wire.codec.cluster import TIER, TIERS
from weft.wire.codec.direction import Direction, Entry
from weft.wire.codec.scheduling import sampling_defaults, sampling_defaults_message
from weft.wire.codec.values import (
    MAX_DETAIL,
    MAX_EOS_TOKENS,
    MAX_MODEL,
    MAX_PAGES,
    MAX_RANK,
    MAX_TOKENS,
    MAX_WAITED_MS,
    inverted,
    named,
    number,
    same_named,
    text,
    texts,
)
from weft.wire.errors import PeerError
from weft.wire.v1 import scheduler_pb2 as pb

MAX_RUNNERS = 1 << 20
MAX_SECONDS = 1 << 31
MAX_TENANTS, MAX_WEIGHT = 256, 1000  # as the schema's
MAX_VERSIONS = 101  # of an adapter, as the schema's, and a canary
PHASE = {
    GroupPhase.ANY: pb.PhaseGroups.ANY,
    GroupPhase.PROMPT: pb.PhaseGroups.PROMPT,
    GroupPhase.TOKEN: pb.PhaseGroups.TOKEN,
}
PHASES = inverted(PHASE)
# fields that the message names otherwise
OTHERWISE = (
    "idle_s", "drain_s", "slo_ttft_s", "slo_token_time_s", "tenant_weights",
    "groups", "sampling_defaults",
)  # fmt: skip


def fill_registry_change(change: RegistryChange, m: pb.RegistryToScheduler) -> None:
    m.version, m.snapshot, m.term = change.version, change.snapshot, change.term
    m.removed_pools.extend(change.removed_pools)
    m.removed_adapters.extend(change.removed_adapters)
    for pool in change.pools:
        same = same_named(pool, *OTHERWISE)
        m.pools.add(
            idle_s=round(pool.idle_s),
            drain_s=round(pool.drain_s),
            slo_ttft_ms=round(1000 * pool.slo_ttft_s),
            slo_token_time_ms=round(1000 * pool.slo_token_time_s),
            tenant_weights=dict(pool.tenant_weights),
            sampling_defaults=sampling_defaults_message(pool.sampling_defaults),
            groups=[pb.PhaseGroups(**group._asdict() | {"phase": PHASE[group.phase]}) for group in pool.groups],
            **same,
        )
    for adapter in change.adapters:
        message = adapter.message[:MAX_DETAIL]
        versions = [pb.AdapterVersion(**version._asdict()) for version in adapter.versions]
        others = same_named(adapter, "tier", "message", "versions")
        m.adapters.add(tier=TIER[adapter.tier], message=message, versions=versions, **others)


def registry_change(m: pb.RegistryToScheduler) -> RegistryChange:
    """Raises PeerError."""
    return RegistryChange(
        snapshot=m.snapshot,
        pools=tuple([_pool(pool) for pool in m.pools]),
        adapters=tuple([_adapter(adapter) for adapter in m.adapters]),
        removed_pools=texts(m.removed_pools, "a pool's name"),
        removed_adapters=texts(m.removed_adapters, "an adapter's uid"),
        term=m.term,
        version=m.version,
    )


def _pool(m: pb.PoolDesired) -> PoolSpec:
    """Unset bounds and policies are the schema's defaults."""
    name = named(m.name, "a pool's name")
    return PoolSpec(
        name=name,
        base_digest=text(m.base_digest, f"pool {name}: base_digest"),
        base_model_name=text(m.base_model_name, f"pool {name}: base_model_name", MAX_MODEL),
        shared_all=m.shared_all,
        shared_namespaces=texts(m.shared_namespaces, f"pool {name}: a namespace"),
        max_queue=m.max_queue or 1000,
        queue=text(m.queue, f"pool {name}: queue") or "fcfs",
        reservation=text(m.reservation, f"pool {name}: reservation") or "calibrated",
        created_unix_s=m.created_unix_s,
        min_runners=number(m.min_runners, f"pool {name}: min_runners", MAX_RUNNERS),
        max_runners=number(m.max_runners, f"pool {name}: max_runners", MAX_RUNNERS),
        idle_s=float(number(m.idle_s, f"pool {name}: idle_s", MAX_SECONDS)),
        drain_s=float(number(m.drain_s, f"pool {name}: drain_s", MAX_SECONDS)),
        max_context_tokens=number(m.max_context_tokens, f"pool {name}: max_context_tokens", MAX_TOKENS),
        consolidation=text(m.consolidation, f"pool {name}: consolidation") or "never",
        tenant_weights=_weights(m, name),
        slo_ttft_s=number(m.slo_ttft_ms, f"pool {name}: slo_ttft_ms", MAX_WAITED_MS) / 1000,
        slo_token_time_s=number(m.slo_token_time_ms, f"pool {name}: slo_token_time_ms", MAX_WAITED_MS) / 1000,
        slo_reject=m.slo_reject,
        phases=text(m.phases, f"pool {name}: phases") or "unified",
        kv_across_classes=m.kv_across_classes,
        groups=tuple([_groups(groups, name) for groups in m.groups]),
        tool_call_parser=text(m.tool_call_parser, f"pool {name}: tool_call_parser"),
        embeds_only=m.embeds_only,
        max_output_tokens=number(m.max_output_tokens, f"pool {name}: max_output_tokens", MAX_TOKENS),
        sampling_defaults=sampling_defaults(m.sampling_defaults),
        chat_template=text(m.chat_template, f"pool {name}: chat_template"),
        chat_template_fault=m.chat_template_fault[:MAX_DETAIL],
        generation=m.generation,
    )


def _groups(m: pb.PhaseGroups, pool: str) -> PhaseGroups:
    if m.phase not in PHASES:
        raise PeerError(f"pool {pool}: groups of phase {m.phase}")
    runners = [number(count, f"pool {pool}: groups' runners", MAX_RUNNERS) for count in (m.min_runners, m.max_runners)]
    return PhaseGroups(PHASES[m.phase], *runners)


def _weights(m: pb.PoolDesired, name: str) -> tuple[tuple[str, int], ...]:
    number(len(m.tenant_weights), f"pool {name}: the number of weights", MAX_TENANTS)
    return tuple(
        [
            (named(tenant, f"pool {name}: a tenant"), number(weight, f"pool {name}: a weight", MAX_WEIGHT, least=1))
            for tenant, weight in sorted(m.tenant_weights.items())
        ]
    )


def _adapter(m: pb.AdapterDesired) -> AdapterSpec:
    uid = named(m.uid, "an adapter's uid")
    tier = TIERS.get(m.tier)
    if tier is None or tier is Tier.DEVICE:
        raise PeerError(f"adapter {uid}: tier {m.tier} cannot be required (the device's is `pinned`)")
    return AdapterSpec(
        uid=uid,
        namespace=text(m.namespace, f"adapter {uid}: namespace"),
        name=text(m.name, f"adapter {uid}: name"),
        model_name=text(m.model_name, f"adapter {uid}: model_name", MAX_MODEL),
        pool=text(m.pool, f"adapter {uid}: pool"),
        digest=text(m.digest, f"adapter {uid}: digest"),
        rank=number(m.rank, f"adapter {uid}: rank", MAX_RANK),
        bytes=m.bytes,
        pinned=m.pinned,
        created_unix_s=m.created_unix_s,
        tier=tier,
        reason=text(m.reason, f"adapter {uid}: reason"),
        message=m.message[:MAX_DETAIL],
        version=text(m.version, f"adapter {uid}: version"),
        versions=_versions(m.versions, uid),
        generation=m.generation,
        eos_token_ids=_eos(m.eos_token_ids, uid),
        own_chat_template=m.own_chat_template,
        chat_template=text(m.chat_template, f"adapter {uid}: chat_template"),
        chat_template_fault=m.chat_template_fault[:MAX_DETAIL],
    )


def _versions(versions: Sequence[pb.AdapterVersion], uid: str) -> tuple[AdapterVersion, ...]:
    if len(versions) > MAX_VERSIONS:
        raise PeerError(f"adapter {uid}: {len(versions)} versions, more than {MAX_VERSIONS}")
    return tuple(
        AdapterVersion(
            named(v.digest, f"adapter {uid}: the digest of a version"),
            number(v.rank, f"adapter {uid}: the rank of a version", MAX_RANK),
            v.bytes,
            text(v.name, f"adapter {uid}: the name of a version"),
            number(v.weight, f"adapter {uid}: the weight of a version", 100),
            _eos(v.eos_token_ids, uid),
            v.own_chat_template,
        )
        for v in versions
    )


def _eos(tokens: Sequence[int], uid: str) -> tuple[int, ...]:
    number(len(tokens), f"adapter {uid}: the number of ends of sequence", MAX_EOS_TOKENS)
    return tuple(tokens)


def _fill_pool_status(status: PoolStatus, m: Any) -> None:
    m.MergeFrom(type(m)(**same_named(status, "slo", "roles", "wanted")))
    if status.slo is not None:
        m.slo.attained, m.slo.ttft, m.slo.token_time = status.slo
    if status.roles is not None:
        m.roles.CopyFrom(pb.RoleCounts(**status.roles._asdict()))
    if status.wanted is not None:
        m.wanted.CopyFrom(pb.PhaseCounts(**status.wanted._asdict()))


def _fill_adapter_status(status: AdapterStatus, m: Any) -> None:
    m.MergeFrom(type(m)(**same_named(status, "canary")))
    if status.canary is not None:
        m.canary.CopyFrom(pb.CanaryCounts(**status.canary._asdict()))


def _pool_status(m: pb.PoolStatus) -> PoolStatus:
    return PoolStatus(
        pool=named(m.pool, "a pool's name"),
        ready_runners=m.ready_runners,
        wanted_runners=m.wanted_runners,
        victims=texts(m.victims, "a runner's name"),
        observed_generation=m.observed_generation,
        slo=_attainment(m.slo) if m.HasField("slo") else None,
        roles=_role_counts(m.roles) if m.HasField("roles") else None,
        wanted=_phase_counts(m.wanted) if m.HasField("wanted") else None,
        kv_pages=number(m.kv_pages, "kv_pages", MAX_PAGES),
    )


def _phase_counts(m: pb.PhaseCounts) -> PhaseCounts:
    return PhaseCounts(*[number(count, "a number of runners", MAX_RUNNERS) for count in (m.prompt, m.token, m.any)])


def _role_counts(m: pb.RoleCounts) -> RoleCounts:
    prompt, token, mixed = [number(count, "a number of runners", MAX_RUNNERS) for count in (m.prompt, m.token, m.mixed)]
    return RoleCounts(prompt, token, mixed, text(m.why, "why runners have their roles"))


def _attainment(m: pb.SloAttainment) -> SloAttainment:
    return SloAttainment(*[number(share, "a percentage", 100) for share in (m.attained, m.ttft, m.token_time)])


def _adapter_status(m: pb.AdapterStatus) -> AdapterStatus:
    return AdapterStatus(
        uid=named(m.uid, "an adapter's uid"),
        digest=text(m.digest, "a digest"),
        routed=m.routed,
        unavailable_runners=m.unavailable_runners,
        load_failed=m.load_failed,
        removed=m.removed,
        load_errors=tuple([error[: 2 * MAX_DETAIL] for error in m.load_errors]),
        canary=_canary(m.canary) if m.HasField("canary") else None,
        observed_generation=m.observed_generation,
    )


def _canary(m: pb.CanaryCounts) -> CanaryCounts:
    digest = named(m.digest, "a canary's digest")
    return CanaryCounts(digest, m.requests, m.failed, m.stable_requests, m.stable_failed)


class RegistryDirection:
    """The registry sends one kind of message, without an envelope."""

    envelope = pb.RegistryToScheduler
    messages = (RegistryChange,)

    def encode(self, message: RegistryChange) -> pb.RegistryToScheduler:
        envelope = pb.RegistryToScheduler()
        fill_registry_change(message, envelope)
        return envelope

    def decode(self, envelope: pb.RegistryToScheduler) -> RegistryChange:
        """Raises PeerError."""
        return registry_change(envelope)


REGISTRY_TO_SCHEDULER = RegistryDirection()
SCHEDULER_TO_REGISTRY: Direction[pb.SchedulerToRegistry, PoolStatus | AdapterStatus] = Direction(
    pb.SchedulerToRegistry,
    "scheduler",
    Entry("pool", PoolStatus, _fill_pool_status, _pool_status),
    Entry("adapter", AdapterStatus, _fill_adapter_status, _adapter_status),
)
