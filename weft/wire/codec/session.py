"""Gateway <-> runner: one stream for each gateway."""

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import chain, islice, repeat
from typing import Any, TypeVar

from weft.domain.ids import Epoch
from weft.domain.request import (
    Draining,
    Ended,
    EndReason,
    FinishReason,
    Freeze,
    Frozen,
    KvTarget,
    NoCapacity,
    PooledState,
    PromptLogprobs,
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
    MAX_EOS_TOKENS,
    MAX_ID,
    MAX_MODEL,
    MAX_PAGES,
    MAX_RANK,
    MAX_TOKENS,
    MAX_WAITED_MS,
    PRIORITY,
    epoch,
    fill_epoch,
    fill_runner_id,
    inverted,
    named,
    number,
    priority,
    runner_id,
    text,
)
from weft.wire.errors import PeerError
from weft.wire.v1 import common_pb2, runner_pb2

T = TypeVar("T")
MAX_DOUBLINGS = 64  # of a 32-bit number of tokens there are fewer
MAX_STOP_TOKENS, MAX_BAD_WORDS, MAX_BANNED_TOKENS, MAX_ALLOWED_TOKENS = 128, 64, 64, 4096
MAX_GRAMMAR_BYTES = 64 << 10
MAX_STATE_BYTES = 4 << 16  # of 65,536 numbers: several times the largest model's
LEAST_TOP_P = 1e-30  # the contract's floats are short, and 0 is "not set"
# One of each for every token: their own constructors are Python functions, which take twice as long.
_new_epoch, _new_sequence_tokens = partial(tuple.__new__, Epoch), partial(tuple.__new__, SequenceTokens)

FINISH = {
    FinishReason.EOS: common_pb2.FINISH_REASON_EOS,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.CANCELLED: common_pb2.FINISH_REASON_CANCELLED,
    FinishReason.FAILED: common_pb2.FINISH_REASON_FAILED,
}
FINISHED = inverted(FINISH)
_RUNNERS_FINISH: dict[FinishReason | None, Any] = {
    None: common_pb2.FINISH_REASON_UNSPECIFIED,
    FinishReason.EOS: common_pb2.FINISH_REASON_EOS,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
}
_RUNNERS_FINISHED = {number: reason for reason, number in _RUNNERS_FINISH.items()}
_ENDED = {
    EndReason.DRAINED: runner_pb2.Ended.DRAINED,
    EndReason.LOAD_FAILED: runner_pb2.Ended.LOAD_FAILED,
    EndReason.INTERNAL: runner_pb2.Ended.INTERNAL,
    EndReason.UNKNOWN_ADAPTER: runner_pb2.Ended.UNKNOWN_ADAPTER,
    EndReason.KV_LOST: runner_pb2.Ended.KV_LOST,
    EndReason.GRAMMAR: runner_pb2.Ended.GRAMMAR,
}
_END_REASONS = inverted(_ENDED)


def _fill_session_hello(hello: SessionHello, m: runner_pb2.SessionHello) -> None:
    m.gateway, m.incarnation = hello.gateway, hello.incarnation


def _session_hello(m: runner_pb2.SessionHello) -> SessionHello:
    return SessionHello(named(m.gateway, "a gateway's id"), text(m.incarnation, "an incarnation"))


def _fill_start(start: Start, m: runner_pb2.Start) -> None:
    m.request_id = start.request_id
    fill_epoch(start.epoch, m.epoch)
    m.adapter = start.adapter
    m.rank, m.adapter_bytes = start.rank, start.adapter_bytes
    m.prompt.extend(start.prompt)
    m.emitted.extend(start.emitted)
    m.max_tokens, m.reservation_tokens = start.max_tokens, start.reservation_tokens
    m.client_request_id, m.cache_salt = start.client_request_id, start.cache_salt
    m.waited_ms, m.delay_ms = round(1000 * start.waited_s), round(1000 * start.delay_s)
    m.by_page, m.leaves, m.stays = start.by_page, start.leaves, start.stays
    m.priority, m.model_name = PRIORITY[start.priority], start.model_name
    m.traceparent = start.traceparent
    _fill_sampling(start.sampling, m.sampling)
    if start.kv_to is not None:
        _fill_kv_target(start.kv_to, m.kv_to)
    if start.kv_from is not None:
        fill_runner_id(start.kv_from, m.kv_from)


