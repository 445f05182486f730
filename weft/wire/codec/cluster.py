"""Runner <-> supervisor and supervisor <-> scheduler: reports up, orders down.

What runs in a runner is its pool's owner's choice (SECURITY.md), and its figures are divided by, summed and sent on.
Bounds that need the runner's specification are in `weft.domain.runner.RunnerBook`.
"""

from typing import cast

from weft.domain.adapter import MOST_NAMES, AdapterState, DesiredAdapter, DesiredChange, Tier
from weft.domain.request import OutcomeAck, OutcomeReport
from weft.domain.routes import Keys, KeysConfirmed
from weft.domain.runner import (
    ClusterReport,
    Heartbeat,
    OffloadState,
    OrderedRunner,
    Overrun,
    PreemptDecision,
    Registered,
    ReportedRunner,
    Resync,
    RunnerFigures,
    RunnerOrder,
    RunnerReport,
    RunnerRole,
    RunnerSpec,
    SchedulerHello,
    SequenceState,
    SupervisorHello,
)
from weft.domain.text import quoted
from weft.wire.codec.direction import Direction, Entry
from weft.wire.codec.scheduling import (
    fill_key,
    fill_outcome_ack,
    fill_outcome_report,
    key,
    outcome_ack,
    outcome_report,
)
from weft.wire.codec.values import (
    MAX_DETAIL,
    MAX_MODEL,
    MAX_PAGES,
    MAX_RANK,
    MAX_TOKENS,
    PRIORITY,
    epoch,
    fill_epoch,
    fill_runner_id,
    inverted,
    named,
    number,
    priority,
    runner_id,
    term,
    text,
    texts,
)
from weft.wire.errors import PeerError, refused
from weft.wire.v1 import scheduler_pb2 as pb
from weft.wire.v1 import supervisor_pb2 as spb

MAX_REPORT_BYTES = 16 << 20  # ten thousand adapters with a long error each; a gRPC message takes 64 MiB
MAX_FORWARDED_BYTES = 16 << 10  # a change of 64 sequences has 7 KiB
MAX_CAPACITY = 1 << 16  # sequences, slots, tokens of a page
MAX_PAGE_BYTES = 1 << 40

TIER = {
    Tier.UNSPECIFIED: spb.AdapterState.TIER_UNSPECIFIED,
    Tier.REMOTE: spb.AdapterState.REMOTE,
    Tier.DISK: spb.AdapterState.DISK,
    Tier.HOST: spb.AdapterState.HOST,
    Tier.DEVICE: spb.AdapterState.DEVICE,
}
TIERS = inverted(TIER)
ROLE = {RunnerRole.MIXED: spb.ROLE_MIXED, RunnerRole.PROMPT: spb.ROLE_PROMPT, RunnerRole.TOKEN: spb.ROLE_TOKEN}
ROLES = inverted(ROLE)


# ---------------------------------------------------------------- a runner's specification and reports


def fill_spec(spec: RunnerSpec, m: spb.RunnerHello) -> None:
    fill_runner_id(spec.runner, m.runner)
    m.address, m.pool, m.base_digest, m.numerics_class = spec.address, spec.pool, spec.base_digest, spec.numerics_class
    m.page_tokens, m.total_pages, m.max_sequences = spec.page_tokens, spec.total_pages, spec.max_sequences
    m.max_adapters, m.max_rank, m.max_context_tokens = spec.max_adapters, spec.max_rank, spec.max_context_tokens
    m.name, m.best_batch, m.step_ms_1, m.step_ms_best = spec.name, spec.best_batch, spec.step_ms_1, spec.step_ms_best
    m.prefill_tokens_per_s, m.page_bytes = spec.prefill_tokens_per_s, spec.page_bytes
    m.kv_address, m.kv_layout, m.kv_bytes_per_s = spec.kv_address, spec.kv_layout, spec.kv_bytes_per_s
    if spec.role is not None:
        m.role = ROLE[spec.role]


