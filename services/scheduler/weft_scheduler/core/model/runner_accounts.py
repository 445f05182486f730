"""What is free on a runner: its last report, minus the Assigns that are not in it yet.

Reports list the (request, epoch) pairs they include; an Assign counts until it is one of them. Pages that paused
sequences wait for are not free either: what a victim leaves goes to the overrunner first.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from weft.domain.adapter import Tier
from weft.domain.ids import BASE, Epoch
from weft.domain.request import Priority
from weft.domain.runner import RunnerReport, RunnerSpec, SequenceState
from weft_scheduler.core.model.runner_report import LastReport
from weft_scheduler.core.policy.reservation.pooled import PooledUse, UseForecast

PROMPT_QUEUE_S = 0.5  # of prompts on a runner, by its measured rate: the rest waits where the queue's policy orders it


def pages_of(tokens: int, page_tokens: int) -> int:
    """Return the pages that hold so many tokens."""
    return -(-tokens // page_tokens)


@dataclass(frozen=True, slots=True)
class UnackedAssign:
    """An Assign that no report includes yet."""

    epoch: Epoch
    pages: int
    adapter: str
    adapter_pages: int = 0  # that its adapter will take
    prompt_tokens: int = 0  # that the runner will compute before the first token
    batch: bool = False  # of a line of a batch


class RunnerAccounts:
    """The sequences, pages and adapter slots of one runner. Without a spec nothing is known of its size."""

    def __init__(self, report: LastReport) -> None:
        self._report = report
        self._spec: RunnerSpec | None = None
        self._max_pinned = 0  # adapters: one slot stays for what is not pinned
        self.max_sequences = 0  # that are placed on it: of the spec, and within its pool's token time
        self.prompt_queue_tokens = 0  # once so many are pending, it takes no more prompts
        self.owned: set[str] = set()  # requests placed here
        self.unacked: dict[str, UnackedAssign] = {}
        self.unacked_pages = 0
        self.unacked_prompt_tokens = 0
        self.active: dict[str, int] = {}  # adapter -> sequences, reported and unacknowledged: its busy slots
        self.batch: dict[str, int] = {}  # batch requests among its sequences and unacknowledged ones -> their pages
        self.batch_pages = 0
        self.pooled: PooledUse | None = None  # of the sequences that are admitted by their expected use
        self._busy: tuple[str, ...] | None = None  # cache of `busy_adapters`
        self._busy_pinned: Sequence[str] = ()

    def describe(self, spec: RunnerSpec) -> None:
        """Know the runner's size."""
        self._spec, self.max_sequences, self._max_pinned = spec, spec.max_sequences, max(0, spec.max_adapters - 1)
        # where no rate was measured: the longest prompt
        self.prompt_queue_tokens = int(PROMPT_QUEUE_S * spec.prefill_tokens_per_s) or spec.max_context_tokens

    def limit(self, token_time_s: float) -> None:
        """Let its steps take no longer; 0: no such objective."""
        assert self._spec is not None
        self.max_sequences = self._spec.sequences_within(token_time_s)

    # ------------------------------------------------------------ questions

    @property
    def free_pages(self) -> int:
        """Whole pages that an Assign may count on."""
        return self.free_tokens // self._spec.page_tokens if self._spec else 0

    @property
    def free_tokens(self) -> int:
        """The longest sequence that fits: n tokens need ceil(n / P) pages, so they fit iff n <= free_pages * P.

        Where sequences are admitted by their expected use also no more than what the highest expected sum leaves, of
        the pages that they have and those that are free. Never negative.
        """
        if self._spec is None:
            return 0
        page_tokens, free_pages = self._spec.page_tokens, self._report.figures.free_pages - self.unacked_pages
        free_tokens = (free_pages - self._report.overdue_pages) * page_tokens
        if self.pooled is not None:
            left = (free_pages + self.pooled.held_pages) * page_tokens - self.pooled.peak_tokens
            free_tokens = min(free_tokens, left)
        return max(0, free_tokens)

    @property
    def pending_prompt_tokens(self) -> int:
        """Tokens of prompts that it has or was assigned, and has not computed yet."""
        return self._report.figures.pending_prompt_tokens + self.unacked_prompt_tokens

    @property
    def working_set(self) -> int:
        """Sequences that it has or was assigned (Punica's working set)."""
        return len(self._report.sequences) + len(self.unacked)

    @property
    def packed_sequences(self) -> int:
        """The batch that it takes in a pool that packs."""
        return min(self._spec.packed_sequences, self.max_sequences) if self._spec else 0

    @property
    def is_loaded(self) -> bool:
        """At least half full, of sequences (those that it runs well) or of pages: not lightly loaded."""
        assert self._spec is not None
        working_set = self.working_set
        full = 2 * working_set >= self._spec.good_sequences
        return full or (working_set > 0 and 2 * self.free_pages <= self._spec.total_pages)

    def has_adapter(self, digest: str) -> bool:
        """True where nothing is loaded for one more sequence of it: it is on the device, or on its way for another."""
        state = self._report.adapters.get(digest)
        return digest == BASE or digest in self.active or (state is not None and state.tier is Tier.DEVICE)

    def busy_adapters(self, pinned: Sequence[str]) -> tuple[str, ...]:
        """Return adapters whose pages no other can get: in use, or pinned. A runner protects all its slots but one."""
        if self._busy is None or self._busy_pinned is not pinned:
            self._busy = tuple(dict.fromkeys((*self.active, *pinned[: self._max_pinned])))
            self._busy_pinned = pinned
        return self._busy

    # ------------------------------------------------------------ assignments

    def own(self, request_id: str, assign: UnackedAssign) -> None:
        """Place a request here. Its pages count until a report includes the epoch."""
        assert request_id not in self.unacked, request_id
        self.owned.add(request_id)
        if self._spec is not None and not self._report.includes(request_id, assign.epoch):
            self.unacked[request_id] = assign
            self.unacked_pages += assign.pages + assign.adapter_pages
            self.unacked_prompt_tokens += assign.prompt_tokens
            self._count(assign.adapter, 1)
            self._count_batch(request_id)

    def expect(self, request_id: str, forecast: UseForecast | None, emitted_tokens: int) -> None:
        """Admit a request that is placed here by what it is expected to use; None: by what it reserves."""
        if forecast is None and self.pooled is not None:
            self.pooled.remove(request_id)  # an earlier epoch of it
        elif forecast is not None and self._spec is not None:
            self.pooled = self.pooled or PooledUse(self._spec.page_tokens)
            assign = self.unacked.get(request_id)
            pages = assign.pages if assign is not None else self._report.sequences[request_id].reserved_pages
            self.pooled.add(request_id, forecast, emitted_tokens, pages)

    def settle(self, deviations: float) -> None:
        """Take the peak of what is expected, with that margin, before its load counts."""
        if self.pooled is not None:
            self.pooled.settle(deviations)
            if not self.pooled.members:
                self.pooled = None

    def disown(self, request_id: str) -> None:
        """Let a request leave. What a report includes stays counted until the next: the runner's book is the truth."""
        self.owned.discard(request_id)
        if request_id in self.unacked:
            self._acknowledge(request_id)
            if self.pooled is not None:
                self.pooled.remove(request_id)

    # ------------------------------------------------------------ reports

    def apply(self, report: RunnerReport, now: float) -> tuple[list[str], list[str]]:
        """Take a report over. Returns (requests whose Assign it acknowledges, adapters whose error has changed).

        Costs what the report carries. Raises ReportGap, StaleReport, ReportInvalid; they leave the runner as it was.
        """
        assert self._spec is not None
        last, errors = self._report, self._report.errors
        last.check(report, self._spec)
        last.take_figures(report, now)
        if report.full:
            self.active, self._busy = {}, None
            for assign in self.unacked.values():
                self._count(assign.adapter, 1)
            for request_id in [*self.batch]:
                self._count_batch(request_id)
        for request_id in report.ended:
            ended = last.end(request_id)
            if ended is not None:
                self._count(ended.adapter, -1)
                self._count_batch(request_id)
        acknowledged = [s.request_id for s in report.sequences if self._include(s)] if report.sequences else []
        if self.pooled is not None:
            self._follow(self.pooled, report)
        changed = last.take_adapters(report) if report.adapters or report.removed_adapters else []
        if report.full:
            changed = [d for d in {**errors, **last.errors} if errors.get(d) != last.errors.get(d)]
        return acknowledged, changed

    def _include(self, sequence: SequenceState) -> bool:
        """Count a reported sequence. True where it acknowledges an Assign."""
        sequences = self._report.sequences
        before = sequences.get(sequence.request_id)
        if before is None:
            self._count(sequence.adapter, 1)
        elif before.adapter != sequence.adapter:
            self._count(before.adapter, -1)
            self._count(sequence.adapter, 1)
        self._report.put(sequence)
        assign = self.unacked.get(sequence.request_id)
        acknowledges = assign is not None and sequence.epoch >= assign.epoch
        if acknowledges:
            self._acknowledge(sequence.request_id)
        self._count_batch(sequence.request_id)
        return acknowledges

    def _acknowledge(self, request_id: str) -> None:
        """Count an Assign no longer."""
        assign = self.unacked.pop(request_id)
        self.unacked_pages -= assign.pages + assign.adapter_pages
        self.unacked_prompt_tokens -= assign.prompt_tokens
        self._count(assign.adapter, -1)
        self._count_batch(request_id)

    def _follow(self, pooled: PooledUse, report: RunnerReport) -> None:
        """Bring the expected use of its sequences up to a report that has been applied but for this."""
        unacked, sequences = self.unacked, self._report.sequences
        for request_id in [*pooled.members] if report.full else report.ended:
            if request_id not in sequences and request_id not in unacked:
                pooled.remove(request_id)
        for sequence in report.sequences:
            if sequence.request_id not in unacked:
                pooled.hold(sequence.request_id, sequence.reserved_pages)
        for request_id, kv_tokens in zip(sequences, report.progress, strict=False):
            if request_id not in unacked:
                pooled.progress(request_id, kv_tokens)

    def _count_batch(self, request_id: str) -> None:
        """Count what a batch request has here: pages that were reported, or that its Assign will take."""
        assign, sequence = self.unacked.get(request_id), self._report.sequences.get(request_id)
        of_assign = assign is not None and assign.batch
        of_report = sequence is not None and sequence.priority is Priority.BATCH
        self.batch_pages -= self.batch.pop(request_id, 0)
        if of_assign or of_report:
            pages = (assign.pages if assign is not None and of_assign else 0) + (
                sequence.reserved_pages if sequence is not None and of_report else 0
            )
            self.batch[request_id] = pages
            self.batch_pages += pages

    def _count(self, adapter: str, by: int) -> None:
        """Count sequences of an adapter. The base takes no slot."""
        if adapter == BASE:
            return
        count = self.active.get(adapter, 0) + by
        if count == by or not count:
            self._busy = None
        if count:
            self.active[adapter] = count
        else:
            del self.active[adapter]
