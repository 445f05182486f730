"""Gateway <-> runner: one stream for each gateway."""

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import chain, islice, repeat
from typing import Any, TypeVar

from weft.domain.bounds import MAX_DETAIL_CHARS, MAX_NAME_CHARS
from weft.domain.ids import Epoch
from weft.domain.request import (
    DraftUse,
    Draining,
    Ended,
    FinishReason,
    Freeze,
    Frozen,
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
from weft.wire.codec.direction import Direction
from weft.wire.codec.pairs import ByHand, Custom, Pair
from weft.wire.codec.values import check_text
from weft.wire.errors import PeerError
from weft.wire.v1 import common_pb2, runner_pb2

T = TypeVar("T")
MAX_DOUBLINGS = 64  # of a 32-bit number of tokens there are fewer
# One of each for every token: their own constructors are Python functions, which take twice as long.
_new_epoch, _new_sequence_tokens = partial(tuple.__new__, Epoch), partial(tuple.__new__, SequenceTokens)

_RUNNERS_FINISH: dict[FinishReason | None, Any] = {
    None: common_pb2.FINISH_REASON_UNSPECIFIED,
    FinishReason.EOS: common_pb2.FINISH_REASON_EOS,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
}
_RUNNERS_FINISHED = {number: reason for reason, number in _RUNNERS_FINISH.items()}


# ---------------------------------------------------------------- a step


def _fill_step(step: Step, m: runner_pb2.Step) -> None:
    """Fill a step's columns: 32 sequences of a token take 17 us, and 70 as a submessage each."""
    m.iteration = step.iteration
    if not step.sequences:
        return
    columns = zip(*step.sequences, strict=True)
    ids, epochs, positions, tokens, finishes, doublings, logprobs, cached, draft_uses = columns
    terms, counters = zip(*epochs, strict=True)
    m.request_ids.extend(ids)
    m.terms.extend(terms)
    m.counters.extend(counters)
    m.positions.extend(positions)
    m.tokens.extend(chain.from_iterable(tokens))
    counts = list(map(len, tokens))
    if counts != [1] * len(counts):
        m.token_counts.extend(counts)
    if any(finishes):
        m.finish_reasons.extend([_RUNNERS_FINISH[finish] for finish in finishes])
    if any(doublings):
        m.doublings.extend(doublings)
    if any(logprobs):
        for of_sequence in logprobs:
            fill_logprobs(of_sequence, m.logprobs.add())
    if any(cached):
        m.cached_tokens.extend(cached)
    if any(draft_uses):
        accepted, rejected = zip(*(use or (0, 0) for use in draft_uses), strict=True)
        m.accepted_draft_tokens.extend(accepted)
        m.rejected_draft_tokens.extend(rejected)


def _step(m: runner_pb2.Step) -> Step:
    request_ids, doublings, logprobs = m.request_ids[:], m.doublings, m.logprobs
    n = len(request_ids)
    if n and max(map(len, request_ids)) > MAX_NAME_CHARS:
        check_text(max(request_ids, key=len), "a request id")
    finishes: Iterable[FinishReason | None] = repeat(None)
    if m.finish_reasons:
        try:
            finishes = [_RUNNERS_FINISHED[reason] for reason in _column(m.finish_reasons, n)]
        except KeyError as error:
            raise PeerError(f"a step with finish reason {error}, expected one that a runner gives") from None
    if doublings and max(doublings) > MAX_DOUBLINGS:
        raise PeerError(f"a step with {max(doublings)} doublings, expected at most {MAX_DOUBLINGS}")
    sequences = zip(
        request_ids,
        map(_new_epoch, zip(_column(m.terms, n), _column(m.counters, n), strict=False)),
        _column(m.positions, n),
        _tokens(m, n),
        finishes,
        _column(doublings, n),
        map(read_logprobs, _columns(logprobs, n)) if logprobs else repeat(()),
        _column(m.cached_tokens, n),
        _draft_uses(m, n),
        strict=False,
    )
    return Step(m.iteration, list(map(_new_sequence_tokens, sequences)))


def _draft_uses(m: runner_pb2.Step, n: int) -> Iterable[DraftUse | None]:
    if not m.accepted_draft_tokens:
        return repeat(None)
    uses = zip(_columns(m.accepted_draft_tokens, n), _columns(m.rejected_draft_tokens, n), strict=True)
    return [DraftUse(*use) if any(use) else None for use in uses]


def _column(values: Sequence[int], n: int) -> Iterable[int]:
    """The values of n sequences, zeros where they are left out."""
    return _columns(values, n) if values else repeat(0)


def _columns(values: Sequence[T], n: int) -> Sequence[T]:
    if len(values) != n:
        raise PeerError(f"a step of {n} sequences with a column of {len(values)}, expected a value for each")
    return values[:]


def _tokens(m: runner_pb2.Step, n: int) -> Iterable[Sequence[int]]:
    """Split the message's list of tokens into lists of each sequence."""
    tokens, counts = m.tokens[:], _columns(m.token_counts, n) if m.token_counts else ()
    if len(tokens) != (sum(counts) if counts else n):
        raise PeerError(f"a step of {n} sequences with {len(tokens)} tokens, expected {sum(counts) if counts else n}")
    rest = iter(tokens)
    return [tuple(islice(rest, count)) for count in counts] if counts else zip(tokens, strict=False)


def fill_logprobs(logprobs: Sequence[TokenLogprob], m: runner_pb2.SequenceLogprobs) -> None:
    add = m.tokens.add
    for logprob, top in logprobs:
        add(logprob=logprob, top_tokens=[token for token, _ in top], top_logprobs=[value for _, value in top])


def read_logprobs(m: runner_pb2.SequenceLogprobs) -> Sequence[TokenLogprob]:
    """Read log probabilities; empty where ids and probabilities differ in number: then they are missing."""
    if any(len(token.top_tokens) != len(token.top_logprobs) for token in m.tokens):
        return ()
    pairs = [(token.logprob, zip(token.top_tokens, token.top_logprobs, strict=True)) for token in m.tokens]
    return [TokenLogprob(logprob, tuple(top)) for logprob, top in pairs]


# ---------------------------------------------------------------- everything else


def _fill_some_logprobs(logprobs: Sequence[TokenLogprob], m: Any) -> None:
    if logprobs:
        fill_logprobs(logprobs, m.logprobs)


def _some_logprobs(m: Any) -> Sequence[TokenLogprob]:
    return read_logprobs(m.logprobs)


def _fill_top_logprobs(top_logprobs: int | None, m: runner_pb2.Sampling) -> None:
    m.logprobs, m.top_logprobs = top_logprobs is not None, top_logprobs or 0


def _top_logprobs(m: runner_pb2.Sampling) -> int | None:
    return m.top_logprobs if m.logprobs else None


def _fill_detail(detail: str, m: runner_pb2.Ended) -> None:
    m.detail = detail[:MAX_DETAIL_CHARS]


def _detail(m: runner_pb2.Ended) -> str:
    """Read a reason. An unknown reason is read as an internal failure."""
    return m.detail[:MAX_DETAIL_CHARS] or f"reason {m.reason}"


LOGPROBS = Custom(_fill_some_logprobs, _some_logprobs)
_TOP_LOGPROBS = Custom(_fill_top_logprobs, _top_logprobs, ("logprobs", "top_logprobs"))
_SAMPLING = Pair(Sampling, runner_pb2.Sampling, custom={"top_logprobs": _TOP_LOGPROBS})

GATEWAY_TO_RUNNER: Direction[runner_pb2.GatewayToRunner, SessionHello | Start | Stop | Freeze] = Direction(
    runner_pb2.GatewayToRunner,
    "gateway",
    hello=SessionHello,
    start=Pair(Start, runner_pb2.Start, parts=[_SAMPLING]),
    stop=Stop,
    freeze=Freeze,
)
RunnerMessage = SessionReady | Step | PromptLogprobs | PooledState | NoCapacity | Ended | Draining | Frozen
RUNNER_TO_GATEWAY: Direction[runner_pb2.RunnerToGateway, RunnerMessage] = Direction(
    runner_pb2.RunnerToGateway,
    "runner",
    ready=SessionReady,
    step=ByHand(Step, _fill_step, _step),
    prompt_logprobs=Pair(PromptLogprobs, runner_pb2.PromptLogprobs, custom={"logprobs": LOGPROBS}),
    pooled_state=PooledState,
    no_capacity=NoCapacity,
    ended=Pair(Ended, runner_pb2.Ended, custom={"detail": Custom(_fill_detail, _detail)}),
    draining=Draining,
    frozen=Frozen,
)
