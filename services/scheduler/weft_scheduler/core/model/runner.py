"""A runner incarnation: who reports it, what it may be used for, and what it adds to its pool."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from weft.domain.adapter import Tier
from weft.domain.ids import RunnerId
from weft.domain.runner import RunnerRole, RunnerSpec
from weft_scheduler.core.model.runner_accounts import RunnerAccounts
from weft_scheduler.core.model.runner_report import LastReport
from weft_scheduler.core.policy.autoscaling.autoscaler import Contribution
from weft_scheduler.core.policy.placement.policy import RunnerLoad
from weft_scheduler.core.policy.placement.runner_index import RunnerShape

Standing = tuple[object, ...]


class Counted(NamedTuple):
    """A runner as its pool has counted it last."""

    standing: Standing = ()
    contribution: Contribution | None = None  # from its first report on until it drains
    accepting: RunnerRole | None = None  # it takes something new now or soon, in that role


class SentOrders:
    """What is on its way to a runner."""

    def __init__(self) -> None:
        self.desired_version = 0  # of the adapters that it has to hold
        self.role: RunnerRole | None = None  # that it has not confirmed

    def order_desired(self, version: int) -> None:
        """Note that the desired adapters of that version are on their way; 0: they may have been lost."""
        self.desired_version = version

    def order_role(self, role: RunnerRole | None) -> None:
        """Note that an order for that role is on its way; None: it may have been lost."""
        self.role = role


class RunnerAccount:
    """One incarnation. Without a spec it is known by name only: a gateway submitted a request that runs there."""

    def __init__(self, runner_id: RunnerId, arrival: int = 0) -> None:
        self.id = runner_id
        self.arrival = arrival  # the newest has the highest
        self.spec: RunnerSpec | None = None
        self.shape = RunnerShape(0, 0)  # of the spec
        self.report = LastReport()
        self.accounts = RunnerAccounts(self.report)
        self.supervisor = ""  # the one that reports it; "": none so far
        self.confirmed = False  # fully reported on its supervisor's present stream
        self.cordoned = False  # should go: takes nothing new
        self.serving = False  # has been able to serve once: what is pinned later does not hold it back
        self.role = RunnerRole.MIXED  # that it is wanted in
        self.alone = True  # no other runner exchanges KV with it: prompts that do not wait here cannot go elsewhere
        self.ready_version: int | None = None  # the desired version it is Ready with
        self.sent = SentOrders()
        self.counted = Counted()

    # ------------------------------------------------------------ questions

    @property
    def name(self) -> str:
        """What people call it; its uuid where it has no name."""
        return (self.spec.name if self.spec else "") or self.id.uuid

    @property
    def placeable(self) -> bool:
        """True where anything new may be placed on it: nothing before its first full report, nor on a victim."""
        return self.confirmed and self.serving and not self.cordoned and not self.report.figures.draining

    def standing(self, pinned: Sequence[str], *, split: bool) -> Standing:
        """Return all that `load` and `contributes` depend on: while it is equal they are, too. `split`: phases are."""
        if self.spec is None:
            return ()
        report, accounts = self.report, self.accounts
        flags = (self.confirmed, self.serving, self.cordoned, report.figures.draining, report.version is None)
        sequences = accounts.working_set, accounts.max_sequences, len(accounts.batch), accounts.batch_pages
        phases = self.role, self.alone, accounts.pending_prompt_tokens if split else 0
        return (accounts.free_tokens, sequences, accounts.busy_adapters(pinned), len(pinned), flags, phases)

    def load(self, pinned: Sequence[str], *, packs: bool) -> RunnerLoad | None:
        """Return what placement indexes; None where nothing fits. `packs`: full batches come before idle runners."""
        spec, accounts = self.spec, self.accounts
        free_tokens, working_set = accounts.free_tokens, accounts.working_set
        if spec is None or not self.placeable or not free_tokens:
            return None
        most = spec.max_sequences if self.role is RunnerRole.PROMPT else accounts.max_sequences
        if working_set >= spec.max_sequences or working_set - len(accounts.batch) >= most:
            return None
        busy, pending = accounts.busy_adapters(pinned), accounts.pending_prompt_tokens
        packed, full = accounts.packed_sequences if packs else 0, len(busy) >= spec.max_adapters
        reserved = spec.total_pages * spec.page_tokens - free_tokens
        phases = self.role, reserved, pending, self.alone or pending < accounts.prompt_queue_tokens
        good = spec.good_sequences
        return RunnerLoad(self.id.uuid, self.shape, working_set, good, free_tokens, busy, full, packed, *phases)

    def contributes(self, pinned: Sequence[str]) -> Contribution | None:
        """Return what it adds to its pool: nothing before its first report, nor while it drains."""
        spec, accounts = self.spec, self.accounts
        if spec is None or self.report.version is None or self.report.figures.draining:
            return None
        protected = min(len(pinned), max(0, spec.max_adapters - 1))
        slots, busy = spec.max_adapters - protected, len(accounts.busy_adapters(pinned)) - protected
        total, page_tokens = spec.total_pages, spec.page_tokens
        reserved = total - accounts.free_pages
        for_prompts, for_tokens = self.role is not RunnerRole.TOKEN, self.role is not RunnerRole.PROMPT
        held = (
            (spec.good_sequences, total * page_tokens, reserved * page_tokens, slots, busy)
            if for_tokens
            else (0, 0, 0, 0, 0)
        )
        pages = (total, reserved) if self.confirmed and self.serving else (0, 0)
        prefill_tokens_per_s = int(spec.prefill_tokens_per_s) * for_prompts
        phases = for_prompts, for_tokens, spec.role is RunnerRole.PROMPT, spec.role is RunnerRole.TOKEN
        return Contribution(
            *held, *pages, prefill_tokens_per_s, *phases, accounts.batch_pages * page_tokens * for_tokens
        )

    def serves(self, held: Iterable[tuple[str, bool, Tier]], version: int) -> bool:
        """True where nothing holds it back but adapters that failed to load: those must not take a runner away."""
        if not (0 < version == self.report.figures.desired_version and self.report.errors):
            return False
        return all(self._settled(digest, pinned, tier) for digest, pinned, tier in held)

    def _settled(self, digest: str, pinned: bool, tier: Tier) -> bool:
        """True where no request has to wait for it. A report has what is loading, not what has come to the disk."""
        state = self.report.adapters.get(digest)
        if pinned:
            return state is not None and (bool(state.error) or state.tier is Tier.DEVICE)
        return tier <= Tier.REMOTE or state is None or not state.loading or bool(state.error)

    # ------------------------------------------------------------ transitions

    def describe(self, spec: RunnerSpec) -> None:
        """Know what does not change while it lives; only the first spec counts."""
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
        """Take its first full report on that supervisor's present stream. True where it was not confirmed."""
        assert self.spec is not None, self.id
        confirmed, self.confirmed, self.supervisor, self.sent = self.confirmed, True, supervisor, SentOrders()
        return not confirmed

    def unconfirm(self) -> None:
        """End its supervisor's stream."""
        assert self.confirmed, self.id
        self.confirmed = False

    def cordon(self, cordoned: bool) -> bool:
        """Let it go, or not. True where that has changed."""
        changed, self.cordoned = self.cordoned != cordoned, cordoned
        return changed

    def take_role(self, role: RunnerRole, *, alone: bool) -> bool:
        """Let it be what it should be. `alone`: no other runner exchanges KV with it. True where that has changed."""
        before, self.role, self.alone = (self.role, self.alone), role, alone
        return before != (role, alone)

    def serve(self) -> None:
        """Note that it can serve, and stays able to."""
        self.serving = True

    def ready(self, version: int | None) -> int | None:
        """Note that it is Ready with that desired version, or not at all. Returns the one before."""
        before, self.ready_version = self.ready_version, version
        return before

    def count(self, standing: Standing, contribution: Contribution | None) -> None:
        """Note what its pool counts of it from now on."""
        accepting = self.role if contribution is not None and not self.cordoned else None
        self.counted = Counted(standing, contribution, accepting)