def _start(m: runner_pb2.Start) -> Start:
    """What is wrong with a request's own values beyond these bounds ends that request alone, in the runner."""
    return Start(
        request_id=named(m.request_id, "a request id"),
        epoch=epoch(m.epoch),
        prompt=tuple(m.prompt),
        emitted=tuple(m.emitted),
        max_tokens=number(m.max_tokens, "max_tokens", MAX_TOKENS),
        reservation_tokens=number(m.reservation_tokens, "reservation_tokens", MAX_TOKENS),
        adapter=text(m.adapter, "an adapter's digest"),
        rank=number(m.rank, "an adapter's rank", MAX_RANK),
        adapter_bytes=m.adapter_bytes,
        sampling=_sampling(m.sampling),
        cache_salt=text(m.cache_salt, "a cache salt"),
        client_request_id=text(m.client_request_id, "a client's request id", MAX_DETAIL),
        waited_s=number(m.waited_ms, "waited_ms", MAX_WAITED_MS) / 1000,
        delay_s=number(m.delay_ms, "delay_ms", MAX_WAITED_MS) / 1000,
        by_page=m.by_page,
        leaves=m.leaves,
        stays=m.stays,
        kv_to=_kv_target(m.kv_to) if m.HasField("kv_to") else None,
        kv_from=runner_id(m.kv_from) if m.HasField("kv_from") else None,
        priority=priority(m.priority),
        model_name=text(m.model_name, "a model's name", MAX_MODEL),
        traceparent=text(m.traceparent, "a trace context"),
    )


def _fill_sampling(sampling: Sampling, m: runner_pb2.Sampling) -> None:
    m.seed, m.choice = sampling.seed, sampling.choice
    m.temperature, m.top_p, m.ignore_eos = sampling.temperature, max(sampling.top_p, LEAST_TOP_P), sampling.ignore_eos
    m.frequency_penalty, m.presence_penalty = sampling.frequency_penalty, sampling.presence_penalty
    for token, bias in sampling.logit_bias:
        m.logit_bias.add(token=token, bias=bias)
    m.logprobs, m.top_logprobs = sampling.top_logprobs is not None, sampling.top_logprobs or 0
    m.top_k, m.min_p, m.min_tokens = sampling.top_k, sampling.min_p, sampling.min_tokens
    m.repetition_penalty = sampling.repetition_penalty
    m.stop_token_ids.extend(sampling.stop_token_ids)
    for words in sampling.bad_words:
        m.bad_words.add(tokens=words)
    m.allowed_token_ids.extend(sampling.allowed_token_ids)
    m.grammar = sampling.grammar
    if sampling.prompt_logprobs is not None:
        m.prompt_logprobs = sampling.prompt_logprobs
    m.pooling = sampling.pooling
    m.eos_token_ids.extend(sampling.eos_token_ids)


def _sampling(m: runner_pb2.Sampling) -> Sampling:
    number(len(m.stop_token_ids), "the number of stop tokens", MAX_STOP_TOKENS)
    number(len(m.allowed_token_ids), "the number of allowed tokens", MAX_ALLOWED_TOKENS)
    number(len(m.eos_token_ids), "the number of ends of sequence", MAX_EOS_TOKENS)
    if m.bad_words:
        number(len(m.bad_words), "the number of bad words", MAX_BAD_WORDS)
        number(max(len(words.tokens) for words in m.bad_words), "the length of a bad word", MAX_BANNED_TOKENS)
    if m.grammar:
        number(len(m.grammar.encode()), "the length of a grammar", MAX_GRAMMAR_BYTES)
    return Sampling(
        seed=m.seed,
        choice=m.choice,
        temperature=m.temperature,
        top_p=m.top_p or 1.0,
        ignore_eos=m.ignore_eos,
        frequency_penalty=m.frequency_penalty,
        presence_penalty=m.presence_penalty,
        logit_bias=tuple([(entry.token, entry.bias) for entry in m.logit_bias]),
        top_logprobs=m.top_logprobs if m.logprobs else None,
        top_k=m.top_k,
        min_p=m.min_p,
        repetition_penalty=m.repetition_penalty or 1.0,
        min_tokens=m.min_tokens,
        stop_token_ids=tuple(m.stop_token_ids),
        bad_words=tuple([tuple(words.tokens) for words in m.bad_words]),
        allowed_token_ids=tuple(m.allowed_token_ids),
        grammar=m.grammar,
        prompt_logprobs=m.prompt_logprobs if m.HasField("prompt_logprobs") else None,
        pooling=m.pooling,
        eos_token_ids=tuple(m.eos_token_ids),
    )


