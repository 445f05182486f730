"""One side of `weft bench turns`: run by path, with the PYTHONPATH of the checkout that it measures.

It imports the product alone, and little of it: an older checkout need not know `turns`.
The first line of standard input says what to load; each further line asks for a case, and is answered in a line with
the seconds of its timed parts (`wall_s`, `cpu_s`) and the units of work in them (`units`).
"""

import asyncio
import gc
import hashlib
import http.server
import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from weft.artifacts.adapter_config import parse_adapter_config
from weft.artifacts.digest import FileEntry, build_manifest, digest_of, hex_of
from weft.domain.adapter import AdapterState, Tier
from weft.domain.ids import Epoch, RunnerId
from weft.domain.machine import TICK, Connected, Kind, Peer, Received, Send
from weft.domain.prediction import Prediction
from weft.domain.request import (
    Assign,
    Ended,
    FinishReason,
    NoCapacity,
    Outcome,
    OutcomeAck,
    OutcomeReport,
    Priority,
    ResubmitComplete,
    Sampling,
    SequenceTokens,
    SessionHello,
    Start,
    Started,
    Step,
    Submit,
)
from weft.domain.routes import AdapterSpec, Keys, PoolRoute, PoolSpec, RegistryChange, Route, Routes
from weft.domain.runner import ClusterReport, ReportedRunner, RunnerFigures, RunnerReport, RunnerSpec, SequenceState
from weft.wire.codec.cluster import SUPERVISOR_TO_SCHEDULER
from weft.wire.codec.scheduling import GATEWAY_TO_SCHEDULER, SCHEDULER_TO_GATEWAY, outcome_bytes
from weft.wire.codec.session import GATEWAY_TO_RUNNER, RUNNER_TO_GATEWAY
from weft.wire.serving import SERVER_OPTIONS
from weft.wire.streams import SendQueue, serve_stream
from weft.wire.v1 import common_pb2, predictor_pb2, runner_pb2, scheduler_pb2
from weft.wire.v1.predictor_pb2_grpc import PredictorServicer, add_PredictorServicer_to_server
from weft.wire.v1.runner_pb2_grpc import RunnerServicer, add_RunnerServicer_to_server
from weft.wire.v1.scheduler_pb2_grpc import SchedulerServicer, add_SchedulerServicer_to_server

PROMPT_TOKENS, DECODE_TOKENS = 128, 32
RUNNERS, BUSY, BATCH = 20, 16, 64  # of the played fleet; requests that end and begin at a time
REQUESTS, STREAMS, REFUSALS, ANSWER_TOKENS = 128, 8, 400, 4
POOL, KEY, MODEL = "team/base", "sk-weft-turns", "tiny"
START_S = 120.0


class Clock:
    """Wall and CPU seconds inside the `with` blocks; `cpu` reads a process's CPU seconds, by default this one's."""

    def __init__(self, cpu: Callable[[], float] = time.process_time) -> None:
        self.wall_s = self.cpu_s = 0.0
        self._cpu = cpu

    def __enter__(self) -> None:
        self._wall_at, self._cpu_at = time.perf_counter(), self._cpu()

    def __exit__(self, *_: object) -> None:
        self.cpu_s += self._cpu() - self._cpu_at
        self.wall_s += time.perf_counter() - self._wall_at


