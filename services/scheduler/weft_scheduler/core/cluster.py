"""What supervisors say: who is there, what each runner holds, who has to leave.

Nothing is placed on a runner before its first full report on its supervisor's present stream. A runner that no
supervisor reports for `absent_s`, while there is one to report it, is gone.
"""

from weft_scheduler.core import room
from weft_scheduler.core.alarms import Alarm, Kind
from weft_scheduler.core.context import Context
from weft_scheduler.core.desired import Desired
from weft_scheduler.core.effects import Ignored, Order, RunnerEnded, TellTerm
from weft_scheduler.core.events import ClusterReport, KeysTold, SupervisorDown, SupervisorUp
from weft_scheduler.core.moves import abandon, preempt
from weft_scheduler.core.requests import acknowledge, forward
from weft_scheduler.core.state import Pending, Phase, Pool, Runner
from weft_scheduler.core.values import DesiredAdapter, RunnerId, RunnerReport, Tier

MEASURE_MOST_S = 5.0  # between two reports of a busy runner: more says that some were lost


def supervisor_up(ctx: Context, event: SupervisorUp) -> None:
    """Greet it with a term above all it has seen, and give it what waits for the store."""
    if event.supervisor in ctx.state.supervisors:
        supervisor_down(ctx, SupervisorDown(event.supervisor))
    ctx.heed_term(event.highest_term)
    first = not ctx.state.supervisors
    ctx.state.supervisors[event.supervisor] = None
    ctx.emit(TellTerm(event.supervisor, ctx.state.term))
    _expect_runners(ctx)
    if not ctx.state.settled:
        ctx.alarms.set_earlier(Alarm(Kind.SETTLED), ctx.now + ctx.config.absent_s)
    if first:
        _forward_all(ctx)


def supervisor_down(ctx: Context, event: SupervisorDown) -> None:
    """Its runners take nothing new until they are reported again; what runs there runs on."""
    if event.supervisor not in ctx.state.supervisors:
        return
    forwarded = next(iter(ctx.state.supervisors)) == event.supervisor
    del ctx.state.supervisors[event.supervisor]
    for runner in ctx.state.runners.values():
        if runner.confirmed and runner.supervisor == event.supervisor:
            _unconfirm(ctx, runner)
    if ctx.state.supervisors:
        _expect_runners(ctx)
        if forwarded:
            _forward_all(ctx)


def report(ctx: Context, event: ClusterReport) -> None:
    """States first: a decision or a loss in the same message is newer than they are."""
    if event.supervisor not in ctx.state.supervisors:
        ctx.emit(Ignored("report", "", "no such supervisor"))
        return
    for state in event.runners:
        absorb(ctx, event.supervisor, state)
    for runner_id in event.lost:
        _lease_over(ctx, event.supervisor, runner_id)
    for decision in event.preempts:
        preempt(ctx, decision)


def _lease_over(ctx: Context, supervisor: str, runner_id: RunnerId) -> None:
    """A runner that has gone over to another supervisor lets its lease run out at the one before: that is no loss."""
    runner = ctx.state.runner(runner_id)
    if runner is not None and runner.supervisor not in ("", supervisor):
        ctx.emit(Ignored("loss", runner_id.uuid, "another supervisor has reported it since"))
        return
    lost(ctx, runner_id, "lease ran out")


def keys_told(ctx: Context, event: KeysTold) -> None:
    state = ctx.state
    if not state.keys_known or state.keys != event.keys:
        state.keys, state.keys_known, state.reroute = event.keys, True, True


def absorb(ctx: Context, supervisor: str, state: RunnerReport) -> None:
    """Take one runner's whole state over."""
    runner = _present(ctx, state)
    if runner is None or runner.spec is None:
        return
    if runner.report is not None and state.sequence < runner.report.sequence:
        ctx.emit(Ignored("report", state.runner.uuid, "older than the last one"))
        return
    if not runner.confirmed or runner.supervisor != supervisor:
        _confirm(ctx, runner, supervisor)
    _measure(ctx, runner, state)
    errors = runner.errors
    for request_id in room.include(runner, state):
        acknowledge(ctx, ctx.state.requests[request_id])
    if runner.errors != errors:
        ctx.state.readiness.add(ctx.pool_of(runner).name)
    _learn_covers(ctx, runner)
    _readiness(ctx, ctx.pool_of(runner), runner)
    tell_desired(ctx, runner)
    ctx.reindex(runner)


def lost(ctx: Context, runner_id: RunnerId, reason: str) -> None:
    """An incarnation is over."""
    runner = ctx.state.runner(runner_id)
    if runner is None:
        return
    if runner.confirmed:
        _unconfirm(ctx, runner)
    abandon(ctx, runner)
    ctx.alarms.clear(Alarm(Kind.ABSENT, runner_id.uuid))
    del ctx.state.runners[runner_id.uuid]
    if runner.spec is not None:
        pool = ctx.pool_of(runner)
        room.forget(pool, runner)
        pool.runners.discard(runner_id.uuid)
        ctx.look_at(runner.spec.pool)
    ctx.emit(RunnerEnded(runner_id, reason))


def _measure(ctx: Context, runner: Runner, state: RunnerReport) -> None:
    """What a busy runner has computed since its last report."""
    before, seconds = runner.report, ctx.now - runner.reported_at
    if before is not None and runner.confirmed and room.is_busy(runner) and 0 < seconds < MEASURE_MOST_S:
        ctx.pool_of(runner).pace.measure(max(0, state.tokens - before.tokens), seconds)
    runner.reported_at = ctx.now