def _fill_kv_target(target: KvTarget, m: runner_pb2.KvTarget) -> None:
    fill_runner_id(target.runner, m.runner)
    m.address = target.address


def _kv_target(m: runner_pb2.KvTarget) -> KvTarget:
    return KvTarget(runner_id(m.runner), named(m.address, "a KV address"))


def _fill_freeze(freeze: Freeze, m: runner_pb2.Freeze) -> None:
    m.request_id = freeze.request_id
    fill_epoch(freeze.epoch, m.epoch)
    fill_epoch(freeze.next_epoch, m.next_epoch)
    _fill_kv_target(freeze.to, m.to)


def _freeze(m: runner_pb2.Freeze) -> Freeze:
    return Freeze(named(m.request_id, "a request id"), epoch(m.epoch), epoch(m.next_epoch), _kv_target(m.to))


def _fill_frozen(frozen: Frozen, m: runner_pb2.Frozen) -> None:
    m.request_id, m.emitted_tokens = frozen.request_id, frozen.emitted_tokens
    fill_epoch(frozen.epoch, m.epoch)


def _frozen(m: runner_pb2.Frozen) -> Frozen:
    emitted = number(m.emitted_tokens, "emitted_tokens", MAX_TOKENS)
    return Frozen(named(m.request_id, "a request id"), epoch(m.epoch), emitted)


def _fill_stop(stop: Stop, m: runner_pb2.Stop) -> None:
    m.request_id, m.preempted = stop.request_id, stop.preempted
    fill_epoch(stop.epoch, m.epoch)
    if stop.finish is not None:
        m.finish = FINISH[stop.finish]


def _stop(m: runner_pb2.Stop) -> Stop:
    return Stop(named(m.request_id, "a request id"), epoch(m.epoch), FINISHED.get(m.finish), m.preempted)


def _fill_ready(greeting: SessionReady, m: runner_pb2.SessionReady) -> None:
    fill_runner_id(greeting.runner, m.runner)


def _ready(m: runner_pb2.SessionReady) -> SessionReady:
    return SessionReady(runner_id(m.runner))


def _fill_step(step: Step, m: runner_pb2.Step) -> None:
    """Columns: 32 sequences of a token take 17 us, and 70 as a submessage each."""
    m.iteration = step.iteration
    if not step.sequences:
        return
    ids, epochs, positions, tokens, finishes, doublings, logprobs = zip(*step.sequences, strict=True)
    terms, counters = zip(*epochs, strict=True)
    m.request_ids.extend(ids)
    m.terms.extend(terms)
    m.counters.extend(counters)
    m.positions.extend(positions)
    m.tokens.extend(chain.from_iterable(tokens))
    counts = [len(of_sequence) for of_sequence in tokens]
    if counts != [1] * len(counts):
        m.token_counts.extend(counts)
    if any(finishes):
        m.finish_reasons.extend([_RUNNERS_FINISH[finish] for finish in finishes])
    if any(doublings):
        m.doublings.extend(doublings)
    if any(logprobs):
        for of_sequence in logprobs:
            fill_logprobs(of_sequence, m.logprobs.add())


def _step(m: runner_pb2.Step) -> Step:
    n = len(m.request_ids)
    request_ids = m.request_ids[:]
    if n and len(longest := max(request_ids, key=len)) > MAX_ID:
        text(longest, "a request id")
    finishes: Iterable[FinishReason | None] = repeat(None)
    if m.finish_reasons:
        try:
            finishes = [_RUNNERS_FINISHED[reason] for reason in _column(m.finish_reasons, n)]
        except KeyError as error:
            raise PeerError(f"a step with finish reason {error}") from None
    if m.doublings and max(m.doublings) > MAX_DOUBLINGS:
        raise PeerError(f"a step with {max(m.doublings)} doublings")
    sequences = zip(
        request_ids,
        map(_new_epoch, zip(_column(m.terms, n), _column(m.counters, n), strict=False)),
        _column(m.positions, n),
        _tokens(m, n),
        finishes,
        _column(m.doublings, n),
        map(read_logprobs, _columns(m.logprobs, n)) if m.logprobs else repeat(()),
        strict=False,
    )
    return Step(m.iteration, list(map(_new_sequence_tokens, sequences)))


