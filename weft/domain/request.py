"""A request, and the messages about it. Times are seconds unless a name says otherwise.

gateway --Submit, Failed, Cancel, Started, OutcomeReport--> scheduler --Assign, Preempt, Reject, OutcomeAck--> gateway
gateway --Start, Stop, Freeze--> runner --Step, PromptLogprobs, PooledState, NoCapacity, Ended, Frozen--> gateway
scheduler --OutcomeReport--> supervisor --OutcomeAck--> scheduler
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Annotated, NamedTuple

from weft.domain.bounds import (
    FLAT,
    MAX_DETAIL_CHARS,
    MAX_NAME_CHARS,
    MAX_REQUEST_TOKENS,
    Any32,
    Any64,
    Bound,
    Detail,
    Digest,
    EosTokens,
    Listed,
    Migrations,
    Milliseconds,
    ModelName,
    Namespace,
    Numerics,
    Pages,
    PoolName,
    Rank,
    RequestId,
    Seconds,
    Text,
    Tokens,
    Trace,
)
from weft.domain.ids import BASE, NEVER, Epoch, RunnerId

MAX_STOP_TOKENS, MAX_BAD_WORDS, MAX_ALLOWED_TOKENS = 128, 64, 4096  # of one request
MAX_GRAMMAR = 64 << 10  # of its text
MAX_PARKS = 64  # sequences that make room for one request
MAX_ALTERNATIVES = 20  # reported beside each token
_Banned = Annotated[tuple[Any32, ...], Bound(64, subject="the length of a bad word")]
GatewayId = Annotated[str, Bound(MAX_NAME_CHARS, 1, "a gateway's id")]
Address = Annotated[str, Bound(MAX_NAME_CHARS, 1, "a runner's address")]
KvAddress = Annotated[str, Bound(MAX_NAME_CHARS, 1, "a KV address")]


class Priority(IntEnum):
    """The priority of a request; the lower number goes first. Batch requests take what interactive ones leave, and are
    the first victims."""

    INTERACTIVE = 0
    BATCH = 1  # a line of a batch: nobody waits for its next token


class FinishReason(Enum):
    """How a request ended, once for each. A runner gives EOS, LENGTH and STOP (a stop token), a gateway all of them."""

    EOS = "eos"
    LENGTH = "length"
    STOP = "stop"
    CANCELLED = "cancelled"
    FAILED = "failed"


class FailReason(Enum):
    """Why an epoch is over without an outcome."""

    SESSION_LOST = "session_lost"
    NO_CAPACITY = "no_capacity"
    PREEMPTED = "preempted"
    DRAINED = "drained"
    LOAD_FAILED = "load_failed"
    RUNNER_ERROR = "runner_error"
    KV_LOST = "kv_lost"  # it did not get from one runner to the other
    RUNNER_FULL = "runner_full"  # that runner's disk has no room for the adapter


class EndReason(Enum):
    """Why a runner ends a sequence before its time."""

    DRAINED = "drained"
    LOAD_FAILED = "load_failed"
    INTERNAL = "internal"
    UNKNOWN_ADAPTER = "unknown_adapter"  # the depot does not have the digest
    KV_LOST = "kv_lost"  # it did not get from one runner to the other
    GRAMMAR = "grammar"  # it does not compile here, or no token of this model can follow: elsewhere neither
    RUNNER_FULL = "runner_full"  # this runner's disk has no room for the adapter


class RejectReason(Enum):
    """Why the scheduler ends a request."""

    QUEUE_FULL = "queue_full"
    TOO_LARGE = "too_large"
    UNKNOWN_POOL = "unknown_pool"
    TOO_MANY_MIGRATIONS = "too_many_migrations"
    ADAPTER_FAILED = "adapter_failed"
    UNKNOWN_ADAPTER = "unknown_adapter"
    SLO_UNATTAINABLE = "slo_unattainable"  # its first token would come later than the pool's objective
    RUNNER_FULL = "runner_full"  # no runner that could load the adapter has room for it on its disk


@dataclass(frozen=True, slots=True)
class Sampling:
    """Parameters of sampling: greedy at temperature 0, else from (seed, choice, absolute position) and the logits.

    `choice`: index among the `n` of the client's request. `logit_bias`: (token, bias), each token once. `top_logprobs`:
    alternatives reported for each token; None: no log probabilities at all. The others are vLLM's: `top_k` of 0 keeps
    all tokens; `repetition_penalty` is over prompt and answer; before `min_tokens` of the answer neither EOS nor a stop
    token is sampled; `bad_words` are sequences of tokens, whose last one is never sampled behind the others of the
    answer; `allowed_token_ids`: empty for all; `grammar`: an llguidance grammar, "" for none; `prompt_logprobs`:
    alternatives reported for each token of the prompt but the first; None: nothing of the prompt. `pooling`: a
    PooledState of the prompt and no token, with `max_tokens` of 0. `eos_token_ids`: the adapter's own ends of sequence,
    beside those of the base.
    """

    seed: Any64 = 0
    choice: Any32 = 0
    temperature: float = 0.0
    top_p: float = 1.0
    ignore_eos: bool = False
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Listed[tuple[Any32, float]] = ()
    top_logprobs: int | None = None
    top_k: Any32 = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: Any32 = 0
    stop_token_ids: Annotated[tuple[Any32, ...], Bound(MAX_STOP_TOKENS, subject="the number of stop tokens")] = ()
    bad_words: Annotated[tuple[_Banned, ...], Bound(MAX_BAD_WORDS, subject="the number of bad words")] = ()
    allowed_token_ids: Annotated[
        tuple[Any32, ...], Bound(MAX_ALLOWED_TOKENS, subject="the number of allowed tokens")
    ] = ()
    grammar: Annotated[str, Bound(MAX_GRAMMAR, subject="a grammar")] = ""
    prompt_logprobs: Any32 | None = None
    pooling: bool = False
    eos_token_ids: EosTokens = ()


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """The values that a request has where it gives none: the base's generation_config.json. None: the API's default."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, Bound((1 << 31) - 1, -1 << 31)] | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: Any32 | None = None


