"""The configuration of a gateway's machine, and the kinds of its deadlines."""

from dataclasses import dataclass
from enum import StrEnum, auto

from weft.domain.timers import TimerQueue

MAX_UNACKED = 10_000  # outcomes


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """Durations in seconds. The first three are settings."""

    max_in_flight: int = 2000  # answers at once; beyond it requests are refused
    hold_s: float = 300.0  # without a runner
    predict_s: float = 0.05  # for a prediction
    # For a runner's session to come up: many handshakes' time; the scheduler takes the Assign back at the same time.
    connect_s: float = 5.0
    session_idle_s: float = 60.0  # a session without requests closes; opening it again takes milliseconds
    max_unacked: int = MAX_UNACKED


class Deadline(StrEnum):
    """The kind of a deadline; the name next to it is a request's, an answer's or a peer's."""

    ARRIVAL = auto()  # a request before its submission
    HOLD = auto()  # an answer without a runner
    SESSION = auto()  # connecting, or idle
    DRAIN = auto()


Timers = TimerQueue[tuple[Deadline, str]]