def _column(values: Sequence[int], n: int) -> Iterable[int]:
    """The values of n sequences, zeros where they are left out."""
    return _columns(values, n) if values else repeat(0)


def _columns(values: Sequence[T], n: int) -> Sequence[T]:
    if len(values) != n:
        raise PeerError(f"a step of {n} sequences with a column of {len(values)}")
    return values[:]


def _tokens(m: runner_pb2.Step, n: int) -> Iterable[Sequence[int]]:
    """Of each sequence."""
    tokens, counts = m.tokens[:], _columns(m.token_counts, n) if m.token_counts else ()
    if len(tokens) != (sum(counts) if counts else n):
        raise PeerError(f"a step of {n} sequences with {len(tokens)} tokens")
    rest = iter(tokens)
    return [tuple(islice(rest, count)) for count in counts] if counts else zip(tokens, strict=False)


def fill_logprobs(logprobs: Sequence[TokenLogprob], m: runner_pb2.SequenceLogprobs) -> None:
    add = m.tokens.add
    for logprob, top in logprobs:
        add(logprob=logprob, top_tokens=[token for token, _ in top], top_logprobs=[value for _, value in top])


def read_logprobs(m: runner_pb2.SequenceLogprobs) -> Sequence[TokenLogprob]:
    """None at all where ids and probabilities are not as many: the stream reports them as missing then."""
    if any(len(token.top_tokens) != len(token.top_logprobs) for token in m.tokens):
        return ()
    pairs = [(token.logprob, zip(token.top_tokens, token.top_logprobs, strict=True)) for token in m.tokens]
    return [TokenLogprob(logprob, tuple(top)) for logprob, top in pairs]


def _fill_prompt_logprobs(part: PromptLogprobs, m: runner_pb2.PromptLogprobs) -> None:
    m.request_id, m.first = part.request_id, part.first
    fill_epoch(part.epoch, m.epoch)
    fill_logprobs(part.logprobs, m.logprobs)


def _prompt_logprobs(m: runner_pb2.PromptLogprobs) -> PromptLogprobs:
    first = number(m.first, "a position of a prompt", MAX_TOKENS, least=1)
    return PromptLogprobs(named(m.request_id, "a request id"), epoch(m.epoch), first, read_logprobs(m.logprobs))


def _fill_pooled_state(state: PooledState, m: runner_pb2.PooledState) -> None:
    m.request_id, m.vector = state.request_id, state.vector
    fill_epoch(state.epoch, m.epoch)


def _pooled_state(m: runner_pb2.PooledState) -> PooledState:
    number(len(m.vector), "the length of a hidden state", MAX_STATE_BYTES, least=1)
    return PooledState(named(m.request_id, "a request id"), epoch(m.epoch), m.vector)


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


GATEWAY_TO_RUNNER: Direction[runner_pb2.GatewayToRunner, SessionHello | Start | Stop | Freeze] = Direction(
    runner_pb2.GatewayToRunner,
    "gateway",
    Entry("hello", SessionHello, _fill_session_hello, _session_hello),
    Entry("start", Start, _fill_start, _start),
    Entry("stop", Stop, _fill_stop, _stop),
    Entry("freeze", Freeze, _fill_freeze, _freeze),
)
RunnerMessage = SessionReady | Step | PromptLogprobs | PooledState | NoCapacity | Ended | Draining | Frozen
RUNNER_TO_GATEWAY: Direction[runner_pb2.RunnerToGateway, RunnerMessage] = Direction(
    runner_pb2.RunnerToGateway,
    "runner",
    Entry("ready", SessionReady, _fill_ready, _ready),
    Entry("step", Step, _fill_step, _step),
    Entry("prompt_logprobs", PromptLogprobs, _fill_prompt_logprobs, _prompt_logprobs),
    Entry("pooled_state", PooledState, _fill_pooled_state, _pooled_state),
    Entry("no_capacity", NoCapacity, _fill_no_capacity, _no_capacity),
    Entry("ended", Ended, _fill_ended, _ended),
    Entry("draining", Draining),
    Entry("frozen", Frozen, _fill_frozen, _frozen),
)
