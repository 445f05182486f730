"""Protobuf <-> core types and rows of the store."""

from collections.abc import Iterator

from weft.store.keys import ApiKey
from weft.store.outcomes import StoredOutcome
from weft.wire.bounds import check_state
from weft.wire.v1 import common_pb2, scheduler_pb2, supervisor_pb2
from weft_supervisor.core.events import (
    Epoch,
    OrderGiven,
    Overrun,
    Preempt,
    Report,
    RunnerId,
    RunnerUp,
    SendOrder,
    SendReport,
    Sequence,
)

MAX_REPORT_BYTES = 32 << 20  # of the states in a message, unless one alone is larger


def runner_id(message: common_pb2.RunnerId) -> RunnerId:
    return RunnerId(message.uuid, message.incarnation)


def runner_id_message(runner: RunnerId) -> common_pb2.RunnerId:
    return common_pb2.RunnerId(uuid=runner.uuid, incarnation=runner.incarnation)


def runner_up(hello: supervisor_pb2.RunnerHello) -> RunnerUp:
    return RunnerUp(runner_id(hello.runner), hello.pool, hello.total_pages)


def report(runner: RunnerId, hello: supervisor_pb2.RunnerHello, state: supervisor_pb2.RunnerState) -> Report:
    """The core's view of a state. The payload is the state itself, complete with hello and id. Raises PeerError."""
    check_state(state, hello)
    state.runner.CopyFrom(hello)
    state.id.CopyFrom(hello.runner)
    return Report(
        runner=runner,
        sequence=state.sequence,
        free_pages=state.free_pages,
        used_pages=state.used_pages,
        sequences=tuple(map(_sequence, state.sequences)),
        overruns=tuple(Overrun(o.request_id, _epoch(o.epoch), o.reservation_tokens) for o in state.overruns),
        ready=state.ready,
        draining=state.draining,
        grown_pages=state.grown_pages,
        doublings=state.doublings,
        adapter_pages=state.adapter_pages,
        payload=state,
    )


def state(report: Report) -> supervisor_pb2.RunnerState:
    """The state that a report was made of."""
    assert isinstance(report.payload, supervisor_pb2.RunnerState)
    return report.payload


def order_given(orders: scheduler_pb2.RunnerOrders) -> OrderGiven:
    order = orders.order
    return OrderGiven(runner_id(orders.runner), order.drain, order if order.has_desired else None)


def order(effect: SendOrder) -> supervisor_pb2.SupervisorToRunner:
    """The latest order, whole."""
    message = supervisor_pb2.RunnerOrder()
    if isinstance(effect.desired, supervisor_pb2.RunnerOrder):
        message.CopyFrom(effect.desired)
    message.drain = effect.drain
    return supervisor_pb2.SupervisorToRunner(order=message)


def cluster_reports(effect: SendReport) -> Iterator[scheduler_pb2.SupervisorToScheduler]:
    """States first, in messages that gRPC takes; what is lost or decided is newer than they are."""
    message, size = scheduler_pb2.SupervisorToScheduler(), 0
    for one in map(state, effect.states):
        if size and size + one.ByteSize() > MAX_REPORT_BYTES:
            yield message
            message, size = scheduler_pb2.SupervisorToScheduler(), 0
        message.report.runners.append(one)
        size += one.ByteSize()
    message.report.lost.extend(map(runner_id_message, effect.lost))
    message.report.preempts.extend(map(_preempt, effect.preempts))
    yield message


def stored(outcome: common_pb2.Outcome) -> StoredOutcome:
    """The row of an outcome: everything but the prompt's text."""
    return StoredOutcome(
        request_id=outcome.request_id,
        pool=outcome.pool,
        namespace=outcome.namespace,
        model_name=outcome.model_name,
        adapter_digest=outcome.adapter_digest,
        prompt_tokens=outcome.prompt_tokens,
        completion_tokens=outcome.completion_tokens,
        finish_reason=_finish_reason(outcome.finish_reason),
        error=outcome.error,
        censored=outcome.censored,
        predicted_p50_tokens=outcome.predicted_p50_tokens,
        predicted_p90_tokens=outcome.predicted_p90_tokens,
        model_version=outcome.model_version,
        ttft_ms=outcome.ttft_ms,
        total_ms=outcome.total_ms,
        moves=outcome.moves,
        doublings=outcome.doublings,
        finished_unix_ms=outcome.finished_unix_ms,
        choice=outcome.choice,
    )


def key_route(key: ApiKey) -> scheduler_pb2.KeyRoute:
    return scheduler_pb2.KeyRoute(key_hash=key.key_hash, namespace=key.namespace, key_id=key.key_id)


def key_info(key: ApiKey) -> supervisor_pb2.KeyInfo:
    return supervisor_pb2.KeyInfo(
        key_id=key.key_id,
        namespace=key.namespace,
        note=key.note,
        created_unix_s=key.created_unix_ms // 1000,
        revoked=key.revoked_unix_ms is not None,
    )


def _sequence(message: supervisor_pb2.SequenceState) -> Sequence:
    return Sequence(
        message.request_id,
        _epoch(message.epoch),
        message.admitted,
        message.reserved_pages,
        message.used_pages,
        message.reservation_tokens,
    )


def _epoch(message: common_pb2.Epoch) -> Epoch:
    return Epoch(message.term, message.counter)


def _preempt(preempt: Preempt) -> scheduler_pb2.PreemptDecision:
    return scheduler_pb2.PreemptDecision(
        runner=runner_id_message(preempt.runner),
        request_id=preempt.request_id,
        epoch=common_pb2.Epoch(term=preempt.epoch.term, counter=preempt.epoch.counter),
        for_request_id=preempt.for_request_id,
        reservation_tokens=preempt.reservation_tokens,
    )


def _finish_reason(value: common_pb2.FinishReason) -> str:
    """The name in lower case; a number that this version does not know stays a number."""
    names = common_pb2.FinishReason
    return names.Name(value).removeprefix("FINISH_REASON_").lower() if value in names.values() else str(value)
