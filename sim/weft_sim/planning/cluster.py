"""The cluster level: which machines compute a request's phases, and how its KV travels between them.

`shortest_queue`: both phases on the machine with the fewest pending tokens. `mixed_pool` (Splitwise, section 4.1): the
prompt machine with the fewest pending tokens and the token machine with the least reserved memory; where all of a kind
are full, a machine of the other kind joins the mixed set, and returns when it is idle. Both as splitwise-sim has them.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf

from weft.domain.runner import RunnerRole
from weft_sim.clock import Clock, Rank
from weft_sim.planning.machine import MachineKind, PlannedMachine, Stepping
from weft_sim.planning.request import PhaseTask, PlannedRequest
from weft_sim.traces import TraceArrival


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model to serve. `kv_token_bytes`: KV of a token in all layers."""

    name: str
    layers: int
    kv_token_bytes: int
    weight_bytes: int


@dataclass(frozen=True, slots=True)
class KvLink:
    """KV between two machines: at most `bytes_per_s`, and no more than their links have; `setup_s` each.

    A prompt of at least `layer_wise_from` tokens sends a layer when it is computed; a shorter one sends all of it
    afterwards (section 4.2). `one_at_a_time`: a machine's transfers share its link, first come first served; else they
    know nothing of each other, as in splitwise-sim. Without memory at the receiver it is tried again after `retry_s`.
    """

    bytes_per_s: float = inf
    layer_wise_from: float = 512
    setup_s: float = 0.0
    one_at_a_time: bool = True
    retry_s: float = 0.05

    def seconds(self, model: ServedModel, prompt_tokens: int, prompt_s: float, bytes_per_s: float = inf) -> float:
        """Return the rest of a transfer at this rate, after a prompt of `prompt_s`."""
        whole_s = prompt_tokens * model.kv_token_bytes / min(self.bytes_per_s, bytes_per_s)
        if prompt_tokens < self.layer_wise_from:
            return self.setup_s + whole_s
        layer_s, hidden_s = whole_s / model.layers, prompt_s * (model.layers - 1) / model.layers
        return self.setup_s + max(layer_s, whole_s - hidden_s)


class UnsupportedRules(ValueError):
    """These machines cannot serve by the rules. The text has the reason."""


@dataclass(frozen=True, slots=True)
class Rules:
    """How a cluster serves. `max_pending_tokens`: of a machine's queue; beyond it no prompt is added."""

    scheduling: str = "mixed_pool"
    stepping: Stepping = field(default_factory=Stepping)
    transfer: KvLink = field(default_factory=KvLink)
    max_pending_tokens: int = 8_192


@dataclass(frozen=True, slots=True)
class Roles:
    """From `at` on, machines in each role."""

    at: float
    prompt: int
    token: int
    mixed: int


