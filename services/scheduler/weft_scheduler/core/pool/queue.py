"""The requests that wait in a pool, and whose turn it is: its queues, its tenants, and the sums of what waits."""

from collections import Counter
from operator import lt

from weft.domain.routes import PoolSpec
from weft_scheduler.core.model.request import Request
from weft_scheduler.core.policy.autoscaling.autoscaler import PoolCapacity
from weft_scheduler.core.policy.priority.claims import Claims
from weft_scheduler.core.policy.priority.headroom import Headroom
from weft_scheduler.core.policy.queue import orders
from weft_scheduler.core.policy.queue.overtaking import Overtaking
from weft_scheduler.core.policy.queue.token_counters import TenantShares, TokenCounters
from weft_scheduler.core.policy.queue.waiting_queue import WaitingQueue

BEYOND_SHARE_S = 10.0  # prompts of tenants within their share that arrive within that time are computed before


class BatchRequests:
    """The batch requests of a pool, owned by the pool."""

    def __init__(self, queue: WaitingQueue[Request]) -> None:
        self.queue, self.overtaking = queue, Overtaking[Request]()
        self.total = 0  # requests that wait or run
        self.running = 0
        self.headroom = Headroom()  # room that they leave on each runner
        self._passed_over = False

    def wait_in(self, queue: WaitingQueue[Request]) -> None:
        """Move the waiting requests to a new queue."""
        self.queue = queue

    def pass_over(self) -> None:
        """Record waiting interactive requests: batch requests miss all changes in the meantime."""
        self._passed_over = True

    def is_due(self, headroom: Headroom) -> bool:
        """Let batch requests leave that room from now on. True if all are to be offered again.

        The room is less than before, or they were passed over since the last call.
        """
        due = self._passed_over or any(map(lt, headroom, self.headroom))
        self.headroom, self._passed_over = headroom, False
        return due

    def count(self, requests: int, running: int) -> None:
        """Count arriving (or, if negative, leaving) requests, and the running requests."""
        self.total, self.running = self.total + requests, self.running + running

    def footprint(self, request: Request, runner_tokens: int) -> int:
        """Return the tokens that a runner needs free for a batch request: with the headroom, unless it is empty."""
        return max(request.waiting.tokens, min(request.waiting.tokens + self.headroom.tokens, runner_tokens))


