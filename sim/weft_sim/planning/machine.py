"""The machine level: a queue, a batch an iteration, memory; uneventful decode steps are one event."""

from bisect import insort
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from weft.domain.runner import RunnerRole
from weft_sim.clock import Clock, Rank
from weft_sim.performance.step import PerformanceModel, StepShape
from weft_sim.planning.batching import BATCHINGS
from weft_sim.planning.decode_run import DecodeRun
from weft_sim.planning.request import PhaseTask, PlannedRequest

GAP_S = 1e-4  # times between tokens are counted in steps of it


@dataclass(frozen=True, slots=True)
class MachineKind:
    """A kind of machine. `kv_bytes`: memory for KV; `max_batch_tokens`: of an iteration; a longer prompt may run alone.

    `max_passed_over`: selections after which a task of `mixed` batching goes first; `link_bytes_per_s`: of its network;
    `request_s`: of the server around the iterations, in TTFT and end to end.
    """

    name: str
    model: PerformanceModel
    kv_bytes: int
    max_sequences: int = 512
    max_batch_tokens: int = 2_048
    max_passed_over: int = 4
    link_bytes_per_s: float = inf
    request_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Stepping:
    """How machines step. `jumps`: steps between two events are one event.

    `lazy`: as splitwise-sim, where an arrival ends them only if its task has a place beside the batch; else each does.
    """

    batching: str = "chunked"
    lazy: bool = False
    jumps: bool = True