def tell_desired(ctx: Context, runner: Runner) -> None:
    """Order the pool's list where the runner has neither applied it nor been told; not before the registry is known."""
    wanted = ctx.pool_of(runner).desired.list
    if not (ctx.state.registry_known and wanted.version and runner.confirmed and runner.report is not None):
        return
    if wanted.version not in (runner.report.desired_version, runner.told_version):
        runner.told_version = wanted.version
        ctx.emit(Order(runner.supervisor, runner.id, wanted))


def serves(state: RunnerReport, desired: Desired) -> bool:
    """Ready, or held back by nothing but adapters that failed to load: those must not take a runner away."""
    if state.ready:
        return True
    failed = {a.digest for a in state.adapters if a.error}
    settled = failed | {a.digest for a in state.adapters if a.on_device}
    coming = {a.digest for a in state.adapters if a.loading} - failed
    known = 0 < desired.list.version == state.desired_version
    return known and bool(failed) and all(_settled(a, settled, coming) for a in desired.list.adapters)


def _settled(adapter: DesiredAdapter, settled: set[str], coming: set[str]) -> bool:
    """Nobody has to wait for it. A runner lists what is on its way to its tier, and not what has come to its disk."""
    if adapter.pinned:
        return adapter.digest in settled
    return adapter.tier <= Tier.REMOTE or adapter.digest not in coming


def _present(ctx: Context, state: RunnerReport) -> Runner | None:
    """The record of that incarnation; a new incarnation ends the old one at once."""
    uuid, incarnation = state.runner
    if ctx.state.ended.get(uuid) == incarnation:
        ctx.emit(Ignored("report", uuid, "that incarnation was replaced"))
        return None
    runner = ctx.state.runners.get(uuid)
    if runner is not None and runner.id != state.runner:
        ctx.state.end(runner.id)
        lost(ctx, runner.id, "a new incarnation started")
        runner = None
    if runner is None:
        runner = ctx.state.new_runner(state.runner)
    if runner.spec is None:
        runner.spec = state.spec
    if runner.spec is None:
        ctx.emit(Ignored("report", uuid, "never described itself"))
    return runner


def _confirm(ctx: Context, runner: Runner, supervisor: str) -> None:
    """Its first full report on this stream: from here on it can be placed on."""
    ctx.alarms.clear(Alarm(Kind.ABSENT, runner.id.uuid))
    runner.supervisor, runner.told_version = supervisor, 0
    if runner.report is None:
        _reserve_adopted(ctx, runner)
    if not runner.confirmed:
        runner.confirmed = True
        pool = ctx.pool_of(runner)
        pool.sweep = True
        pool.runners.add(runner.id.uuid)
        pool.shelves.shelf(runner.shape).members += 1


def _reserve_adopted(ctx: Context, runner: Runner) -> None:
    """Requests that gateways said run there, entered before anything was known of its pages."""
    assert runner.spec is not None
    for request_id in sorted(runner.owned):
        request = ctx.state.requests[request_id]
        request.assigned_class = runner.spec.numerics_class
        pages = room.pages_of(room.room_tokens(request), runner.spec.page_tokens)
        room.reserve(runner, request_id, Pending(request.epoch, pages, request.digest))


def _unconfirm(ctx: Context, runner: Runner) -> None:
    """Off the shelves; its accounts stay."""
    pool, shape = ctx.pool_of(runner), runner.shape
    runner.confirmed, pool.sweep = False, True
    ctx.reindex(runner)
    pool.shelves.shelf(shape).members -= 1
    _readiness(ctx, pool, runner)
    pool.shelves.prune(shape)


def _readiness(ctx: Context, pool: Pool, runner: Runner) -> None:
    """Count it among the pool's Ready runners under the list it has applied, or not."""
    state = runner.report
    assert state is not None
    runner.serving = runner.serving or serves(state, pool.desired)
    known = state.desired_version if state.desired_version <= pool.desired.list.version else 0  # of another process
    version = known if runner.confirmed and state.ready and not state.draining else None
    if version == runner.ready_version:
        return
    shelf = pool.shelves.shelf(runner.shape)
    if runner.ready_version is not None:
        pool.ready_versions[runner.ready_version] -= 1
        if not pool.ready_versions[runner.ready_version]:
            del pool.ready_versions[runner.ready_version]
        shelf.ready -= 1
    if version is not None:
        pool.ready_versions[version] += 1
        shelf.ready += 1
    runner.ready_version = version
    pool.max_context_tokens = min(pool.shelves.ready_contexts(), default=pool.max_context_tokens)
    ctx.state.readiness.add(pool.name)


def _learn_covers(ctx: Context, runner: Runner) -> None:
    """Reservations that the runner doubled in place."""
    assert runner.report is not None
    for sequence in runner.report.sequences:
        request = ctx.state.requests.get(sequence.request_id)
        if request is None or request.epoch != sequence.epoch or request.runner != runner.id:
            continue
        acknowledge(ctx, request)
        if request.phase is not Phase.LEAVING:
            reached = request.start_emitted_tokens + sequence.reservation_tokens
            request.cover_tokens = max(request.cover_tokens, reached)


def _expect_runners(ctx: Context) -> None:
    for runner in ctx.state.runners.values():
        if not runner.confirmed:
            ctx.alarms.set(Alarm(Kind.ABSENT, runner.id.uuid), ctx.now + ctx.config.absent_s)


def _forward_all(ctx: Context) -> None:
    for request_id, kept in ctx.outcomes.kept.items():
        forward(ctx, request_id, kept.record)