NO_DEFAULTS = SamplingDefaults()


class TokenLogprob(NamedTuple):
    """Natural logarithms of the probabilities that the model gave at one position: log softmax of its raw logits.

    `top`: the most likely (token, logarithm), the likeliest first, the lower id first among equals.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


# ---------------------------------------------------------------- gateway and runner


@dataclass(frozen=True, slots=True)
class SessionHello:
    """First message of a gateway's session: `incarnation` is the one that the scheduler named."""

    gateway: GatewayId
    incarnation: Text


@dataclass(frozen=True, slots=True)
class SessionReady:
    """The runner's answer to a session's hello."""

    runner: RunnerId


class Allotment(NamedTuple):
    """The part of a Start that the scheduler decides beside its reservation: the gateway passes it on to the runner.

    `rank` and `adapter_bytes` describe an adapter that the runner may not know; 0: not known.
    """

    rank: Rank = 0
    adapter_bytes: Any64 = 0
    delay_s: Seconds = 0.0  # what the queue policy adds to its arrival: the runner's prompts run in that order
    by_page: bool = False  # nothing is reserved ahead: it grows by a page at a time
    leaves: bool = False  # where it outruns its reservation and no page is free it is preempted itself (S3)
    stays: bool = False  # it was preempted as often as it may be: another one is, and all its pages are reserved
    # Sequences of tenants beyond their share that are parked for it where the runner has no room, the first ones first.
    parks: Annotated[tuple[RequestId, ...], Bound(MAX_PARKS, subject="the number of sequences to park")] = ()


NO_ALLOTMENT = Allotment()


@dataclass(frozen=True, slots=True)
class KvTarget:
    """A runner that takes KV of another one. `address`: of its end of `KvTransfer`."""

    runner: RunnerId
    address: KvAddress


