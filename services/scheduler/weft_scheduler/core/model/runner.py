"""A runner incarnation: what it reported, what was assigned to it since, what is free by both, and what it is used for.

Free is the last report minus the Assigns that are not in it yet. Reports list the (request, epoch) pairs they include;
an Assign counts until it is one of them. Pages that paused sequences wait for are not free either: what a victim leaves
goes to the overrunner first. Each part writes its own fields.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from weft.domain.adapter import AdapterState, Tier
from weft.domain.ids import BASE, Epoch, RunnerId
from weft.domain.request import Priority
from weft.domain.runner import (
    ReportGap,
    ReportInvalid,
    RunnerFigures,
    RunnerReport,
    RunnerRole,
    RunnerSpec,
    SequenceState,
    fault_of,
)
from weft_scheduler.core.model.parked_sequences import ParkedSequences
from weft_scheduler.core.policy.autoscaling.autoscaler import Contribution
from weft_scheduler.core.policy.placement.policy import RunnerLoad
from weft_scheduler.core.policy.placement.runner_index import RunnerShape
from weft_scheduler.core.policy.priority.claims import Claim
from weft_scheduler.core.policy.reservation.pooled import PooledUse, UseForecast

PROMPT_QUEUE_S = 0.5  # prompts on a runner, by its measured rate: the rest waits where the queue's policy orders it


class StaleReport(Exception):
    """A report older than the last report."""


class LastReport:
    """The full report with all later changes, as one."""

    def __init__(self) -> None:
        self.version: int | None = None
        self.figures = RunnerFigures(ready=False)
        self.overdue_pages = 0  # pages that paused sequences wait for
        self.taken_s = 0.0
        self.sequences: dict[str, SequenceState] = {}
        self.progress: Sequence[int] = ()  # tokens in KV of each of `sequences`, in their order
        self.adapters: dict[str, AdapterState] = {}  # in host memory or nearer, loading, or with an error
        self.errors: dict[str, str] = {}  # digest -> why its last load failed

    def includes(self, request_id: str, epoch: Epoch) -> bool:
        """Return whether the report includes this epoch."""
        sequence = self.sequences.get(request_id)
        return sequence is not None and sequence.epoch == epoch

    def in_kv(self) -> Iterator[tuple[str, int]]:
        """Yield each sequence and its tokens in KV."""
        return zip(self.sequences, self.progress or [0] * len(self.sequences), strict=False)

    def check(self, report: RunnerReport, spec: RunnerSpec) -> None:
        """Raise ReportGap, StaleReport or ReportInvalid for a report that cannot follow."""
        if report.full:
            if self.version is not None and report.version < self.version:
                raise StaleReport("older than the last one")
        elif self.version is None or report.version > self.version + 1:
            raise ReportGap(f"report {report.version} after {self.version}")
        elif report.version <= self.version:
            raise StaleReport("older than the last one")
        own_sequences, sequences = self.sequences, len(report.sequences)
        if not report.full and sequences:
            sequences = (
                len(own_sequences) - len(report.ended) + len([s for s in report.sequences if s[0] not in own_sequences])
            )
        if fault := fault_of(spec, report.figures, sequences):
            raise ReportInvalid(f"invalid: {fault}")

    def take_figures(self, report: RunnerReport, now: float) -> None:
        """Take the figures of the runner from a report. A full report begins anew."""
        if report.full:
            self.sequences, self.adapters, self.errors = {}, {}, {}
        self.version, self.figures, self.taken_s = report.version, report.figures, now
        self.progress = report.progress
        self.overdue_pages = sum([overrun.wanted_pages for overrun in report.overruns]) if report.overruns else 0

    def put(self, sequence: SequenceState) -> None:
        """Add a sequence, or its changes."""
        self.sequences[sequence.request_id] = sequence

    def end(self, request_id: str) -> SequenceState | None:
        """Forget an ended sequence and return it; None if it was unknown."""
        return self.sequences.pop(request_id, None)

    def take_adapters(self, report: RunnerReport) -> list[str]:
        """Take the relevant adapters of a report. Return the digests with a changed error."""
        changed: list[str] = []
        for digest in report.removed_adapters:
            self.adapters.pop(digest, None)
            if self.errors.pop(digest, None) is not None:
                changed.append(digest)
        for adapter in report.adapters:
            if adapter.loading or adapter.error or adapter.tier >= Tier.HOST:
                self.adapters[adapter.digest] = adapter
            else:
                self.adapters.pop(adapter.digest, None)
            if adapter.error != self.errors.get(adapter.digest, ""):
                changed.append(adapter.digest)
                if adapter.error:
                    self.errors[adapter.digest] = adapter.error
                else:
                    del self.errors[adapter.digest]
        return changed


def pages_of(tokens: int, page_tokens: int) -> int:
    """Return the number of pages for `tokens` tokens."""
    return -(-tokens // page_tokens)


@dataclass(frozen=True, slots=True)
class UnackedAssign:
    """An Assign not yet included in a report."""

    epoch: Epoch
    pages: int
    adapter: str
    adapter_pages: int = 0  # pages that its adapter will take
    prompt_tokens: int = 0  # tokens that the runner will compute before the first one of the answer
    batch: bool = False  # of a line of a batch
    parks: tuple[str, ...] = ()  # sequences that the runner parks for it


class RunnerAccounts:
    """The sequences, pages and adapter slots of one runner. Without a spec nothing is known of its size."""

    def __init__(self, report: LastReport) -> None:
        self._report = report
        self._spec: RunnerSpec | None = None
        self._max_pinned = 0  # adapters: one slot stays for what is not pinned
        self.good_sequences = 0  # the batch that it runs well
        self.max_sequences = 0  # sequences that may be placed on it: of the spec, and within its pool's token time
        self.prompt_queue_tokens = 0  # pending tokens from which on it takes no more prompts
        self.owned: set[str] = set()  # requests placed here
        self.unacked: dict[str, UnackedAssign] = {}
        self.unacked_pages = 0
        self.unacked_prompt_tokens = 0
        self.active: dict[str, int] = {}  # adapter -> sequences, reported and unacknowledged: its busy slots
        self.batch: dict[str, int] = {}  # batch requests among its sequences and unacknowledged ones -> their pages
        self.batch_pages = 0
        self.parked = ParkedSequences()
        self.pooled: PooledUse | None = None  # use of the sequences that are admitted by their expected use
        self._busy: tuple[str, ...] | None = None  # cache of `busy_adapters`
        self._busy_pinned: Sequence[str] = ()

    def describe(self, spec: RunnerSpec) -> None:
        """Take the runner's size."""
        self._spec, self.good_sequences, self.max_sequences = spec, spec.good_sequences, spec.max_sequences
        self._max_pinned = max(0, spec.max_adapters - 1)
        # where no rate was measured: the longest prompt
        self.prompt_queue_tokens = int(PROMPT_QUEUE_S * spec.prefill_tokens_per_s) or spec.max_context_tokens

    def limit(self, token_time_s: float) -> None:
        """Bound the runner's steps by `token_time_s`; 0: no objective."""
        assert self._spec is not None
        self.max_sequences = self._spec.sequences_within(token_time_s)

    # ------------------------------------------------------------ questions

    @property
    def free_pages(self) -> int:
        """Whole pages available for an Assign."""
        return self.free_tokens // self._spec.page_tokens if self._spec else 0

    @property
    def free_tokens(self) -> int:
        """The longest sequence that fits: n tokens need ceil(n / P) pages, so they fit iff n <= free_pages * P.

        Where sequences are admitted by their expected use also no more than what the highest expected sum leaves, of
        the pages that they have and those that are free. Never negative.
        """
        return max(0, self.spare_tokens)

    @property
    def spare_tokens(self) -> int:
        """Free tokens, as in `free_tokens`; negative when waiting requests need more tokens than are free."""
        if self._spec is None:
            return 0
        free_pages = self._report.figures.free_pages - self.unacked_pages
        if self.pooled is None:
            return (free_pages - self._report.overdue_pages) * self._spec.page_tokens
        expected_tokens = (free_pages + self.pooled.held_pages) * self._spec.page_tokens - self.pooled.peak_tokens
        return min(expected_tokens, (free_pages - self._report.overdue_pages) * self._spec.page_tokens)

    @property
    def pending_prompt_tokens(self) -> int:
        """Tokens of prompts that the runner has or was assigned, and has not computed yet."""
        return self._report.figures.pending_prompt_tokens + self.unacked_prompt_tokens

    @property
    def working_set(self) -> int:
        """Running and assigned sequences of the runner (Punica's working set), without parked sequences."""
        return len(self._report.sequences) + len(self.unacked) - len(self.parked.ids)

    @property
    def packed_sequences(self) -> int:
        """The batch size of the runner in a packing pool."""
        return min(self._spec.packed_sequences, self.max_sequences) if self._spec else 0

    @property
    def is_loaded(self) -> bool:
        """Return whether the runner is at least half full, by pages or by sequences of its best batch."""
        assert self._spec is not None
        working_set = self.working_set
        full = 2 * working_set >= self.good_sequences
        return full or (working_set > 0 and 2 * self.free_pages <= self._spec.total_pages)

    def has_adapter(self, digest: str) -> bool:
        """Return whether a new sequence needs no load of its adapter: the adapter is on the device or loading."""
        state = self._report.adapters.get(digest)
        return digest == BASE or digest in self.active or (state is not None and state.tier is Tier.DEVICE)

    def busy_adapters(self, pinned: Sequence[str]) -> tuple[str, ...]:
        """Return the adapters with protected pages: in use or pinned. A runner protects all its slots except one."""
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
            if assign.parks:
                self.parked.expect(self._report.sequences, assign.parks, 1)

    def expect(self, request_id: str, forecast: UseForecast | None, emitted_tokens: int) -> None:
        """Admit a request placed here by its expected use, or (None) by its reservation."""
        if forecast is None and self.pooled is not None:
            self.pooled.remove(request_id)  # an earlier epoch of it
        elif forecast is not None and self._spec is not None:
            self.pooled = self.pooled or PooledUse(self._spec.page_tokens)
            assign = self.unacked.get(request_id)
            pages = assign.pages if assign is not None else self._report.sequences[request_id].reserved_pages
            self.pooled.add(request_id, forecast, emitted_tokens, pages)

    def settle(self, deviations: float) -> None:
        """Take the peak of the expected use, with this margin, before the runner's load counts."""
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
        """Take a report. Return (requests with an acknowledged Assign, adapters with a changed error).

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
            self.parked.count(last.sequences, [*self.parked.ids])
        for request_id in report.ended:
            ended = last.end(request_id)
            if ended is not None:
                self._count(ended.adapter, -1)
                self._count_batch(request_id)
                self.parked.count(last.sequences, (request_id,))
        acknowledged = [s.request_id for s in report.sequences if self._include(s)] if report.sequences else []
        if self.pooled is not None:
            self._follow(self.pooled, report)
        changed = last.take_adapters(report) if report.adapters or report.removed_adapters else []
        if report.full:
            changed = [d for d in {**errors, **last.errors} if errors.get(d) != last.errors.get(d)]
        return acknowledged, changed

    def _include(self, sequence: SequenceState) -> bool:
        """Count a reported sequence. True if it acknowledges an Assign."""
        sequences = self._report.sequences
        old_sequence = sequences.get(sequence.request_id)
        if old_sequence is None:
            self._count(sequence.adapter, 1)
        elif old_sequence.adapter != sequence.adapter:
            self._count(old_sequence.adapter, -1)
            self._count(sequence.adapter, 1)
        self._report.put(sequence)
        assign = self.unacked.get(sequence.request_id)
        acknowledges = assign is not None and sequence.epoch >= assign.epoch
        if acknowledges:
            self._acknowledge(sequence.request_id)
        self._count_batch(sequence.request_id)
        self.parked.count(sequences, (sequence.request_id,))
        return acknowledges

    def _acknowledge(self, request_id: str) -> None:
        """Count an Assign no longer."""
        assign = self.unacked.pop(request_id)
        self.unacked_pages -= assign.pages + assign.adapter_pages
        self.unacked_prompt_tokens -= assign.prompt_tokens
        self._count(assign.adapter, -1)
        self._count_batch(request_id)
        if assign.parks:
            self.parked.expect(self._report.sequences, assign.parks, -1)

    def _follow(self, pooled: PooledUse, report: RunnerReport) -> None:
        """Bring the expected use of the sequences up to a report that has been applied but for this."""
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
        """Count the pages of a batch request here: reported pages, or the pages of its Assign."""
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

    def _count(self, adapter: str, step: int) -> None:
        """Count sequences of an adapter. The base takes no slot."""
        if adapter == BASE:
            return
        count = self.active.get(adapter, 0) + step
        if count == step or not count:
            self._busy = None
        if count:
            self.active[adapter] = count
        else:
            del self.active[adapter]


Standing = tuple[object, ...]
NOTHING_HELD = 0, 0, 0, 0, 0  # for the tokens of answers


class Counted(NamedTuple):
    """A runner as its pool has counted it last."""

    standing: Standing = ()
    contribution: Contribution | None = None  # from its first report on until it drains
    accepting: RunnerRole | None = None  # it takes something new now or soon, in that role


class Contact(IntEnum):
    """What a runner's last report is worth. False: nothing is placed on the runner."""

    NONE = 0  # there is no full one, or it is too old
    LAPSED = 1  # no supervisor reports it now: what one has reported last counts for `lapsed_s`
    PRESENT = 2  # it follows a full one on the supervisor's present stream


