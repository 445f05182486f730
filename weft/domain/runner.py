"""A runner: its specification, and its state as reports that carry what changed."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Annotated, NamedTuple

from weft.domain.adapter import AdapterState, DesiredChange
from weft.domain.bounds import (
    FLAT,
    MAX_DETAIL_CHARS,
    MAX_NAME_CHARS,
    MAX_PAGES,
    MAX_RANK,
    MAX_REQUEST_TOKENS,
    Any32,
    Any64,
    AnySigned,
    Bound,
    Capacity,
    Digest,
    Listed,
    ListedOf,
    Name,
    Pages,
    RequestId,
    SomeCapacity,
    SomeDigest,
    Text,
    Tokens,
)
from weft.domain.ids import Epoch, RunnerId, Term
from weft.domain.request import Priority

PACKED_SLOWDOWN = 1.1
ANSWER_LEASES = 0.375
KV_SHARE = 4  # one adapter, and all pinned ones together, leave one page in KV_SHARE to sequences


class RunnerRole(Enum):
    """The role of a runner, what it computes now: a state, ordered by the scheduler (Splitwise, section 4.2)."""

    MIXED = "mixed"  # both phases in one batch, prompts in chunks beside running rows
    PROMPT = "prompt"  # prompts, several in a step
    TOKEN = "token"  # noqa: S105 (the tokens after the first one)


@dataclass(frozen=True, slots=True)
class RunnerSpec:
    """The properties of a runner that stay while it lives: its hello."""

    runner: RunnerId
    address: Name
    pool: Name
    page_tokens: SomeCapacity
    total_pages: Annotated[int, Bound(MAX_PAGES, 1)]
    max_sequences: SomeCapacity
    max_adapters: SomeCapacity  # on the device at a time: what its pages could hold, or a bound that was set
    max_rank: Annotated[int, Bound(MAX_RANK, 1)]
    max_context_tokens: Annotated[int, Bound(MAX_REQUEST_TOKENS, 1)]  # min(model, total_pages * page_tokens)
    base_digest: Text = ""
    name: Text = ""  # what people and the operator call it: its pod, or its component
    # Runners of one class compute the same tokens (docs/numerics.md).
    numerics_class: Annotated[str, Bound(MAX_DETAIL_CHARS)] = ""
    # Sequences beyond which throughput gains < 5 % or the token time is exceeded; 0: not measured.
    best_batch: Capacity = 0
    step_ms_1: float = 0.0  # an iteration of one sequence
    step_ms_best: float = 0.0  # an iteration of best_batch sequences
    prefill_tokens_per_s: float = 0.0
    # Bytes of a page, for KV and adapters alike; 0: adapters have memory of their own.
    page_bytes: Annotated[int, Bound(1 << 40)] = 0
    kv_address: Text = ""  # where it takes KV of other runners; "": nowhere
    kv_layout: Text = ""  # what a page of KV holds: runners with equal ones can exchange KV
    role: RunnerRole | None = None  # that its hardware is for; None: any
    kv_bytes_per_s: float = 0.0  # of KV to another runner, as it measured without a network; 0: not measured
    swaps: bool = False  # KV of its sequences can go to host memory and back
    checks_drafts: bool = False  # a Start's draft saves time here

    @property
    def good_sequences(self) -> int:
        """The batch that the runner runs well, at most `max_sequences`."""
        return min(self.best_batch or self.max_sequences, self.max_sequences)

    @property
    def packed_sequences(self) -> int:
        """The batch that the runner takes before another runner starts one: its steps are at most a tenth slower, by
        the line through the measured ones, and it has at most half as many sequences more than `good_sequences`. Not
        measured: `good_sequences`."""
        if not self.step_ms_best:
            return self.good_sequences
        return min(self.sequences_within(PACKED_SLOWDOWN * self.step_ms_best / 1000), 3 * self.good_sequences // 2)

    @property
    def kv_pages(self) -> int:
        """The pages that adapters never take from sequences for good: what an idle runner has free at least."""
        return max(1, self.total_pages // KV_SHARE)

    def step_s(self, sequences: int) -> float:
        """Estimate the time of an iteration of `sequences`, on the line through the two measured; 0: none was."""
        row_ms = (self.step_ms_best - self.step_ms_1) / max(1, self.best_batch - 1)
        return (self.step_ms_1 + row_ms * max(0, sequences - 1)) / 1000

    def sequences_within(self, token_time_s: float) -> int:
        """The largest batch whose steps take at most `token_time_s`, by the measured ones; `max_sequences` for 0 s, or
        if none was measured."""
        if not token_time_s or self.best_batch < 2 or self.step_ms_best <= self.step_ms_1:
            return self.max_sequences
        return max(1, bisect_right(range(1, self.max_sequences + 1), token_time_s, key=self.step_s))


class Parking(IntEnum):
    """Whether a sequence waits on its runner so that those of tenants within their share run."""

    NONE = 0
    PARKED = 1  # it computes nothing, and has its KV
    OVER = 2  # it was parked for as long as it may be, and is not parked again


class SequenceState(NamedTuple):
    """A sequence on a runner. `arrived_ms`: at its gateway, on the runner's clock; the newest has the highest.

    `reserved_pages`: a page that several sequences read counts for the one that has held it longest; 0: its KV is in
    the runner's host memory, or others own all that it reads.
    """

    request_id: RequestId
    epoch: Epoch
    gateway: Text
    adapter: Digest
    reserved_pages: Pages
    reservation_tokens: Tokens  # output tokens from this epoch's start on
    arrived_ms: AnySigned
    stays: bool = False  # another one is preempted
    priority: Priority = Priority.INTERACTIVE
    parking: Parking = Parking.NONE


class Overrun(NamedTuple):
    """A sequence paused at its page boundary for want of a page; `reservation_tokens` is doubled already."""

    request_id: RequestId
    epoch: Epoch
    wanted_pages: Pages  # beyond those that it has
    reservation_tokens: Tokens
    leaves: bool = False  # it is the victim itself (S3)


class OffloadState(NamedTuple):
    """State of a runner whose weights come from disk. The milliseconds are of a token of each running sequence, lately.

    `alone_ms`: of one request alone, as predicted; `disk_bound`: because the disk has to be read for it.
    """

    resident_share: float  # of the weights, in memory
    disk_bytes_per_s: float = 0.0  # while anything is read; 0: nothing was yet
    predicted_ms: float = 0.0  # 0: none yet, or the machine was not measured
    measured_ms: float = 0.0
    alone_ms: float = 0.0
    disk_bound: bool = False


class RunnerFigures(NamedTuple):
    """The part of a runner's state that every report carries whole. Counters start with the incarnation."""

    free_pages: Any32 = 0  # in no reservation, or of an adapter that no sequence uses: what a newcomer can count on
    used_pages: Any32 = 0  # hold tokens
    adapter_pages: Any32 = 0  # of adapters in use, pinned or being loaded, or kept free for those that wait
    draining: bool = False
    ready: bool = True
    desired_version: Any64 = 0  # of the last DesiredChange that was applied
    iterations: Any64 = 0
    forwards: Any64 = 0
    grown_pages: Any64 = 0  # reservations grown in place
    doublings: Any64 = 0
    tokens: Any64 = 0  # computed, of prompts and of answers
    prefix_reused_tokens: Any64 = 0
    role: Annotated[RunnerRole, RunnerRole.MIXED] = RunnerRole.MIXED
    pending_prompt_tokens: Any32 = 0  # of its sequences, not computed yet
    offload: OffloadState | None = None  # None: all weights are in memory
    drafts: Any64 = 0  # rows of steps that had one
    accepted_tokens: Any64 = 0  # of drafts


