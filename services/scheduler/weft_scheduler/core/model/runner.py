"""A runner incarnation: what it reported, what was assigned to it since, and what is free by both.

Free is the last report minus the Assigns that are not in it yet. Reports list the (request, epoch) pairs they include;
an Assign counts until it is one of them. Pages that paused sequences wait for are not free either: what a victim leaves
goes to the overrunner first. Only the methods here write the fields.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

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
from weft_scheduler.core.policy.autoscaling.autoscaler import Contribution
from weft_scheduler.core.policy.placement.policy import RunnerLoad
from weft_scheduler.core.policy.placement.runner_index import RunnerShape
from weft_scheduler.core.policy.reservation.pooled import PooledUse, UseForecast

PROMPT_QUEUE_S = 0.5  # of prompts on a runner, by its measured rate: the rest waits where the queue's policy orders it


def pages_of(tokens: int, page_tokens: int) -> int:
    """Pages that hold so many tokens."""
    return -(-tokens // page_tokens)


@dataclass(frozen=True, slots=True)
class UnackedAssign:
    """An Assign that no report includes yet."""

    epoch: Epoch
    pages: int
    adapter: str
    adapter_pages: int = 0  # that its adapter will take
    prompt_tokens: int = 0  # that the runner will compute before the first token
    priority: Priority = Priority.INTERACTIVE


class StaleReport(Exception):
    """A report that is older than the last one."""


class RunnerAccount:
    """One incarnation. Without a spec it is known by name only: a gateway submitted a request that runs there."""

    def __init__(self, runner_id: RunnerId, arrival: int = 0) -> None:
        self.id = runner_id
        self.arrival = arrival  # the newest has the highest
        self.supervisor = ""  # the one that reports it; "": none so far
        self.confirmed = False  # fully reported on its supervisor's present stream
        self.cordoned = False  # should go: takes nothing new
        self.serving = False  # has been able to serve once: what is pinned later does not hold it back
        self.spec: RunnerSpec | None = None
        self.shape = RunnerShape(0, 0)  # of the spec
        self.good_sequences: int  # of the spec
        self.max_pinned: int  # adapters: one slot stays for what is not pinned
        self.prompt_queue_tokens: int  # once so many are pending, it takes no more prompts
        self.most_sequences: int  # that are placed on it: of the spec, and within its pool's token time
        self.version: int | None = None  # of the last report
        self.figures = RunnerFigures(ready=False)
        self.overdue_pages = 0  # that paused sequences wait for
        self.reported_s = 0.0
        self.sequences: dict[str, SequenceState] = {}
        self.progress: Sequence[int] = ()  # tokens in KV of each of `sequences`, in their order
        self.adapters: dict[str, AdapterState] = {}  # in host memory or nearer, loading, or with an error
        self.errors: dict[str, str] = {}  # digest -> why its last load failed
        self.active: dict[str, int] = {}  # adapter -> sequences, reported and unacknowledged: its busy slots
        self.unacked: dict[str, UnackedAssign] = {}
        self.unacked_pages = 0
        self.unacked_prompt_tokens = 0
        self.batch: dict[str, int] = {}  # batch requests among its sequences and unacknowledged ones -> their pages
        self.batch_pages = 0
        self.role = RunnerRole.MIXED  # that it is wanted in
        self.alone = True  # no other runner exchanges KV with it: prompts that do not wait here cannot go elsewhere
        self.pooled: PooledUse | None = None  # of the sequences that are admitted by their expected use
        self.owned: set[str] = set()  # requests placed here
        self.contribution: Contribution | None = None  # to its pool, from its first report on until it drains
        self.accepting: RunnerRole | None = None  # as its pool has counted it: it takes something new now or soon
        self.ready_version: int | None = None  # the desired version it is Ready with
        self.desired_sent = 0
        self.role_sent: RunnerRole | None = None  # an order that it has not confirmed
        self.counted: tuple[object, ...] = ()  # its standing as its pool has counted it
        self._busy: tuple[str, ...] | None = None  # cache of `busy_adapters`
        self._busy_pinned: Sequence[str] = ()

    # ------------------------------------------------------------ questions

    @property
    def name(self) -> str:
        """What people call it; its uuid where it has no name."""
        return (self.spec.name if self.spec else "") or self.id.uuid

    @property
    def placeable(self) -> bool:
        """Whether anything new may be placed on it: nothing before its first full report, nor on a victim."""
        return self.confirmed and self.serving and not self.cordoned and not self.figures.draining

    @property
    def total_pages(self) -> int:
        return self.spec.total_pages if self.spec else 0

    @property
    def free_pages(self) -> int:
        """Whole pages that an Assign may count on."""
        return self.free_tokens // self.spec.page_tokens if self.spec else 0

    @property
    def free_tokens(self) -> int:
        """The longest sequence that fits: n tokens need ceil(n / P) pages, so they fit iff n <= free_pages * P.

        Where sequences are admitted by their expected use also no more than what the highest expected sum leaves, of
        the pages that they have and those that are free. Never negative.
        """
        if self.spec is None:
            return 0
        page_tokens, free_pages = self.spec.page_tokens, self.figures.free_pages - self.unacked_pages
        free_tokens = (free_pages - self.overdue_pages) * page_tokens
        if self.pooled is not None:
            left = (free_pages + self.pooled.held_pages) * page_tokens - self.pooled.peak_tokens
            free_tokens = min(free_tokens, left)
        return max(0, free_tokens)

    @property
    def pending_prompt_tokens(self) -> int:
        """Tokens of prompts that it has or was assigned, and has not computed yet."""
        return self.figures.pending_prompt_tokens + self.unacked_prompt_tokens

    @property
    def working_set(self) -> int:
        """Sequences that it has or was assigned (Punica's working set)."""
        return len(self.sequences) + len(self.unacked)

    @property
    def packed_sequences(self) -> int:
        """The batch that it takes in a pool that packs."""
        return min(self.spec.packed_sequences, self.most_sequences) if self.spec else 0

    @property
    def loaded(self) -> bool:
        """At least half full, of sequences (those that it runs well) or of pages: not lightly loaded."""
        assert self.spec is not None, self.id
        working_set = self.working_set
        full = 2 * working_set >= self.good_sequences
        return full or (working_set > 0 and 2 * self.free_pages <= self.spec.total_pages)

    def includes(self, request_id: str, epoch: Epoch) -> bool:
        """Whether its last report counts that epoch."""
        sequence = self.sequences.get(request_id)
        return sequence is not None and sequence.epoch == epoch

    def in_kv(self) -> Iterator[tuple[str, int]]:
        """Each reported sequence and the tokens that it had in KV."""
        return zip(self.sequences, self.progress or [0] * len(self.sequences), strict=False)

    def has_adapter(self, digest: str) -> bool:
        """Whether nothing is loaded for one more sequence of it: it is on the device, or on its way for another."""
        state = self.adapters.get(digest)
        return digest == BASE or digest in self.active or (state is not None and state.tier is Tier.DEVICE)

    def busy_adapters(self, pinned: Sequence[str]) -> tuple[str, ...]:
        """Adapters whose pages no other can get: in use, or pinned. A runner protects all its slots but one."""
        if self._busy is None or self._busy_pinned is not pinned:
            self._busy = tuple(dict.fromkeys((*self.active, *pinned[: self.max_pinned])))
            self._busy_pinned = pinned
        return self._busy

    def standing(self, pinned: Sequence[str], *, split: bool) -> tuple[object, ...]:
        """All that `load` and `contributes` depend on: while it is equal they are, too. `split`: phases are."""
        if self.spec is None:
            return ()
        figures = self.figures
        flags = (self.confirmed, self.serving, self.cordoned, figures.draining, self.version is None)
        sequences = self.working_set, self.most_sequences, len(self.batch), self.batch_pages
        phases = self.role, self.alone, self.pending_prompt_tokens if split else 0
        return (self.free_tokens, sequences, self.busy_adapters(pinned), len(pinned), flags, phases)

    def load(self, pinned: Sequence[str], *, packs: bool) -> RunnerLoad | None:
        """What placement indexes; None where nothing fits. `packs`: its pool prefers full batches to idle runners."""
        spec, free_tokens, working_set = self.spec, self.free_tokens, self.working_set
        if spec is None or not self.placeable or not free_tokens:
            return None
        most = spec.max_sequences if self.role is RunnerRole.PROMPT else self.most_sequences
        if working_set >= spec.max_sequences or working_set - len(self.batch) >= most:
            return None
        busy, pending = self.busy_adapters(pinned), self.pending_prompt_tokens
        good, packed, full = self.good_sequences, self.packed_sequences if packs else 0, len(busy) >= spec.max_adapters
        reserved = spec.total_pages * spec.page_tokens - free_tokens
        phases = self.role, reserved, pending, self.alone or pending < self.prompt_queue_tokens
        return RunnerLoad(self.id.uuid, self.shape, working_set, good, free_tokens, busy, full, packed, *phases)

    def contributes(self, pinned: Sequence[str]) -> Contribution | None:
        """What it adds to its pool: nothing before its first report, nor while it drains."""
        spec = self.spec
        if spec is None or self.version is None or self.figures.draining:
            return None
        protected = min(len(pinned), self.max_pinned)
        slots, busy = spec.max_adapters - protected, len(self.busy_adapters(pinned)) - protected
        total, reserved, page_tokens = spec.total_pages, spec.total_pages - self.free_pages, spec.page_tokens
        for_prompts, for_tokens = self.role is not RunnerRole.TOKEN, self.role is not RunnerRole.PROMPT
        held = (
            (self.good_sequences, total * page_tokens, reserved * page_tokens, slots, busy)
            if for_tokens
            else (0, 0, 0, 0, 0)
        )
        pages = (total, reserved) if self.confirmed and self.serving else (0, 0)
        prefill_tokens_per_s = int(spec.prefill_tokens_per_s) * for_prompts
        phases = for_prompts, for_tokens, spec.role is RunnerRole.PROMPT, spec.role is RunnerRole.TOKEN
        return Contribution(*held, *pages, prefill_tokens_per_s, *phases, self.batch_pages * page_tokens * for_tokens)

    def serves(self, held: Iterable[tuple[str, bool, Tier]], version: int) -> bool:
        """Held back by nothing but adapters that failed to load: those must not take a runner away."""
        if not (0 < version == self.figures.desired_version and self.errors):
            return False
        return all(self._settled(digest, pinned, tier) for digest, pinned, tier in held)

    def _settled(self, digest: str, pinned: bool, tier: Tier) -> bool:
        """No request has to wait for it. A runner reports what is loading, and not what has come to its disk."""
        state = self.adapters.get(digest)
        if pinned:
            return state is not None and (bool(state.error) or state.tier is Tier.DEVICE)
        return tier <= Tier.REMOTE or state is None or not state.loading or bool(state.error)

    # ------------------------------------------------------------ transitions

    def describe(self, spec: RunnerSpec) -> None:
        """What does not change while it lives; only the first one counts."""
        if self.spec is None:
            self.spec, self.good_sequences, self.most_sequences = spec, spec.good_sequences, spec.max_sequences
            self.max_pinned = max(0, spec.max_adapters - 1)
            # where no rate was measured: the longest prompt
            self.prompt_queue_tokens = int(PROMPT_QUEUE_S * spec.prefill_tokens_per_s) or spec.max_context_tokens
            token_bytes, kv_tokens = spec.page_bytes // spec.page_tokens, spec.kv_pages * spec.page_tokens
            self.shape = RunnerShape(
                spec.max_rank,
                spec.max_context_tokens,
                spec.numerics_class,
                token_bytes,
                kv_tokens * bool(token_bytes),
                spec.kv_layout if spec.kv_address else "",
            )

    def limit(self, token_time_s: float) -> None:
        """Its steps should not take longer; 0: no such objective."""
        assert self.spec is not None, self.id
        self.most_sequences = self.spec.sequences_within(token_time_s)

    def confirm(self, supervisor: str) -> bool:
        """Its first full report on that supervisor's present stream. True where it was not confirmed."""
        assert self.spec is not None, self.id
        confirmed, self.confirmed, self.supervisor, self.desired_sent = self.confirmed, True, supervisor, 0
        self.role_sent = None
        return not confirmed

    def unconfirm(self) -> None:
        """Its supervisor's stream is over."""
        assert self.confirmed, self.id
        self.confirmed = False

    def cordon(self, cordoned: bool) -> bool:
        """Whether it should go. True where that has changed."""
        changed, self.cordoned = self.cordoned != cordoned, cordoned
        return changed

    def take_role(self, role: RunnerRole, *, alone: bool) -> bool:
        """What it should be. `alone`: no other runner exchanges KV with it. True where that has changed."""
        before, self.role, self.alone = (self.role, self.alone), role, alone
        return before != (role, alone)

    def serve(self) -> None:
        """It can serve, and stays able to."""
        self.serving = True

    def sent_role(self, role: RunnerRole | None) -> None:
        """An order for that role is on its way to it; None: it may have been lost."""
        self.role_sent = role

    def sent(self, version: int) -> None:
        """The desired adapters of that version are on their way to it."""
        self.desired_sent = version

    def ready(self, version: int | None) -> int | None:
        """It is Ready with that desired version, or not at all. Returns the one before."""
        before, self.ready_version = self.ready_version, version
        return before

    def count(self, standing: tuple[object, ...], contribution: Contribution | None) -> None:
        """What its pool counts of it from now on."""
        self.counted, self.contribution = standing, contribution
        self.accepting = self.role if contribution is not None and not self.cordoned else None

    # ------------------------------------------------------------ accounts

    def own(self, request_id: str, assign: UnackedAssign) -> None:
        """A request is placed here. Its pages count until a report includes the epoch."""
        assert request_id not in self.unacked, (self.id, request_id)
        self.owned.add(request_id)
        if self.spec is not None and not self.includes(request_id, assign.epoch):
            self.unacked[request_id] = assign
            self.unacked_pages += assign.pages + assign.adapter_pages
            self.unacked_prompt_tokens += assign.prompt_tokens
            self._count(assign.adapter, 1)
            self._count_batch(request_id)

    def expect(self, request_id: str, forecast: UseForecast | None, emitted_tokens: int) -> None:
        """A request that is placed here is admitted by what it is expected to use; None: by what it reserves."""
        if forecast is None and self.pooled is not None:
            self.pooled.remove(request_id)  # an earlier epoch of it
        elif forecast is not None and self.spec is not None:
            self.pooled = self.pooled or PooledUse(self.spec.page_tokens)
            assign = self.unacked.get(request_id)
            pages = assign.pages if assign is not None else self.sequences[request_id].reserved_pages
            self.pooled.add(request_id, forecast, emitted_tokens, pages)

    def settle(self, deviations: float) -> None:
        """Before its load counts: the peak of what is expected, with that margin."""
        if self.pooled is not None:
            self.pooled.settle(deviations)
            if not self.pooled.members:
                self.pooled = None

    def disown(self, request_id: str) -> None:
        """A request has left. What a report includes stays counted until the next: the runner's book is the truth."""
        self.owned.discard(request_id)
        if request_id in self.unacked:
            self._acknowledge(request_id)
            if self.pooled is not None:
                self.pooled.remove(request_id)

    def apply(self, report: RunnerReport, now: float) -> tuple[list[str], list[str]]:
        """Take a report over. Returns (requests whose Assign it acknowledges, adapters whose error has changed).

        Costs what the report carries. Raises ReportGap, StaleReport, ReportInvalid; they leave the runner as it was.
        """
        self._check(report)
        errors = self.errors
        if report.full:
            self.sequences, self.adapters, self.errors, self.active, self._busy = {}, {}, {}, {}, None
            for assign in self.unacked.values():
                self._count(assign.adapter, 1)
            for request_id in [*self.batch]:
                self._count_batch(request_id)
        self.version, self.figures, self.reported_s = report.version, report.figures, now
        self.progress = report.progress
        self.overdue_pages = sum([overrun.wanted_pages for overrun in report.overruns]) if report.overruns else 0
        for request_id in report.ended:
            ended = self.sequences.pop(request_id, None)
            if ended is not None:
                self._count(ended.adapter, -1)
                self._count_batch(request_id)
        acknowledged = [s.request_id for s in report.sequences if self._include(s)] if report.sequences else []
        if self.pooled is not None:
            self._follow(self.pooled, report)
        changed = self._apply_adapters(report) if report.adapters or report.removed_adapters else []
        if report.full:
            changed = [d for d in {**errors, **self.errors} if errors.get(d) != self.errors.get(d)]
        return acknowledged, changed

    def _check(self, report: RunnerReport) -> None:
        if report.full:
            if self.version is not None and report.version < self.version:
                raise StaleReport("older than the last one")
        elif self.version is None or report.version > self.version + 1:
            raise ReportGap(f"report {report.version} after {self.version}")
        elif report.version <= self.version:
            raise StaleReport("older than the last one")
        known, sequences = self.sequences, len(report.sequences)
        if not report.full and sequences:
            sequences = len(known) - len(report.ended) + len([s for s in report.sequences if s[0] not in known])
        assert self.spec is not None, self.id
        if fault := fault_of(self.spec, report.figures, sequences):
            raise ReportInvalid(f"invalid: {fault}")

    def _include(self, sequence: SequenceState) -> bool:
        """Count a reported sequence. True where it acknowledges an Assign."""
        before = self.sequences.get(sequence.request_id)
        if before is None:
            self._count(sequence.adapter, 1)
        elif before.adapter != sequence.adapter:
            self._count(before.adapter, -1)
            self._count(sequence.adapter, 1)
        self.sequences[sequence.request_id] = sequence
        assign = self.unacked.get(sequence.request_id)
        acknowledges = assign is not None and sequence.epoch >= assign.epoch
        if acknowledges:
            self._acknowledge(sequence.request_id)
        self._count_batch(sequence.request_id)
        return acknowledges

    def _acknowledge(self, request_id: str) -> None:
        """Its Assign counts no longer."""
        assign = self.unacked.pop(request_id)
        self.unacked_pages -= assign.pages + assign.adapter_pages
        self.unacked_prompt_tokens -= assign.prompt_tokens
        self._count(assign.adapter, -1)
        self._count_batch(request_id)

    def _follow(self, pooled: PooledUse, report: RunnerReport) -> None:
        """The expected use of its sequences, as of a report that has been applied but for this."""
        unacked = self.unacked
        for request_id in [*pooled.members] if report.full else report.ended:
            if request_id not in self.sequences and request_id not in unacked:
                pooled.remove(request_id)
        for sequence in report.sequences:
            if sequence.request_id not in unacked:
                pooled.hold(sequence.request_id, sequence.reserved_pages)
        for request_id, kv_tokens in zip(self.sequences, report.progress, strict=False):
            if request_id not in unacked:
                pooled.progress(request_id, kv_tokens)

    def _apply_adapters(self, report: RunnerReport) -> list[str]:
        """Keep those that matter here. Returns the digests whose error has changed."""
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

    def _count_batch(self, request_id: str) -> None:
        """What a batch request has here may have changed: pages that were reported, or that its Assign will take."""
        assign, sequence = self.unacked.get(request_id), self.sequences.get(request_id)
        of_assign = assign is not None and assign.priority is Priority.BATCH
        of_report = sequence is not None and sequence.priority is Priority.BATCH
        self.batch_pages -= self.batch.pop(request_id, 0)
        if of_assign or of_report:
            pages = (assign.pages if assign is not None and of_assign else 0) + (
                sequence.reserved_pages if sequence is not None and of_report else 0
            )
            self.batch[request_id] = pages
            self.batch_pages += pages

    def _count(self, adapter: str, by: int) -> None:
        """The base takes no slot."""
        if adapter == BASE:
            return
        count = self.active.get(adapter, 0) + by
        if count == by or not count:
            self._busy = None
        if count:
            self.active[adapter] = count
        else:
            del self.active[adapter]