def read_spec(m: spb.RunnerHello) -> RunnerSpec:
    """Raises PeerError."""
    runner = runner_id(m.runner)
    who = f"runner {quoted(runner.uuid)}: "
    spec = RunnerSpec(
        runner=runner,
        address=named(m.address, who + "address"),
        pool=named(m.pool, who + "pool"),
        page_tokens=number(m.page_tokens, who + "page_tokens", MAX_CAPACITY, least=1),
        total_pages=number(m.total_pages, who + "total_pages", MAX_PAGES, least=1),
        max_sequences=number(m.max_sequences, who + "max_sequences", MAX_CAPACITY, least=1),
        max_adapters=number(m.max_adapters, who + "max_adapters", MAX_CAPACITY, least=1),
        max_rank=number(m.max_rank, who + "max_rank", MAX_RANK, least=1),
        max_context_tokens=number(m.max_context_tokens, who + "max_context_tokens", MAX_TOKENS, least=1),
        base_digest=text(m.base_digest, who + "base_digest"),
        name=text(m.name, who + "name"),
        numerics_class=text(m.numerics_class, who + "numerics_class", MAX_DETAIL),
        best_batch=number(m.best_batch, who + "best_batch", MAX_CAPACITY),
        step_ms_1=m.step_ms_1,
        step_ms_best=m.step_ms_best,
        prefill_tokens_per_s=m.prefill_tokens_per_s,
        page_bytes=number(m.page_bytes, who + "page_bytes", MAX_PAGE_BYTES),
        kv_address=text(m.kv_address, who + "kv_address"),
        kv_layout=text(m.kv_layout, who + "kv_layout"),
        role=ROLES.get(m.role),
        kv_bytes_per_s=m.kv_bytes_per_s,
    )
    if spec.max_context_tokens > spec.total_pages * spec.page_tokens:
        raise PeerError(f"{who}max_context_tokens {spec.max_context_tokens} are more than its pages hold")
    return spec


def fill_report(report: RunnerReport, m: spb.RunnerReport) -> None:
    figures = report.figures
    m.version, m.full = report.version, report.full
    m.free_pages, m.used_pages, m.adapter_pages = figures.free_pages, figures.used_pages, figures.adapter_pages
    m.draining, m.ready, m.desired_version = figures.draining, figures.ready, figures.desired_version
    m.iterations, m.forwards, m.tokens = figures.iterations, figures.forwards, figures.tokens
    m.grown_pages, m.doublings = figures.grown_pages, figures.doublings
    m.prefix_reused_tokens = figures.prefix_reused_tokens
    m.pending_prompt_tokens = figures.pending_prompt_tokens
    m.role = ROLE[figures.role]
    if (offload := figures.offload) is not None:
        m.offload.resident_share, m.offload.disk_bytes_per_s = offload.resident_share, offload.disk_bytes_per_s
        m.offload.predicted_ms, m.offload.measured_ms = offload.predicted_ms, offload.measured_ms
        m.offload.alone_ms, m.offload.disk_bound = offload.alone_ms, offload.disk_bound
    for s in report.sequences:
        sequence = m.sequences.add(
            request_id=s.request_id,
            gateway=s.gateway,
            adapter=s.adapter,
            reserved_pages=s.reserved_pages,
            reservation_tokens=s.reservation_tokens,
            arrived_ms=s.arrived_ms,
            stays=s.stays,
            priority=PRIORITY[s.priority],
        )
        fill_epoch(s.epoch, sequence.epoch)
    if report.ended:
        m.ended.extend(report.ended)
    for a in report.adapters:
        m.adapters.add(
            digest=a.digest,
            tier=TIER[a.tier],
            running=a.running,
            bytes=a.bytes,
            rank=a.rank,
            loading=a.loading,
            error=a.error[:MAX_DETAIL],
            shortfall=a.shortfall[:MAX_DETAIL],
        )
    if report.removed_adapters:
        m.removed_adapters.extend(report.removed_adapters)
    for o in report.overruns:
        overrun = m.overruns.add(
            request_id=o.request_id, wanted_pages=o.wanted_pages, reservation_tokens=o.reservation_tokens,
            leaves=o.leaves,
        )  # fmt: skip
        fill_epoch(o.epoch, overrun.epoch)
    if report.progress:
        m.progress.extend(report.progress)


