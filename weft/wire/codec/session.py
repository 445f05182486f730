"""Gateway <-> runner: one stream for each gateway."""

from collections.abc import Sequence

from weft.domain.ids import Epoch
from weft.domain.request import (
    Draining,
    Ended,
    EndReason,
    FinishReason,
    NoCapacity,
    Sampling,
    SequenceTokens,
    SessionHello,
    SessionReady,
    Start,
    Step,
    Stop,
    TokenLogprob,
)
from weft.wire.codec.direction import Direction, Entry
from weft.wire.codec.values import (
    MAX_DETAIL,
    MAX_ID,
    MAX_PAGES,
    MAX_RANK,
    MAX_TOKENS,
    MAX_WAITED_MS,
    epoch,
    fill_epoch,
    fill_runner_id,
    inverted,
    named,
    number,
    runner_id,
    text,
)
from weft.wire.errors import PeerError
from weft.wire.v1 import common_pb2, runner_pb2

MAX_DOUBLINGS = 64  # of a 32-bit number of tokens there are fewer
LEAST_TOP_P = 1e-30  # the contract's floats are short, and 0 is "not set"

FINISH = {
    FinishReason.EOS: common_pb2.FINISH_REASON_EOS,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.CANCELLED: common_pb2.FINISH_REASON_CANCELLED,
    FinishReason.FAILED: common_pb2.FINISH_REASON_FAILED,
}
FINISHED = inverted(FINISH)
_RUNNERS_FINISH: dict[int, FinishReason | None] = {
    common_pb2.FINISH_REASON_UNSPECIFIED: None,
    common_pb2.FINISH_REASON_EOS: FinishReason.EOS,
    common_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
}
_ENDED = {
    EndReason.DRAINED: runner_pb2.Ended.DRAINED,
    EndReason.LOAD_FAILED: runner_pb2.Ended.LOAD_FAILED,
    EndReason.INTERNAL: runner_pb2.Ended.INTERNAL,
    EndReason.UNKNOWN_ADAPTER: runner_pb2.Ended.UNKNOWN_ADAPTER,
}
_END_REASONS = inverted(_ENDED)


def _fill_session_hello(hello: SessionHello, m: runner_pb2.SessionHello) -> None:
    m.gateway_id, m.incarnation = hello.gateway, hello.incarnation


def _session_hello(m: runner_pb2.SessionHello) -> SessionHello:
    return SessionHello(named(m.gateway_id, "a gateway's id"), text(m.incarnation, "an incarnation"))


def _fill_start(start: Start, m: runner_pb2.Start) -> None:
    m.request_id = start.request_id
    fill_epoch(start.epoch, m.epoch)
    m.adapter_digest = start.adapter
    m.adapter_rank, m.adapter_bytes = start.rank, start.adapter_bytes
    m.prompt_tokens.extend(start.prompt)
    m.emitted_tokens.extend(start.emitted)
    m.max_tokens, m.reservation_tokens = start.max_tokens, start.reservation_tokens
    m.gateway_request_id, m.cache_salt = start.client_request_id, start.cache_salt
    m.waited_ms, m.delay_ms = round(1000 * start.waited_s), round(1000 * start.delay_s)
    sampling, s = start.sampling, m.sampling
    s.seed, s.choice = sampling.seed, sampling.choice
    s.temperature, s.top_p, s.ignore_eos = sampling.temperature, max(sampling.top_p, LEAST_TOP_P), sampling.ignore_eos
    s.frequency_penalty, s.presence_penalty = sampling.frequency_penalty, sampling.presence_penalty
    for token, bias in sampling.logit_bias:
        s.logit_bias.add(token=token, bias=bias)
    s.logprobs, s.top_logprobs = sampling.top_logprobs is not None, sampling.top_logprobs or 0


def _start(m: runner_pb2.Start) -> Start:
    """What is wrong with a request's own values beyond these bounds ends that request alone, in the runner."""
    s = m.sampling
    return Start(
        request_id=named(m.request_id, "a request id"),
        epoch=epoch(m.epoch),
        prompt=tuple(m.prompt_tokens),
        emitted=tuple(m.emitted_tokens),
        max_tokens=number(m.max_tokens, "max_tokens", MAX_TOKENS),
        reservation_tokens=number(m.reservation_tokens, "reservation_tokens", MAX_TOKENS),
        adapter=text(m.adapter_digest, "an adapter's digest"),
        rank=number(m.adapter_rank, "an adapter's rank", MAX_RANK),
        adapter_bytes=m.adapter_bytes,
        sampling=Sampling(
            seed=s.seed,
            choice=s.choice,
            temperature=s.temperature,
            top_p=s.top_p or 1.0,
            ignore_eos=s.ignore_eos,
            frequency_penalty=s.frequency_penalty,
            presence_penalty=s.presence_penalty,
            logit_bias=tuple([(entry.token, entry.bias) for entry in s.logit_bias]),
            top_logprobs=s.top_logprobs if s.logprobs else None,
        ),
        cache_salt=text(m.cache_salt, "a cache salt"),
        client_request_id=text(m.gateway_request_id, "a client's request id", MAX_DETAIL),
        waited_s=number(m.waited_ms, "waited_ms", MAX_WAITED_MS) / 1000,
        delay_s=number(m.delay_ms, "delay_ms", MAX_WAITED_MS) / 1000,
    )


