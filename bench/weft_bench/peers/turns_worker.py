"""One side of `weft bench turns`, served by `serve.py` with the PYTHONPATH of the checkout that it measures.

It imports the product alone, and little of it: an older checkout need not know `turns`. Each case is answered with the
seconds of its timed parts (`wall_s`, `cpu_s`) and the units of work in them (`units`).
"""

import asyncio
import gc
import hashlib
import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from pathlib import Path
from typing import Any

from weft.artifacts.adapter_config import parse_adapter_config
from weft.artifacts.digest import FileEntry, build_manifest, digest_of, hex_of
from weft.domain import machine, prediction, request, routes, runner
from weft.domain.adapter import AdapterState, Tier
from weft.domain.ids import Epoch, RunnerId
from weft.domain.machine import Connected, Kind, Peer, Received, Send
from weft.wire.codec import cluster, scheduling, session
from weft.wire.serving import SERVER_OPTIONS
from weft.wire.streams import SendQueue, serve_stream
from weft.wire.v1 import common_pb2, predictor_pb2, runner_pb2, scheduler_pb2
from weft.wire.v1.predictor_pb2_grpc import PredictorServicer, add_PredictorServicer_to_server
from weft.wire.v1.runner_pb2_grpc import RunnerServicer, add_RunnerServicer_to_server
from weft.wire.v1.scheduler_pb2_grpc import SchedulerServicer, add_SchedulerServicer_to_server

PROMPT_TOKENS, DECODE_PROMPT_TOKENS, DECODE_TOKENS = 128, 64, 32  # a decode's prompts are not timed
RUNNERS, BUSY, BATCH, ADAPTERS = 20, 16, 64, 100  # of the cores: requests of a runner; requests that begin at a time
REQUESTS, STREAMS, REFUSALS, ANSWER_TOKENS = 128, 8, 400, 4
POOL, KEY, MODEL = "team/base", "sk-weft-turns", "tiny"
START_S = 120.0
REGISTRY, GATEWAY, SUPERVISOR = Peer(Kind.REGISTRY, "r"), Peer(Kind.GATEWAY, "g"), Peer(Kind.SUPERVISOR, "s")
Starts = list[tuple[Peer, request.Start]]


class Clock:
    """Wall and CPU seconds inside the `with` blocks; `cpu` reads a process's CPU seconds, by default this one's."""

    def __init__(self, cpu: Callable[[], float] = time.process_time) -> None:
        self.wall_s, self.seconds, self._cpu = 0.0, list[float](), cpu  # `seconds`: the CPU's, of each block

    def __enter__(self) -> None:
        self._wall_at, self._cpu_at = time.perf_counter(), self._cpu()

    def __exit__(self, *_: object) -> None:
        self.seconds.append(self._cpu() - self._cpu_at)
        self.wall_s += time.perf_counter() - self._wall_at


def connect(scheduler: Any, registry: routes.RegistryChange) -> None:
    """Connect a scheduler's core with its peers, who tell all that they have."""
    for event in (
        Connected(REGISTRY), Received(REGISTRY, registry), Connected(GATEWAY),
        Received(GATEWAY, request.ResubmitComplete()), Connected(SUPERVISOR), Received(SUPERVISOR, routes.Keys(())),
    ):  # fmt: skip
        scheduler.handle(event, 0.0)


