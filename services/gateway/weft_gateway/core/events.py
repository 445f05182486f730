"""What the shell reports to the gateway beside its peers' messages, and what the shell does beside sending messages."""

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

    `start`: characters of the answer before the token's own; a token inside a character starts with that character.
    """

    token: int
    logprob: TokenLogprob
    start: int


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A client's request that is valid, tokenised and allowed: `n` answers to one prompt.

    For the rest of the system each answer is a request of its own, with an id of its own: ID for one, ID/0, ID/1, ...
    for several. `bytes_of`: the bytes of a token, b"" for one that clients do not get. `include_stop`: a stop string or
    a stop token that ends an answer belongs to its text (vLLM).
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
    include_stop: bool = False  # what ends the answer is part of its text
    returns_tokens: bool = False  # the client gets the answer's token ids, too
    cache_salt: str | None = ""  # the client's: prompts are reused inside it alone; None: no prompt is reused
    traceparent: str = ""  # W3C trace context of a request that is sampled
    key_id: str = ""  # of the caller's API key
    may_reason: bool = False  # the tokens of the answer's reasoning are counted
    open_ended: bool = False  # nobody asked for `max_tokens`: it is what the context lets
    draft: tuple[int, ...] = ()  # what the client expects of the answer

    answers: tuple[str, ...] = field(init=False)  # their ids

    def __post_init__(self) -> None:
        single, n = (self.request_id,), self.n
        object.__setattr__(self, "answers", single if n == 1 else tuple(f"{self.request_id}/{i}" for i in range(n)))


# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class SessionAlive:
    """The runner of a session has answered (`CheckSession`)."""

    peer: Peer


@dataclass(frozen=True, slots=True)
class RequestHeld:
    """A request that was told to wait (`Admission.arrive`, `resolve`) does so. Proceed or Refuse answers it."""

    request_id: str


@dataclass(frozen=True, slots=True)
class RequestReady:
    """The prompts of a call can be submitted: the first one has the id that has arrived."""

    requests: Sequence[PreparedRequest]


@dataclass(frozen=True, slots=True)
class ClientGone:
    """Nothing reads the answers of this request any more; or the shell refused it before its submission."""

    request_id: str


@dataclass(frozen=True, slots=True)
class RequestAborted:
    """The gateway itself ends an answer, which `request_id` names: the process stops, or has a bug."""

    request_id: str
    failure: Failure


class TokenizerState(Enum):
    """What has become of a base model's tokenizer."""

    LOADING = auto()  # for as long as it may come
    READY = auto()
    FAILED = auto()  # another try would change nothing
    REMOVED = auto()  # no pool needs it


@dataclass(frozen=True, slots=True)
class TokenizerChanged:
    """`problem`: why the last load failed."""

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
    """Text of an answer for its client, and the tokens that are reported with it; any of them may be empty.

    `answer_tokens`: of the answer so far. `tokens`: those that are new, where the request returns tokens.
    `prompt_logprobs`: of every token of the prompt, None for the first one, once for an answer whose request asks for
    them, before all of its text. `state`: of a request that pools, see `PooledState`. `token_starts`: the characters of
    the answer before each new token, where the request `may_reason`.
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
    """A runner has begun with an answer. `cached_tokens`: of the prompt, that the first runner reused."""

    request_id: str
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class End:
    """How an answer ended. `failure` is set when the reason is FAILED."""

    reason: FinishReason
    failure: Failure | None = None
    stop: str | int | None = None  # the stop string, or the stop token, that ended it


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of an answer: exactly one for each."""

    request_id: str
    end: End
    outcome: Outcome
    ttft_s: float | None
    total_s: float
    priority: Priority = Priority.INTERACTIVE
    draft_use: DraftUse = field(default_factory=DraftUse)


@dataclass(frozen=True, slots=True)
class OpenSession:
    """Open a stream to a runner of that pool. Connected or Closed answers it."""

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
    """Too many outcomes are unacknowledged: the oldest one is lost."""

    request_id: str


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """A bug of the gateway ends this answer, and no other."""

    request_id: str
    error: Exception


@dataclass(frozen=True, slots=True)
class Drained:
    """No request is left, and no outcome that could still be stored."""


Effect = (
    Send | Close | Emit | FirstToken | Finish | Proceed | Refuse | Submitted | OpenSession | CheckSession
    | PeerViolation | RoutesChanged | OutcomeDropped | RequestFailed | Drained
)  # fmt: skip
