"""A pool's batch requests: those that wait, how many there are, and the room beside them (`policy/priority`)."""

from operator import lt

from weft_scheduler.core.model.request import Request
from weft_scheduler.core.policy.priority.headroom import Headroom
from weft_scheduler.core.policy.queue.overtaking import Overtaking
from weft_scheduler.core.policy.queue.waiting_queue import WaitingQueue


class BatchRequests:
    """One owner: the pool."""

    def __init__(self, queue: WaitingQueue[Request]) -> None:
        self.queue, self.overtaking = queue, Overtaking[Request]()
        self.total = 0  # that wait or run
        self.running = 0
        self.headroom = Headroom()  # that they leave on each runner
        self._passed_over = False

    def wait_in(self, queue: WaitingQueue[Request]) -> None:
        """Let those that wait wait in another queue."""
        self.queue = queue

    def pass_over(self) -> None:
        """Interactive requests wait: what changes meanwhile is not looked at for those that wait here."""
        self._passed_over = True

    def is_due(self, headroom: Headroom) -> bool:
        """From now on they leave that room. True where all are to be offered again: it is less than before, or they
        were passed over since the last call.
        """
        due = self._passed_over or any(map(lt, headroom, self.headroom))
        self.headroom, self._passed_over = headroom, False
        return due

    def count(self, requests: int, running: int) -> None:
        """Count requests that come (or go, negative), and those that are on runners."""
        self.total, self.running = self.total + requests, self.running + running

    def footprint(self, request: Request, runner_tokens: int) -> int:
        """Tokens that a runner needs free for a batch request: beside it the headroom, but for an empty runner."""
        return max(request.waiting.tokens, min(request.waiting.tokens + self.headroom.tokens, runner_tokens))
