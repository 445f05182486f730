"""The handlers of what supervisors send: which runners there are, what each holds, which sequence has to leave.

Nothing is placed on a runner before its first full report. A supervisor's stream may end for reasons that say nothing
of its runners: they are placed on by their last report for `lapsed_s`, until a stream brings a full one. So is a runner
that has lost its lease, or that no supervisor reports for `absent_s` while there is one to report it, as long as a
gateway finds it alive; else it is gone. A report costs what it carries.
"""

from collections.abc import Iterable

from weft.domain.adapter import DesiredChange, Tier
from weft.domain.ids import RunnerId
from weft.domain.machine import Peer
from weft.domain.request import RunnerChecked, RunnerGone
from weft.domain.runner import (
    ClusterReport,
    OrderedRunner,
    ReportedRunner,
    ReportGap,
    ReportInvalid,
    Resync,
    RunnerOrder,
    RunnerReport,
    RunnerRole,
    SchedulerHello,
    SupervisorHello,
)
from weft_scheduler.core import migration
from weft_scheduler.core.effects import RunnerDoubted, RunnerLost, Stale
from weft_scheduler.core.epochs import advance_term
from weft_scheduler.core.model.gateway import GatewayStream
from weft_scheduler.core.model.request import Phase
from weft_scheduler.core.model.runner import Contact, RunnerAccount, SentOrders, StaleReport
from weft_scheduler.core.phases import order_role
from weft_scheduler.core.pool.pool import Pool
from weft_scheduler.core.request_lifecycle import account, acknowledge, count_parked, overran
from weft_scheduler.core.requests import forward_outcome
from weft_scheduler.core.rescheduling import on_preempt_decision, stop_requests_of
from weft_scheduler.core.state import State
from weft_scheduler.core.timers import Timer, TimerKind

NOT_ALIVE = "no supervisor reports it, and no gateway finds it alive"
MAX_INTERVAL_S = 5.0  # time between two reports of a loaded runner: a longer one proves that some were lost


def on_connected(state: State, peer: Peer, hello: object) -> None:
    """Answer a supervisor with a term above all its stored terms, and send it the buffered outcomes."""
    on_closed(state, peer.name)
    advance_term(state, hello.highest_term if isinstance(hello, SupervisorHello) else 0)
    first = not state.supervisors
    state.supervisors[peer.name] = peer
    state.send(peer, SchedulerHello(state.numbers.term))
    _expect_runners(state)
    if not state.settled:
        state.timers.set_earlier(Timer(TimerKind.STARTUP_GRACE), state.now + state.config.absent_s)
    if first:
        _forward_outcomes(state)


def on_closed(state: State, name: str) -> None:
    """Place on a supervisor's runners by its last report for `lapsed_s`. Running requests continue."""
    if name not in state.supervisors:
        return
    forwarded = next(iter(state.supervisors)) == name
    del state.supervisors[name]
    for runner in state.runners.values():
        if runner.supervisor == name:
            _lapse(state, runner)
    if state.supervisors:
        _expect_runners(state)
        if forwarded:
            _forward_outcomes(state)


def on_cluster_report(state: State, peer: Peer, report: ClusterReport) -> None:
    """Take reports first: a decision or a loss in the same message is newer than they are."""
    for reported in report.reports:
        apply_report(state, peer, reported)
    for runner_id in report.lost:
        runner = state.runners.present(runner_id)
        if runner is not None and runner.supervisor not in ("", peer.name):
            state.emit(Stale("loss", runner_id.uuid, "another supervisor has reported it since"))
        else:
            _doubt(state, runner_id, "lease ran out")
    for decision in report.preempts:
        on_preempt_decision(state, decision)


