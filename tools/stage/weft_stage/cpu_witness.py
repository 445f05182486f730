"""What the engine really ran: the adapter of every row of every step, from the batch and from the executor's plan.

A benchmark of popularities is worth nothing when its rows do not use the adapters it names, so each step is held
against the engine's books. While the clock runs only references are kept; they are compared afterwards.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from weft_kernels.plan import SegmentPlan
from weft_runner.core import Action, Batch, Unload
from weft_runner.model import Executor, StepInput
from weft_runner.shell.adapter_pool import InSlot
from weft_runner.shell.engine import Engine
from weft_stage.errors import WrongAdapter


@dataclass(frozen=True, slots=True)
class Beat:
    """One beat that ran something. `adapters` has one entry a row, "" for the base."""

    began: float
    ended: float
    prefills: int
    tokens: int
    adapters: tuple[str, ...]

    @property
    def rows(self) -> int:
        return len(self.adapters)

    @property
    def distinct(self) -> int:
        """How many different adapters it read."""
        return len({adapter for adapter in self.adapters if adapter})


@dataclass(frozen=True, slots=True)
class SlotLoad:
    """An adapter that came into a slot. `seconds`: what its loader worked on it."""

    digest: str
    seated: float
    seconds: float
    n_bytes: int


@dataclass(slots=True)
class _Seen:
    """A step as it was noted: what was chosen, which digests sat in the slots, what was run."""

    began: float
    batch: Batch
    seats: dict[int, str]
    plans: list[SegmentPlan]
    accounted: bool = False
    ended: float = 0.0


class Witness:
    """Stands between the engine and its pool, executor and adapters. One thread.

    An executor that looks ahead is handed a step before the one in front of it has ended: steps are accounted for in
    the order in which they were launched.
    """

    def __init__(self, engine: Engine) -> None:
        self.loads: list[SlotLoad] = []
        self._seats: dict[int, str] = {}  # replaced, never changed: steps keep the one that they ran with
        self._seen: list[_Seen] = []
        self._waiting: deque[_Seen] = deque()  # launched, not accounted for
        self._batch, self._chosen, self._running = Batch((), 0), 0.0, False
        pool = engine.runner.pool
        self._account, pool.account = pool.account, self._noting_account
        pool.schedule, pool.schedule_behind = self._noting(pool.schedule), self._noting(pool.schedule_behind)
        self._execute, self._put = engine.adapters.execute, engine.adapters.put
        engine.adapters.execute = self._noting_execute
        engine.adapters.put = self._noting_put
        for name in ("run", "launch", "follow"):
            self._watch(engine.executor, name)

    def begin(self) -> None:
        """Forget the steps and loads so far."""
        self._seen, self.loads = [], []
        self._waiting.clear()

    def ended(self, now: float) -> None:
        """The last beat has told its iteration."""
        for seen in reversed(self._seen):
            if seen.ended:
                return
            if seen.accounted:
                seen.ended = now

    def verified(self) -> list[Beat]:
        """Every beat since `begin` that ran rows. Raises WrongAdapter when a row did not run with its adapter."""
        return [_beat(seen) for seen in self._seen if seen.ended]

    # ---- in the place of the pool's, the adapters' and the executor's methods

    def _noting(self, choose: Callable[..., Batch]) -> Callable[..., Batch]:
        def noting(*arguments: Any, **options: Any) -> Batch:
            self._chosen = time.perf_counter()
            self._batch = choose(*arguments, **options)
            return self._batch

        return noting

    def _noting_account(self, *results: Any, **options: Any) -> None:
        if self._waiting:  # else it was launched before `begin`
            self._waiting.popleft().accounted = True
        self._account(*results, **options)

    def _watch(self, executor: Executor, name: str) -> None:
        """Note the steps that this method of the executor is handed, but not those that it hands to another one."""
        method = getattr(executor, name, None)
        if method is None:
            return

        def noting(step: StepInput, *arguments: Any, **options: Any) -> Any:
            outermost, self._running = not self._running, True
            if outermost:
                self._note(step, again=name != "follow")
            try:
                return method(step, *arguments, **options)
            finally:
                self._running = not outermost

        setattr(executor, name, noting)

    def _note(self, step: StepInput, *, again: bool) -> None:
        """`again`: a step of the same batch, with the last one not accounted for, is another try at it."""
        if again and self._waiting and self._waiting[-1].batch.number == self._batch.number:
            self._waiting[-1].plans.append(step.plan)
            return
        began = self._chosen if again else time.perf_counter()
        seen = _Seen(began, self._batch, self._seats, [step.plan])
        self._seen.append(seen)
        self._waiting.append(seen)

    def _noting_execute(self, action: Action) -> None:
        if isinstance(action, Unload):
            self._seats = {seat: digest for seat, digest in self._seats.items() if seat != action.slot}
        self._execute(action)

    def _noting_put(self, built: InSlot) -> None:
        self._put(built)
        loaded = built.loaded
        self._seats = {**self._seats, built.slot: loaded.digest}
        self.loads.append(SlotLoad(loaded.digest, time.perf_counter(), loaded.seconds, loaded.n_bytes))


def _beat(seen: _Seen) -> Beat:
    rows = seen.batch.rows
    if len(seen.plans) != 1:
        raise WrongAdapter(f"a batch of {len(rows)} rows took {len(seen.plans)} forwards")
    asked = tuple(row.adapter for row in rows)
    ran = tuple(seen.seats.get(slot, "") for slot in slots_of(seen.plans[0], [row.n_tokens for row in rows]))
    if asked != ran:
        raise WrongAdapter(f"rows asked for the adapters {asked} and ran with {ran}")
    return Beat(seen.began, seen.ended, seen.batch.n_prefills, seen.batch.n_tokens, asked)


def slots_of(plan: SegmentPlan, row_tokens: Sequence[int]) -> list[int]:
    """The slot that each row's tokens use, -1 for none. Raises WrongAdapter when a row has more than one."""
    slots = [-1] * plan.rows
    for segment in plan.segments:
        slots[segment.start : segment.end] = [segment.slot] * (segment.end - segment.start)
    found, start = list[int](), 0
    for tokens in row_tokens:
        used = set(slots[start : start + tokens])
        if len(used) != 1:
            raise WrongAdapter(f"a row of {tokens} tokens uses the slots {sorted(used)}")
        found.append(used.pop())
        start += tokens
    return found