class Engine:
    """A runner's engine with a random model, driven from this thread. Adapters are named by their folders."""

    def __init__(self, work: dict[str, Any], scratch: str) -> None:
        parse_settings: Any = import_module("weft_runner.settings").parse_settings
        nowhere, base = "127.0.0.1:1", Path(work["base"])
        flags = {
            "listen": nowhere, "probes": nowhere, "supervisor": nowhere, "depot": f"http://{nowhere}",
            "data-dir": scratch, "pool": POOL, "base-digest": f"sha256:{0:064}", "kv-pages": work["pages"],
            "max-sequences": work["rows"], "token-time-ms": 60_000, "speculation": "off", **work["flags"],
        }  # fmt: skip
        settings = parse_settings(_words(flags), profile=False, max_prefills=work["rows"])
        files = {name: base / name for name in ("config.json", "model.safetensors")}
        self._peer, self._vocab, self._posted, self._tokens = Peer(Kind.GATEWAY, "bench"), work["vocab"], 0, 0
        self._first, self._ended, self._loaded = set[str](), set[str](), set[tuple[str, ...]]()
        built = import_module("weft_runner.shell.engine_factory").build_engine(settings, files, self, self._told)
        self._engine, self.name = built.engine, f"{built.numerics_class}, {built.threads} threads"
        self._engine.post(Connected(self._peer, request.SessionHello("bench", "")))

    def adapter(self, digest: str) -> Any:
        """Return an adapter's files, as the runner's source of adapters."""
        scales = parse_adapter_config((Path(digest) / "adapter_config.json").read_bytes())
        return import_module("weft_runner.model").AdapterFiles(Path(digest) / "adapter_model.safetensors", scales)

    def retain(self, digests: frozenset[str]) -> None:
        """Keep everything."""

    def on_disk(self) -> tuple[str, ...]:
        return ()

    def run(self, asked: dict[str, Any], clock: Clock) -> int:
        """Run a case's requests again and again; returns the timed tokens of a row, or the timed prefills."""
        rng, adapters, decodes = random.Random(asked["seed"]), asked["adapters"], asked["kind"] == "decode"
        if tuple(adapters) not in self._loaded:  # a row whose adapter is not loaded yet would begin late
            self._loaded.add(tuple(adapters))
            self._play(adapters, rng, 1, Clock())
        return sum(self._play(adapters, rng, 1 + DECODE_TOKENS * decodes, clock) for _ in range(asked["repeats"]))

    def _play(self, adapters: Sequence[str], rng: random.Random, tokens: int, clock: Clock) -> int:
        """Run a request a row and time its prefill (`tokens` 1) or the steps with all rows in decode; their number."""
        self._first.clear()
        self._ended.clear()
        rows, length = len(adapters), PROMPT_TOKENS if tokens == 1 else DECODE_PROMPT_TOKENS
        starts = [self._start(adapter, rng, length, tokens) for adapter in adapters]
        with clock if tokens == 1 else Clock():
            for start in starts:
                self._engine.post(Received(self._peer, start))
            self._until(lambda: len(self._first) == rows)
        if tokens == 1:
            return 1
        before = self._tokens
        with clock:
            self._until(lambda: bool(self._ended))
        steps = (self._tokens - before) // rows
        self._until(lambda: len(self._ended) == rows)
        if not steps:
            raise RuntimeError(f"expected steps with all {rows} rows, got none")
        return steps

    def _start(self, adapter: str, rng: random.Random, length: int, tokens: int) -> request.Start:
        self._posted += 1
        prompt = tuple(rng.randrange(5, self._vocab) for _ in range(length))  # 0 to 4 are special
        return request.Start(
            str(self._posted), Epoch(1, self._posted), prompt, (), max_tokens=tokens, reservation_tokens=tokens,
            adapter=adapter, sampling=request.Sampling(ignore_eos=True),
        )  # fmt: skip

    def _until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            self._engine.run_once()

    def _told(self, output: Any) -> None:
        for _, message in output.sends:
            if isinstance(message, request.Ended | request.NoCapacity):
                raise RuntimeError(f"expected an answer, got {message}")
            for sequence in message.sequences if isinstance(message, request.Step) else ():
                self._first.add(sequence.request_id)
                self._tokens += len(sequence.tokens)
                if sequence.finish is not None:
                    self._ended.add(sequence.request_id)