class ReceivedReport(RunnerReport):
    """A report with the message that it came as, which is what a supervisor forwards: 2.1 us, encoded again 7.7 us.

    As safe: the scheduler decodes it within the same bounds, and of large ones, in which long reasons and unknown
    fields could be, only what was read travels on. One that is changed (`_replace`) has no message.
    """

    message: spb.RunnerReport | None = None


def received_report(m: spb.RunnerReport) -> ReceivedReport:
    """Raises PeerError."""
    report = cast(ReceivedReport, read_report(m, ReceivedReport))
    if m.ByteSize() <= MAX_FORWARDED_BYTES:
        report.message = m
    return report


def read_report(m: spb.RunnerReport, of: type[RunnerReport] = RunnerReport) -> RunnerReport:
    """Raises PeerError. Lists that are empty, as most are in most reports, cost nothing."""
    if (size := m.ByteSize()) > MAX_REPORT_BYTES:
        raise PeerError(f"a report of {size} bytes is more than {MAX_REPORT_BYTES}")
    return of(
        m.version,
        m.full,
        RunnerFigures(
            m.free_pages,
            m.used_pages,
            m.adapter_pages,
            m.draining,
            m.ready,
            m.desired_version,
            m.iterations,
            m.forwards,
            m.grown_pages,
            m.doublings,
            m.tokens,
            m.prefix_reused_tokens,
            ROLES.get(m.role, RunnerRole.MIXED),
            m.pending_prompt_tokens,
            _offload(m.offload) if m.HasField("offload") else None,
        ),
        [_sequence(sequence) for sequence in m.sequences] if m.sequences else (),
        texts(m.ended, "a request id") if m.ended else (),
        [_adapter(adapter) for adapter in m.adapters] if m.adapters else (),
        texts(m.removed_adapters, "an adapter's digest") if m.removed_adapters else (),
        [_overrun(overrun) for overrun in m.overruns] if m.overruns else (),
        m.progress if m.progress else (),
    )


def _offload(m: spb.OffloadState) -> OffloadState:
    return OffloadState(
        m.resident_share, m.disk_bytes_per_s, m.predicted_ms, m.measured_ms, m.alone_ms, m.disk_bound
    )  # fmt: skip


def _sequence(m: spb.SequenceState) -> SequenceState:
    return SequenceState(
        named(m.request_id, "a sequence's request id"),
        epoch(m.epoch),
        text(m.gateway, "a gateway's id"),
        text(m.adapter, "an adapter's digest"),
        number(m.reserved_pages, "reserved_pages", MAX_PAGES),
        number(m.reservation_tokens, "reservation_tokens", MAX_TOKENS),
        m.arrived_ms,
        m.stays,
        priority(m.priority),
    )


def _adapter(m: spb.AdapterState) -> AdapterState:
    return AdapterState(
        named(m.digest, "an adapter's digest"),
        TIERS.get(m.tier, Tier.UNSPECIFIED),
        number(m.running, "running", MAX_CAPACITY),
        m.bytes,
        number(m.rank, "an adapter's rank", MAX_RANK),
        m.loading,
        m.error[:MAX_DETAIL],
        m.shortfall[:MAX_DETAIL],
    )


def _overrun(m: spb.Overrun) -> Overrun:
    return Overrun(
        named(m.request_id, "an overrun's request id"),
        epoch(m.epoch),
        number(m.wanted_pages, "wanted_pages", MAX_PAGES),
        number(m.reservation_tokens, "reservation_tokens", MAX_TOKENS),
        m.leaves,
    )


def fill_reported(reported: ReportedRunner, m: spb.ReportedRunner) -> None:
    fill_runner_id(reported.runner, m.runner)
    report = reported.report
    if isinstance(report, ReceivedReport) and report.message is not None:
        m.report.CopyFrom(report.message)
    else:
        fill_report(report, m.report)
    if reported.spec is not None:
        fill_spec(reported.spec, m.spec)