class RunnerReport(NamedTuple):
    """A runner's whole state (`full`), or what changed since the report `version - 1` of the same incarnation.

    Pages: free + reserved + adapter pages = total. `sequences` and `adapters` replace those of their ids, after `ended`
    and `removed_adapters` have gone. `overruns` are always all of them. `progress`: tokens in KV of each sequence, in
    the order in which the sequences entered the book; empty: not reported.
    """

    version: Any64
    full: bool
    figures: Annotated[RunnerFigures, FLAT] = RunnerFigures()
    sequences: ListedOf[SequenceState] = ()
    ended: ListedOf[RequestId] = ()  # request ids
    adapters: ListedOf[AdapterState] = ()
    removed_adapters: ListedOf[SomeDigest] = ()  # digests that are on no tier but the depot's, and idle
    overruns: ListedOf[Overrun] = ()
    progress: ListedOf[Any32] = ()


class ReportGap(Exception):
    """A report does not follow the one before it: its sender has to send a full one."""


class ReportInvalid(Exception):
    """A report contradicts its runner's specification: nothing of that runner can be trusted."""


MAX_BOOK_CHARS = 16 << 20  # 200,000 adapters without an error; what changes add is bounded as a full report is


def fault_of(spec: RunnerSpec, figures: RunnerFigures, sequences: int) -> str | None:
    """Explain why a runner of this specification cannot have these figures and `sequences` sequences; None: it can.

    As many may be parked as run.
    """
    max_pages = max(figures.free_pages, figures.used_pages, figures.adapter_pages)
    if max_pages > spec.total_pages:
        return f"{max_pages} pages, of {spec.total_pages} pages in all"
    if sequences > 2 * spec.max_sequences:
        return f"{sequences} sequences are more than twice max_sequences {spec.max_sequences}"
    return None


