"""protobuf <-> core types. What a peer may not send is MessageInvalid; the core trusts what comes out of here."""

from collections.abc import Iterable
from functools import lru_cache

from weft.wire.v1 import common_pb2 as cpb
from weft.wire.v1 import scheduler_pb2 as pb
from weft.wire.v1 import supervisor_pb2 as spb
from weft_scheduler.core import effects as ef
from weft_scheduler.core import events as ev
from weft_scheduler.core.values import (
    AdapterSpec,
    AdapterView,
    DesiredList,
    Epoch,
    KeyRoute,
    PoolSpec,
    PreemptDecision,
    RouteTable,
    RunnerId,
    RunnerReport,
    RunnerSpec,
    SequenceView,
)
from weft_scheduler.errors import MessageInvalid

FAIL_REASONS = {
    pb.Failed.SESSION_LOST: ev.FailReason.SESSION_LOST,
    pb.Failed.NO_ROOM: ev.FailReason.NO_ROOM,
    pb.Failed.PREEMPTED: ev.FailReason.PREEMPTED,
    pb.Failed.DRAINED: ev.FailReason.DRAINED,
    pb.Failed.LOAD_FAILED: ev.FailReason.LOAD_FAILED,
    pb.Failed.RUNNER_ERROR: ev.FailReason.RUNNER_ERROR,
}
REJECT_REASONS = {
    ef.RejectReason.QUEUE_FULL: pb.Reject.QUEUE_FULL,
    ef.RejectReason.TOO_LARGE: pb.Reject.TOO_LARGE,
    ef.RejectReason.UNKNOWN_POOL: pb.Reject.UNKNOWN_POOL,
    ef.RejectReason.TOO_MANY_MOVES: pb.Reject.TOO_MANY_MOVES,
    ef.RejectReason.ADAPTER_FAILED: pb.Reject.ADAPTER_FAILED,
    ef.RejectReason.UNKNOWN_ADAPTER: pb.Reject.UNKNOWN_ADAPTER,
}


# ---------------------------------------------------------------- gateway


def gateway_event(gateway: str, message: pb.GatewayToScheduler) -> ev.GatewayEvent:
    """What a gateway said after its hello. Raises MessageInvalid."""
    match message.WhichOneof("message"):
        case "submit":
            return _submit(gateway, message.submit)
        case "failed":
            return _failed(gateway, message.failed)
        case "cancel":
            return ev.Cancel(gateway, _named(message.cancel.request_id))
        case "outcome":
            return _outcome(gateway, message.outcome)
        case "started":
            return ev.Started(gateway, _named(message.started.request_id), _epoch(message.started.epoch))
        case other:
            raise MessageInvalid(f"a gateway may not send {other} here")


def _submit(gateway: str, m: pb.Submit) -> ev.Submit:
    if not m.max_tokens:
        raise MessageInvalid(f"submit {m.request_id}: max_tokens is 0")
    running = m.HasField("runner") and bool(m.runner.uuid)
    return ev.Submit(
        gateway=gateway,
        request_id=_named(m.request_id),
        pool=m.pool,
        namespace=m.namespace,
        model_name=m.model_name,
        digest=m.adapter_digest,
        prompt_tokens=m.prompt_tokens,
        max_tokens=m.max_tokens,
        emitted_tokens=m.emitted_tokens,
        p50_tokens=m.p50_tokens,
        p90_tokens=m.p90_tokens,
        waited_s=m.waited_ms / 1000,
        epoch=_epoch(m.epoch),
        runner=_runner_id(m.runner) if running else None,
        moves=m.moves,
        reservation_tokens=m.reservation_tokens,
    )


def _failed(gateway: str, m: pb.Failed) -> ev.Failed:
    if m.reason not in FAIL_REASONS:
        raise MessageInvalid(f"failed {m.request_id}: reason {m.reason} is unknown")
    return ev.Failed(gateway, _named(m.request_id), _epoch(m.epoch), FAIL_REASONS[m.reason], m.emitted_tokens, m.detail)


def _outcome(gateway: str, m: cpb.Outcome) -> ev.OutcomeReported:
    return ev.OutcomeReported(
        gateway=gateway,
        request_id=_named(m.request_id),
        pool=m.pool,
        digest=m.adapter_digest,
        completion_tokens=m.completion_tokens,
        censored=m.censored,
        record=m.SerializeToString(),
    )


GatewayEffect = ef.Assign | ef.Preempt | ef.Reject | ef.SendRoutes | ef.TellGone | ef.AckOutcomes