class SentOrders(NamedTuple):
    """Orders on their way to a runner."""

    desired_version: int = 0  # version of the adapters that it has to hold
    role: RunnerRole | None = None  # role that it has not confirmed


class RunnerAccount:
    """One incarnation. Without a spec only its name is known, from a gateway's request that runs there."""

    def __init__(self, runner_id: RunnerId, arrival: int = 0) -> None:
        self.id = runner_id
        self.arrival = arrival  # the newest has the highest
        self.spec: RunnerSpec | None = None
        self.shape = RunnerShape(0, 0)  # shape by the spec
        self.report = LastReport()
        self.accounts = RunnerAccounts(self.report)
        self.supervisor = ""  # supervisor that reports it; "": none so far
        self.contact = Contact.NONE
        self.cordoned = False  # should go: takes nothing new
        self.serving = False  # has been able to serve once: what is pinned later does not hold it back
        self.role = RunnerRole.MIXED  # role that it is wanted in
        self.alone = True  # no other runner exchanges KV with it: prompts that do not wait here cannot go elsewhere
        self.ready_version: int | None = None  # the desired version it is Ready with
        self.sent = SentOrders()
        self.counted = Counted()

    # ------------------------------------------------------------ questions

    @property
    def name(self) -> str:
        """The name of the runner for people, or else its uuid."""
        return (self.spec.name if self.spec else "") or self.id.uuid

    @property
    def placeable(self) -> bool:
        """Return whether requests may be placed on the runner: after its first full report, and not on a victim."""
        return bool(self.contact) and self.serving and not self.cordoned and not self.report.figures.draining

    def standing(self, pinned: Sequence[str], *, split: bool) -> Standing:
        """Return all that `load` and `contributes` depend on: while it is equal they are, too. `split`: phases are."""
        if self.spec is None:
            return ()
        report, accounts = self.report, self.accounts
        flags = (bool(self.contact), self.serving, self.cordoned, report.figures.draining, report.version is None)
        sequences = accounts.working_set, accounts.max_sequences, len(accounts.batch), accounts.batch_pages
        phases = self.role, self.alone, accounts.pending_prompt_tokens if split else 0
        return (accounts.free_tokens, sequences, accounts.busy_adapters(pinned), len(pinned), flags, phases)

    def load(self, pinned: Sequence[str], *, packs: bool) -> RunnerLoad | None:
        """Return what placement indexes; None if nothing fits. `packs`: full batches come before idle runners."""
        spec, accounts = self.spec, self.accounts
        free_tokens, working_set = accounts.free_tokens, accounts.working_set
        if spec is None or not self.placeable or not free_tokens:
            return None
        max_sequences = spec.max_sequences if self.role is RunnerRole.PROMPT else accounts.max_sequences
        if working_set >= spec.max_sequences or working_set - len(accounts.batch) >= max_sequences:
            return None
        busy, pending = accounts.busy_adapters(pinned), accounts.pending_prompt_tokens
        packed, full = accounts.packed_sequences if packs else 0, len(busy) >= spec.max_adapters
        reserved = spec.total_pages * spec.page_tokens - free_tokens
        phases = self.role, reserved, pending, self.alone or pending < accounts.prompt_queue_tokens
        sequences = working_set, accounts.good_sequences
        return RunnerLoad(self.id.uuid, self.shape, *sequences, free_tokens, busy, full, packed, *phases)

    def contributes(self, pinned: Sequence[str]) -> Contribution | None:
        """Return what the runner adds to its pool: nothing before its first report, nor while it drains."""
        spec, accounts = self.spec, self.accounts
        if spec is None or self.report.version is None or self.report.figures.draining:
            return None
        protected = min(len(pinned), max(0, spec.max_adapters - 1))
        slots, busy = spec.max_adapters - protected, len(accounts.busy_adapters(pinned)) - protected
        total, page_tokens, reserved = spec.total_pages, spec.page_tokens, spec.total_pages - accounts.free_pages
        for_prompts, for_tokens = self.role is not RunnerRole.TOKEN, self.role is not RunnerRole.PROMPT
        tokens = accounts.good_sequences, total * page_tokens, reserved * page_tokens
        use = (*tokens, slots, busy) if for_tokens else NOTHING_HELD
        pages = (total, reserved) if self.contact and self.serving else (0, 0)
        phases = for_prompts, for_tokens, spec.role is RunnerRole.PROMPT, spec.role is RunnerRole.TOKEN
        prefill, batch_tokens = int(spec.prefill_tokens_per_s) * for_prompts, accounts.batch_pages * page_tokens
        return Contribution(*use, *pages, prefill, *phases, batch_tokens * for_tokens)

    def fits_beside(
        self, claims: Sequence[Claim], adapter: str, tokens: int, n_bytes: int, pinned: Sequence[str]
    ) -> bool:
        """Return whether a request fits in addition to `claims`. `n_bytes`: the size of its adapter if it is not in
        use.
        """
        spec, accounts = self.spec, self.accounts
        busy = {*accounts.busy_adapters(pinned), *(claim.adapter for claim in claims), BASE}
        if adapter not in busy:
            tokens = self.shape.tokens_with_adapter(tokens, n_bytes)
        places = accounts.max_sequences - (accounts.working_set - len(accounts.batch))
        return (
            spec is not None
            and tokens + sum(claim.tokens for claim in claims) <= accounts.free_tokens
            and min(places, spec.max_sequences - accounts.working_set) > len(claims)
            and len(busy | {adapter}) - 1 <= spec.max_adapters
        )

    def serves(self, required: Iterable[tuple[str, bool, Tier]], version: int) -> bool:
        """Return whether only failed loads of adapters keep the runner from its version. Failed loads must not remove a
        runner.
        """
        if not (0 < version == self.report.figures.desired_version and self.report.errors):
            return False
        return all(self._settled(digest, pinned, tier) for digest, pinned, tier in required)

    def _settled(self, digest: str, pinned: bool, tier: Tier) -> bool:
        """Return whether no request must wait for the adapter. Reports have loading adapters, not adapters on disk."""
        state = self.report.adapters.get(digest)
        if pinned:
            return state is not None and (bool(state.error) or state.tier is Tier.DEVICE)
        return tier <= Tier.REMOTE or state is None or not state.loading or bool(state.error)

    # ------------------------------------------------------------ transitions

    def describe(self, spec: RunnerSpec) -> None:
        """Take what does not change while the runner lives; only the first spec counts."""
        if self.spec is None:
            self.spec = spec
            self.accounts.describe(spec)
            token_bytes, kv_tokens = spec.page_bytes // spec.page_tokens, spec.kv_pages * spec.page_tokens
            self.shape = RunnerShape(
                spec.max_rank,
                spec.max_context_tokens,
                spec.numerics_class,
                token_bytes,
                kv_tokens * bool(token_bytes),
                spec.kv_layout if spec.kv_address else "",
            )

    def confirm(self, supervisor: str) -> bool:
        """Take the runner's first full report on that supervisor's present stream. True if it was not confirmed."""
        assert self.spec is not None, self.id
        old_contact, self.contact = self.contact, Contact.PRESENT
        self.supervisor, self.sent = supervisor, SentOrders()
        return old_contact is Contact.NONE

    def lose(self, contact: Contact) -> None:
        """Record that the supervisor's stream has ended, or that the runner is closed for placement."""
        assert contact < self.contact, self.id
        self.contact = contact

    def cordon(self, cordoned: bool) -> bool:
        """Set whether the runner may leave. Return True for a change."""
        changed, self.cordoned = self.cordoned != cordoned, cordoned
        return changed

    def take_role(self, role: RunnerRole, *, alone: bool) -> bool:
        """Set the runner's role. `alone`: it exchanges KV with no runner. Return True for a change."""
        old_role, self.role, self.alone = (self.role, self.alone), role, alone
        return old_role != (role, alone)

    def send(self, sent: SentOrders) -> None:
        """Record the orders in transit to the runner."""
        self.sent = sent

    def serve(self) -> None:
        """Record that the runner can serve from now on."""
        self.serving = True

    def ready(self, version: int | None) -> int | None:
        """Record the desired version with which the runner is Ready, or None. Return the previous version."""
        old_version, self.ready_version = self.ready_version, version
        return old_version

    def count(self, standing: Standing, contribution: Contribution | None) -> None:
        """Record the runner's count in its pool."""
        accepting = self.role if contribution is not None and not self.cordoned else None
        self.counted = Counted(standing, contribution, accepting)