@dataclass(frozen=True, slots=True)
class Start:
    """Run an epoch of a request. `emitted`: tokens of the answer so far, prefilled with the prompt, never sent again.

    `reservation_tokens` counts output tokens beyond prompt + emitted. Prefix pages are shared among requests of one
    `cache_salt` only.
    `kv_to`: compute the prompt and the first token, then send the KV there. `kv_from`: wait for the KV that this runner
    sends, and go on from there.
    """

    request_id: RequestId
    epoch: Epoch
    prompt: Listed[Any32]
    emitted: Listed[Any32]
    max_tokens: Tokens  # of the whole answer, emitted ones included
    reservation_tokens: Tokens
    adapter: Digest = BASE
    sampling: Sampling = field(default_factory=Sampling)
    cache_salt: Text = ""
    client_request_id: Annotated[str, Bound(MAX_DETAIL_CHARS)] = ""  # for logs
    waited_s: Seconds = 0.0  # since it arrived at the gateway: a duration, as clocks differ
    allotment: Annotated[Allotment, FLAT] = NO_ALLOTMENT  # of its Assign
    kv_to: KvTarget | None = None
    kv_from: RunnerId | None = None
    priority: Priority = Priority.INTERACTIVE
    model_name: ModelName = ""  # that the client asked for: the runner's metrics name adapters by it
    traceparent: Trace = ""  # W3C trace context of a request that is sampled
    draft: Listed[Any32] = ()  # tokens that the caller expects of the answer: guesses, which change no token


@dataclass(frozen=True, slots=True)
class Stop:
    """Cancel an epoch. It counts only from the session that started the epoch.

    `finish`: how the request ended; None: it goes on elsewhere, and `preempted` says whether for want of memory.
    """

    request_id: RequestId
    epoch: Epoch
    finish: FinishReason | None = None
    preempted: bool = False


@dataclass(frozen=True, slots=True)
class Freeze:
    """Stop an epoch after the present iteration, answer Frozen, then send its KV there as that of `next_epoch`."""

    request_id: RequestId
    epoch: Epoch
    next_epoch: Epoch
    to: KvTarget


@dataclass(frozen=True, slots=True)
class Frozen:
    """The answer to Freeze, after the last of the epoch's tokens. `emitted_tokens`: of the answer."""

    request_id: RequestId
    epoch: Epoch
    emitted_tokens: Tokens


class DraftUse(NamedTuple):
    """Tokens of a caller's draft that steps guessed: accepted tokens, and rejected tokens."""

    accepted: int = 0
    rejected: int = 0


