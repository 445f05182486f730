"""What a live request tells the other processes: whole messages, made of its parts."""

import time

from weft.wire.v1 import common_pb2, predictor_pb2, runner_pb2, scheduler_pb2
from weft_gateway.core.events import Finish, FinishReason, Start
from weft_gateway.shell import wire
from weft_gateway.shell.active_request import LiveRequest, Prepared, Sampling
from weft_gateway.shell.clients import ToScheduler
from weft_gateway.shell.runner_sessions import ToRunner


def submit_of(live: LiveRequest, now: float) -> ToScheduler:
    """The request as the scheduler needs it, new or re-submitted: with its age, and where it runs."""
    prepared, stream, running = live.prepared, live.stream, live.stream.running
    submit = scheduler_pb2.Submit(
        request_id=live.request_id,
        pool=prepared.route.pool,
        namespace=prepared.namespace,
        model_name=prepared.route.model_name,
        adapter_digest=prepared.route.adapter_digest,
        prompt_tokens=len(prepared.prompt_tokens),
        emitted_tokens=len(stream.tokens),
        max_tokens=prepared.max_tokens,
        p50_tokens=live.predicted.p50_tokens,
        p90_tokens=live.predicted.p90_tokens,
        waited_ms=round(1000 * (now - prepared.arrived)),
        moves=stream.counted_moves,
        numerics_class=stream.numerics_class,
    )
    if running:
        submit.epoch.CopyFrom(wire.epoch_out(running.epoch))
        submit.runner.CopyFrom(wire.runner_out(running.runner))
        submit.reservation_tokens = running.reservation_tokens
        submit.start_emitted_tokens = stream.start_tokens
    return ToScheduler(submit=submit)


def start_of(live: LiveRequest, start: Start) -> ToRunner:
    """One epoch for a runner, continuing after the tokens so far."""
    prepared = live.prepared
    message = runner_pb2.Start(
        request_id=live.request_id,
        epoch=wire.epoch_out(start.epoch),
        adapter_digest=prepared.route.adapter_digest,
        prompt_tokens=prepared.prompt_tokens,
        emitted_tokens=start.emitted,
        max_tokens=prepared.max_tokens,
        reservation_tokens=start.reservation_tokens,
        sampling=_sampling(prepared.sampling),
        gateway_request_id=prepared.client_request_id,
        cache_salt=prepared.namespace,
    )
    return ToRunner(start=message)


def predict_item_of(prepared: Prepared) -> predictor_pb2.PredictItem:
    """What the predictor is asked."""
    return predictor_pb2.PredictItem(
        request_id=prepared.request_id,
        prompt_text=prepared.prompt_text,
        pool=prepared.route.pool,
        adapter=prepared.route.model_name,
        prompt_tokens=len(prepared.prompt_tokens),
        max_tokens=prepared.max_tokens,
    )


def outcome_of(live: LiveRequest, finish: Finish, now: float) -> common_pb2.Outcome:
    """The one terminal record of a request that ended at `now` (the shell's clock).

    Censored: the real length is only known to be at least this one (cut by a limit, the client, or a failure). A stop
    string is the client's own end, so it is the real length.
    """
    prepared, stream, predicted = live.prepared, live.stream, live.predicted
    first = live.first_token_at
    return common_pb2.Outcome(
        request_id=prepared.request_id,
        pool=prepared.route.pool,
        namespace=prepared.namespace,
        model_name=prepared.route.model_name,
        adapter_digest=prepared.route.adapter_digest,
        prompt_tokens=len(prepared.prompt_tokens),
        completion_tokens=len(stream.tokens),
        finish_reason=wire.finish_out(finish.reason),
        error=finish.failure.code if finish.failure else "",
        censored=finish.reason not in (FinishReason.EOS, FinishReason.STOP),
        predicted_p50_tokens=predicted.p50_tokens,
        predicted_p90_tokens=predicted.p90_tokens,
        model_version=predicted.model_version,
        prompt_text=prepared.prompt_text,
        ttft_ms=round(1000 * (first - prepared.arrived)) if first is not None else 0,
        total_ms=round(1000 * (now - prepared.arrived)),
        moves=stream.moves,
        doublings=stream.doublings,
        finished_unix_ms=time.time_ns() // 1_000_000,
        choice=prepared.sampling.choice,
    )


def _sampling(sampling: Sampling) -> runner_pb2.Sampling:
    """The wire's floats are short: a top_p too small for them stays above 0."""
    top_p = max(sampling.top_p, 1e-30)
    return runner_pb2.Sampling(
        seed=sampling.seed,
        choice=sampling.choice,
        temperature=sampling.temperature,
        top_p=top_p,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        logit_bias=[runner_pb2.TokenBias(token=token, bias=bias) for token, bias in sampling.logit_bias],
        logprobs=sampling.top_logprobs is not None,
        top_logprobs=sampling.top_logprobs or 0,
    )