class Engine:
    """A runner's engine with a random model, beaten from this thread. Adapters are named by their folders."""

    def __init__(self, work: dict[str, Any], scratch: str) -> None:
        from weft_runner.settings import parse_settings
        from weft_runner.shell.engine_factory import build_engine

        nowhere, base = "127.0.0.1:1", Path(work["base"])
        flags = {
            "listen": nowhere, "probes": nowhere, "supervisor": nowhere, "depot": f"http://{nowhere}",
            "data-dir": scratch, "pool": POOL, "base-digest": f"sha256:{0:064}", "kv-pages": work["pages"],
            "max-sequences": work["rows"], "token-time-ms": 60_000, "speculation": "off", **work["flags"],
        }  # fmt: skip
        words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
        settings = parse_settings(words, profile=False, max_prefills=work["rows"])
        files = {name: base / name for name in ("config.json", "model.safetensors")}
        self._session, self._vocab, self._posted = Peer(Kind.GATEWAY, "bench"), work["vocab"], 0
        self._first, self._ended, self._tokens = set[str](), set[str](), 0
        self._rows = 0
        self._bundle = build_engine(settings, files, self, self._told)
        self._engine = self._bundle.engine
        self._engine.post(Connected(self._session, SessionHello("bench", "")))
        self._loaded = set[tuple[str, ...]]()
        self.name = f"{self._bundle.numerics_class}, {self._bundle.threads} threads"

    def adapter(self, digest: str) -> Any:
        """Return an adapter's files, as the runner's source of adapters."""
        from weft_runner.model import AdapterFiles

        scales = parse_adapter_config((Path(digest) / "adapter_config.json").read_bytes())
        return AdapterFiles(Path(digest) / "adapter_model.safetensors", scales)

    def retain(self, digests: frozenset[str]) -> None:
        """Keep everything."""

    def on_disk(self) -> tuple[str, ...]:
        return ()

    def run(self, asked: dict[str, Any], clock: Clock) -> int:
        """Run a case's requests again and again; returns the timed tokens of a row, or the timed prompts."""
        rng, adapters, units = random.Random(asked["seed"]), asked["adapters"], 0
        if tuple(adapters) not in self._loaded:  # an adapter that is loaded late would keep its row back
            self._loaded.add(tuple(adapters))
            self._play(adapters, self._prompts(rng, len(adapters)), 1)
        for _ in range(asked["repeats"]):
            prompts = self._prompts(rng, len(adapters))
            if asked["kind"] == "prefill":
                with clock:
                    self._play(adapters, prompts, 1)
                units += 1
            else:
                units += self._play(adapters, prompts, 1 + DECODE_TOKENS, clock)
        return units

    def _prompts(self, rng: random.Random, count: int) -> list[tuple[int, ...]]:
        """Draw prompts without special tokens (0 to 4)."""
        return [tuple(rng.randrange(5, self._vocab) for _ in range(PROMPT_TOKENS)) for _ in range(count)]

    def _play(
        self, adapters: Sequence[str], prompts: Sequence[tuple[int, ...]], tokens: int, clock: Clock | None = None
    ) -> int:
        """Run one request a row. `clock`: of the steps that have all rows in decode; returns their number."""

        self._first.clear()
        self._ended.clear()
        self._rows = len(adapters)
        for adapter, prompt in zip(adapters, prompts, strict=True):
            self._posted += 1
            start = Start(
                str(self._posted), Epoch(1, self._posted), prompt, (), max_tokens=tokens,
                reservation_tokens=tokens, adapter=adapter, sampling=Sampling(ignore_eos=True),
            )  # fmt: skip
            self._engine.post(Received(self._session, start))
        self._until(lambda: bool(self._ended) or len(self._first) == self._rows)
        before = self._tokens
        if clock is None:
            self._until(lambda: len(self._ended) == self._rows)
            return 0
        with clock:
            self._until(lambda: bool(self._ended))
        counted = self._tokens - before
        self._until(lambda: len(self._ended) == self._rows)
        if counted < self._rows:
            raise RuntimeError(f"expected steps with all {self._rows} rows, got none")
        return counted // self._rows

    def _until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            self._engine.run_once()

    def _told(self, output: Any) -> None:

        for _, message in output.sends:
            if isinstance(message, Step):
                for sequence in message.sequences:
                    self._first.add(sequence.request_id)
                    self._tokens += len(sequence.tokens)
                    if sequence.finish is not None:
                        self._ended.add(sequence.request_id)
            elif isinstance(message, Ended | NoCapacity):
                raise RuntimeError(f"expected an answer, got {message}")


