"""What the peers of each process may send: messages alone, and in any order to the cores that take them."""

import socket
import struct
from typing import Any

from google.protobuf.message import DecodeError, Message

from fuzz.building import Choices, filled
from harness.scheduler_driver import Driver
from weft.domain.fleet import FleetReport
from weft.domain.ids import Epoch, RunnerId
from weft.domain.limits import LimitReport
from weft.domain.machine import TICK, Close, Closed, Connected, Kind, Peer, Received
from weft.domain.request import (
    Assign,
    EndReason,
    FinishReason,
    GatewayHello,
    Priority,
    Sampling,
    SequenceTokens,
    SessionHello,
    Start,
    Step,
)
from weft.domain.routes import PoolRoute, RegistryHello, Route, Routes
from weft.domain.runner import SupervisorHello
from weft.wire.codec import batch, cluster, kv_transfer, prediction, registry, scheduling, session
from weft.wire.codec.cluster import (
    RUNNER_TO_SUPERVISOR,
    SCHEDULER_TO_SUPERVISOR,
    SUPERVISOR_TO_RUNNER,
    SUPERVISOR_TO_SCHEDULER,
)
from weft.wire.codec.kv_transfer import KV_FROM_RECEIVER, KV_FROM_SENDER
from weft.wire.codec.registry import REGISTRY_TO_SCHEDULER
from weft.wire.codec.scheduling import GATEWAY_TO_SCHEDULER, SCHEDULER_TO_GATEWAY
from weft.wire.codec.session import GATEWAY_TO_RUNNER, RUNNER_TO_GATEWAY
from weft.wire.errors import PeerError
from weft_gateway.core import SCHEDULER as TO_SCHEDULER
from weft_gateway.core import (
    Gateway,
    GatewayConfig,
    OpenSession,
    PreparedRequest,
    Proceed,
    RequestReady,
    TokenizerChanged,
    TokenizerState,
)
from weft_runner.core import BatchLimits, Fetch, Fetched, PoolLimits, Runner, SampledToken
from weft_runner.core.events import (
    CompileGrammar,
    FetchFailed,
    GrammarCompiled,
    Load,
    Loaded,
    LoadFailed,
    RunStep,
    StepDone,
    StepResults,
    StepSlot,
    SwapDone,
    SwapFailed,
    SwapIn,
    SwapOut,
)
from weft_runner.shell.kv_connection import KvConnection
from weft_supervisor.core import Supervisor, SupervisorConfig, runner_peer

NAMES = ("g", "s", "r", "q", "acme", "acme/p", "acme/m", "base", "sha256:1", "sha256:base", "uid-sha256:1", "cpu/x")
DIRECTIONS: list[Any] = [  # of every contract
    value
    for module in (batch, cluster, kv_transfer, prediction, registry, scheduling, session)
    for value in vars(module).values()
    if hasattr(value, "envelope") and not isinstance(value, type)
]


def decoded(data: bytes) -> None:
    """A message of one direction: raw bytes, or a filled envelope."""
    choices = Choices(data)
    _decode(choices.of(DIRECTIONS), choices, data[1:])


def _decode(direction: Any, choices: Choices, raw: bytes) -> Any:
    envelope: Message = direction.envelope()
    if choices.number(8):
        filled(envelope, choices, NAMES)
    else:
        envelope.ParseFromString(raw)
    return direction.decode(envelope)


def kv_frames(data: bytes) -> None:
    """What another runner writes into a connection of KV, from its first byte to its end."""
    here, there = socket.socketpair()
    with here, there:
        there.sendall(data[1:])
        there.shutdown(socket.SHUT_WR)
        connection = KvConnection(here, stall_s=1.0)
        direction = KV_FROM_SENDER if data[:1] < b"\x80" else KV_FROM_RECEIVER
        while True:
            envelope = direction.envelope()
            envelope.ParseFromString(connection.receive_frame())
            direction.decode(envelope)


def frames(*sizes: int) -> bytes:
    return b"".join(struct.pack(">I", size) + bytes(range(size % 256)) for size in sizes)


GATEWAY, SUPERVISOR, REGISTRY = Peer(Kind.GATEWAY, "g"), Peer(Kind.SUPERVISOR, "s"), Peer(Kind.REGISTRY, "registry")
HELLOS = {
    GATEWAY: GatewayHello("g", applies_routes=True),
    SUPERVISOR: SupervisorHello("s"),
    REGISTRY: RegistryHello(None),
}
SENDS = {GATEWAY: GATEWAY_TO_SCHEDULER, SUPERVISOR: SUPERVISOR_TO_SCHEDULER, REGISTRY: REGISTRY_TO_SCHEDULER}


