"""What the engine really ran: the adapter of every row of every step, from the batch and from the executor's plan.

A benchmark of popularities is worth nothing when its rows do not use the adapters it names, so each step is held
against the engine's books. While the clock runs only references are kept; they are compared afterwards.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from weft_bench.errors import WrongAdapter
from weft_kernels.plan import SegmentPlan
from weft_runner.core.events import Action, Unload
from weft_runner.core.iteration import Batch
from weft_runner.engine import Engine
from weft_runner.memory.adapter_pool import Loaded
from weft_runner.model.executor import Executor
from weft_runner.model.step import Step


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
    """A beat as it was noted: which digests sat in the slots, what was chosen, what was run."""

    began: float
    batch: Batch
    seats: dict[int, str]
    plans: list[SegmentPlan]
    ended: float = 0.0


class Witness:
    """Stands between the engine and its pool, executor and adapters. One thread."""

    def __init__(self, engine: Engine) -> None:
        self.loads: list[SlotLoad] = []
        self._seats: dict[int, str] = {}  # replaced, never changed: beats keep the one that they ran with
        self._seen: list[_Seen] = []
        self._choose, self._carry_out, self._put = engine.pool.choose, engine.adapters.carry_out, engine.adapters.put
        engine.pool.choose = self._noting_choose
        engine.adapters.carry_out = self._noting_carry_out
        engine.adapters.put = self._noting_put
        engine.executor = cast(Executor, _Watched(engine.executor, self._noting_run))

    def begin(self) -> None:
        """Forget the beats and loads so far."""
        self._seen, self.loads = [], []

    def ended(self, now: float) -> None:
        """The last beat has told its iteration."""
        if self._seen and not self._seen[-1].ended:
            self._seen[-1].ended = now

    def verified(self) -> list[Beat]:
        """Every beat since `begin` that ran rows. Raises WrongAdapter when a row did not run with its adapter."""
        return [_beat(seen) for seen in self._seen if seen.batch.rows]

    # ---- in the place of the pool's and the adapters' methods, and before the executor's

    def _noting_choose(self) -> Batch:
        began = time.perf_counter()
        batch = self._choose()
        self._seen.append(_Seen(began, batch, self._seats, []))
        return batch

    def _noting_run(self, step: Step) -> None:
        self._seen[-1].plans.append(step.plan)

    def _noting_carry_out(self, actions: Iterable[Action]) -> None:
        actions = list(actions)
        gone = {action.slot for action in actions if isinstance(action, Unload)}
        self._seats = {seat: digest for seat, digest in self._seats.items() if seat not in gone}
        if self._seen and not self._seen[-1].plans:
            self._seen[-1].seats = self._seats  # between the choice and the step
        self._carry_out(actions)

    def _noting_put(self, loaded: Loaded) -> None:
        self._put(loaded)
        self._seats = {**self._seats, loaded.slot: loaded.digest}
        n_bytes = loaded.adapter.n_bytes
        self.loads.append(SlotLoad(loaded.digest, time.perf_counter(), loaded.seconds, n_bytes))


class _Watched:
    """An executor whose steps are noted."""

    def __init__(self, executor: Executor, note: Callable[[Step], None]) -> None:
        self._executor, self._note = executor, note

    def run(self, step: Step, **options: Any) -> Any:
        self._note(step)
        return self._executor.run(step, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)


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