def _fill_stop(stop: Stop, m: runner_pb2.Stop) -> None:
    m.request_id = stop.request_id
    fill_epoch(stop.epoch, m.epoch)


def _stop(m: runner_pb2.Stop) -> Stop:
    return Stop(named(m.request_id, "a request id"), epoch(m.epoch))


def _fill_ready(greeting: SessionReady, m: runner_pb2.SessionReady) -> None:
    fill_runner_id(greeting.runner, m.runner)


def _ready(m: runner_pb2.SessionReady) -> SessionReady:
    return SessionReady(runner_id(m.runner))


def _fill_step(step: Step, m: runner_pb2.Step) -> None:
    m.iteration = step.iteration
    add = m.sequences.add
    for request_id, (term, counter), position, tokens, finish, doublings, logprobs in step.sequences:
        sequence = add(request_id=request_id, position=position, tokens=tokens, doublings=doublings)
        sequence.epoch.term, sequence.epoch.counter = term, counter
        if finish is not None:
            sequence.finish_reason = FINISH[finish]
        for logprob, top in logprobs:
            sequence.logprobs.add(
                logprob=logprob, top_tokens=[token for token, _ in top], top_logprobs=[value for _, value in top]
            )


def _step(m: runner_pb2.Step) -> Step:
    return Step(m.iteration, [_sequence_tokens(sequence) for sequence in m.sequences])


def _sequence_tokens(m: runner_pb2.SequenceTokens) -> SequenceTokens:
    request_id = m.request_id
    if m.finish_reason not in _RUNNERS_FINISH or m.doublings > MAX_DOUBLINGS:
        raise PeerError(f"a step with finish reason {m.finish_reason} and {m.doublings} doublings")
    return SequenceTokens(
        request_id if len(request_id) <= MAX_ID else text(request_id, "a request id"),
        Epoch(m.epoch.term, m.epoch.counter),
        m.position,
        m.tokens,
        _RUNNERS_FINISH[m.finish_reason],
        m.doublings,
        _logprobs(m.logprobs) if m.logprobs else (),
    )


def _logprobs(messages: Sequence[runner_pb2.TokenLogprob]) -> Sequence[TokenLogprob]:
    """None at all where ids and probabilities are not as many: the stream reports them as missing then."""
    if any(len(m.top_tokens) != len(m.top_logprobs) for m in messages):
        return ()
    return [TokenLogprob(m.logprob, tuple(zip(m.top_tokens, m.top_logprobs, strict=True))) for m in messages]


def _fill_no_capacity(refusal: NoCapacity, m: runner_pb2.NoCapacity) -> None:
    m.request_id = refusal.request_id
    fill_epoch(refusal.epoch, m.epoch)
    m.free_pages, m.reason = refusal.free_pages, refusal.reason


def _no_capacity(m: runner_pb2.NoCapacity) -> NoCapacity:
    return NoCapacity(
        named(m.request_id, "a request id"),
        epoch(m.epoch),
        number(m.free_pages, "free_pages", MAX_PAGES),
        m.reason[:MAX_DETAIL],
    )


def _fill_ended(ended: Ended, m: runner_pb2.Ended) -> None:
    m.request_id = ended.request_id
    fill_epoch(ended.epoch, m.epoch)
    m.reason, m.detail, m.emitted_tokens = _ENDED[ended.reason], ended.detail[:MAX_DETAIL], ended.emitted_tokens


def _ended(m: runner_pb2.Ended) -> Ended:
    """A reason that this version does not know is an internal one."""
    return Ended(
        named(m.request_id, "a request id"),
        epoch(m.epoch),
        _END_REASONS.get(m.reason, EndReason.INTERNAL),
        m.detail[:MAX_DETAIL] or f"reason {m.reason}",
        number(m.emitted_tokens, "emitted_tokens", MAX_TOKENS),
    )


GATEWAY_TO_RUNNER: Direction[runner_pb2.GatewayToRunner, SessionHello | Start | Stop] = Direction(
    runner_pb2.GatewayToRunner,
    "gateway",
    Entry("hello", SessionHello, _fill_session_hello, _session_hello),
    Entry("start", Start, _fill_start, _start),
    Entry("stop", Stop, _fill_stop, _stop),
)
RUNNER_TO_GATEWAY: Direction[runner_pb2.RunnerToGateway, SessionReady | Step | NoCapacity | Ended | Draining] = (
    Direction(
        runner_pb2.RunnerToGateway,
        "runner",
        Entry("ready", SessionReady, _fill_ready, _ready),
        Entry("step", Step, _fill_step, _step),
        Entry("no_capacity", NoCapacity, _fill_no_capacity, _no_capacity),
        Entry("ended", Ended, _fill_ended, _ended),
        Entry("draining", Draining),
    )
)