def scheduler_core(data: bytes) -> None:
    """Peers of every kind say anything in any order; the scheduler goes on, and its books balance."""
    choices, driver = Choices(data), Driver().start("sha256:1")
    driver.runner("r")
    for _ in range(1 + choices.number(12)):
        peer = choices.of([*SENDS])
        match choices.number(10):
            case 0:
                driver.handle(Closed(peer))
                driver.handle(Connected(peer, HELLOS[peer]))
            case 1:
                driver.now += choices.of((0.001, 0.3, 6.0, 61.0))
                driver.handle(TICK)
            case 2:
                driver.submit("q", "sha256:1")
            case _:
                try:
                    message = _decode(SENDS[peer], choices, data[1:])
                except (PeerError, DecodeError):
                    continue
                if not isinstance(message, GatewayHello | SupervisorHello):
                    driver.handle(Received(peer, message))
    driver.core.check()


def supervisor_core(data: bytes) -> None:
    """Runners and a scheduler say anything in any order; the supervisor goes on, and its books balance."""
    choices, core, now = Choices(data), Supervisor(SupervisorConfig()), 0.0
    scheduler, runners = Peer(Kind.SCHEDULER, "scheduler"), dict[str, Peer]()
    core.handle(Connected(scheduler), now)
    for _ in range(1 + choices.number(12)):
        now += choices.of((0.001, 0.3, 1.0, 3.0))
        try:
            if choices.number(4):
                message = _decode(RUNNER_TO_SUPERVISOR, choices, data[1:])
                if hasattr(message, "total_pages"):
                    peer = runner_peer(message.runner)
                    runners[peer.name] = peer
                    core.handle(Connected(peer, message), now)
                elif runners:
                    core.handle(Received(choices.of([*runners.values()]), message), now)
            else:
                core.handle(Received(scheduler, _decode(SCHEDULER_TO_SUPERVISOR, choices, data[1:])), now)
        except (PeerError, DecodeError):
            continue
        core.handle(TICK, now)
    core.check()


RUNNER_LIMITS = PoolLimits(12, 4, 5, 2, 40, 9, frozenset([0]), BatchLimits(1, 7), host_bytes=25)
SESSION = Peer(Kind.GATEWAY, "g")


def runner_core(data: bytes) -> None:
    """A gateway and a supervisor say anything in any order; the runner computes, and its books balance."""
    choices, core, now = Choices(data), Runner(RUNNER_LIMITS), 0.0
    waiting: list[Any] = []  # for what the shell does beside the steps

    def handle(event: Any) -> None:
        effects = core.handle(event, now)
        core.check()
        waiting.extend(one for one in effects if isinstance(one, Fetch | Load | SwapOut | SwapIn | CompileGrammar))
        for step in (one for one in effects if isinstance(one, RunStep)):
            rows = [row.key for row in step.batch.rows if row.samples]
            failures = {key: "torn" for key in rows if not choices.number(16)}
            tokens = {key: SampledToken(choices.number(40)) for key in rows if key not in failures}
            handle(StepDone(step, StepResults(tokens, failures), 1.0))

    handle(Connected(SESSION, SessionHello("g", "i")))
    handle(Connected(SUPERVISOR))
    for _ in range(1 + choices.number(16)):
        match choices.number(12):
            case 0:
                handle(Closed(SESSION))
                handle(Connected(SESSION, SessionHello("g", "i")))
            case 1:
                now += choices.of((0.001, 0.06, 3.0, 31.0))
                handle(TICK)
            case 2 | 3:
                handle(StepSlot())
            case 4 if waiting:
                handle(_result_of(waiting.pop(0), fails=not choices.number(4)))
            case 5:
                prompt = tuple(choices.number(40) for _ in range(1 + choices.number(12)))
                epoch = Epoch(1, choices.number(8))
                handle(Received(SESSION, Start(choices.of(NAMES), epoch, prompt, (), 8, choices.number(9))))
            case kind:
                peer, direction = (SUPERVISOR, SUPERVISOR_TO_RUNNER) if kind < 8 else (SESSION, GATEWAY_TO_RUNNER)
                try:
                    message = _decode(direction, choices, data[1:])
                except (PeerError, DecodeError):
                    continue
                handle(Received(peer, message))


