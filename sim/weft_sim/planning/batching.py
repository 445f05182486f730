"""Batching mechanisms of the Splitwise paper (section 2.5) and ours: the tasks of a machine's next iteration.

- `request`: requests form a batch, and no other joins until all of them are finished.
- `continuous`: every iteration is either prompts or decode rows; prompts go first, and rows wait for them.
- `mixed`: prompts run in one batch with decode rows, up to a number of tokens; rows beyond it wait. A task that was
  passed over too often goes first, as far as none that was not stands before it in the queue.
- `chunked`: all decode rows run, and prompts fill what tokens are left, the last of them in part (Sarathi, vLLM, Weft).
"""

from collections.abc import Callable, Iterable, Mapping
from itertools import takewhile
from sys import maxsize
from typing import TYPE_CHECKING

from weft_sim.planning.request import PhaseTask, PlannedRequest

if TYPE_CHECKING:
    from weft_sim.planning.machine import PlannedMachine

Batching = Callable[["PlannedMachine"], list[PhaseTask]]


class Selection:
    """A batch within sequences, tokens and memory, with at most one task of a request."""

    def __init__(self, machine: "PlannedMachine", budget: int = 0) -> None:
        self._max_sequences, self._budget = machine.kind.max_sequences, budget or machine.kind.max_batch_tokens
        self._free = machine.kind.kv_bytes - machine.kv_used
        self._requests: set[PlannedRequest] = set()
        self.tokens = 0
        self.tasks: list[PhaseTask] = []

    def add(self, tasks: Iterable[PhaseTask], *, skip: bool = False) -> None:
        """Add tasks in order up to the first without room. `skip`: pass over tasks without memory."""
        for task in tasks:
            if len(self.tasks) == self._max_sequences or (self.tasks and self.tokens + task.tokens > self._budget):
                return
            if task.request in self._requests:
                continue
            if not task.is_held and task.kv_bytes > self._free:
                if skip:
                    continue
                return
            self._take(task)

    def keep(self, rows: list[PhaseTask]) -> None:
        """Add running decode rows, without checks of room."""
        self.tasks += rows
        self.tokens += len(rows)
        self._requests.update([row.request for row in rows])

    def add_heads(self, requests: Iterable[PlannedRequest]) -> None:
        """Add the next tasks of requests."""
        self.add(request.tasks[0] for request in requests if request not in self._requests)

    def add_chunks(self, tasks: Iterable[PhaseTask]) -> None:
        """Add prompts, each with the tokens that are left for it."""
        for task in tasks:
            task.tokens = min(task.left, self._budget - self.tokens)
            if (
                task.tokens <= 0
                or len(self.tasks) == self._max_sequences
                or not (task.is_held or task.kv_bytes <= self._free)
            ):
                return
            self._take(task)

    def _take(self, task: PhaseTask) -> None:
        self.tasks.append(task)
        self._requests.add(task.request)
        self.tokens += task.tokens
        if not task.is_held:
            self._free -= task.kv_bytes


def mixed(machine: "PlannedMachine") -> list[PhaseTask]:
    selection, bound = Selection(machine), machine.kind.max_passed_over
    selection.add(takewhile(lambda task: task.passed_over >= bound, machine.waiting), skip=True)
    selection.add(machine.prompts)
    selection.add(machine.preempted)
    selection.add(machine.batch)
    selection.add_heads(machine.requests)
    return selection.tasks


def continuous(machine: "PlannedMachine") -> list[PhaseTask]:
    selection = Selection(machine)
    selection.add(machine.prompts)
    if not selection.tasks:
        selection.add(machine.preempted)
        selection.add(machine.batch)
        selection.add_heads(request for request in machine.requests if not request.tasks[0].is_prompt)
    return selection.tasks


def request_level(machine: "PlannedMachine") -> list[PhaseTask]:
    """Select as many requests as memory takes: prompts, in as many iterations as they need, then decode rows."""
    if not any(request.batched for request in machine.requests):
        batch = Selection(machine, budget=maxsize)
        batch.add(machine.prompts)
        for task in batch.tasks:
            task.request.batched = True
    heads = [request.tasks[0] for request in machine.requests if request.batched]
    prompts = Selection(machine)
    prompts.add(task for task in heads if task.is_prompt)
    return prompts.tasks or heads


def chunked(machine: "PlannedMachine") -> list[PhaseTask]:
    selection = Selection(machine)
    selection.keep([task for task in machine.batch if not task.is_prompt])
    selection.add_heads(request for request in machine.requests if not request.tasks[0].is_prompt)
    selection.add_chunks(task for task in machine.batch if task.is_prompt)
    selection.add_chunks(machine.prompts)
    return selection.tasks


BATCHINGS: Mapping[str, Batching] = {
    "request": request_level,
    "continuous": continuous,
    "mixed": mixed,
    "chunked": chunked,
}