class RunnerBook:
    """A runner's state as its reports gave it: what a supervisor keeps, the command shows and the simulator checks by.

    Applying a report costs what the report carries. The scheduler keeps accounts of its own, of what placement needs.
    """

    def __init__(self, spec: RunnerSpec) -> None:
        self.spec = spec
        self.version: int | None = None  # of the last report; None: no full one so far
        self.figures = RunnerFigures(ready=False)
        self.sequences: dict[str, SequenceState] = {}
        self.adapters: dict[str, AdapterState] = {}
        self.overruns: Sequence[Overrun] = ()
        self.progress: Sequence[int] = ()
        self.reserved_pages = 0  # by all sequences
        self._chars = 0  # of all sequences and adapters

    def apply(self, report: RunnerReport) -> None:
        """Take in a report. Raises ReportGap, which leaves the book as it was, and ReportInvalid, which spoils it."""
        if report.full:
            self.sequences, self.adapters, self.progress, self.reserved_pages, self._chars = {}, {}, (), 0, 0
        elif self.version is None or report.version != self.version + 1:
            raise ReportGap(f"report {report.version} after {self.version}")
        self.version, self.figures, self.overruns = report.version, report.figures, report.overruns
        for request_id in report.ended:
            if (ended := self.sequences.pop(request_id, None)) is not None:
                self.reserved_pages -= ended.reserved_pages
                self._chars -= _chars_of_sequence(ended)
        for sequence in report.sequences:
            if (old_sequence := self.sequences.get(sequence.request_id)) is not None:
                self.reserved_pages -= old_sequence.reserved_pages
                self._chars -= _chars_of_sequence(old_sequence)
            self.reserved_pages += sequence.reserved_pages
            self._chars += _chars_of_sequence(sequence)
            self.sequences[sequence.request_id] = sequence
        for digest in report.removed_adapters:
            if (removed := self.adapters.pop(digest, None)) is not None:
                self._chars -= _chars_of_adapter(removed)
        for adapter in report.adapters:
            if (old_adapter := self.adapters.get(adapter.digest)) is not None:
                self._chars -= _chars_of_adapter(old_adapter)
            self._chars += _chars_of_adapter(adapter)
            self.adapters[adapter.digest] = adapter
        self.progress = report.progress
        fault = fault_of(self.spec, self.figures, len(self.sequences))
        if self._chars > MAX_BOOK_CHARS:
            fault = f"{self._chars} characters of sequences and adapters are more than {MAX_BOOK_CHARS}"
        if fault is not None:
            raise ReportInvalid(f"runner {self.spec.runner.uuid!r}: {fault}")

    @classmethod
    def of_report(cls, reported: "ReportedRunner") -> "RunnerBook":
        """Make the book of a full report that came with its specification. Raises ReportInvalid."""
        assert reported.spec is not None, "a full report comes with its specification"
        book = cls(reported.spec)
        book.apply(reported.report)
        return book

    def full(self) -> RunnerReport:
        """Report the whole state."""
        assert self.version is not None, "a book without a report"
        return RunnerReport(
            version=self.version,
            full=True,
            figures=self.figures,
            sequences=tuple(self.sequences.values()),
            adapters=tuple(self.adapters.values()),
            overruns=self.overruns,
            progress=self.progress,
        )


