"""A pool's runners: who is there, what each adds, and the index by which requests are placed on them."""

from collections import Counter
from collections.abc import Iterable
from typing import TypeVar

from weft.domain.routes import PoolSpec
from weft.domain.runner import RunnerRole
from weft_scheduler.core.model.adapters import PoolAdapters
from weft_scheduler.core.model.runner import RunnerAccount
from weft_scheduler.core.policy.autoscaling.autoscaler import Contribution, PoolCapacity
from weft_scheduler.core.policy.placement.policy import PlacementPolicy, RunnerLoad
from weft_scheduler.core.policy.placement.punica import Punica
from weft_scheduler.core.policy.placement.runner_index import RunnerShape
from weft_scheduler.core.policy.placement.splitwise import Splitwise
from weft_scheduler.core.policy.reservation.pooled import Margin


class ReadyRunners:
    """The Ready runners, as published to gateways and in statuses."""

    def __init__(self) -> None:
        self.count = 0
        self.shapes: Counter[RunnerShape] = Counter()
        self.pages: Counter[int] = Counter()  # KV pages in all -> runners
        self.versions: Counter[int] = Counter()  # desired version -> runners
        self.min_context_tokens = 0  # the smallest limit of any; the last known while there are none
        self.min_pages = 0  # the fewest pages in all of any; the last known while there are none
        self.draft_checks: Counter[bool] = Counter()  # whether they check drafts -> runners
        self.check_drafts = True  # all of them do; the last known while there are none

    def put(self, runner: RunnerAccount, version: int | None) -> None:
        """Count a runner as Ready with that desired version; None: it is not Ready."""
        was_ready, pages = runner.ready(version), runner.spec.total_pages if runner.spec else 0
        checks = runner.spec is not None and runner.spec.checks_drafts
        if was_ready is not None:
            _decrement(self.versions, was_ready)
            _decrement(self.shapes, runner.shape)
            _decrement(self.pages, pages)
            _decrement(self.draft_checks, checks)
        if version is not None:
            self.versions[version] += 1
            self.shapes[runner.shape] += 1
            self.pages[pages] += 1
            self.draft_checks[checks] += 1
        self.count += (version is not None) - (was_ready is not None)
        contexts = (shape.max_context_tokens for shape in self.shapes)
        self.min_context_tokens = min(contexts, default=self.min_context_tokens)
        self.min_pages = min(self.pages, default=self.min_pages)
        self.check_drafts = min(self.draft_checks, default=self.check_drafts)