def to_gateway(effect: GatewayEffect) -> pb.SchedulerToGateway:
    """The message of an effect for a gateway."""
    match effect:
        case ef.Assign():
            return pb.SchedulerToGateway(assign=_assign(effect))
        case ef.Preempt():
            return pb.SchedulerToGateway(
                preempt=pb.Preempt(request_id=effect.request_id, epoch=_to_epoch(effect.epoch))
            )
        case ef.Reject():
            return pb.SchedulerToGateway(reject=_reject(effect))
        case ef.SendRoutes():
            return pb.SchedulerToGateway(routes=_routes(effect.table))
        case ef.TellGone():
            return pb.SchedulerToGateway(runner_gone=pb.RunnerGone(runner=_to_runner_id(effect.runner)))
        case ef.AckOutcomes():
            return pb.SchedulerToGateway(outcome_ack=pb.OutcomeAck(request_ids=effect.request_ids))


def _assign(effect: ef.Assign) -> pb.Assign:
    return pb.Assign(
        request_id=effect.request_id,
        epoch=_to_epoch(effect.epoch),
        runner=_to_runner_id(effect.runner),
        address=effect.address,
        reservation_tokens=effect.reservation_tokens,
    )


def _reject(effect: ef.Reject) -> pb.Reject:
    return pb.Reject(
        request_id=effect.request_id,
        reason=REJECT_REASONS[effect.reason],
        message=effect.message,
        retry_after_ms=effect.retry_after_ms,
    )


@lru_cache(maxsize=2)
def _routes(table: RouteTable) -> pb.Routes:
    """Built once a version, for all gateways."""
    return pb.Routes(
        version=table.version,
        keys_known=table.keys_known,
        keys=[pb.KeyRoute(key_hash=k.key_hash, namespace=k.namespace, key_id=k.key_id) for k in table.keys],
        routes=[
            pb.Route(
                model_name=r.model_name,
                namespace=r.namespace,
                pool=r.pool,
                adapter_digest=r.digest,
                rank=r.rank,
                uid=r.uid,
                created_unix_s=r.created_unix_s,
            )
            for r in table.routes
        ],
        pools=[
            pb.PoolRoute(
                pool=p.spec.name,
                base_digest=p.spec.base_digest,
                base_model_name=p.spec.base_model_name,
                max_context_tokens=p.max_context_tokens,
                ready_runners=p.ready_runners,
                shared_all=p.spec.shared_all,
                shared_namespaces=p.spec.shared_namespaces,
            )
            for p in table.pools
        ],
    )


# ---------------------------------------------------------------- supervisor


def cluster_event(supervisor: str, message: pb.SupervisorToScheduler) -> ev.ClusterEvent:
    """What a supervisor said after its hello. Raises MessageInvalid."""
    match message.WhichOneof("message"):
        case "report":
            return _report(supervisor, message.report)
        case "outcome_ack":
            return ev.OutcomesStored(supervisor, tuple(message.outcome_ack.request_ids))
        case "keys":
            keys = (KeyRoute(k.key_hash, k.namespace, k.key_id) for k in message.keys.keys)
            return ev.KeysTold(supervisor, tuple(sorted(keys, key=lambda k: k.key_hash)))
        case other:
            raise MessageInvalid(f"a supervisor may not send {other} here")


def _report(supervisor: str, m: pb.ClusterReport) -> ev.ClusterReport:
    return ev.ClusterReport(
        supervisor=supervisor,
        runners=tuple(runner_report(r) for r in m.runners),
        lost=tuple(_runner_id(r) for r in m.lost),
        preempts=tuple(
            PreemptDecision(_runner_id(p.runner), p.request_id, _epoch(p.epoch), p.for_request_id, p.reservation_tokens)
            for p in m.preempts
        ),
    )


def runner_report(m: spb.RunnerState) -> RunnerReport:
    """A runner's whole state. Raises MessageInvalid."""
    if not m.id.uuid:
        raise MessageInvalid("a runner state without an id")
    device = spb.AdapterState.DEVICE
    return RunnerReport(
        runner=_runner_id(m.id),
        spec=_runner_spec(m.runner) if m.HasField("runner") else None,
        sequence=m.sequence,
        free_pages=m.free_pages,
        sequences=tuple(
            SequenceView(s.request_id, _epoch(s.epoch), s.adapter_digest, s.reservation_tokens) for s in m.sequences
        ),
        adapters=tuple(
            AdapterView(a.digest, a.tier == device, a.error) for a in m.adapters if a.error or a.tier == device
        ),
        owed_pages=sum(o.wanted_pages for o in m.overruns),
        draining=m.draining,
        ready=m.ready,
        highest_term=m.highest_term,
        desired_version=m.desired_version,
    )


