"""The events of the shell besides peers' messages, and the effects besides sent messages."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from weft.domain.machine import Close, Closed, Connected, Kind, Peer, Received, Send, Tick
from weft.domain.request import DraftUse, FinishReason, Outcome, Priority, Sampling, SessionHello, TokenLogprob
from weft.domain.routes import Route

SCHEDULER = Peer(Kind.SCHEDULER, "scheduler")
PREDICTOR = Peer(Kind.PREDICTOR, "predictor")
BytesOf = Callable[[int], bytes]


@dataclass(frozen=True, slots=True)
class Failure:
    """A named error, for the client and the outcome."""

    code: str
    message: str
    retry_after_ms: int = 0


class TokenLogprobOut(NamedTuple):
    """A token of the answer with its log probability, for the client.

    `start`: characters of the answer before the token's first character; a token inside a character starts with it.
    """

    token: int
    logprob: TokenLogprob
    start: int


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A valid, tokenised and allowed request of a client: `n` answers to a prompt.

    For the rest of the system each answer is a separate request with a separate id: ID for a single answer, ID/0, ID/1,
    ... for several. `bytes_of`: the bytes of a token, b"" for a token hidden from clients. `include_stop`: a final stop
    string or stop token belongs to the answer's text (vLLM).
    """

    request_id: str
    client_request_id: str
    namespace: str  # of the caller; "" when keys are off
    route: Route
    prompt: tuple[int, ...]
    prompt_text: str  # for the predictor
    max_tokens: int
    sampling: Sampling
    bytes_of: BytesOf
    arrived_unix_ms: int
    stops: tuple[str, ...] = ()
    n: int = 1
    include_stop: bool = False  # the stop string or token is part of the text
    returns_tokens: bool = False  # the client gets the answer's token ids, too
    cache_salt: str | None = ""  # the client's: prompts are reused inside it only; None: no prompt is reused
    traceparent: str = ""  # W3C trace context of a sampled request
    key_id: str = ""  # of the caller's API key
    may_reason: bool = False  # the tokens of the answer's reasoning are counted
    open_ended: bool = False  # the client set no `max_tokens`: it is the room in the context
    draft: tuple[int, ...] = ()  # the client's expectation of the answer

    answers: tuple[str, ...] = field(init=False)  # their ids

    def __post_init__(self) -> None:
        request_ids, n = (self.request_id,), self.n
        object.__setattr__(
            self, "answers", request_ids if n == 1 else tuple(f"{self.request_id}/{i}" for i in range(n))
        )


# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class SessionAlive:
    """The runner of a session has answered (`CheckSession`)."""

    peer: Peer


@dataclass(frozen=True, slots=True)
class RequestHeld:
    """The wait of a request (told by `Admission.arrive`, `resolve`). Proceed or Refuse answers it."""

    request_id: str


@dataclass(frozen=True, slots=True)
class RequestReady:
    """The prompts of a call are ready for submission: the first prompt has the arrived id."""

    requests: Sequence[PreparedRequest]


@dataclass(frozen=True, slots=True)
class ClientGone:
    """The client of a request has gone; or the shell refused the request before its submission."""

    request_id: str


@dataclass(frozen=True, slots=True)
class RequestAborted:
    """The gateway itself ends an answer (`request_id`): the process stops, or has a bug."""

    request_id: str
    failure: Failure


class TokenizerState(Enum):
    """The state of a base model's tokenizer."""

    LOADING = auto()  # for as long as it may come
    READY = auto()
    FAILED = auto()  # another try would change nothing
    REMOVED = auto()  # no pool needs it


@dataclass(frozen=True, slots=True)
class TokenizerChanged:
    """A changed tokenizer. `problem`: the failure of the last load."""

    digest: str
    state: TokenizerState
    problem: str = ""


@dataclass(frozen=True, slots=True)
class DrainStarted:
    """Take no more requests, let running answers finish within `limit_s`, then end the rest. Drained answers it."""

    limit_s: float


Event = (
    Received | Connected | Closed | Tick | RequestHeld | RequestReady | ClientGone | RequestAborted | TokenizerChanged
    | DrainStarted | SessionAlive
)  # fmt: skip

# ---------------------------------------------------------------- effects


@dataclass(frozen=True, slots=True)
class Proceed:
    """The request may take its next step."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Refuse:
    """The request is over before its submission."""

    request_id: str
    failure: Failure


@dataclass(frozen=True, slots=True)
class Submitted:
    """The scheduler has the request, or gets it with the next stream. `predicted`: with a prediction."""

    request: PreparedRequest
    predicted: bool


class Emit(NamedTuple):
    """Text of an answer for its client, and the tokens reported with it; any of them may be empty.

    `answer_tokens`: tokens of the answer so far. `tokens`: the new tokens, if the request returns tokens.
    `prompt_logprobs`: for every token of the prompt, None for the first token. They come once, before all text, if the
    request asks for them. `state`: of a pooled request, see `PooledState`. `token_starts`: the characters of the answer
    before each new token, if the request `may_reason`.
    """

    request_id: str
    text: str
    logprobs: Sequence[TokenLogprobOut] = ()
    answer_tokens: int = 0
    tokens: Sequence[int] = ()
    prompt_logprobs: Sequence[TokenLogprob | None] = ()
    state: bytes = b""
    token_starts: Sequence[int] = ()


class FirstToken(NamedTuple):
    """A runner has begun an answer. `cached_tokens`: the prompt's tokens reused by the first runner."""

    request_id: str
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class End:
    """The end of an answer. `failure` is set when the reason is FAILED."""

    reason: FinishReason
    failure: Failure | None = None
    stop: str | int | None = None  # the final stop string or stop token


@dataclass(frozen=True, slots=True)
class Finish:
    """The report of an answer's end, exactly once per answer."""

    request_id: str
    end: End
    outcome: Outcome
    ttft_s: float | None
    total_s: float
    priority: Priority = Priority.INTERACTIVE
    draft_use: DraftUse = field(default_factory=DraftUse)


@dataclass(frozen=True, slots=True)
class OpenSession:
    """Open a stream to a runner of the pool. Connected or Closed answers it."""

    peer: Peer
    address: str
    hello: SessionHello
    pool: str


@dataclass(frozen=True, slots=True)
class CheckSession:
    """Ask a session's runner whether it is there. SessionAlive or Closed answers it within a second."""

    peer: Peer


@dataclass(frozen=True, slots=True)
class PeerViolation:
    """A runner's message broke the contract, and Close follows."""

    peer: Peer
    reason: str


@dataclass(frozen=True, slots=True)
class RoutesChanged:
    """The route table has changed; `pools`: rows of pools, too."""

    pools: bool


@dataclass(frozen=True, slots=True)
class OutcomeDropped:
    """The loss of the oldest outcome, because too many outcomes are unacknowledged."""

    request_id: str


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """A bug of the gateway that ends only this answer."""

    request_id: str
    error: Exception


@dataclass(frozen=True, slots=True)
class Drained:
    """The end of the drain: no request is left, and no outcome for storage."""


Effect = (
    Send | Close | Emit | FirstToken | Finish | Proceed | Refuse | Submitted | OpenSession | CheckSession
    | PeerViolation | RoutesChanged | OutcomeDropped | RequestFailed | Drained
)  # fmt: skip