def apply_report(state: State, peer: Peer, reported: ReportedRunner) -> None:
    """Apply one runner's report, or request a full report."""
    runner_id, report, spec = reported
    runner = state.runners.get(runner_id.uuid)
    if runner is None or runner.id != runner_id:
        runner = _new_incarnation(state, runner_id, runner, is_known=spec is not None)
        if runner is None:
            if not state.runners.was_replaced(runner_id):
                state.send(peer, Resync(runner_id))
            return
    if spec is not None:
        runner.describe(spec)
    took_over = runner.contact is not Contact.PRESENT or runner.supervisor != peer.name
    if runner.spec is None or (took_over and not report.full):
        state.send(peer, Resync(runner_id))
        return
    if runner.report.version is None:
        placed_by_gateways = runner.accounts.owned - runner.accounts.unacked.keys()  # submitted as running there
        for request_id in sorted(placed_by_gateways):
            request = state.requests[request_id]
            if request.runner == runner.id:
                request.classes.assign(runner.spec.numerics_class)
            account(runner, request, state.pool(request.pool))
    old, taken_s, loaded = runner.report.figures, runner.report.taken_s, runner.accounts.is_loaded
    measured = runner.report.version is not None and runner.contact is Contact.PRESENT
    try:
        acknowledged, errors = runner.accounts.apply(report, state.now)
    except ReportGap:
        state.send(peer, Resync(runner_id))
        return
    except (StaleReport, ReportInvalid) as error:
        state.emit(Stale("report", runner_id.uuid, str(error)))
        return
    pool = state.pool_of(runner)
    parked = bool(runner.accounts.parked.changed) and count_parked(state, runner)
    if (report.sequences or parked) and len(pool.waiting.queue) and pool.waiting.shares.farthest_beyond() is not None:
        state.mark_schedulable(pool.name, ())  # who runs there may make room from now on
    if took_over:
        _expect_no_longer(state, runner_id)
        if runner.confirm(peer.name) and pool.fleet.confirm(runner):  # from here on it can be placed on
            pool.waiting.recheck()
    if measured and loaded and runner.role is not RunnerRole.PROMPT and 0 < state.now - taken_s < MAX_INTERVAL_S:
        tokens = max(0, runner.report.figures.tokens - old.tokens)
        pool.scaling.autoscaler.throughput.measure(tokens, state.now - taken_s)
    if measured and (reused := runner.report.figures.prefix_reused_tokens - old.prefix_reused_tokens) > 0:
        pool.scaling.reuse.find(reused, state.now)
    for request_id in acknowledged:
        acknowledge(state, state.requests[request_id])
    if report.sequences:
        _learn_reservations(state, runner, report)
    if errors:
        pool.fleet.set_errors(runner, errors)
        _mark_statuses(state, pool, errors)
    _update_readiness(state, pool, runner)
    if runner.report.figures.draining is not old.draining:
        pool.fleet.drains(runner)
        migration.expect_at_once(state, pool)
    if report.full:  # what it has counts: an order may have been lost between its supervisor and it
        version = pool.adapters.version
        runner.send(SentOrders(version if runner.report.figures.desired_version == version else 0))
    if report.full or runner.sent.desired_version != pool.adapters.version:
        push_desired(state, pool, runner, unknown=_unknown_digests(state, pool, report) if report.full else ())
    if runner.sent.role is not None or runner.report.figures.role is not runner.role:
        order_role(state, runner)
    state.update_runner(runner)


def on_runner_lost(state: State, runner_id: RunnerId, reason: str) -> None:
    """End an incarnation: stop its requests, and forget it."""
    runner = state.runners.present(runner_id)
    if runner is None:
        return
    if runner.contact:
        _unconfirm(state, runner)
    stop_requests_of(state, runner)
    _expect_no_longer(state, runner_id)
    del state.runners[runner_id.uuid]
    if runner.spec is not None:
        pool = state.pool_of(runner)
        _mark_statuses(state, pool, runner.report.errors)
        pool.fleet.forget(runner)
        pool.scaling.autoscaler.forget(runner_id.uuid)
        state.mark_schedulable(pool.name)
    state.emit(RunnerLost(runner_id, reason))


