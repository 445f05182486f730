"""Protobuf <-> core. Nothing else in the gateway knows both."""

from collections.abc import Sequence

from weft.wire.errors import PeerError
from weft.wire.v1 import common_pb2, runner_pb2, scheduler_pb2
from weft_gateway.core.events import (
    Assigned,
    Epoch,
    EpochEnded,
    Failed,
    FailedReason,
    Failure,
    FinishReason,
    Preempted,
    Rejected,
    RunnerId,
    StepTokens,
    TokenLogprob,
)

MAX_DOUBLINGS = 64  # of a 32-bit number of tokens there are fewer
MAX_DETAIL = 1_000  # characters of a runner's reason: it goes to the scheduler and to logs
_FINISH_IN = {common_pb2.FINISH_REASON_EOS: FinishReason.EOS, common_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH}
_FINISH_OUT = {
    FinishReason.EOS: common_pb2.FINISH_REASON_EOS,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.CANCELLED: common_pb2.FINISH_REASON_CANCELLED,
    FinishReason.FAILED: common_pb2.FINISH_REASON_FAILED,
}
_FAILED_OUT = {
    FailedReason.SESSION_LOST: scheduler_pb2.Failed.SESSION_LOST,
    FailedReason.NO_ROOM: scheduler_pb2.Failed.NO_ROOM,
    FailedReason.PREEMPTED: scheduler_pb2.Failed.PREEMPTED,
    FailedReason.DRAINED: scheduler_pb2.Failed.DRAINED,
    FailedReason.LOAD_FAILED: scheduler_pb2.Failed.LOAD_FAILED,
    FailedReason.RUNNER_ERROR: scheduler_pb2.Failed.RUNNER_ERROR,
}
_ENDED_IN = {
    runner_pb2.Ended.DRAINED: FailedReason.DRAINED,
    runner_pb2.Ended.LOAD_FAILED: FailedReason.LOAD_FAILED,
    runner_pb2.Ended.UNKNOWN_ADAPTER: FailedReason.LOAD_FAILED,
}
_REJECT_IN = {
    scheduler_pb2.Reject.QUEUE_FULL: ("queue_full", "The queue of this model's pool is full."),
    scheduler_pb2.Reject.TOO_LARGE: ("too_large", "The request does not fit the largest runner of its pool."),
    scheduler_pb2.Reject.UNKNOWN_POOL: ("model_not_found", "The model's pool does not exist any more."),
    scheduler_pb2.Reject.TOO_MANY_MOVES: ("too_many_moves", "The request was moved too many times."),
    scheduler_pb2.Reject.ADAPTER_FAILED: ("adapter_failed", "No runner could load the model's adapter."),
    scheduler_pb2.Reject.UNKNOWN_ADAPTER: ("model_not_found", "The model was deleted while the request waited."),
}


def epoch_in(epoch: common_pb2.Epoch) -> Epoch:
    return Epoch(epoch.term, epoch.counter)


def epoch_out(epoch: Epoch) -> common_pb2.Epoch:
    return common_pb2.Epoch(term=epoch.term, counter=epoch.counter)


def runner_in(runner: common_pb2.RunnerId) -> RunnerId:
    return RunnerId(runner.uuid, runner.incarnation)


def runner_out(runner: RunnerId) -> common_pb2.RunnerId:
    return common_pb2.RunnerId(uuid=runner.uuid, incarnation=runner.incarnation)


def assigned_in(message: scheduler_pb2.Assign) -> Assigned:
    return Assigned(
        epoch_in(message.epoch),
        runner_in(message.runner),
        message.address,
        message.reservation_tokens,
        message.numerics_class,
    )


def preempted_in(message: scheduler_pb2.Preempt) -> Preempted:
    return Preempted(epoch_in(message.epoch))


def rejected_in(message: scheduler_pb2.Reject) -> Rejected:
    code, text = _REJECT_IN.get(message.reason, ("rejected", "The scheduler refused the request."))
    text = f"{text} {message.message}".strip()
    return Rejected(Failure(code, text, message.retry_after_ms))


def tokens_in(message: runner_pb2.SequenceTokens) -> StepTokens:
    """Raises PeerError."""
    finish = _FINISH_IN.get(message.finish_reason)
    if (finish is None and message.finish_reason) or message.doublings > MAX_DOUBLINGS:
        raise PeerError(f"a step with finish reason {message.finish_reason} and {message.doublings} doublings")
    return StepTokens(
        Epoch(message.epoch.term, message.epoch.counter),
        message.position,
        message.tokens,
        finish,
        message.doublings,
        _logprobs_in(message.logprobs) if message.logprobs else (),
    )


def _logprobs_in(messages: Sequence[runner_pb2.TokenLogprob]) -> Sequence[TokenLogprob]:
    """None at all where ids and probabilities are not as many: the stream misses them then."""
    if any(len(one.top_tokens) != len(one.top_logprobs) for one in messages):
        return ()
    return [TokenLogprob(one.logprob, tuple(zip(one.top_tokens, one.top_logprobs, strict=True))) for one in messages]


def no_room_in(message: runner_pb2.NoRoom) -> EpochEnded:
    detail = message.reason[:MAX_DETAIL]
    return EpochEnded(epoch_in(message.epoch), FailedReason.NO_ROOM, detail, message.free_pages)


def ended_in(message: runner_pb2.Ended) -> EpochEnded:
    reason = _ENDED_IN.get(message.reason, FailedReason.RUNNER_ERROR)
    detail = message.detail[:MAX_DETAIL] or f"reason {message.reason}"
    return EpochEnded(epoch_in(message.epoch), reason, detail)


def failed_out(request_id: str, failed: Failed) -> scheduler_pb2.GatewayToScheduler:
    return scheduler_pb2.GatewayToScheduler(
        failed=scheduler_pb2.Failed(
            request_id=request_id,
            epoch=epoch_out(failed.epoch),
            reason=_FAILED_OUT[failed.reason],
            emitted_tokens=failed.emitted_tokens,
            free_pages=failed.free_pages,
            detail=failed.detail,
        )
    )


def finish_out(reason: FinishReason) -> common_pb2.FinishReason:
    return _FINISH_OUT[reason]