class SequenceTokens(NamedTuple):
    """The tokens of a step for one sequence. `position`: the index of the first token in the answer.

    `logprobs`: one for each token where the request asked for them. `doublings`: of the reservation so far.
    `cached_tokens`: of the prompt, that were reused instead of computed; 0 except beside the epoch's first token.
    `draft_use`: of the step, if it guessed tokens of the request's draft; the accepted tokens come first.
    """

    request_id: str
    epoch: Epoch
    position: int
    tokens: Sequence[int]
    finish: FinishReason | None = None
    doublings: int = 0
    logprobs: Sequence[TokenLogprob] = ()
    cached_tokens: int = 0
    draft_use: DraftUse | None = None


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log probabilities of a prompt's tokens from position `first` on, as far as they are computed; sent before the
    first token of the answer.

    The first token of a prompt has none. A runner sends each as often as it computes it.
    """

    request_id: RequestId
    epoch: Epoch
    first: Annotated[int, Bound(MAX_REQUEST_TOKENS, 1, "a position of a prompt")]
    logprobs: Sequence[TokenLogprob]


@dataclass(frozen=True, slots=True)
class PooledState:
    """The hidden state of a prompt's last token behind the final norm, before the sequence's end.

    `vector`: little-endian fp32 [H]. A runner sends it as often as it computes it.
    """

    request_id: RequestId
    epoch: Epoch
    vector: Annotated[bytes, Bound(4 << 16, 1, "the length of a hidden state")]


class Step(NamedTuple):
    """The output of one iteration of a runner for one gateway."""

    iteration: int
    sequences: Sequence[SequenceTokens]


@dataclass(frozen=True, slots=True)
class NoCapacity:
    """The runner did not admit the epoch. `reason`: "pages", "sequences" or "context"."""

    request_id: RequestId
    epoch: Epoch
    free_pages: Pages
    reason: Detail


@dataclass(frozen=True, slots=True)
class Ended:
    """The runner gives a sequence up after `emitted_tokens` of its answer."""

    request_id: RequestId
    epoch: Epoch
    reason: Annotated[EndReason, EndReason.INTERNAL]
    detail: Detail = ""
    emitted_tokens: Tokens = 0


@dataclass(frozen=True, slots=True)
class Draining:
    """The runner ends: it takes no Start, and a sequence that does not move to another runner ends with DRAINED."""


# ---------------------------------------------------------------- gateway and scheduler


@dataclass(frozen=True, slots=True)
class GatewayHello:
    """First message of a gateway's stream. `applies_routes`: it sends RoutesApplied for every route table."""

    gateway: GatewayId
    applies_routes: bool = False


@dataclass(frozen=True, slots=True)
class ResubmitComplete:
    """The gateway has submitted again everything that it holds."""


@dataclass(frozen=True, slots=True)
class Submit:
    """A request, new or submitted again on a new stream. `epoch` and `runner`: where it runs, if it does.

    `p10_tokens` to `p99_tokens`: predicted output, `bucket_tokens`: what S3 reserves for it; 0: no prediction.
    `reservation_tokens` and `start_emitted_tokens` describe the present epoch from its start on. `numerics_class`: of
    the runner that computed the latest token.
    """

    request_id: RequestId
    pool: PoolName
    namespace: Namespace
    model_name: ModelName
    adapter: Digest
    prompt_tokens: Tokens
    max_tokens: Tokens
    emitted_tokens: Tokens = 0
    p10_tokens: Tokens = 0
    p50_tokens: Tokens = 0
    p90_tokens: Tokens = 0
    p99_tokens: Tokens = 0
    bucket_tokens: Tokens = 0
    waited_s: Seconds = 0.0  # a duration: it keeps the request's age across streams and schedulers
    epoch: Epoch = NEVER
    runner: RunnerId | None = None
    migrations: Migrations = 0  # epochs that ended so far, without NO_CAPACITY and PREEMPTED
    preemptions: Migrations = 0  # epochs that ended by PREEMPTED, and by NO_CAPACITY with tokens
    reservation_tokens: Tokens = 0
    start_emitted_tokens: Tokens = 0
    numerics_class: Numerics = ""
    token_runner: RunnerId | None = None  # of its Assign, until it has taken over from `runner`
    priority: Priority = Priority.INTERACTIVE
    traceparent: Trace = ""  # W3C trace context of a request that is sampled
    open_ended: bool = False  # nobody asked for `max_tokens`: the answer may be as long as its runner's context lets it


@dataclass(frozen=True, slots=True)
class Failed:
    """An epoch is over without an outcome, with `emitted_tokens` streamed: place the request again.

    `runner`: of two runners of the epoch the one that failed it; None: not known.
    """

    request_id: RequestId
    epoch: Epoch
    reason: FailReason
    emitted_tokens: Tokens = 0
    free_pages: Pages = 0  # with NO_CAPACITY, for information
    detail: Detail = ""
    runner: RunnerId | None = None


@dataclass(frozen=True, slots=True)
class Cancel:
    """The request's client is gone."""

    request_id: RequestId
    emitted_tokens: Tokens = 0