def _result_of(order: Any, *, fails: bool) -> Any:
    """What the shell of a runner reports of what the runner has ordered."""
    match order:
        case Fetch(digest):
            failed = FetchFailed(digest, EndReason.INTERNAL, "torn", permanent=False)
            return failed if fails else Fetched(digest, 10 if order.measure else None, 10 if order.to_host else None)
        case Load(digest):
            failed = LoadFailed(digest, EndReason.INTERNAL, "torn", permanent=False)
            return failed if fails else Loaded(digest, 4, 10, 10, 0.1)
        case CompileGrammar():
            return GrammarCompiled(order.peer, order.request_id, order.epoch, None, "no grammar")
        case _:
            return SwapFailed(order.number, "torn") if fails else SwapDone(order.number, len(order.pages), 0.1)


ROUTES = Routes(
    version=1,
    full=True,
    routes=(Route("acme/m", "acme", "acme/p", "sha256:1"),),
    pools=(PoolRoute("acme/p", "sha256:base", "m", 512, 1),),
)
RUNNERS = tuple(RunnerId(*of) for of in (("r", "q"), ("r", "r"), ("q", "q")))


def gateway_core(data: bytes) -> None:
    """A scheduler, a predictor and runners say anything in any order; the gateway goes on, and its books balance."""
    choices, core, now, counter = Choices(data), Gateway(GatewayConfig(), "g", lambda _outcome: b""), 100.0, 0
    sessions: dict[Peer, None] = {}

    def handle(event: Any) -> None:
        for effect in core.handle(event, now):
            match effect:
                case OpenSession(peer):
                    sessions[peer] = None
                case Close(peer):
                    sessions.pop(peer, None)
                case _:
                    pass
        core.check()

    handle(Connected(TO_SCHEDULER))
    handle(Received(TO_SCHEDULER, ROUTES))
    handle(TokenizerChanged("sha256:base", TokenizerState.READY))
    for _ in range(1 + choices.number(16)):
        match choices.number(12):
            case 0:
                now += choices.of((0.001, 0.06, 6.0, 61.0))
                handle(TICK)
            case 1:
                handle(choices.of((Closed, Connected))(TO_SCHEDULER))
            case 2 if sessions:
                handle(choices.of((Closed, Connected))(choices.of([*sessions])))
            case 3 | 4:
                counter += 1
                request_id, n = f"q{counter}", 1 + choices.number(2)
                core.admission.arrive(request_id, Priority.INTERACTIVE, now)
                if isinstance(core.admission.resolve(request_id, "acme/p", n, Priority.INTERACTIVE, now), Proceed):
                    handle(RequestReady([_prepared(request_id, n)]))
            case 5 if core.requests:
                epoch, runner = Epoch(1, choices.number(8)), choices.of(RUNNERS)
                handle(Received(TO_SCHEDULER, Assign(choices.of([*core.requests]), epoch, runner, "h:1", 8)))
            case 6 if core.requests and sessions:
                handle(Received(choices.of([*sessions]), _step(core, choices)))
            case kind:
                if kind > 9 and not sessions:
                    continue
                peer = choices.of([*sessions]) if kind > 9 else TO_SCHEDULER
                try:
                    message = _decode(RUNNER_TO_GATEWAY if kind > 9 else SCHEDULER_TO_GATEWAY, choices, data[1:])
                except (PeerError, DecodeError):
                    continue
                if not isinstance(message, FleetReport | LimitReport):  # of the shell
                    handle(Received(peer, message))


def _prepared(request_id: str, n: int) -> PreparedRequest:
    return PreparedRequest(
        request_id, request_id, "acme", ROUTES.routes[0], (1, 2), "text", 100, Sampling(),
        lambda token: bytes([token % 256]), 5_000, n=n,
    )  # fmt: skip


def _step(core: Gateway, choices: Choices) -> Step:
    """The next tokens of a request, or some that nobody waits for."""
    request_id = choices.of([*core.requests])
    stream = core.requests[request_id]
    epoch = stream.running.epoch if stream.running and choices.number(4) else Epoch(1, choices.number(8))
    at = len(stream.tokens) if choices.number(4) else choices.number(8)
    finish = choices.of((None, None, None, FinishReason.EOS, FinishReason.LENGTH))
    return Step(1, [SequenceTokens(request_id, epoch, at, choices.rest(choices.number(4)), finish)])
