"""A deployment as one run: hosts, processes, streams and clients."""

from array import array
from collections.abc import Callable
from dataclasses import replace
from hashlib import blake2b
from typing import Any

from weft.domain.machine import Kind, Peer
from weft.domain.prediction import Prediction
from weft.domain.request import GatewayHello
from weft.domain.runner import SupervisorHello
from weft_gateway.core import events as gw
from weft_sim.clock import Clock, random_of
from weft_sim.controller import ControllerShell
from weft_sim.deployment import Deployment, RunnerPlan
from weft_sim.hosts import Host, Lane
from weft_sim.laws import ClientRequest, Laws
from weft_sim.network import Network
from weft_sim.process import SimulatedProcess
from weft_sim.shells import GatewayShell, PredictorShell, RegistryShell, RunnerShell, SchedulerShell, SupervisorShell
from weft_sim.timeline import Timeline
from weft_sim.wire import WireCodec


class World:
    """One run. `laws` watches; `check`: every machine checks itself after every event."""

    def __init__(
        self,
        deployment: Deployment,
        seed: int,
        *,
        check: bool = True,
        watch: bool = True,
        timeline: Timeline | None = None,
    ) -> None:
        self.deployment, self.seed, self.timeline = deployment, seed, timeline
        self.clock = Clock()
        ages = any(pool.queue == "shortest" for pool in deployment.pools)  # then its order bounds who passes whom
        bound = None if ages else deployment.scheduler.starvation_bound
        self.laws = Laws(
            lambda: self.clock.now, lambda: self.scheduler.now, bound, deployment.scheduler.avoid_s,
            deployment.scheduler.max_preemptions,
        )  # fmt: skip
        self.network = Network(
            self.clock, WireCodec(), random_of(seed, "network"),
            delay_s=deployment.delay_s, jitter_s=deployment.jitter_s,
        )  # fmt: skip
        self.digest = blake2b(digest_size=8)
        if watch:
            self.network.on_delivery = self._delivered
        hosts = {name: Host(name, cores, self.clock) for name, cores in deployment.hosts.items()}
        self.processes: dict[str, SimulatedProcess] = {}
        self.clients: dict[str, ClientRequest] = {}
        self.contents = {adapter.digest: adapter.bytes for adapter in deployment.adapters}  # at the depot
        self.predictions: dict[str, Prediction] = {}  # that are replayed, by request
        self.on_end: Callable[[ClientRequest], None] | None = None
        self.on_event: Callable[[SimulatedProcess, object, float], None] | None = (
            None  # of processes that are made from now on
        )
        self.watched, self._check = watch, check
        self.hosts = hosts
        control, process = deployment.control, self._process
        self.gaps_s: array[float] | None = None  # between two tokens of an answer; None: they are not kept
        self.clients_cost = deployment.costs.client_token > 0.0
        self.client = Lane(hosts[control], wake_s=deployment.costs.client_wake)
        self.controller = ControllerShell(self) if deployment.objects else None
        self.registry = process("registry", Kind.REGISTRY, self.controller or RegistryShell(deployment), control)
        self.scheduler = process("scheduler", Kind.SCHEDULER, SchedulerShell(self), control)
        self.supervisor = process("supervisor", Kind.SUPERVISOR, SupervisorShell(self), control)
        self.supervisor.link(self.scheduler, lambda: SupervisorHello("supervisor", self._stored_term()))
        self.registry.link(self.scheduler, lambda: None)
        self.predictor = process("predictor", Kind.PREDICTOR, PredictorShell(self), control)
        self.supervisor.link(self.predictor, lambda: None)
        self.runners: dict[str, SimulatedProcess] = {}
        for plan in deployment.runners:
            self.add_runner(plan)
        self.gateways: list[SimulatedProcess] = []
        for number in range(deployment.gateways):
            gateway = process(f"gateway-{number}", Kind.GATEWAY, GatewayShell(self), control)
            gateway.link(self.scheduler, lambda gateway=gateway: GatewayHello(gateway.peer.name, applies_routes=True))
            gateway.link(self.predictor, lambda: None)
            self.gateways.append(gateway)

    def _process(self, name: str, kind: Kind, shell: Any, host: str) -> SimulatedProcess:
        made = SimulatedProcess(
            name, kind, shell, self.hosts[host], self.clock, self.network, self.deployment.costs, check=self._check
        )
        if self.watched:
            made.on_effects = self.laws.effects
        made.on_event = self.on_event
        self.processes[name] = made
        return made

    def add_runner(self, plan: RunnerPlan, cores: int = 0) -> SimulatedProcess:
        """Add a runner's process, not started yet. `cores`: of a host of its own."""
        if cores:
            self.hosts[plan.host] = Host(plan.host, cores, self.clock)
        shell = RunnerShell(self, plan)
        runner = self._process(plan.spec.address, Kind.RUNNER, shell, plan.host)
        runner.link(self.supervisor, lambda: shell.spec)
        self.runners[plan.spec.address] = runner
        return runner

    # ---------------------------------------------------------------- use

    def start(self) -> None:
        for process in self.processes.values():
            process.start()

    def serving(self) -> list[SimulatedProcess]:
        """Return the runners that are up, neither starting nor ending."""
        controller = self.controller
        return [r for r in self.runners.values() if r.up and (controller is None or controller.serves(r.name))]

    def submit(self, request_id: str, answers: list[ClientRequest], predicted: Prediction | None = None) -> None:
        """Bring a client's request to its gateway; a gateway that is down refuses the connection."""
        gateway = self.processes[answers[0].gateway]
        if not gateway.up:
            return
        if predicted is not None:
            self.predictions[request_id] = replace(predicted, request_id=request_id)
        for request in answers:
            request.arrived = self.clock.now
            self.clients[request.id] = request
            self.laws.submitted(request)
            if self.timeline is not None:
                self.timeline.begin(request.gateway, request.id, "request", self.clock.now, model=request.model_name)
        assert isinstance(gateway.shell, GatewayShell)
        if cost := self.deployment.costs.client_request:
            self.client.run(cost, gateway.shell.arrive, gateway, request_id, answers)
        else:
            gateway.shell.arrive(gateway, request_id, answers)

    def cancel(self, request_id: str) -> None:
        """Let the client go away."""
        answers = [r for r in self.clients.values() if r.request_id == request_id and not r.finish]
        if not answers or not (gateway := self.processes[answers[0].gateway]).up:
            return
        for answer in answers:
            answer.is_gone = True
        gateway.post(gw.ClientGone(request_id))

    @property
    def trace_hash(self) -> str:
        """The hash of every message that was delivered: its time, its ends, its bytes."""
        return self.digest.hexdigest()

    # ---------------------------------------------------------------- from shells

    def _delivered(self, sender: Peer, receiver: Peer, data: bytes) -> None:
        self.digest.update(f"{self.clock.now!r} {sender.name} {receiver.name} {len(data)} ".encode())
        self.digest.update(data)

    def _stored_term(self) -> int:
        shell = self.supervisor.shell
        assert isinstance(shell, SupervisorShell)
        return shell.term

    def emitted(self, request: ClientRequest) -> None:
        """Send a token on its way to its client."""
        if self.clients_cost:
            self.client.run(self.deployment.costs.client_token, self._read, request)
        else:
            self._read(request)

    def finished(self, request_id: str, reason: str, error: str) -> None:
        if self.watched:
            self.laws.ended(request_id, reason, error)
        request = self.clients[request_id]
        request.finish, request.error = reason, error
        if self.clients_cost:
            self.client.run(0.0, self._read_end, request)
        else:
            self._read_end(request)

    def _read(self, request: ClientRequest) -> None:
        """Let a client read a token."""
        now = self.clock.now
        if self.gaps_s is not None:
            if request.last_at is not None:
                self.gaps_s.append(now - request.last_at)
            request.last_at = now
        if request.first_at is None:
            request.first_at = now
            if self.timeline is not None:
                self.timeline.instant(request.gateway, f"first token {request.id}", now)

    def _read_end(self, request: ClientRequest) -> None:
        request.ended_at = self.clock.now
        if self.on_end is not None:
            self.on_end(request)
        if self.timeline is not None:
            self.timeline.end(
                request.gateway, request.id, "request", self.clock.now, reason=request.finish, error=request.error
            )
