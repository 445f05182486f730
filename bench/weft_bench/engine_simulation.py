"""An inference engine around a step model: continuous batching, chunked prompts, KV memory, adapter slots.

One iteration after the other, at the step model's seconds. Iterations in which nothing begins, ends or arrives are
jumped over: their time is their number times that of the middle one, exact where time is linear in the context.
Requests are admitted first come, first served; one whose adapter finds no slot is passed by those that need none. An
adapter that nobody uses any more keeps its slot until another one needs it, the least recently admitted first. KV is
counted in tokens, half a page a sequence being waste. Where the next tokens find no memory, the youngest sequence is
preempted, waits at the front, and is computed again.
"""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from math import ceil, inf

from weft_bench.engine_queue import AdapterFifo
from weft_bench.engine_request import EngineRequest
from weft_sim.performance.step import PerformanceModel, StepShape


class PromptBatching(Enum):
    """How prompts share iterations with decode rows."""

    CHUNKED = "chunked"  # decode rows first, prompts in what is left of the tokens, cut where it ends (vLLM)
    WHOLE = "whole"  # the same, but prompts are not cut (TensorRT-LLM)
    PROMPTS_FIRST = "prompts first"  # an iteration has prompts, cut, or decode rows; prompts before (SGLang)


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What an instance admits. `reserve`: memory for the whole answer when a request begins; `slots` None: no limit."""

    kv_tokens: float
    max_sequences: int = 256
    batch_tokens: int = 8192
    batching: PromptBatching = PromptBatching.CHUNKED
    reserve: bool = False
    slots: int | None = None
    page_tokens: int = 16


# Shape, how many equal iterations, seconds of one, requests without a token before them, decode rows.
Observer = Callable[[StepShape, int, float, int, int], None]


@dataclass
class EngineSimulation:
    """One instance."""

    model: PerformanceModel
    limits: EngineLimits
    observer: Observer | None = None
    now: float = 0.0
    preemptions: int = 0
    waiting: AdapterFifo = field(default_factory=AdapterFifo)
    _prompts: list[EngineRequest] = field(
        default_factory=list[EngineRequest]
    )  # running, not all of the prompt computed
    _decoding: dict[int, EngineRequest] = field(default_factory=dict[int, EngineRequest])  # oldest first
    _ends: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])  # heap: iteration, key of _decoding
    _users: dict[int, int] = field(default_factory=dict[int, int])  # running requests by adapter
    _in_slots: OrderedDict[int, None] = field(default_factory=OrderedDict[int, None])  # least recently admitted first
    _loads: int = 0  # adapters that came to a slot for this iteration
    _passed_over: int = 0  # waiting requests whose adapters find none
    _iteration: int = 0
    _key: int = 0
    _context: int = 0  # tokens of the decode rows
    _held: int = 0

    @property
    def running(self) -> int:
        """Sequences that were admitted."""
        return len(self._prompts) + len(self._decoding)

    @property
    def idle(self) -> bool:
        """Is there nothing to do?"""
        return not self.waiting and not self.running

    @property
    def kv_used(self) -> float:
        """Tokens whose KV is held, with the waste of pages."""
        return self._held + self.running * self.limits.page_tokens / 2

    def submit(self, request: EngineRequest) -> None:
        """Add a request, to be admitted when `iterate` finds memory. Raises ValueError when it never can."""
        if request.prompt_tokens + request.output_tokens > self.limits.kv_tokens - self.limits.page_tokens:
            raise ValueError(f"{request.prompt_tokens} + {request.output_tokens} tokens do not fit the KV memory")
        request.to_compute = request.prompt_tokens
        self.waiting.append(request)

    def iterate(self, next_arrival_s: float = inf) -> list[EngineRequest]:
        """Run one iteration, or as many equal ones as end before the next arrival. Returns the requests that ended."""
        admits = not self._preempt()
        rows = len(self._decoding)
        prompts_only = self.limits.batching is PromptBatching.PROMPTS_FIRST
        chunks = self._chunks(self.limits.batch_tokens - (0 if prompts_only else rows), admits)
        if chunks:
            return self._mixed(chunks, 0 if prompts_only else rows)
        return self._decode(next_arrival_s)

    def _preempt(self) -> bool:
        """Preempt the youngest until every decode row finds memory for a token. True where one was preempted."""
        before = self.preemptions
        while (
            self.kv_used + len(self._decoding) > self.limits.kv_tokens and self.running > 1 and not self.limits.reserve
        ):
            self.preemptions += 1
            if self._prompts:
                request = self._prompts.pop()
            else:
                _, request = self._decoding.popitem()
                steps = self._iteration - request.since
                self._context -= request.to_compute + steps
                self._held -= steps
                request.made += steps
            self._free(request)
            request.to_compute, request.computed = request.prompt_tokens + request.made, 0
            self.waiting.put_first(request)
        return self.preemptions > before

    def _chunks(self, budget: int, admits: bool) -> list[tuple[EngineRequest, int]]:
        """Return the prompts of this iteration, with how many of their tokens; new ones among them if `admits`."""
        found = list[tuple[EngineRequest, int]]()
        whole = self.limits.batching is PromptBatching.WHOLE
        self._loads = self._passed_over = 0
        for request in self._prompts:
            size = min(request.to_compute - request.computed, budget)
            if size > 0:
                budget -= size
                found.append((request, size))
                self._hold(request, size)
        while admits and budget > 0 and self.running < self.limits.max_sequences:
            slots = self.limits.slots
            request = self.waiting.head(slots is None or len(self._users) < slots)
            if request is None:
                break
            cached = min(request.cached_tokens, request.to_compute - 1)
            left = request.to_compute - cached
            size = left if whole else min(left, budget)
            if size > budget and (found or self._decoding) and left <= self.limits.batch_tokens:
                break
            need = request.prompt_tokens + request.output_tokens if self.limits.reserve else request.to_compute
            if self.kv_used + len(self._decoding) + need + self.limits.page_tokens / 2 > self.limits.kv_tokens:
                break
            self._admit(request, cached)
            self._hold(request, size)
            budget -= size
            found.append((request, size))
        if len(self._users) == self.limits.slots:
            self._passed_over = self.waiting.without_slot
        return found

    def _admit(self, request: EngineRequest, cached: int) -> None:
        self.waiting.remove(request)
        self._prompts.append(request)
        request.computed = cached
        request.held = request.prompt_tokens + request.output_tokens if self.limits.reserve else cached
        self._held += request.held
        if request.adapter is not None:
            self._bring(request.adapter)
            self._users[request.adapter] = self._users.get(request.adapter, 0) + 1
            self.waiting.resident(request.adapter)

    def _bring(self, adapter: int) -> None:
        """Bring an adapter to a slot, unless it is in one."""
        if adapter in self._in_slots:
            self._in_slots.move_to_end(adapter)
            return
        if len(self._in_slots) == self.limits.slots:
            del self._in_slots[next(other for other in self._in_slots if other not in self._users)]
        self._in_slots[adapter] = None
        self._loads += 1

    def _hold(self, request: EngineRequest, size: int) -> None:
        if not self.limits.reserve:
            request.held += size
            self._held += size

    def _free(self, request: EngineRequest) -> None:
        """Free what a request held, and its adapter's slot if no other request uses that."""
        self._held -= request.held
        request.held = 0
        if request.adapter is None:
            return
        self._users[request.adapter] -= 1
        if not self._users[request.adapter]:
            del self._users[request.adapter]
            self.waiting.gone(request.adapter)

    def _mixed(self, chunks: list[tuple[EngineRequest, int]], rows: int) -> list[EngineRequest]:
        """Run one iteration with prompts, and with all decode rows or none."""
        tokens = sum(size for _, size in chunks)
        pairs = sum(size * request.computed + size * (size + 1) // 2 for request, size in chunks)
        context = self._context + rows if rows else 0
        self._spend(self._shape(len(chunks), tokens, pairs, rows, context), 1)
        ended = self._after(1) if rows else []
        for request, size in chunks:
            request.computed += size
            if request.computed == request.to_compute:
                ended += self._begin_decoding(request)
        self._prompts = [request for request in self._prompts if request.computed < request.to_compute]
        return ended

    def _begin_decoding(self, request: EngineRequest) -> list[EngineRequest]:
        """Count the first token of a request whose prompt is computed. Returns the request where it was the last."""
        request.made += 1
        if request.first_s is None:
            request.first_s = self.now
        left = request.output_tokens - request.made
        request.since = self._iteration
        if left <= 0:
            request.last_s = self.now
            self._free(request)
            return [request]
        self._key += 1
        self._decoding[self._key] = request
        self._context += request.to_compute
        heapq.heappush(self._ends, (self._iteration + left, self._key))
        return []

    def _decode(self, next_arrival_s: float) -> list[EngineRequest]:
        """Run iterations of the decode rows until one of them ends, memory does, or a request arrives."""
        rows = len(self._decoding)
        while self._ends[0][1] not in self._decoding:
            heapq.heappop(self._ends)
        count = self._ends[0][0] - self._iteration
        if not self.limits.reserve:
            count = min(count, max(1, int((self.limits.kv_tokens - self.kv_used) // rows)))
        if count > 1 and next_arrival_s < inf:
            shortest = self.model.seconds(self._shape(0, 0, 0, rows, self._context + rows))
            count = max(1, min(count, ceil((next_arrival_s - self.now) / shortest)))
            longest = self.model.seconds(self._shape(0, 0, 0, rows, self._context + rows * count))
            count = max(1, min(count, ceil((next_arrival_s - self.now) / longest)))  # none begins after the arrival
        if rows % 2 and count > 1 and count % 2 == 0:
            count -= 1  # so that the middle has a whole number of tokens
        middle = self._context + rows * (count + 1) // 2
        self._spend(self._shape(0, 0, 0, rows, middle), count)
        return self._after(count)

    def _shape(self, prompts: int, tokens: int, pairs: int, rows: int, context: int) -> StepShape:
        return StepShape(prompts, tokens, pairs, rows, context, len(self._users), self._loads, self._passed_over)

    def _spend(self, shape: StepShape, count: int) -> None:
        seconds = self.model.seconds(shape)
        if self.observer:
            self.observer(shape, count, seconds, len(self.waiting) + len(self._prompts), len(self._decoding))
        self.now += seconds * count

    def _after(self, count: int) -> list[EngineRequest]:
        """Count `count` more tokens for each decode row. Returns those that ended."""
        self._iteration += count
        grown = count * len(self._decoding)
        self._context += grown
        self._held += 0 if self.limits.reserve else grown
        ended = list[EngineRequest]()
        while self._ends and self._ends[0][0] <= self._iteration:
            request = self._decoding.pop(heapq.heappop(self._ends)[1], None)
            if request is None:
                continue
            steps = self._iteration - request.since
            request.made += steps
            request.last_s = self.now
            self._context -= request.to_compute + steps
            self._held -= 0 if self.limits.reserve else steps
            self._free(request)
            ended.append(request)
        return ended


def serve(
    engine: EngineSimulation,
    arrivals: Iterable[EngineRequest],
    until_s: float = inf,
    answered: Callable[[EngineRequest], EngineRequest | None] = lambda _: None,
    max_waiting: int | None = None,
) -> list[EngineRequest]:
    """Serve requests in the order of their arrival until all ended or the clock says so. Returns those that ended.

    `answered` may give another request, which arrives at once: clients that wait for their answers. Beyond
    `max_waiting` a request is lost.
    """
    ended = list[EngineRequest]()
    coming = iter(arrivals)
    upcoming = next(coming, None)
    while engine.now < until_s:
        while upcoming is not None and upcoming.arrival_s <= engine.now:
            if max_waiting is None or len(engine.waiting) < max_waiting:
                engine.submit(upcoming)
            upcoming = next(coming, None)
        if engine.idle:
            if upcoming is None:
                break
            engine.now = upcoming.arrival_s
            continue
        for request in engine.iterate(min(until_s, upcoming.arrival_s if upcoming else inf)):
            ended.append(request)
            follower = answered(request)
            if follower is not None:
                follower.arrival_s = engine.now
                engine.submit(follower)
    return ended
