"""What can happen to a request, and what its stream wants done. Values only."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from weft.identities import Epoch, RunnerId


class FinishReason(Enum):
    """How a request ended: exactly one a request."""

    EOS = auto()
    LENGTH = auto()
    STOP = auto()
    CANCELLED = auto()
    FAILED = auto()


class FailedReason(Enum):
    """Why an epoch is over without an outcome (Failed.Reason of the wire)."""

    SESSION_LOST = auto()
    NO_ROOM = auto()
    PREEMPTED = auto()
    DRAINED = auto()
    LOAD_FAILED = auto()
    RUNNER_ERROR = auto()


@dataclass(frozen=True, slots=True)
class Failure:
    """A named error, for the client and the outcome."""

    code: str
    message: str
    retry_after_ms: int = 0


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """How likely the model held a token, and the likeliest ones there: (token, natural logarithm), likeliest first."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class TokenLogprobOut:
    """A token of the answer with its log probability, for the client.

    `start` counts the characters of the answer before its own; a token inside a character starts with that character.
    """

    token: int
    logprob: TokenLogprob
    start: int


# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class StepTokens:
    """Tokens of one iteration; `position` is the index of the first in the answer; `finish` is EOS, LENGTH or None.

    `logprobs`: one for each token where the request asked for them.
    """

    epoch: Epoch
    position: int
    tokens: Sequence[int]
    finish: FinishReason | None = None
    doublings: int = 0
    logprobs: Sequence[TokenLogprob] = ()


@dataclass(frozen=True, slots=True)
class Assigned:
    """The scheduler's order: run there from now on."""

    epoch: Epoch
    runner: RunnerId
    address: str
    reservation_tokens: int
    numerics_class: str = ""  # of that runner


@dataclass(frozen=True, slots=True)
class Preempted:
    """The scheduler takes this epoch back; another assignment follows."""

    epoch: Epoch


@dataclass(frozen=True, slots=True)
class RunnerLost:
    """The session to that incarnation broke, or its lease ran out."""

    runner: RunnerId
    detail: str = ""


@dataclass(frozen=True, slots=True)
class EpochEnded:
    """The runner answered NoRoom or Ended for this epoch."""

    epoch: Epoch
    reason: FailedReason
    detail: str = ""
    free_pages: int = 0


@dataclass(frozen=True, slots=True)
class Rejected:
    """The scheduler will not place this request."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class PoolAvailability:
    """The shell's word: whether the scheduler is there and the request's pool has a ready runner."""

    served: bool


@dataclass(frozen=True, slots=True)
class HoldExpired:
    """A timer of the shell; counts only if the stream was held too long. `failure` says what was missing."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class ClientGone:
    """Nobody reads the answer any more."""


@dataclass(frozen=True, slots=True)
class Aborted:
    """The gateway itself ends the request (it stops, or has a bug)."""

    failure: Failure


Event = (
    StepTokens
    | Assigned
    | Preempted
    | RunnerLost
    | EpochEnded
    | Rejected
    | PoolAvailability
    | HoldExpired
    | ClientGone
    | Aborted
)


# ---------------------------------------------------------------- effects


@dataclass(frozen=True, slots=True)
class Start:
    """Start this epoch at that runner, continuing after `emitted`."""

    epoch: Epoch
    runner: RunnerId
    address: str
    emitted: tuple[int, ...]
    reservation_tokens: int


@dataclass(frozen=True, slots=True)
class Stop:
    """Cancel this epoch at that runner."""

    epoch: Epoch
    runner: RunnerId


@dataclass(frozen=True, slots=True)
class Failed:
    """Tell the scheduler that this epoch is over: place the request again."""

    epoch: Epoch
    reason: FailedReason
    emitted_tokens: int
    free_pages: int = 0
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Started:
    """Tell the scheduler that the runner admitted this epoch."""

    epoch: Epoch


@dataclass(frozen=True, slots=True)
class Cancel:
    """Tell the scheduler to forget the request."""


@dataclass(frozen=True, slots=True)
class Emit:
    """Text for the client, and the tokens that are told with it; one of the two may be empty."""

    text: str
    told: tuple[TokenLogprobOut, ...] = ()


@dataclass(frozen=True, slots=True)
class Finish:
    """The one terminal effect. `failure` is set when the reason is FAILED."""

    reason: FinishReason
    failure: Failure | None = None


Effect = Start | Stop | Failed | Started | Cancel | Emit | Finish