class PoolFleet:
    """The runners of a pool. `adapters`: the adapters of the pool; runners hold pinned adapters."""

    def __init__(self, spec: PoolSpec, adapters: PoolAdapters) -> None:
        self._spec, self._adapters = spec, adapters
        self.is_split = spec.split
        self.runners: dict[str, RunnerAccount] = {}  # runners that have been confirmed, by uuid
        self.confirmed_shapes: Counter[RunnerShape] = Counter()
        self.accepting: Counter[tuple[RunnerRole, RunnerShape]] = Counter()  # runners that take more now or soon
        self.ready = ReadyRunners()
        self.draining: dict[str, None] = {}  # an ordered set of uuids of runners that end
        self.load_failures: dict[str, dict[str, str]] = {}  # adapter -> uuid -> why its load failed there
        self.capacity = PoolCapacity()
        self.margin = Margin()  # margin of pooled admission
        self.placement = new_placement(spec)
        self.prefers_packing = False  # full batches are preferred to idle runners
        self.batch_runners: dict[str, None] = {}  # uuids of runners that have batch requests, an ordered set
        self.crowded: set[str] = set()  # uuids of runners without a place that batch requests may have
        self.roles_stale = False  # runners that take something new have come or gone
        self._left = 0  # places of each runner that batch requests leave

    # ------------------------------------------------------------ questions

    def fitting_shapes(self, rank: int, context_tokens: int) -> list[RunnerShape]:
        """Return the shapes of confirmed runners with enough rank and context for such a request."""
        return [shape for shape in self.confirmed_shapes if shape.fits(rank, context_tokens)]

    def accepts(self, rank: int, context_tokens: int, numerics_class: str) -> bool:
        """Return whether a runner of this class accepts such a request now or soon."""
        return any(shape.fits(rank, context_tokens, numerics_class) for _, shape in self.accepting)

    def runners_of_roles(self) -> Counter[RunnerRole]:
        """Return how many accepting runners are wanted in each role."""
        counts = Counter[RunnerRole]()
        for (role, _), runners in self.accepting.items():
            counts[role] += runners
        return counts

    def load_of(self, runner: RunnerAccount) -> RunnerLoad | None:
        """Return the placement index entry of a runner; None without room."""
        return runner.load(self._adapters.pinned, packs=self.prefers_packing)

    # ------------------------------------------------------------ who is there

    def confirm(self, runner: RunnerAccount) -> bool:
        """Add a confirmed runner. Return True if it is the only runner."""
        first = not self.confirmed_shapes
        runner.accounts.limit(self._spec.slo_token_time_s)
        self.runners[runner.id.uuid] = runner
        self.confirmed_shapes[runner.shape] += 1
        return first

    def unconfirm(self, runner: RunnerAccount) -> bool:
        """Count a runner that is not confirmed any more; its accounts stay. True if it was the last of its shape."""
        _decrement(self.confirmed_shapes, runner.shape)
        return runner.shape not in self.confirmed_shapes

    def forget(self, runner: RunnerAccount) -> None:
        """Forget a lost runner and its contribution."""
        uuid = runner.id.uuid
        self.runners.pop(uuid, None)
        self.draining.pop(uuid, None)
        self.crowded.discard(uuid)
        self.batch_runners.pop(uuid, None)
        self.placement.remove(uuid)
        self._count(runner, None, ())
        self.set_errors(runner, [*runner.report.errors], is_deleted=True)

    def drains(self, runner: RunnerAccount) -> None:
        """Record that a runner ends, or serves again."""
        if runner.report.figures.draining:
            self.draining[runner.id.uuid] = None
        else:
            self.draining.pop(runner.id.uuid, None)

    def set_errors(self, runner: RunnerAccount, digests: Iterable[str], *, is_deleted: bool = False) -> None:
        """Record changed load errors of digests on a runner."""
        for digest in digests:
            error = "" if is_deleted else runner.report.errors.get(digest, "")
            if error:
                self.load_failures.setdefault(digest, {})[runner.id.uuid] = error
            elif (failures := self.load_failures.get(digest)) is not None:
                failures.pop(runner.id.uuid, None)
                if not failures:
                    del self.load_failures[digest]

    # ------------------------------------------------------------ accounts

    def update(self, runner: RunnerAccount, *, again: bool = False) -> bool:
        """Count and index the contribution of a runner after a change (True), or always with `again`."""
        runner.accounts.settle(self.margin.deviations)
        pinned = self._adapters.pinned
        standing = runner.standing(pinned, split=self.is_split)
        if standing == runner.counted.standing and not again:
            return False
        self._count(runner, runner.contributes(pinned), standing)
        if (load := runner.load(pinned, packs=self.prefers_packing)) is not None:
            self.placement.update(load)
        else:
            self.placement.remove(runner.id.uuid)
        self._note_batch(runner)
        return True

    def follow(self, spec: PoolSpec) -> None:
        """Use the spec's objective for tokens, and its phases."""
        old_spec, self._spec, self.is_split = self._spec, spec, spec.split
        if spec.slo_token_time_s != old_spec.slo_token_time_s:
            for runner in self.runners.values():
                runner.accounts.limit(spec.slo_token_time_s)
                self.update(runner)
        if (spec.split, spec.kv_across_classes) != (old_spec.split, old_spec.kv_across_classes):
            self.placement, self.roles_stale = new_placement(spec), True
            for runner in self.runners.values():
                self.update(runner, again=True)

    def pack(self, *, prefer: bool) -> None:
        """Prefer full batches to idle runners from now on, or not."""
        if prefer != self.prefers_packing:
            self.prefers_packing = prefer
            for runner in self.runners.values():
                self.update(runner, again=True)

    def keep_headroom(self, places: int) -> None:
        """Let batch requests leave `places` places free on each runner."""
        if places != self._left:
            self._left = places
            for runner in self.runners.values():
                self._note_batch(runner)

    def planned(self) -> None:
        """Record that the roles fit the present runners."""
        self.roles_stale = False

    def _note_batch(self, runner: RunnerAccount) -> None:
        """Note whether a runner has batch requests, and a place for another (at most half is kept for others)."""
        if runner.accounts.batch:
            self.batch_runners[runner.id.uuid] = None
        else:
            self.batch_runners.pop(runner.id.uuid, None)
        places = runner.spec.max_sequences if runner.spec is not None else 0
        if runner.accounts.working_set + min(self._left, places // 2) >= places:
            self.crowded.add(runner.id.uuid)
        else:
            self.crowded.discard(runner.id.uuid)

    def _count(self, runner: RunnerAccount, contribution: Contribution | None, standing: tuple[object, ...]) -> None:
        old_contribution, accepted = runner.counted.contribution, runner.counted.accepting
        runner.count(standing, contribution)
        if contribution != old_contribution:
            self.capacity.replace(old_contribution, contribution)
        if (runner.counted.accepting is None) != (accepted is None) and self.is_split:
            self.roles_stale = True
        if runner.counted.accepting is not accepted:
            if accepted is not None:
                _decrement(self.accepting, (accepted, runner.shape))
            if runner.counted.accepting is not None:
                self.accepting[runner.counted.accepting, runner.shape] += 1


def new_placement(spec: PoolSpec) -> PlacementPolicy:
    """Return the placement for the phases of a spec."""
    return Splitwise(spec.kv_across_classes) if spec.split else Punica()


K = TypeVar("K")


def _decrement(counter: Counter[K], key: K) -> None:
    counter[key] -= 1
    if not counter[key]:
        del counter[key]