def _chars_of_sequence(sequence: SequenceState) -> int:
    return len(sequence.request_id) + len(sequence.gateway) + len(sequence.adapter)


def _chars_of_adapter(adapter: AdapterState) -> int:
    return len(adapter.digest) + len(adapter.error) + len(adapter.shortfall)


# ---------------------------------------------------------------- runner and supervisor


@dataclass(frozen=True, slots=True)
class Registered:
    """The supervisor's answer to a runner's hello, and again to a message that comes `ANSWER_LEASES` after the last."""

    lease_ms: Annotated[int, Bound(1 << 31, 1)]  # a runner silent this long is gone
    report_ms: Annotated[int, Bound(1 << 31)]  # the least time between two reports


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Renews a lease while nothing changes."""


@dataclass(frozen=True, slots=True)
class RunnerOrder:
    """An order of the scheduler, by way of the supervisor. `role`: from the runner's next step on; None: as before."""

    desired: DesiredChange | None = None
    drain: bool = False
    role: RunnerRole | None = None


@dataclass(frozen=True, slots=True)
class Resync:
    """Ask for a full report. `runner`: its runner, if the receiver is a supervisor."""

    runner: RunnerId | None = None


# ---------------------------------------------------------------- supervisor and scheduler


@dataclass(frozen=True, slots=True)
class SupervisorHello:
    """First message of a supervisor's stream. `highest_term`: that a scheduler has announced, in the store."""

    supervisor: Annotated[str, Bound(MAX_NAME_CHARS, 1, "a supervisor's id")]
    highest_term: Term = 0


@dataclass(frozen=True, slots=True)
class SchedulerHello:
    """First message of a scheduler to a supervisor, which persists the term as the highest seen."""

    term: Term


class ReportedRunner(NamedTuple):
    """A report of a runner. `spec`: present in every full report."""

    runner: RunnerId
    report: RunnerReport
    spec: RunnerSpec | None = None


@dataclass(frozen=True, slots=True)
class PreemptDecision:
    """The supervisor's answer to an overrun without free pages: this sequence leaves its runner (S3, section 3.3)."""

    runner: RunnerId
    request_id: RequestId  # the victim: the newest sequence of that runner
    epoch: Epoch
    # The overrunner that the pages go to; it may be the victim itself.
    for_request_id: Annotated[str, Bound(MAX_NAME_CHARS, subject="a request id")]
    reservation_tokens: Tokens  # of the victim from now on


@dataclass(frozen=True, slots=True)
class ClusterReport:
    """Merged: at most one each report_ms, at once for overruns and lost runners. Reports of a runner are in order."""

    reports: tuple[ReportedRunner, ...] = ()
    lost: Listed[RunnerId] = ()  # leases that ran out
    preempts: Listed[PreemptDecision] = ()


@dataclass(frozen=True, slots=True)
class OrderedRunner:
    """The scheduler's order for a single runner."""

    runner: RunnerId
    order: RunnerOrder