class Cluster:
    """Machines that serve arrivals, once. A request's token phase begins on its prompt's machine or on a second one.

    Unless `rules.stepping.lazy`, a request whose phases are on one machine reserves the memory of both with the first.
    `observe` is called with a request at its first token and at its end; once it returns True the run stops.

    Raises UnsupportedRules for request-level batching on machines of one phase.
    """

    def __init__(
        self,
        machines: Sequence[tuple[MachineKind, RunnerRole]],
        model: ServedModel,
        rules: Rules,
        observe: Callable[[PlannedRequest], bool] | None = None,
        clock: Clock | None = None,
    ) -> None:
        if rules.stepping.batching == "request" and any(role is not RunnerRole.MIXED for _, role in machines):
            raise UnsupportedRules("request-level batching keeps a request's phases together: use mixed machines only")
        self.clock = clock or Clock(0.0)
        self.model, self.rules, self._observe = model, rules, observe
        self.machines = [
            PlannedMachine(number, kind, role, rules.stepping, self.clock, self._finished, self._freed)
            for number, (kind, role) in enumerate(machines)
        ]
        self.pools = {role: [machine for machine in self.machines if machine.role is role] for role in RunnerRole}
        self.requests: list[PlannedRequest] = []
        self.roles: list[Roles] = []
        self.transferred_bytes = 0
        self._placed: dict[
            PlannedRequest, PlannedMachine
        ] = {}  # of a prompt that is not finished: where its token phase will be
        self._assign = {"shortest_queue": self._shortest_queue, "mixed_pool": self._mixed_pool}[rules.scheduling]
        self._count_roles()

    def serve(self, arrivals: Sequence[TraceArrival]) -> None:
        """Serve to the last answer, or until `observe` stops it; what can never be served stays unfinished."""
        for number, arrival in enumerate(arrivals):
            request = PlannedRequest(
                number, arrival.at_s, arrival.prompt_tokens, arrival.output_tokens, arrival.adapter
            )
            self.requests.append(request)
            self.clock.at(arrival.at_s, Rank.ARRIVAL, self._arrived, request)
        self.clock.run()

    @property
    def gaps(self) -> Counter[int]:
        """Return the times between tokens of all requests, in GAP_S."""
        return sum((machine.gaps for machine in self.machines), Counter[int]())

    def check(self) -> None:
        """Check the accounts: every request is on at most one machine's books, and KV balances."""
        for machine in self.machines:
            machine.check()
        used_bytes = sum(request.kv_bytes for request in self.requests)
        assert used_bytes == sum(machine.kv_used for machine in self.machines)
        assert sum(map(len, self.pools.values())) == len(self.machines)

    # ---------------------------------------------------------------- where

    def _arrived(self, request: PlannedRequest) -> None:
        prompt, token = self._assign(request)
        first, second = self._kv(request.prompt_tokens + 1), self._kv(request.output_tokens - 1)
        together = prompt is token
        if together and not self.rules.stepping.lazy:
            first, second = first + second, 0
        prompt.pending_tokens += request.prompt_tokens
        token.pending_tokens += 1
        prompt.kv_promised += first
        token.kv_promised += second if together else first + second
        self._placed[request] = token
        request.server_s = prompt.kind.request_s
        prompt.submit(PhaseTask(request, True, request.prompt_tokens, request.prompt_tokens, first))
        if together and request.output_tokens > 1:
            prompt.submit(self._token_task(request, second))

    def _token_task(self, request: PlannedRequest, kv_bytes: int) -> PhaseTask:
        return PhaseTask(request, False, request.output_tokens - 1, 1, kv_bytes)

    def _shortest_queue(self, _: PlannedRequest) -> tuple[PlannedMachine, PlannedMachine]:
        machine = min(self.machines, key=_pending)
        return machine, machine

    def _mixed_pool(self, request: PlannedRequest) -> tuple[PlannedMachine, PlannedMachine]:
        prompts, tokens, mixed = (self.pools[role] for role in (RunnerRole.PROMPT, RunnerRole.TOKEN, RunnerRole.MIXED))
        prompt = self._prompt_machine(prompts, request) or self._prompt_machine(mixed, request)
        token = self._token_machine(tokens, request) or self._token_machine(mixed, request)
        if prompt is None and tokens:
            prompt = self._to_mixed(min(tokens, key=_pending))
        if token is None and prompts:
            token = self._to_mixed(min(prompts, key=_promised))
        if prompt is None or token is None:
            prompt = token = min((*prompts, *mixed, *tokens), key=_pending)
        return prompt, token

    def _prompt_machine(self, machines: Sequence[PlannedMachine], request: PlannedRequest) -> PlannedMachine | None:
        machine = min(machines, key=_pending, default=None)
        if machine is None:
            return None
        full = machine.pending_tokens + request.prompt_tokens > self.rules.max_pending_tokens
        return None if full and machine.waiting else machine

    def _token_machine(self, machines: Sequence[PlannedMachine], request: PlannedRequest) -> PlannedMachine | None:
        machine = min(machines, key=_promised, default=None)
        if machine is None:
            return None
        needed = self._kv(request.prompt_tokens + request.output_tokens)
        return None if machine.kv_promised + needed >= machine.kind.kv_bytes else machine

    def _to_mixed(self, machine: PlannedMachine) -> PlannedMachine:
        self.pools[machine.role].remove(machine)
        machine.role = RunnerRole.MIXED
        self.pools[RunnerRole.MIXED].append(machine)
        self._count_roles()
        return machine

    def _freed(self, machine: PlannedMachine) -> None:
        if machine.role is RunnerRole.MIXED and machine.home is not RunnerRole.MIXED:
            self.pools[RunnerRole.MIXED].remove(machine)
            machine.role = machine.home
            self.pools[machine.home].append(machine)
            self._count_roles()

    def _count_roles(self) -> None:
        sizes = (len(self.pools[role]) for role in (RunnerRole.PROMPT, RunnerRole.TOKEN, RunnerRole.MIXED))
        self.roles.append(Roles(self.clock.now, *sizes))

    # ---------------------------------------------------------------- what then

    def _finished(self, machine: PlannedMachine, task: PhaseTask) -> None:
        request, now = task.request, self.clock.now
        if not task.is_prompt:
            machine.pending_tokens -= 1
            self._ended(machine, request)
            return
        machine.pending_tokens -= request.prompt_tokens
        request.first_at = now
        if self._observe is not None and self._observe(request):
            self.clock.stop()
        token = self._placed.pop(request)
        if request.output_tokens == 1:
            token.pending_tokens -= 1
            if token is not machine:
                token.kv_promised -= self._kv(request.prompt_tokens + 1)
            self._ended(machine, request)
            return
        if token is machine:
            for following in request.tasks:
                following.last_at = now
        else:
            assert request.began is not None
            self._send(request, machine, token, now - request.began)

    def _ended(self, machine: PlannedMachine, request: PlannedRequest) -> None:
        request.ended = self.clock.now
        machine.release(request, request.kv_bytes)
        self._has_memory(machine)
        if self._observe is not None and self._observe(request):
            self.clock.stop()

    def _send(self, request: PlannedRequest, source: PlannedMachine, target: PlannedMachine, prompt_s: float) -> None:
        """Begin the transfer once the target has memory for it."""
        kv_bytes, transfer, now = self._kv(request.prompt_tokens + 1), self.rules.transfer, self.clock.now
        if target.kv_used + kv_bytes > target.kind.kv_bytes:
            again = partial(self._send, request, source, target, prompt_s)
            self.clock.call_after(transfer.retry_s, Rank.DELIVERY, again)
            return
        target.kv_used += kv_bytes
        request.kv_bytes += kv_bytes
        request.transferred = True
        self.transferred_bytes += kv_bytes
        begin = max(now, source.link_free) if transfer.one_at_a_time else now
        rate = min(source.kind.link_bytes_per_s, target.kind.link_bytes_per_s)
        end = begin + transfer.seconds(self.model, request.prompt_tokens, prompt_s, rate)
        source.link_free = end
        self.clock.at(end, Rank.DELIVERY, self._received, request, source, target, kv_bytes)

    def _received(self, request: PlannedRequest, source: PlannedMachine, target: PlannedMachine, kv_bytes: int) -> None:
        source.release(request, kv_bytes)
        task = self._token_task(request, self._kv(request.output_tokens - 1))
        assert request.first_at is not None
        task.last_at = request.first_at
        target.submit(task)
        source.wake()

    def _has_memory(self, machine: PlannedMachine) -> None:
        """Wake a machine with newly free memory. Machines of splitwise-sim do not select again then."""
        if not self.rules.stepping.lazy:
            machine.wake()

    def _kv(self, tokens: int) -> int:
        return tokens * self.model.kv_token_bytes


def _pending(machine: PlannedMachine) -> int:
    return machine.pending_tokens


def _promised(machine: PlannedMachine) -> int:
    return machine.kv_promised