def read_reported(m: spb.ReportedRunner) -> ReportedRunner:
    """Raises PeerError."""
    runner = runner_id(m.runner)
    spec = read_spec(m.spec) if m.HasField("spec") else None
    if spec is not None and spec.runner != runner:
        raise PeerError(f"a report of runner {quoted(runner.uuid)} with the specification of {spec.runner.uuid}")
    return ReportedRunner(runner, read_report(m.report), spec)


# ---------------------------------------------------------------- orders


def fill_order(order: RunnerOrder, m: spb.RunnerOrder) -> None:
    m.drain = order.drain
    if order.role is not None:
        m.role = ROLE[order.role]
    if order.desired is None:
        return
    change = m.desired
    change.version, change.full = order.desired.version, order.desired.full
    change.removed.extend(order.desired.removed)
    for adapter in order.desired.adapters:
        change.adapters.add(
            digest=adapter.digest,
            rank=adapter.rank,
            bytes=adapter.bytes,
            pinned=adapter.pinned,
            tier=TIER[adapter.tier],
            model_names=adapter.model_names,
        )


def read_order(m: spb.RunnerOrder) -> RunnerOrder:
    """A tier that this version does not know is loaded on demand. Raises PeerError."""
    role = ROLES.get(m.role)
    if not m.HasField("desired"):
        return RunnerOrder(None, m.drain, role)
    adapters = tuple(
        [
            DesiredAdapter(
                named(a.digest, "an adapter's digest"),
                number(a.rank, "an adapter's rank", MAX_RANK),
                a.bytes,
                a.pinned,
                TIERS.get(a.tier, Tier.UNSPECIFIED),
                tuple([text(name, "a model's name", MAX_MODEL) for name in a.model_names[:MOST_NAMES]]),
            )
            for a in m.desired.adapters
        ]
    )
    if len({adapter.digest for adapter in adapters}) < len(adapters):
        raise PeerError("a list of desired adapters names a digest twice")
    removed = texts(m.desired.removed, "an adapter's digest")
    return RunnerOrder(DesiredChange(m.desired.version, m.desired.full, adapters, removed), m.drain, role)


def _fill_registered(registered: Registered, m: spb.Registered) -> None:
    m.lease_ms, m.report_ms = registered.lease_ms, registered.report_ms


def _registered(m: spb.Registered) -> Registered:
    return Registered(number(m.lease_ms, "lease_ms", 1 << 31, least=1), number(m.report_ms, "report_ms", 1 << 31))


def _fill_resync(resync: Resync, m: spb.Resync) -> None:
    if resync.runner is not None:
        fill_runner_id(resync.runner, m.runner)


def _resync(m: spb.Resync) -> Resync:
    return Resync(runner_id(m.runner) if m.HasField("runner") else None)


# ---------------------------------------------------------------- supervisor and scheduler


def _fill_supervisor_hello(hello: SupervisorHello, m: pb.SupervisorHello) -> None:
    m.supervisor, m.highest_term = hello.supervisor, hello.highest_term


def _supervisor_hello(m: pb.SupervisorHello) -> SupervisorHello:
    return SupervisorHello(named(m.supervisor, "a supervisor's id"), term(m.highest_term))


def _fill_scheduler_hello(hello: SchedulerHello, m: pb.SchedulerHello) -> None:
    m.term = hello.term


def _scheduler_hello(m: pb.SchedulerHello) -> SchedulerHello:
    return SchedulerHello(term(m.term))


def _fill_cluster_report(report: ClusterReport, m: pb.ClusterReport) -> None:
    for reported in report.reports:
        fill_reported(reported, m.reports.add())
    for runner in report.lost:
        fill_runner_id(runner, m.lost.add())
    for decision in report.preempts:
        preempt = m.preempts.add(
            request_id=decision.request_id,
            for_request_id=decision.for_request_id,
            reservation_tokens=decision.reservation_tokens,
        )
        fill_runner_id(decision.runner, preempt.runner)
        fill_epoch(decision.epoch, preempt.epoch)