def on_lapsed(state: State, timer: Timer) -> None:
    """Place nothing more on a runner with an outdated report."""
    _unconfirm(state, state.runners[timer.name])


def on_unreported(state: State, timer: Timer) -> None:
    """Doubt a runner that no supervisor reports. While there is none, silence proves nothing."""
    runner = state.runners[timer.name]
    if state.supervisors and runner.contact is not Contact.PRESENT:
        _doubt(state, runner.id, "no supervisor reports it")


def _doubt(state: State, runner_id: RunnerId, reason: str) -> None:
    """Let the gateways check an unreported runner. It is lost unless a gateway finds it alive."""
    runner = state.runners.present(runner_id)
    if runner is None or not state.gateways:
        on_runner_lost(state, runner_id, reason)
        return
    _lapse(state, runner)
    for gateway in state.gateways.values():
        gateway.check(runner_id)
        state.send(gateway.peer, RunnerGone(runner_id, unless_alive=True))
    state.timers.set(Timer(TimerKind.RUNNER_CHECKED, runner_id.uuid), state.now + state.config.check_s)
    state.emit(RunnerDoubted(runner_id, reason))


def on_checked(state: State, gateway: GatewayStream, checked: RunnerChecked) -> None:
    """Trust a runner that a gateway finds alive, and ask again later. Otherwise it is lost after the last answer."""
    runner = state.runners.present(checked.runner)
    if runner is None or runner.id not in gateway.checks:
        return
    gateway.checked(runner.id)
    if checked.alive:
        _expect_no_check(state, runner.id)
        state.timers.set(Timer(TimerKind.RUNNER_UNREPORTED, runner.id.uuid), state.now + state.config.absent_s)
    elif not any(runner.id in gateway_stream.checks for gateway_stream in state.gateways.values()):
        on_runner_lost(state, runner.id, NOT_ALIVE)


def on_check_due(state: State, timer: Timer) -> None:
    """End a runner that was found alive by no gateway in time."""
    on_runner_lost(state, state.runners[timer.name].id, NOT_ALIVE)


def _lapse(state: State, runner: RunnerAccount) -> None:
    """Place on a runner by its last report, for `lapsed_s` at the most."""
    if runner.contact is Contact.PRESENT:
        runner.lose(Contact.LAPSED)
        state.timers.set(Timer(TimerKind.RUNNER_LAPSED, runner.id.uuid), state.now + state.config.lapsed_s)


def push_desired(
    state: State,
    pool: Pool,
    runner: RunnerAccount,
    change: DesiredChange | None = None,
    base_version: int = 0,
    unknown: tuple[str, ...] = (),
) -> None:
    """Send what the runner has to hold, if it neither has it nor was sent it; not before the registry is known.

    `change`: what has changed since `base_version`. `unknown`: digests on its disk that the registry does not have.
    """
    adapters = pool.adapters
    if not (state.registry.is_known and adapters.version and runner.contact is Contact.PRESENT):
        return
    if change is not None and base_version and runner.sent.desired_version == base_version:
        desired = change
    elif unknown or runner.sent.desired_version != adapters.version:
        desired = adapters.full(unknown)
    else:
        return
    runner.send(runner.sent._replace(desired_version=adapters.version))
    supervisor = state.supervisors[runner.supervisor]
    state.send(supervisor, OrderedRunner(runner.id, RunnerOrder(desired)))


def resync_all(state: State) -> None:
    """Ask for full reports, which list the digests on the runners' disks: the registry is known now."""
    for runner in state.runners.values():
        if runner.contact is Contact.PRESENT:
            state.send(state.supervisors[runner.supervisor], Resync(runner.id))