class Fleet:
    """The cores of scheduler and gateway with a played registry, supervisor and busy runners; messages are encoded."""

    def __init__(self) -> None:
        from weft_scheduler.core import Scheduler, SchedulerConfig

        self._gateway, self._supervisor = Peer(Kind.GATEWAY, "g"), Peer(Kind.SUPERVISOR, "s")
        registry = Peer(Kind.REGISTRY, "r")
        self._core, self._now, self._count = Scheduler(SchedulerConfig(), 1), 0.0, 0
        pool = PoolSpec(POOL, "sha256:base", "base", max_queue=10**9)
        adapters = tuple(
            AdapterSpec(f"ns{i}/a{i}", f"ns{i}", POOL, f"sha256:{i:064x}", 16, f"uid-{i}") for i in range(100)
        )
        for event in (
            Connected(registry), Received(registry, RegistryChange(True, (pool,), adapters)), Connected(self._gateway),
            Received(self._gateway, ResubmitComplete()), Connected(self._supervisor),
            Received(self._supervisor, Keys(())),
        ):  # fmt: skip
            self._core.handle(event, self._now)
        runners = [RunnerId(f"acme.{i:032x}", "i") for i in range(RUNNERS)]
        self._specs = {runner: RunnerSpec(runner, "a:1", POOL, 16, 4096, 64, 64, 64, 4096) for runner in runners}
        self._versions = dict.fromkeys(runners, 0)
        self._fresh: dict[Any, list[Any]] = {runner: [] for runner in runners}
        self._running: deque[tuple[str, Any, str]] = deque()
        self._report({runner: [] for runner in runners}, full=True)
        for _ in range(RUNNERS * BUSY // BATCH):
            self._start(self._submissions(), Clock())
        self._report({runner: [] for runner in runners})

    def run(self, asked: dict[str, Any], clock: Clock) -> int:
        """Let requests end and others begin: `reports` times the runners' reports, `decisions` the submissions."""
        reports, units = asked["kind"] == "reports", 0
        for _ in range(asked["repeats"]):
            self._now += 0.05
            ended = self._end()
            sent = self._report(ended, clock=clock if reports else Clock())
            submitted = self._start(self._submissions(), Clock() if reports else clock)
            units += sent if reports else submitted
            self._core.handle(TICK, self._now)
        return units

    def _submissions(self) -> list[Any]:

        chance, made = random.Random(self._count), list[Any]()
        for _ in range(BATCH):
            self._count += 1
            adapter = min(99, int(chance.paretovariate(0.5)) - 1)
            digest, tokens = f"sha256:{adapter:064x}", chance.randint(16, 256)
            made.append(Submit(f"r{self._count}", POOL, f"ns{adapter}", "m", digest, tokens, 512, p90_tokens=64))
        return made

    def _start(self, submissions: Sequence[Any], clock: Clock) -> int:
        """Submit requests, each of which is placed at once; the runners' next reports have them."""

        with clock:
            effects = [each for submit in submissions for each in self._handle(self._gateway, submit)]
        assigned = [each.message for each in effects if isinstance(getattr(each, "message", None), Assign)]
        if len(assigned) != len(submissions):
            raise RuntimeError(f"expected {len(submissions)} placed requests, got {len(assigned)}")
        adapters = {submit.request_id: submit.adapter for submit in submissions}
        for message in assigned:
            name, adapter = message.request_id, adapters[message.request_id]
            self._running.append((name, message.runner, adapter))
            state = SequenceState(name, message.epoch, "g", adapter, 1, message.reservation_tokens, 1)
            self._fresh[message.runner].append(state)
            self._core.handle(Received(self._gateway, Started(name, message.epoch)), self._now)
        return len(assigned)

    def _end(self) -> dict[Any, list[str]]:
        """Let the oldest requests end, as the gateway says and the store keeps; returns them by runner."""
        ended = {runner: list[str]() for runner in self._specs}
        for name, runner, adapter in [self._running.popleft() for _ in range(BATCH)]:
            outcome = Outcome(name, POOL, "ns0", "m", adapter, 16, 64, FinishReason.EOS, finished_unix_ms=1)
            report = OutcomeReport(name, POOL, adapter, 64, censored=False, record=outcome_bytes(outcome))
            self._handle(self._gateway, report)
            self._handle(self._supervisor, OutcomeAck((name,)))
            ended[runner].append(name)
        return ended

    def _report(self, ended: dict[Any, list[str]], clock: Clock | None = None, *, full: bool = False) -> int:
        """Let each runner report its ends and beginnings: bytes as they travel, decoded and digested in time."""

        raw = list[bytes]()
        for runner, names in ended.items():
            self._versions[runner] += 1
            fresh, self._fresh[runner] = self._fresh[runner], []
            resident = [AdapterState(digest, Tier.DEVICE) for digest in {state.adapter for state in fresh}]
            report = RunnerReport(
                self._versions[runner], full, RunnerFigures(2048, desired_version=1), fresh, tuple(names),
                adapters=resident,
            )  # fmt: skip
            reported = ReportedRunner(runner, report, self._specs[runner]) if full else ReportedRunner(runner, report)
            raw.append(SUPERVISOR_TO_SCHEDULER.encode(ClusterReport((reported,))).SerializeToString())
        with clock or Clock():
            for each in raw:
                message = SUPERVISOR_TO_SCHEDULER.decode(scheduler_pb2.SupervisorToScheduler.FromString(each))
                self._handle(self._supervisor, message)
        return len(raw)

    def _handle(self, peer: Any, message: Any) -> Iterable[Any]:

        return self._core.handle(Received(peer, message), self._now)


class Cores(Fleet):
    """A request's path through both cores and their codecs, without network: submission, steps, outcome."""

    def __init__(self) -> None:
        from weft_gateway.core import Gateway, GatewayConfig, TokenizerChanged, TokenizerState

        super().__init__()
        self._route = Route("ns0/a0", "ns0", POOL, f"sha256:{0:064x}")
        self._own = Gateway(GatewayConfig(), "g", outcome_bytes)
        self._starts: list[tuple[Any, Start]] = []
        table = Routes(1, True, routes=(self._route,), pools=(PoolRoute(POOL, "sha256:base", "base", 4096, 1),))
        ready = TokenizerChanged("sha256:base", TokenizerState.READY)
        for event in (Connected(self._scheduler), Received(self._scheduler, table), ready):
            self._follow(event)

    _scheduler = Peer(Kind.SCHEDULER, "scheduler")

    def run(self, asked: dict[str, Any], clock: Clock) -> int:
        for _ in range(asked["repeats"]):
            self._now += 0.05
            with clock:
                self._submit()
            starts, self._starts = self._starts, []
            by_runner = {runner: list[Start]() for runner in self._specs}
            for peer, start in starts:
                runner = next(each for each in self._specs if peer.name.startswith(each.uuid))
                by_runner[runner].append(start)
                state = SequenceState(start.request_id, start.epoch, "g", start.adapter, 1, 64, 1)
                self._fresh[runner].append(state)
            self._report({runner: [] for runner in self._specs})
            peers = {start.request_id: peer for peer, start in starts}
            for position in range(ANSWER_TOKENS + 1):
                self._step(by_runner, peers, position, clock)
            if len(starts) != BATCH or self._own.requests:
                raise RuntimeError(f"expected {BATCH} answers, got {len(starts)}, {len(self._own.requests)} not over")
            self._report({runner: [start.request_id for start in own] for runner, own in by_runner.items()})
            self._core.handle(TICK, self._now)
        return asked["repeats"] * BATCH

    def _submit(self) -> None:
        from weft_gateway.core import PREDICTOR, PreparedRequest, RequestReady

        for _ in range(BATCH):
            self._count += 1
            name, priority, prompt = f"p{self._count}", Priority.INTERACTIVE, tuple(range(5, 21))
            self._own.admission.arrive(name, priority, self._now)
            self._own.admission.resolve(name, POOL, 1, priority, self._now)
            prepared = PreparedRequest(name, name, "ns0", self._route, prompt, "text", 512, Sampling(), _bytes_of, 1)
            self._follow(RequestReady([prepared]))
            self._follow(Received(PREDICTOR, Prediction(name, 7, 21)))

    def _step(self, by_runner: Any, peers: dict[str, Any], position: int, clock: Clock) -> None:
        """Let each runner tell of a token of each of its answers; the last step has none, and ends them."""
        finish, tokens = (FinishReason.EOS, ()) if position == ANSWER_TOKENS else (None, (7,))
        steps = list[tuple[Any, bytes]]()
        for starts in filter(None, by_runner.values()):
            rows = [SequenceTokens(start.request_id, start.epoch, position, tokens, finish) for start in starts]
            raw = RUNNER_TO_GATEWAY.encode(Step(position + 1, rows)).SerializeToString()
            steps.append((peers[starts[0].request_id], raw))
        with clock:
            for peer, raw in steps:
                self._follow(Received(peer, RUNNER_TO_GATEWAY.decode(runner_pb2.RunnerToGateway.FromString(raw))))

    def _follow(self, event: Any) -> None:
        """Hand the gateway's core an event and carry what it sends to its peers, who answer."""
        for effect in self._own.handle(event, self._now):
            if not isinstance(effect, Send):
                if type(effect).__name__ == "OpenSession":
                    self._follow(Connected(effect.peer))
            elif effect.peer.kind is Kind.RUNNER:
                GATEWAY_TO_RUNNER.encode(effect.message).SerializeToString()
                if isinstance(effect.message, Start):
                    self._starts.append((effect.peer, effect.message))
            elif effect.peer == self._scheduler:
                raw = GATEWAY_TO_SCHEDULER.encode(effect.message).SerializeToString()
                message = GATEWAY_TO_SCHEDULER.decode(scheduler_pb2.GatewayToScheduler.FromString(raw))
                self._answer(self._handle(self._gateway, message))
                if isinstance(message, OutcomeReport):
                    self._answer(self._handle(self._supervisor, OutcomeAck((message.request_id,))))

    def _answer(self, effects: Iterable[Any]) -> None:
        for effect in effects:
            if isinstance(effect, Send) and effect.peer == self._gateway:
                raw = SCHEDULER_TO_GATEWAY.encode(effect.message).SerializeToString()
                message = SCHEDULER_TO_GATEWAY.decode(scheduler_pb2.SchedulerToGateway.FromString(raw))
                self._follow(Received(self._scheduler, message))


class Peers(SchedulerServicer, RunnerServicer, PredictorServicer):
    """The peers of a gateway, played: each request is placed at once and answered, a token a step."""

    address = ""

    def __init__(self, base_digest: str) -> None:
        self._runner, self._count = common_pb2.RunnerId(uuid="runner", incarnation="1"), 0
        self._routes = scheduler_pb2.Routes(version=1, full=True, keys_known=True)
        base = {"base_digest": base_digest, "base_model_name": MODEL, "max_context_tokens": 512}
        self._routes.pools.add(name=POOL, ready_runners=1, **base)
        self._routes.routes.add(model_name=MODEL, namespace="team", pool=POOL)
        self._routes.keys.add(key_hash=hashlib.sha256(KEY.encode()).hexdigest(), namespace="team", key_id="turns")

    async def Gateway(self, requests: Any, context: Any) -> Any:  # noqa: N802
        out: SendQueue[Any] = SendQueue()
        out.put(scheduler_pb2.SchedulerToGateway(routes=self._routes))

        def take(message: Any) -> None:
            if message.HasField("submit"):
                self._count += 1
                assign = scheduler_pb2.Assign(
                    request_id=message.submit.request_id, epoch=common_pb2.Epoch(term=1, counter=self._count),
                    reservation_tokens=8, runner=self._runner, address=self.address,
                )  # fmt: skip
                out.put(scheduler_pb2.SchedulerToGateway(assign=assign))
            elif message.HasField("outcome_report"):
                ack = scheduler_pb2.OutcomeAck(request_ids=[message.outcome_report.request_id])
                out.put(scheduler_pb2.SchedulerToGateway(outcome_ack=ack))

        async for message in serve_stream(requests, context, out, take):
            yield message

    async def Session(self, requests: Any, context: Any) -> Any:  # noqa: N802
        out: SendQueue[Any] = SendQueue()

        def take(message: Any) -> None:
            if message.HasField("hello"):
                out.put(runner_pb2.RunnerToGateway(ready=runner_pb2.SessionReady(runner=self._runner)))
            elif message.HasField("start"):
                name, epoch = message.start.request_id, message.start.epoch
                for position in range(ANSWER_TOKENS):
                    end = FinishReason.LENGTH if position == ANSWER_TOKENS - 1 else None
                    tokens = SequenceTokens(name, Epoch(epoch.term, epoch.counter), position, (20 + position,), end)
                    out.put(RUNNER_TO_GATEWAY.encode(Step(position + 1, [tokens])))

        async for message in serve_stream(requests, context, out, take):
            yield message

    async def Predictions(self, requests: Any, context: Any) -> Any:  # noqa: N802
        async for request in requests:
            yield await self.Predict(request, context)

    async def Predict(self, request: Any, context: Any) -> Any:  # noqa: ARG002, N802
        items = [predictor_pb2.Prediction(request_id=i.request_id, p50_tokens=7, p90_tokens=21) for i in request.items]
        return predictor_pb2.PredictResponse(items=items, model_version="v1")


class Gateway:
    """The checkout's gateway, a process of its own whose CPU is counted, between played peers; clients in here."""

    def __init__(self, work: dict[str, Any]) -> None:
        self._loop, self._log = asyncio.new_event_loop(), Path(work["scratch"]) / "gateway.log"
        blobs = {
            path.name: path.read_bytes() for path in Path(work["model"]).iterdir() if path.suffix != ".safetensors"
        }
        entries = [FileEntry(name, hex_of(digest_of(data)), len(data)) for name, data in sorted(blobs.items())]
        manifest = build_manifest("model", entries).to_bytes()
        depot = _depot({digest_of(data): data for data in (*blobs.values(), manifest)})
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = int(free.getsockname()[1])
        peer = self._loop.run_until_complete(self._serve(Peers(digest_of(manifest))))
        flags = {
            "http": f"127.0.0.1:{self._port}", "scheduler": peer, "predictor": peer, "depot": depot,
            "data-dir": Path(work["scratch"]) / "gateway",
        }  # fmt: skip
        command = [sys.executable, "-I", "-S", work["child"], str(os.getpid()), sys.executable, "-P"]
        command += [
            "-m",
            "weft_gateway",
            *(word for name, value in flags.items() for word in (f"--{name}", str(value))),
        ]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self._loop.run_until_complete(self._ready())

    async def _serve(self, peers: Peers) -> str:
        import grpc.aio

        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        add_SchedulerServicer_to_server(peers, self._server)
        add_RunnerServicer_to_server(peers, self._server)
        add_PredictorServicer_to_server(peers, self._server)
        peers.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()
        return peers.address

    async def _ready(self) -> None:
        end = time.monotonic() + START_S
        while True:
            try:
                if await self._ask(await self._connected(), b"GET /readyz HTTP/1.1\r\nhost: x\r\n\r\n") == 200:
                    return
            except OSError:
                if self._process.poll() is not None:
                    end = 0.0
            if time.monotonic() > end:
                raise RuntimeError(f"the gateway is not ready: {self._log.read_text(errors='replace')[-1000:]}")
            await asyncio.sleep(0.1)

    def cpu_s(self) -> float:
        """Return the gateway's CPU seconds, by the kernel's clock of its process."""
        return time.clock_gettime(~self._process.pid << 3 | 2)

    def run(self, asked: dict[str, Any], clock: Clock) -> int:
        return self._loop.run_until_complete(self._run(asked, clock))

    async def _run(self, asked: dict[str, Any], clock: Clock) -> int:
        """Ask over connections that are open and have a session to the runner behind them before the clock starts."""
        refused = asked["kind"] == "refused"
        streams, count, status = (REFUSALS, 1, 401) if refused else (STREAMS, REQUESTS // STREAMS, 200)
        ends = [await self._connected() for _ in range(streams)]
        warm = [_posted(KEY) if not refused else b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n"] * streams
        await asyncio.gather(*map(self._ask, ends, warm))
        for _ in range(asked["repeats"]):
            with clock:
                clients = (self._client(each, _posted("unknown" if refused else KEY), count, status) for each in ends)
                await asyncio.gather(*clients)
        for _, writer in ends:
            writer.close()
        return asked["repeats"] * streams * count

    async def _client(self, ends: Any, request: bytes, count: int, status: int) -> None:
        for _ in range(count):
            if (got := await self._ask(ends, request)) != status:
                raise RuntimeError(f"expected status {status}, got {got}")

    async def _connected(self) -> Any:
        return await asyncio.open_connection("127.0.0.1", self._port)

    async def _ask(self, ends: Any, request: bytes) -> int:
        """Send a request, read the whole answer and return its status."""
        reader, writer = ends
        writer.write(request)
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        if b"transfer-encoding: chunked" in head:
            await reader.readuntil(b"\r\n0\r\n\r\n")
        else:
            await reader.readexactly(int(head.partition(b"content-length: ")[2].split()[0]))
        return int(head.split()[1])


def _bytes_of(_token: int) -> bytes:
    return b"a"


def _posted(key: str) -> bytes:
    body = {"model": MODEL, "prompt": "the red fox jumps over seven lazy dogs", "max_tokens": ANSWER_TOKENS}
    content = json.dumps({**body, "stream": True, "temperature": 0, "ignore_eos": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nauthorization: Bearer {key}"
    return f"{head}\r\ncontent-length: {len(content)}\r\n\r\n".encode() + content


def _depot(blobs: dict[str, bytes]) -> str:
    """Serve blobs by digest, and return the address."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            data = blobs.get(self.path.rpartition("/")[2], b"")
            self.send_response(200 if data else 404)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}"


def main() -> None:
    """Answer until standard input ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what others print is no answer
    work = json.loads(sys.stdin.readline())
    import weft

    if Path(work["checkout"]) not in Path(str(weft.__file__)).parents:
        raise RuntimeError(f"expected the code of {work['checkout']}, got {weft.__file__}")
    kinds, loaded = set(work["kinds"]), dict[str, Any]()
    engines = {name: Engine(engine, work["scratch"]) for name, engine in work["engines"].items()}
    if kinds & {"reports", "decisions"}:
        loaded |= dict.fromkeys(("reports", "decisions"), Fleet())
    if "path" in kinds:
        loaded["path"] = Cores()
    if kinds & {"request", "refused"}:
        loaded |= dict.fromkeys(("request", "refused"), Gateway(work))
    what: dict[str, Any] = {"ready": next(iter(engines.values())).name if engines else ""}
    while True:
        print(json.dumps(what), file=answers, flush=True)
        if not (line := sys.stdin.readline()):
            return
        asked = json.loads(line)
        run = loaded[asked["kind"]] if asked["kind"] in loaded else engines[asked["shape"]]
        clock = Clock(run.cpu_s) if isinstance(run, Gateway) else Clock()
        gc.collect()
        units = run.run(asked, clock)
        what = {"wall_s": clock.wall_s, "cpu_s": clock.cpu_s, "units": units}


if __name__ == "__main__":
    main()
