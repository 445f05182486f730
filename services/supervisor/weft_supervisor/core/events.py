"""What can happen to a supervisor, and what it can order.

States and adapter lists pass through to the scheduler and the runners as they came (`payload`, `desired`): the core
reads the few fields that it decides on and never looks inside these.
"""

from dataclasses import dataclass, field

from weft.identities import Epoch, RunnerId


@dataclass(frozen=True, slots=True)
class Sequence:
    """A sequence on a runner. `admitted`: the newest has the highest."""

    request_id: str
    epoch: Epoch
    admitted: int
    reserved_pages: int = 0
    used_pages: int = 0
    reservation_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Overrun:
    """A sequence paused for want of a page; `reservation_tokens` is doubled already."""

    request_id: str
    epoch: Epoch
    reservation_tokens: int


@dataclass(frozen=True, slots=True)
class Report:
    """A runner's whole state. Free + reserved + adapter pages = total pages; reserved covers used."""

    runner: RunnerId
    sequence: int
    free_pages: int
    used_pages: int
    sequences: tuple[Sequence, ...] = ()
    overruns: tuple[Overrun, ...] = ()
    ready: bool = False
    draining: bool = False
    grown_pages: int = 0
    doublings: int = 0
    adapter_pages: int = 0
    payload: object = field(default=None, compare=False)


# ------------------------------------------------------------------------------------------------ what can happen


@dataclass(frozen=True, slots=True)
class RunnerUp:
    """A runner opened its stream and said hello."""

    runner: RunnerId
    pool: str
    total_pages: int


@dataclass(frozen=True, slots=True)
class Beat:
    """A heartbeat: nothing changed."""

    runner: RunnerId


@dataclass(frozen=True, slots=True)
class OrderGiven:
    """The scheduler orders a runner. `desired` None: the list given before still counts."""

    runner: RunnerId
    drain: bool
    desired: object | None = None


@dataclass(frozen=True, slots=True)
class SchedulerUp:
    """A new scheduler stream: it knows nothing."""


@dataclass(frozen=True, slots=True)
class SchedulerDown:
    """The scheduler stream broke."""


@dataclass(frozen=True, slots=True)
class TermSeen:
    """A scheduler told its term."""

    term: int


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed."""


Event = RunnerUp | Report | Beat | OrderGiven | SchedulerUp | SchedulerDown | TermSeen | Tick

# ------------------------------------------------------------------------------------------------ what is ordered


@dataclass(frozen=True, slots=True)
class Preempt:
    """This sequence leaves its runner; its pages go to `for_request_id` first (S3's supervisor)."""

    runner: RunnerId
    request_id: str
    epoch: Epoch
    for_request_id: str
    reservation_tokens: int


@dataclass(frozen=True, slots=True)
class SendReport:
    """One merged message to the scheduler."""

    states: tuple[Report, ...] = ()
    lost: tuple[RunnerId, ...] = ()
    preempts: tuple[Preempt, ...] = ()


@dataclass(frozen=True, slots=True)
class SendOrder:
    """To a runner: the latest order, whole."""

    runner: RunnerId
    drain: bool
    desired: object | None


@dataclass(frozen=True, slots=True)
class EndStream:
    """That incarnation has been replaced (or was never the newest): it is not served any more."""

    runner: RunnerId


@dataclass(frozen=True, slots=True)
class PersistTerm:
    """A higher term than ever before."""

    term: int


@dataclass(frozen=True, slots=True)
class Note:
    """Something worth a log line: what, and about whom."""

    text: str
    runner: RunnerId
    fields: tuple[tuple[str, object], ...] = ()


Effect = SendReport | SendOrder | EndStream | PersistTerm | Note