class Cores:
    """The cores of gateway and scheduler without network; registry, supervisor and busy runners are played.

    Requests begin and end, `BATCH` at a time. `path` times a request's way through both cores and all codecs,
    `decisions` the scheduler's core with a submission, `reports` what decodes and digests a runner's report.
    """

    def __init__(self) -> None:
        self._parts: Any = import_module("weft_gateway.core")
        core: Any = import_module("weft_scheduler.core")
        self._gateway = self._parts.Gateway(self._parts.GatewayConfig(), "g", scheduling.outcome_bytes)
        self._scheduler = core.Scheduler(core.SchedulerConfig(), 1)
        self._now, self._count, self._starts, self._chance = 0.0, 0, Starts(), random.Random(0)
        self._clocks = {kind: Clock() for kind in ("path", "decisions", "reports")}
        names = [(f"ns{i}/a{i}", f"ns{i}", POOL, f"sha256:{i:064x}", 16) for i in range(ADAPTERS)]
        self._routes = tuple(routes.Route(*name) for name in names)
        adapters = tuple(routes.AdapterSpec(*name, f"uid-{i}") for i, name in enumerate(names))
        pool = routes.PoolSpec(POOL, "sha256:base", "base", max_queue=10**9)
        connect(self._scheduler, routes.RegistryChange(True, (pool,), adapters))
        ready = self._parts.TokenizerChanged("sha256:base", self._parts.TokenizerState.READY)
        pools = (routes.PoolRoute(POOL, "sha256:base", "base", 4096, 1),)
        table = Received(self._parts.SCHEDULER, routes.Routes(1, True, routes=self._routes, pools=pools))
        for event in (Connected(self._parts.SCHEDULER), table, ready):
            self._feed(event)
        self._versions = {RunnerId(f"acme.{i:032x}", "i"): 0 for i in range(RUNNERS)}
        self._report((), ())
        self._report([start for _ in range(RUNNERS * BUSY // BATCH) for start in self._begin()], ())

    def run(self, asked: dict[str, Any], clock: Clock) -> int:
        self._clocks = {kind: Clock() for kind in self._clocks} | {asked["kind"]: clock}
        running = len(self._gateway.requests)
        for _ in range(asked["repeats"]):
            self._now += 0.05
            starts = self._begin()
            self._report(starts, ())
            self._answer(starts)
            self._report((), starts)
            self._scheduler.handle(machine.TICK, self._now)
            if len(starts) != BATCH or len(self._gateway.requests) != running:
                raise RuntimeError(f"expected {BATCH} answered requests, got {len(starts)} that began")
        return asked["repeats"] * (2 * RUNNERS if asked["kind"] == "reports" else BATCH)

    def _begin(self) -> Starts:
        """Bring prompts from the gateway to runners."""
        drawn = [min(ADAPTERS, int(self._chance.paretovariate(0.5))) - 1 for _ in range(BATCH)]
        with self._clocks["path"]:
            for number in drawn:
                self._count += 1
                name, priority, prompt = f"r{self._count}", request.Priority.INTERACTIVE, tuple(range(5, 21))
                self._gateway.admission.arrive(name, priority, self._now)
                self._gateway.admission.resolve(name, POOL, 1, priority, self._now)
                fields = (name, name, f"ns{number}", self._routes[number], prompt, "text", 512, request.Sampling())
                self._feed(self._parts.RequestReady([self._parts.PreparedRequest(*fields, _bytes_of, 1)]))
                self._feed(Received(self._parts.PREDICTOR, prediction.Prediction(name, 7, 21)))
        starts, self._starts = self._starts, []
        return starts

    def _answer(self, starts: Starts) -> None:
        """Let each runner tell of a token of each of its answers; the last step has none, and ends them."""
        for position in range(ANSWER_TOKENS + 1):
            finish, tokens = (request.FinishReason.EOS, ()) if position == ANSWER_TOKENS else (None, (7,))
            rows = defaultdict[Peer, list[request.SequenceTokens]](list)
            for peer, start in starts:
                rows[peer].append(request.SequenceTokens(start.request_id, start.epoch, position, tokens, finish))
            steps = [(peer, _bytes(session.RUNNER_TO_GATEWAY, request.Step(1, own))) for peer, own in rows.items()]
            with self._clocks["path"]:
                for peer, raw in steps:
                    step = session.RUNNER_TO_GATEWAY.decode(runner_pb2.RunnerToGateway.FromString(raw))
                    self._feed(Received(peer, step))

    def _report(self, begun: Iterable[tuple[Peer, request.Start]], ended: Iterable[tuple[Peer, request.Start]]) -> None:
        """Let each runner report what began and ended there; the first report of all is full."""
        fresh, over = defaultdict[str, list[Any]](list), defaultdict[str, list[str]](list)
        for peer, start in begun:
            state = (start.request_id, start.epoch, "g", start.adapter, 1, start.reservation_tokens, 1)
            fresh[peer.name.partition("/")[0]].append(runner.SequenceState(*state))
        for peer, start in ended:
            over[peer.name.partition("/")[0]].append(start.request_id)
        sent = list[bytes]()
        for name, version in self._versions.items():
            full, states = not version, fresh[name.uuid]
            self._versions[name] += 1
            adapters = [AdapterState(digest, Tier.DEVICE) for digest in sorted({state.adapter for state in states})]
            figures, gone = runner.RunnerFigures(2048, desired_version=1), tuple(over[name.uuid])
            report = runner.RunnerReport(version + 1, full, figures, states, gone, adapters=adapters)
            spec = runner.RunnerSpec(name, "a:1", POOL, 16, 4096, 64, 64, 64, 4096) if full else None
            reported = runner.ReportedRunner(name, report, spec)
            sent.append(_bytes(cluster.SUPERVISOR_TO_SCHEDULER, runner.ClusterReport((reported,))))
        with self._clocks["reports"]:
            for raw in sent:
                message = scheduler_pb2.SupervisorToScheduler.FromString(raw)
                decoded = cluster.SUPERVISOR_TO_SCHEDULER.decode(message)
                self._scheduler.handle(Received(SUPERVISOR, decoded), self._now)

    def _feed(self, event: Any) -> None:
        """Hand the gateway's core an event, and what it sends to its peers, who answer."""
        for effect in self._gateway.handle(event, self._now):
            if isinstance(effect, self._parts.OpenSession):
                self._feed(Connected(effect.peer))
            elif not isinstance(effect, Send):
                continue
            elif isinstance(effect.message, request.Start):
                _bytes(session.GATEWAY_TO_RUNNER, effect.message)
                self._starts.append((effect.peer, effect.message))
            elif effect.peer.kind is Kind.SCHEDULER:
                direction, raw_type = scheduling.GATEWAY_TO_SCHEDULER, scheduler_pb2.GatewayToScheduler
                self._schedule(direction.decode(raw_type.FromString(_bytes(direction, effect.message))))

    def _schedule(self, message: Any) -> None:
        """Hand the scheduler's core a message of the gateway, and the gateway the answers. Outcomes are stored."""
        with self._clocks["decisions"] if isinstance(message, request.Submit) else Clock():
            effects = list(self._scheduler.handle(Received(GATEWAY, message), self._now))
        if isinstance(message, request.OutcomeReport):
            stored = Received(SUPERVISOR, request.OutcomeAck((message.request_id,)))
            effects += self._scheduler.handle(stored, self._now)
        for effect in effects:
            if isinstance(effect, Send) and effect.peer == GATEWAY:
                direction, raw_type = scheduling.SCHEDULER_TO_GATEWAY, scheduler_pb2.SchedulerToGateway
                answer = direction.decode(raw_type.FromString(_bytes(direction, effect.message)))
                self._feed(Received(self._parts.SCHEDULER, answer))


def _bytes(direction: Any, message: object) -> bytes:
    return direction.encode(message).SerializeToString()


def _bytes_of(_token: int) -> bytes:
    return b"a"


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

    async def Gateway(self, request_iterator: Any, context: Any) -> Any:  # noqa: N802
        out: SendQueue[Any] = SendQueue()
        out.put(scheduler_pb2.SchedulerToGateway(routes=self._routes))
        async for message in serve_stream(request_iterator, context, out, partial(self._place, out)):
            yield message

    def _place(self, out: SendQueue[Any], message: Any) -> None:
        if message.HasField("submit"):
            self._count += 1
            assign = scheduler_pb2.Assign(
                request_id=message.submit.request_id, runner=self._runner, address=self.address,
                epoch=common_pb2.Epoch(term=1, counter=self._count), reservation_tokens=8,
            )  # fmt: skip
            out.put(scheduler_pb2.SchedulerToGateway(assign=assign))
        elif message.HasField("outcome_report"):
            ack = scheduler_pb2.OutcomeAck(request_ids=[message.outcome_report.request_id])
            out.put(scheduler_pb2.SchedulerToGateway(outcome_ack=ack))

    async def Session(self, request_iterator: Any, context: Any) -> Any:  # noqa: N802
        out: SendQueue[Any] = SendQueue()
        async for message in serve_stream(request_iterator, context, out, partial(self._answer, out)):
            yield message

    def _answer(self, out: SendQueue[Any], message: Any) -> None:
        if message.HasField("hello"):
            out.put(runner_pb2.RunnerToGateway(ready=runner_pb2.SessionReady(runner=self._runner)))
        for position in range(ANSWER_TOKENS * message.HasField("start")):
            epoch, name = Epoch(message.start.epoch.term, message.start.epoch.counter), message.start.request_id
            end = request.FinishReason.LENGTH if position == ANSWER_TOKENS - 1 else None
            row = request.SequenceTokens(name, epoch, position, (20 + position,), end)
            out.put(session.RUNNER_TO_GATEWAY.encode(request.Step(position + 1, [row])))

    async def Predictions(self, request_iterator: Any, context: Any) -> Any:  # noqa: N802
        async for asked in request_iterator:
            yield await self.Predict(asked, context)

    async def Predict(self, request: Any, context: Any) -> Any:  # noqa: ARG002, N802
        items = [predictor_pb2.Prediction(request_id=i.request_id, p50_tokens=7, p90_tokens=21) for i in request.items]
        return predictor_pb2.PredictResponse(items=items, model_version="v1")


class Gateway:
    """The checkout's gateway, a process of its own whose CPU is counted. Its peers and clients are in this process."""

    def __init__(self, work: dict[str, Any]) -> None:
        scratch = Path(work["scratch"])
        self._loop, self._log = asyncio.new_event_loop(), scratch / "gateway.log"
        digest, depot = _depot(Path(work["model"]), scratch)
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = int(free.getsockname()[1])
        peer = self._loop.run_until_complete(self._serve(Peers(digest)))
        flags = {
            "http": f"127.0.0.1:{self._port}", "scheduler": peer, "predictor": peer, "depot": depot,
            "data-dir": scratch / "gateway",
        }  # fmt: skip
        command = [sys.executable, "-I", "-S", work["child"], str(os.getpid()), sys.executable, "-P"]
        with self._log.open("wb") as log:
            command += ["-m", "weft_gateway", *_words(flags)]
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self._loop.run_until_complete(self._ready())

    async def _serve(self, peers: Peers) -> str:
        self._server: Any = import_module("grpc.aio").server(options=SERVER_OPTIONS)
        add_SchedulerServicer_to_server(peers, self._server)
        add_RunnerServicer_to_server(peers, self._server)
        add_PredictorServicer_to_server(peers, self._server)
        peers.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()
        return peers.address

    async def _ready(self) -> None:
        end = time.monotonic() + START_S
        while self._process.poll() is None and time.monotonic() < end:
            try:
                return await _ask(await self._connected(), _get("/readyz"))
            except (OSError, RuntimeError):
                await asyncio.sleep(0.1)
        raise RuntimeError(f"the gateway is not ready: {self._log.read_text(errors='replace')[-1000:]}")

    def cpu_s(self) -> float:
        """Return the gateway's CPU seconds, by the kernel's clock of its process."""
        return time.clock_gettime(~self._process.pid << 3 | 2)

    def run(self, asked: dict[str, Any], clock: Clock) -> int:
        return self._loop.run_until_complete(self._run(asked, clock))

    async def _run(self, asked: dict[str, Any], clock: Clock) -> int:
        """Send requests over connections that have been used. Refusals are held a second each, all at a time."""
        refused = asked["kind"] == "refused"
        streams, count, status = (REFUSALS, 1, 401) if refused else (STREAMS, REQUESTS // STREAMS, 200)
        ends = [await self._connected() for _ in range(streams)]
        await asyncio.gather(*(_ask(each, _get("/healthz") if refused else _post(KEY)) for each in ends))
        for _ in range(asked["repeats"]):
            with clock:
                sent = _post("unknown" if refused else KEY)
                await asyncio.gather(*(_ask(each, sent, status, count) for each in ends))
        for _, writer in ends:
            writer.close()
        return asked["repeats"] * streams * count

    async def _connected(self) -> Any:
        return await asyncio.open_connection("127.0.0.1", self._port)


async def _ask(ends: Any, sent: bytes, status: int = 200, count: int = 1) -> None:
    """Send a request, again and again, and read each answer to the end. Raises RuntimeError for another status."""
    for _ in range(count):
        ends[1].write(sent)
        head = (await ends[0].readuntil(b"\r\n\r\n")).lower()
        if b"transfer-encoding: chunked" in head:
            await ends[0].readuntil(b"\r\n0\r\n\r\n")
        else:
            await ends[0].readexactly(int(head.partition(b"content-length: ")[2].split()[0]))
        if int(head.split()[1]) != status:
            raise RuntimeError(f"expected status {status}, got {head}")


def _get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode()


def _post(key: str) -> bytes:
    body = {"model": MODEL, "prompt": "the red fox jumps over seven lazy dogs", "max_tokens": ANSWER_TOKENS}
    content = json.dumps({**body, "stream": True, "temperature": 0, "ignore_eos": True}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return f"{head}authorization: Bearer {key}\r\ncontent-length: {len(content)}\r\n\r\n".encode() + content


def _depot(model: Path, scratch: Path) -> tuple[str, str]:
    """Serve a model's files but its weights; returns the model's digest and the depot's address."""
    (blobs := scratch / "v1" / "blobs").mkdir(parents=True)
    found = {path.name: path.read_bytes() for path in sorted(model.iterdir()) if path.suffix != ".safetensors"}
    entries = [FileEntry(name, hex_of(digest_of(data)), len(data)) for name, data in found.items()]
    manifest = build_manifest("model", entries).to_bytes()
    for data in (*found.values(), manifest):
        (blobs / digest_of(data)).write_bytes(data)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=str(scratch)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return digest_of(manifest), f"http://127.0.0.1:{server.server_port}"


def _words(flags: dict[str, Any]) -> list[str]:
    return [word for name, value in flags.items() for word in (f"--{name}", str(value))]


def load(work: dict[str, Any]) -> tuple[str, Callable[..., dict[str, float]]]:
    """Return what runs, and what answers a case. Raises RuntimeError if the code is another checkout's."""
    if Path(work["checkout"]) not in Path(machine.__file__).parents:
        raise RuntimeError(f"expected the code of {work['checkout']}, got {machine.__file__}")
    engines = {name: Engine(engine, work["scratch"]) for name, engine in work["engines"].items()}
    loaded: dict[str, Any] = {**engines}
    if "cores" in work["parts"]:
        loaded["cores"] = Cores()
    if "gateway" in work["parts"]:
        loaded["gateway"] = Gateway(work)

    def run(**asked: Any) -> dict[str, float]:
        part = loaded[asked["on"]]
        clock = Clock(part.cpu_s) if isinstance(part, Gateway) else Clock()
        gc.collect()
        units = part.run(asked, clock)
        return {"wall_s": clock.wall_s, "cpu_s": sum(clock.seconds), "units": units}

    return ", ".join(sorted({engine.name for engine in engines.values()})), run