class PoolQueue:
    """The requests of a pool. Sums, tenants and counts are of interactive ones, unless they say otherwise."""

    def __init__(self, spec: PoolSpec, capacity: PoolCapacity) -> None:
        self.queue = _queue_of(spec)
        self.overtaking = Overtaking[Request]()
        self.shares = TenantShares(self.queue.counters, capacity)
        self.batch = BatchRequests(_queue_of(spec))
        self.claims = Claims()
        self.requests: dict[str, dict[str, None]] = {}  # adapter -> ids of its requests, batch requests too
        self.running = 0  # on runners, batch requests too
        self.queued_by_adapter: Counter[str] = Counter()
        self.queued_tokens = self.queued_work = self.queued_prompt_tokens = 0
        self._recheck = False

    # ------------------------------------------------------------ who is there

    def add(self, request: Request) -> None:
        """Take a request in."""
        if request.batch:
            self.batch.count(1, 0)
        else:
            self.shares.add(request.tenant)
        self.requests.setdefault(request.adapter, {})[request.id] = None

    def remove(self, request: Request) -> bool:
        """Forget a request. Return True if it was the last request of its adapter."""
        if request.batch:
            self.batch.count(-1, 0)
        else:
            self.shares.remove(request.tenant)
        ids = self.requests[request.adapter]
        del ids[request.id]
        if not ids:
            del self.requests[request.adapter]
        return not ids

    def request_ids(self) -> list[str]:
        """Return the ids of all requests, in a fixed order."""
        return sorted(request_id for ids in self.requests.values() for request_id in ids)

    def count_running(self, request: Request, step: int) -> None:
        """Count a running request (1), or its end (-1)."""
        self.running += step
        if request.batch:
            self.batch.count(0, step)
        elif step > 0:
            self.shares.run(request.tenant, request.id)
        else:
            self.shares.stop(request.tenant, request.id)

    # ------------------------------------------------------------ who waits

    def queue_of(self, request: Request) -> WaitingQueue[Request]:
        """Return the queue of a request's priority."""
        return self.batch.queue if request.batch else self.queue

    def overtaking_of(self, request: Request) -> Overtaking[Request]:
        """Return the counts of the queue of a request's priority."""
        return self.batch.overtaking if request.batch else self.overtaking

    def enqueue(self, request: Request, work_per_s: float) -> None:
        """Let a request wait. `work_per_s`: tokens per second of the pool, for an order with ageing."""
        self._push(request, work_per_s)
        if request.batch:
            return
        self.queued_by_adapter[request.adapter] += 1
        self.queued_tokens += request.waiting.tokens
        self.queued_work += request.waiting.work
        self.queued_prompt_tokens += request.tokens.prompt

    def dequeue(self, request: Request) -> None:
        """Let a request wait no longer. Raises KeyError if it does not."""
        self.queue_of(request).remove(request)
        self.overtaking_of(request).forget(request.id)
        if request.batch:
            return
        self.claims.forget(request.id)
        self.queued_tokens -= request.waiting.tokens
        self.queued_work -= request.waiting.work
        self.queued_prompt_tokens -= request.tokens.prompt
        self.queued_by_adapter[request.adapter] -= 1
        if not self.queued_by_adapter[request.adapter]:
            del self.queued_by_adapter[request.adapter]

    def stop_awaiting_class(self, request: Request, work_per_s: float) -> None:
        """Let a queued request wait for any numerics class; it keeps its place by age."""
        self.queue_of(request).remove(request)
        request.stop_awaiting_class()
        self._push(request, work_per_s)

    def follow(self, spec: PoolSpec, work_per_s: float) -> None:
        """Order waiting requests by the policy and the weights of the spec."""
        waiting = sorted((*self.queue, *self.batch.queue), key=lambda request: request.order)
        self.queue = _queue_of(spec)
        self.batch.wait_in(_queue_of(spec))
        self.shares.follow(self.queue.counters)
        for request in waiting:
            self._push(request, work_per_s)

    def recheck(self) -> None:
        """Let the next cycle reject requests that became infeasible."""
        self._recheck = True

    def take_recheck(self) -> bool:
        """Return whether queued requests may have become infeasible since the last call."""
        recheck, self._recheck = self._recheck, False
        return recheck

    def _push(self, request: Request, work_per_s: float) -> None:
        waiting = self.queue_of(request)
        if waiting.policy.ages:
            request.expect_work()
        waiting.push(request, work_per_s)

    # ------------------------------------------------------------ tenants

    def charge(self, request: Request, load_tokens: float) -> None:
        """Charge a request's tenant for what it is expected to cost, and for loading its adapter, in output tokens."""
        extra_cost = request.charge(max(request.charged, request.tokens.predicted_cost))
        self.queue_of(request).counters.charge(request.tenant, extra_cost + load_tokens)

    def settle(self, request: Request, output_tokens: int) -> None:
        """Charge the tenant of an ended request for computed tokens in place of the prediction."""
        if request.charged:
            extra_cost = request.charge(request.tokens.cost_of(output_tokens))
            self.queue_of(request).counters.charge(request.tenant, extra_cost)

    def delay_s(self, request: Request, now: float) -> float:
        """Return the delay of a leaving request's arrival in the order of prompts.

        The prompts of a tenant that runs more than its share come after those that others bring within a while: else
        each of those waited for the prompts that a flood has on the runner already.
        """
        if request.batch:
            return self.batch.queue.delay_s(request, now, alone=True)  # its prompt comes after interactive ones anyway
        alone = self.shares.is_alone()
        is_above_share = not alone and self.shares.is_beyond(request.tenant)
        return self.queue.delay_s(request, now, alone=alone) + is_above_share * BEYOND_SHARE_S


def _queue_of(spec: PoolSpec) -> WaitingQueue[Request]:
    return WaitingQueue(orders.QUEUE_POLICIES[spec.queue](), TokenCounters(dict(spec.tenant_weights)))