class PlannedMachine:
    """`waiting`: tasks by (times passed over, arrival) as they came; `prompts` and `preempted` among them as they came;
    `requests`: all that are here and unfinished, by arrival.

    The cluster level counts `pending_tokens` and `kv_promised` when it assigns a request.
    """

    def __init__(
        self,
        number: int,
        kind: MachineKind,
        role: RunnerRole,
        stepping: Stepping,
        clock: Clock,
        on_task: Callable[["PlannedMachine", PhaseTask], None],
        on_free: Callable[["PlannedMachine"], None],
    ) -> None:
        self.number, self.kind, self.home, self.role = number, kind, role, role
        self._stepping, self._clock, self._on_task, self._on_free = stepping, clock, on_task, on_free
        self._select = BATCHINGS[stepping.batching]
        self.waiting: list[PhaseTask] = []
        self.prompts: list[PhaseTask] = []
        self.preempted: list[PhaseTask] = []
        self.requests: list[PlannedRequest] = []
        self.batch: list[PhaseTask] = []
        self.pending_tokens = 0
        self.kv_used = self.kv_promised = 0
        self.link_free = 0.0  # when its latest transfer is over
        self._prompts_in_batch = self._batch_tokens = 0
        self._run: DecodeRun | None = None
        self._began, self._steps, self._most_steps, self._epoch = 0.0, 0, 0, 0
        self._pausing = self._completing = False
        self.busy_s, self.iterations, self.rows, self.prompt_tokens = 0.0, 0, 0, 0
        self.gaps: Counter[int] = Counter()  # times between tokens, in GAP_S

    # ---------------------------------------------------------------- tasks come

    def submit(self, task: PhaseTask) -> None:
        request = task.request
        if not request.tasks:
            insort(self.requests, request, key=lambda queued: queued.arrived)
        request.tasks.append(task)
        self._enqueue(task)
        if self._completing:
            return
        if not self.batch:
            self._start_with(task)
        elif self._interrupts(task):
            self.pause()

    def wake(self) -> None:
        """Select again after memory has become free."""
        if self._completing or not self.waiting:
            return
        if not self.batch:
            self._start_with(self.waiting[0])
        elif len(self.batch) < self.kind.max_sequences and self._batch_tokens < self.kind.max_batch_tokens:
            self.pause()

    def _start_with(self, task: PhaseTask) -> None:
        if not self._stepping.lazy or task.is_held or self.kv_used + task.kv_bytes <= self.kind.kv_bytes:
            self.start()

    def _interrupts(self, task: PhaseTask) -> bool:
        if not self._stepping.lazy:
            return True
        tokens, budget, rows = self._batch_tokens, self.kind.max_batch_tokens, len(self.batch) - self._prompts_in_batch
        fits = len(self.batch) < self.kind.max_sequences and tokens + task.tokens <= budget
        return fits or (task.is_prompt and rows > 0 and tokens - rows + task.tokens <= budget)

    def pause(self) -> None:
        """End the steps in one piece with the running step."""
        if self._run is None or self._pausing:
            return
        self._pausing = True
        elapsed_s = self._clock.now - self._began
        self._steps = min(self._most_steps, self._run.steps_within(elapsed_s) + 1)
        self._await(self._run.seconds(self._steps) - elapsed_s)

    # ---------------------------------------------------------------- iterations

    def start(self, *, eventful: bool = True) -> None:
        """Select the next batch and run it."""
        selected = self._select(self)
        self._change(selected)
        self._batch_tokens = sum(task.tokens for task in selected)
        if eventful:
            self._count_passed_over()
        if not self.batch:
            if not self.requests:
                self._on_free(self)
            return
        now = self._began = self._clock.now
        for task in self.batch:
            if not task.is_held:
                self._begin(task, now)
        self._run = None
        if self._prompts_in_batch:
            self._steps = 1
            self._await(self.kind.model.seconds(self._shape()))
            return
        rows, context = len(self.batch), sum(map(_context, self.batch))
        self._most_steps = min(task.left for task in self.batch)
        self._run = DecodeRun(self.kind.model, rows, context, self._adapters(), self._most_steps)
        self._steps = self._most_steps if self._stepping.jumps and self._repeats() else 1
        self._await(self._run.seconds(self._steps))

    def _repeats(self) -> bool:
        """Return whether the next iteration selects this batch again if no event comes before it.

        It does not where a waiting task's turn has come, or where rows beyond a bound take turns.
        """
        return not self.waiting or set(self._select(self)) == set(self.batch)

    def _change(self, selected: list[PhaseTask]) -> None:
        """Change the batch: the old batch's tasks stay in their order, and new ones follow."""
        old, new = set(self.batch), set(selected)
        for task in self.batch:
            if task not in new:
                self._enqueue(task)
                self.preempted.append(task)
        self.batch = [task for task in self.batch if task in new]
        for task in selected:
            if task not in old:
                self._dequeue(task)
                self.batch.append(task)
        self._prompts_in_batch = sum(task.is_prompt for task in self.batch)

    def _begin(self, task: PhaseTask, now: float) -> None:
        request = task.request
        self.kv_used += task.kv_bytes
        request.kv_bytes += task.kv_bytes
        task.is_held = True
        if task.is_prompt:
            request.began = now
        else:
            request.resumed = now

    def _await(self, seconds: float) -> None:
        self._epoch += 1
        self._clock.call_after(seconds, Rank.WORK, self._completed, self._epoch)

    def _completed(self, epoch: int) -> None:
        if epoch != self._epoch:
            return
        now, done = self._clock.now, self._advanced()
        self.busy_s += now - self._began
        self.iterations += self._steps
        self.rows += self._steps * len(self.batch)
        eventful = bool(done) or self._pausing or self._run is None
        self._completing = True
        for task in done:
            self.batch.remove(task)
            task.request.tasks.remove(task)
            if not task.request.tasks:
                self.requests.remove(task.request)
            self._on_task(self, task)
        self._run, self._pausing, self._completing = None, False, False
        self.start(eventful=eventful)

    def _advanced(self) -> list[PhaseTask]:
        """Count the tokens of completed iterations. Return the finished tasks."""
        now, steps, began = self._clock.now, self._steps, self._began
        step_s, steady, done = (now - began) / steps, 0, list[PhaseTask]()
        first_at = began + (self._run.seconds(1) if self._run is not None else step_s)
        for task in self.batch:
            if task.is_prompt:
                task.left -= task.tokens
                self.prompt_tokens += task.tokens
            else:
                task.left -= steps
                if task.last_at == began:
                    steady += 1
                else:
                    self.gaps[round((first_at - task.last_at) / GAP_S)] += 1
                    self.gaps[round(step_s / GAP_S)] += steps - 1
                task.last_at = now
            if task.left <= 0:
                done.append(task)
        self.gaps[round(step_s / GAP_S)] += steps * steady
        return done

    # ---------------------------------------------------------------- accounts

    def release(self, request: PlannedRequest, kv_bytes: int) -> None:
        """Take a request's KV off this machine."""
        self.kv_used -= kv_bytes
        self.kv_promised -= kv_bytes
        request.kv_bytes -= kv_bytes

    def check(self) -> None:
        assert 0 <= self.kv_used <= self.kind.kv_bytes
        assert self.pending_tokens >= 0
        assert len(self.batch) <= self.kind.max_sequences
        assert len(set(self.waiting) | set(self.batch)) == sum(len(request.tasks) for request in self.requests)

    def _enqueue(self, task: PhaseTask) -> None:
        insort(self.waiting, task, key=lambda queued: (queued.passed_over, queued.request.arrived))
        if task.is_prompt and task.is_held:
            self.prompts.insert(0, task)
        elif task.is_prompt:
            self.prompts.append(task)

    def _dequeue(self, task: PhaseTask) -> None:
        self.waiting.remove(task)
        if task.is_prompt:
            self.prompts.remove(task)
        if task.is_held:
            self.preempted.remove(task)

    def _count_passed_over(self) -> None:
        """Count the requests with an unselected next task."""
        batch = set(self.batch)
        for request in self.requests:
            if (task := request.tasks[0]) not in batch:
                task.passed_over += 1

    def _shape(self) -> StepShape:
        prompts = [task for task in self.batch if task.is_prompt]
        rows = [task for task in self.batch if not task.is_prompt]
        return StepShape(
            len(prompts),
            sum(task.tokens for task in prompts),
            sum(map(_pairs, prompts)),
            len(rows),
            sum(map(_context, rows)),
            self._adapters(),
        )

    def _adapters(self) -> int:
        return len({task.request.adapter for task in self.batch if task.request.adapter >= 0})


def _context(task: PhaseTask) -> int:
    """Return the tokens that a task's next decode step attends to."""
    return task.request.prompt_tokens + task.request.output_tokens - task.left


def _pairs(task: PhaseTask) -> int:
    """Sum over the prompt tokens of this iteration the tokens that each attends to."""
    done, tokens = task.request.prompt_tokens - task.left, task.tokens
    return tokens * done + tokens * (tokens + 1) // 2