@dataclass(frozen=True, slots=True)
class Started:
    """The runner admitted this epoch: its first token arrived.

    `handed_off`: the token runner has taken over, and the prompt runner has nothing of the request any more.
    """

    request_id: RequestId
    epoch: Epoch
    handed_off: bool = False


@dataclass(frozen=True, slots=True)
class TokenRunner:
    """The second runner of an Assign: it computes the tokens after the first one. `kv_address`: where it takes KV."""

    runner: RunnerId
    address: Address
    kv_address: KvAddress
    numerics_class: Numerics = ""


@dataclass(frozen=True, slots=True)
class Assign:
    """Run (request, epoch) at that runner. Above the present epoch it is a migration: Stop there, Start here at once.

    Punica, section 5.3. `token_runner`: the one that computes the tokens after the first one, where that is another
    (Splitwise, section 4.2); the reservation is its. None: `runner` computes all of them. `kv_address`: the migration
    takes the KV along, to there; "": it is computed again.
    """

    request_id: RequestId
    epoch: Epoch
    runner: RunnerId
    address: Address
    reservation_tokens: Tokens
    numerics_class: Numerics = ""
    allotment: Annotated[Allotment, FLAT] = NO_ALLOTMENT
    token_runner: TokenRunner | None = None
    kv_address: Text = ""


@dataclass(frozen=True, slots=True)
class Preempt:
    """Stop this epoch at its runner, answer Failed(PREEMPTED), hold the stream until the next Assign."""

    request_id: RequestId
    epoch: Epoch


@dataclass(frozen=True, slots=True)
class Reject:
    """The request is over."""

    request_id: RequestId
    reason: RejectReason
    message: Detail = ""
    retry_after_ms: Any32 = 0


@dataclass(frozen=True, slots=True)
class RunnerGone:
    """The lease of that runner ran out: every session to that incarnation is over.

    `unless_alive`: but one whose runner answers; RunnerChecked says which it is.
    """

    runner: RunnerId
    unless_alive: bool = False


@dataclass(frozen=True, slots=True)
class RunnerChecked:
    """A gateway's word on a runner whose lease ran out. `alive`: it answers; else there is no session to it."""

    runner: RunnerId
    alive: bool


# ---------------------------------------------------------------- outcomes


@dataclass(frozen=True, slots=True)
class Outcome:
    """The one terminal record of a request, written by its gateway, keyed by request id.

    `censored`: the real length is only known to be >= `completion_tokens`.
    """

    request_id: RequestId
    pool: PoolName
    namespace: Namespace  # of the caller; "" when keys are off
    model_name: ModelName
    adapter: Digest
    prompt_tokens: Tokens
    completion_tokens: Tokens  # streamed and billed
    finish: FinishReason
    finished_unix_ms: Annotated[int, Bound(1 << 62)]
    error: Text = ""
    censored: bool = False
    predicted_p50_tokens: Tokens = 0
    predicted_p90_tokens: Tokens = 0
    model_version: Text = ""  # of the predictor
    ttft_ms: Any32 = 0
    total_ms: Any32 = 0
    migrations: Migrations = 0
    doublings: Migrations = 0
    choice: Any32 = 0  # of the client's request; the first one stands for request and prompt in usage
    key_id: Text = ""  # of the caller's API key; "": it has none, as lines of batches


@dataclass(frozen=True, slots=True)
class OutcomeReport:
    """An outcome on its way to the store. The scheduler learns from the fields and passes `record` on unread."""

    request_id: RequestId
    pool: PoolName
    adapter: Digest
    completion_tokens: Tokens
    censored: bool
    record: Annotated[bytes, Bound(64 << 10, 1, "the size of an outcome")]  # an encoded Outcome
    ttft_ms: Milliseconds = 0  # 0: no token came
    total_ms: Milliseconds = 0
    model_name: ModelName = ""
    failed: bool = False  # its finish reason is FAILED


@dataclass(frozen=True, slots=True)
class OutcomeAck:
    """These outcomes are in the store: the sender may forget them."""

    request_ids: Listed[RequestId]