def _cluster_report(m: pb.ClusterReport) -> ClusterReport:
    """Supervisors refuse bad reports: one that got past them is dropped, and the reports of other runners count."""
    reports: list[ReportedRunner] = []
    for message in m.reports:
        try:
            reports.append(read_reported(message))
        except PeerError as error:
            refused("runner", error)
    return ClusterReport(
        reports=tuple(reports),
        lost=tuple([runner_id(runner) for runner in m.lost]),
        preempts=tuple(
            [
                PreemptDecision(
                    runner_id(p.runner),
                    named(p.request_id, "a request id"),
                    epoch(p.epoch),
                    text(p.for_request_id, "a request id"),
                    number(p.reservation_tokens, "reservation_tokens", MAX_TOKENS),
                )
                for p in m.preempts
            ]
        ),
    )


def _fill_keys(keys: Keys, m: pb.Keys) -> None:
    for one in keys.keys:
        fill_key(one, m.keys.add())
    m.version = keys.version


def _keys(m: pb.Keys) -> Keys:
    return Keys(tuple([key(one) for one in m.keys]), m.version)


def _fill_confirmed(confirmed: KeysConfirmed, m: pb.KeysConfirmed) -> None:
    m.version = confirmed.version


def _confirmed(m: pb.KeysConfirmed) -> KeysConfirmed:
    return KeysConfirmed(m.version)


def _fill_ordered(ordered: OrderedRunner, m: pb.RunnerOrders) -> None:
    fill_runner_id(ordered.runner, m.runner)
    fill_order(ordered.order, m.order)


def _ordered(m: pb.RunnerOrders) -> OrderedRunner:
    return OrderedRunner(runner_id(m.runner), read_order(m.order))


RunnerMessage = RunnerSpec | RunnerReport | Heartbeat
SupervisorMessage = SupervisorHello | ClusterReport | OutcomeAck | Keys | KeysConfirmed
OrderMessage = SchedulerHello | OrderedRunner | OutcomeReport | Resync

RUNNER_TO_SUPERVISOR: Direction[spb.RunnerToSupervisor, RunnerMessage] = Direction(
    spb.RunnerToSupervisor,
    "runner",
    Entry("hello", RunnerSpec, fill_spec, read_spec),
    Entry("report", RunnerReport, fill_report, received_report),
    Entry("heartbeat", Heartbeat),
)
SUPERVISOR_TO_RUNNER: Direction[spb.SupervisorToRunner, Registered | RunnerOrder | Resync] = Direction(
    spb.SupervisorToRunner,
    "supervisor",
    Entry("registered", Registered, _fill_registered, _registered),
    Entry("order", RunnerOrder, fill_order, read_order),
    Entry("resync", Resync, _fill_resync, _resync),
)
SUPERVISOR_TO_SCHEDULER: Direction[pb.SupervisorToScheduler, SupervisorMessage] = Direction(
    pb.SupervisorToScheduler,
    "supervisor",
    Entry("hello", SupervisorHello, _fill_supervisor_hello, _supervisor_hello),
    Entry("report", ClusterReport, _fill_cluster_report, _cluster_report),
    Entry("outcome_ack", OutcomeAck, fill_outcome_ack, outcome_ack),
    Entry("keys", Keys, _fill_keys, _keys),
    Entry("keys_confirmed", KeysConfirmed, _fill_confirmed, _confirmed),
)
SCHEDULER_TO_SUPERVISOR: Direction[pb.SchedulerToSupervisor, OrderMessage] = Direction(
    pb.SchedulerToSupervisor,
    "scheduler",
    Entry("hello", SchedulerHello, _fill_scheduler_hello, _scheduler_hello),
    Entry("orders", OrderedRunner, _fill_ordered, _ordered),
    Entry("outcome_report", OutcomeReport, fill_outcome_report, outcome_report),
    Entry("resync", Resync, _fill_resync, _resync),
)