def _new_incarnation(
    state: State, runner_id: RunnerId, present: RunnerAccount | None, *, is_known: bool
) -> RunnerAccount | None:
    """Return the record of a new incarnation. A new incarnation ends the old incarnation at once."""
    if state.runners.was_replaced(runner_id):
        state.emit(Stale("report", runner_id.uuid, "that incarnation was replaced"))
        return None
    if not is_known:
        return None
    if present is not None:
        state.runners.replace(present.id)
        on_runner_lost(state, present.id, "a new incarnation started")
    return state.runners.begin(runner_id)


def _unconfirm(state: State, runner: RunnerAccount) -> None:
    """Place nothing on a runner any more; its accounts stay."""
    pool = state.pool_of(runner)
    runner.lose(Contact.NONE)
    if pool.fleet.unconfirm(runner):
        pool.waiting.recheck()
    state.update_runner(runner)
    _update_readiness(state, pool, runner)


def _update_readiness(state: State, pool: Pool, runner: RunnerAccount) -> None:
    """Count a runner among the pool's Ready runners under its applied desired version, or remove it."""
    figures, adapters = runner.report.figures, pool.adapters
    if not runner.serving:
        required = ((a.digest, a.pinned, a.tier) for a in adapters.published.values())
        if figures.ready or runner.serves(required, adapters.version):
            runner.serve()
    applied = figures.desired_version * (figures.desired_version <= adapters.version)  # 0: of an earlier scheduler
    version = applied if runner.contact and figures.ready and not figures.draining else None
    old_version = runner.ready_version
    if version != old_version:
        count = pool.fleet.ready.count
        pool.fleet.ready.put(runner, version)
        if pool.fleet.ready.count != count:
            state.routes.pool_changed(pool.name)
            _mark_statuses(state, pool, pool.fleet.load_failures)
        _mark_statuses(state, pool, adapters.held_after(min(v for v in (old_version, version) if v is not None)))
        state.mark_dirty(pool.name)


def _mark_statuses(state: State, pool: Pool, digests: Iterable[str]) -> None:
    """Record possible changes in the statuses of adapters with these contents."""
    for digest in digests:
        state.published.mark_adapters(pool.adapters.by_digest.get(digest, ()))


def _learn_reservations(state: State, runner: RunnerAccount, report: RunnerReport) -> None:
    """Take reservations doubled in place by the runner. A swapped sequence has no page."""
    for sequence in report.sequences:
        request = state.requests.get(sequence.request_id)
        if request is not None and request.epoch == sequence.epoch and request.runner == runner.id:
            acknowledge(state, request)
            if request.phase is not Phase.STOPPING:
                request.reservation.grow(sequence.reservation_tokens)
            if not sequence.reserved_pages:
                overran(state.pool(request.pool), request)


def _unknown_digests(state: State, pool: Pool, report: RunnerReport) -> tuple[str, ...]:
    """Return the runner's digests that are unknown to the registry."""
    if not state.registry.is_known:
        return ()
    on_runner = (a.digest for a in report.adapters if a.tier >= Tier.DISK)
    return tuple(digest for digest in on_runner if not pool.adapters.knows(digest))


def _expect_runners(state: State) -> None:
    for runner in state.runners.values():
        if runner.contact is not Contact.PRESENT:
            timer = Timer(TimerKind.RUNNER_UNREPORTED, runner.id.uuid)
            state.timers.set(timer, state.now + state.config.absent_s)


def _expect_no_longer(state: State, runner_id: RunnerId) -> None:
    for kind in (TimerKind.RUNNER_LAPSED, TimerKind.RUNNER_UNREPORTED):
        state.timers.clear(Timer(kind, runner_id.uuid))
    _expect_no_check(state, runner_id)


def _expect_no_check(state: State, runner_id: RunnerId) -> None:
    state.timers.clear(Timer(TimerKind.RUNNER_CHECKED, runner_id.uuid))
    for gateway in state.gateways.values():
        gateway.checked(runner_id)


def _forward_outcomes(state: State) -> None:
    for _, report in state.outcomes.outcomes.values():
        forward_outcome(state, report)