def _runner_spec(m: spb.RunnerHello) -> RunnerSpec:
    if not (m.page_tokens and m.pool and m.address):
        raise MessageInvalid(f"runner {m.runner.uuid}: page_tokens, pool and address are needed")
    return RunnerSpec(
        address=m.address,
        pool=m.pool,
        page_tokens=m.page_tokens,
        total_pages=m.total_pages,
        max_sequences=m.max_sequences,
        max_adapters=m.max_adapters,
        max_rank=m.max_rank,
        max_context_tokens=m.max_context_tokens,
    )


ClusterEffect = ef.TellTerm | ef.Order | ef.ForwardOutcome


def to_supervisor(effect: ClusterEffect) -> pb.SchedulerToSupervisor:
    """The message of an effect for a supervisor."""
    match effect:
        case ef.TellTerm():
            return pb.SchedulerToSupervisor(hello=pb.SchedulerHello(term=effect.term))
        case ef.Order():
            return pb.SchedulerToSupervisor(
                orders=pb.RunnerOrders(runner=_to_runner_id(effect.runner), order=_order(effect.desired))
            )
        case ef.ForwardOutcome():
            return pb.SchedulerToSupervisor(outcome=cpb.Outcome.FromString(effect.record))


@lru_cache(maxsize=64)
def _order(desired: DesiredList) -> spb.RunnerOrder:
    """Built once a version, for all runners of a pool."""
    return spb.RunnerOrder(
        has_desired=True,
        desired_version=desired.version,
        desired=[
            spb.DesiredAdapter(digest=a.digest, rank=a.rank, bytes=a.bytes, pinned=a.pinned) for a in desired.adapters
        ],
    )


# ---------------------------------------------------------------- registry


def registry_event(m: pb.RegistryToScheduler) -> ev.RegistryChange:
    """What the registry wants."""
    return ev.RegistryChange(
        snapshot=m.snapshot,
        pools=tuple(_pool(p) for p in m.pools),
        adapters=tuple(_adapters(m.adapters)),
        removed_pools=tuple(m.removed_pools),
        removed_adapters=tuple(m.removed_adapter_uids),
    )


def _pool(m: pb.PoolDesired) -> PoolSpec:
    """Unset bounds and policies are the schema's defaults."""
    return PoolSpec(
        name=_named(m.pool),
        base_digest=m.base_digest,
        base_model_name=m.base_model_name,
        shared_all=m.shared_all,
        shared_namespaces=tuple(m.shared_namespaces),
        max_queue=m.max_queue or 1000,
        max_moves=m.max_moves or 8,
        placement=m.placement or "punica",
        queue=m.queue or "fcfs",
        reservation=m.reservation or "calibrated",
        created_unix_s=m.created_unix_s,
        min_runners=m.min_runners,
    )


def _adapters(messages: Iterable[pb.AdapterDesired]) -> Iterable[AdapterSpec]:
    for m in messages:
        yield AdapterSpec(
            uid=_named(m.uid),
            namespace=m.namespace,
            name=m.name,
            model_name=m.model_name,
            pool=m.pool,
            digest=m.digest,
            rank=m.rank,
            bytes=m.bytes,
            pinned=m.pinned,
            created_unix_s=m.created_unix_s,
        )


RegistryEffect = ef.PoolStatus | ef.AdapterStatus


def to_registry(effect: RegistryEffect) -> pb.SchedulerToRegistry:
    """The message of an effect for the registry."""
    match effect:
        case ef.PoolStatus():
            return pb.SchedulerToRegistry(
                pool=pb.PoolStatus(
                    pool=effect.pool,
                    ready_runners=effect.ready_runners,
                    wanted_runners=effect.wanted_runners,
                    running=effect.running,
                    queued=effect.queued,
                )
            )
        case ef.AdapterStatus():
            return pb.SchedulerToRegistry(
                adapter=pb.AdapterStatus(
                    uid=effect.uid,
                    digest=effect.digest,
                    routed=effect.routed,
                    ready_runners=effect.ready_runners,
                    load_errors=effect.load_errors,
                )
            )


# ---------------------------------------------------------------- shared


def _epoch(m: cpb.Epoch) -> Epoch:
    return Epoch(m.term, m.counter)


def _to_epoch(epoch: Epoch) -> cpb.Epoch:
    return cpb.Epoch(term=epoch.term, counter=epoch.counter)


def _runner_id(m: cpb.RunnerId) -> RunnerId:
    return RunnerId(m.uuid, m.incarnation)


def _to_runner_id(runner: RunnerId) -> cpb.RunnerId:
    return cpb.RunnerId(uuid=runner.uuid, incarnation=runner.incarnation)


def _named(name: str) -> str:
    if not name:
        raise MessageInvalid("a message without the id of what it speaks of")
    return name
