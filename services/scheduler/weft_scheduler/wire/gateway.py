"""What gateways say and hear."""

from functools import lru_cache

from weft.wire.errors import PeerError
from weft.wire.v1 import common_pb2 as cpb
from weft.wire.v1 import scheduler_pb2 as pb
from weft_scheduler.core import effects as ef
from weft_scheduler.core import events as ev
from weft_scheduler.core.values import RouteTable
from weft_scheduler.wire.shared import epoch_of, named, runner_id_of, to_epoch, to_runner_id

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


def gateway_event(gateway: str, message: pb.GatewayToScheduler) -> ev.GatewayEvent:
    """What a gateway said after its hello. Raises PeerError."""
    match message.WhichOneof("message"):
        case "submit":
            return _submit(gateway, message.submit)
        case "failed":
            return _failed(gateway, message.failed)
        case "cancel":
            return ev.Cancel(gateway, named(message.cancel.request_id))
        case "outcome":
            return _outcome(gateway, message.outcome)
        case "started":
            return ev.Started(gateway, named(message.started.request_id), epoch_of(message.started.epoch))
        case other:
            raise PeerError(f"a gateway may not send {other} here")


def _submit(gateway: str, m: pb.Submit) -> ev.Submit:
    if not m.max_tokens:
        raise PeerError(f"submit {m.request_id}: max_tokens is 0")
    running = m.HasField("runner") and bool(m.runner.uuid)
    return ev.Submit(
        gateway=gateway,
        request_id=named(m.request_id),
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
        epoch=epoch_of(m.epoch),
        runner=runner_id_of(m.runner) if running else None,
        moves=m.moves,
        reservation_tokens=m.reservation_tokens,
        start_emitted_tokens=m.start_emitted_tokens,
        numerics_class=m.numerics_class,
    )


def _failed(gateway: str, m: pb.Failed) -> ev.Failed:
    if m.reason not in FAIL_REASONS:
        raise PeerError(f"failed {m.request_id}: reason {m.reason} is unknown")
    return ev.Failed(
        gateway, named(m.request_id), epoch_of(m.epoch), FAIL_REASONS[m.reason], m.emitted_tokens, m.detail
    )


def _outcome(gateway: str, m: cpb.Outcome) -> ev.OutcomeReported:
    return ev.OutcomeReported(
        gateway=gateway,
        request_id=named(m.request_id),
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
            return pb.SchedulerToGateway(preempt=pb.Preempt(request_id=effect.request_id, epoch=to_epoch(effect.epoch)))
        case ef.Reject():
            return pb.SchedulerToGateway(reject=_reject(effect))
        case ef.SendRoutes():
            return _routes(effect.table)
        case ef.TellGone():
            return pb.SchedulerToGateway(runner_gone=pb.RunnerGone(runner=to_runner_id(effect.runner)))
        case ef.AckOutcomes():
            return pb.SchedulerToGateway(outcome_ack=pb.OutcomeAck(request_ids=effect.request_ids))


def _assign(effect: ef.Assign) -> pb.Assign:
    return pb.Assign(
        request_id=effect.request_id,
        epoch=to_epoch(effect.epoch),
        runner=to_runner_id(effect.runner),
        address=effect.address,
        reservation_tokens=effect.reservation_tokens,
        numerics_class=effect.numerics_class,
    )


def _reject(effect: ef.Reject) -> pb.Reject:
    return pb.Reject(
        request_id=effect.request_id,
        reason=REJECT_REASONS[effect.reason],
        message=effect.message,
        retry_after_ms=effect.retry_after_ms,
    )


@lru_cache(maxsize=2)
def _routes(table: RouteTable) -> pb.SchedulerToGateway:
    """Built once a version, for all gateways: the message is the same, and nobody changes it."""
    message = pb.SchedulerToGateway()
    message.routes.CopyFrom(_table(table))
    return message


def _table(table: RouteTable) -> pb.Routes:
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
                hold_s=p.spec.hold_s,
            )
            for p in table.pools
        ],
    )
