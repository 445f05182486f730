"""The real gateway between fakes at its narrow seams.

Real: the gateway's app under uvicorn on a real socket, its gRPC clients, its tokenizer and template code, the official
`openai` client. Fake: scheduler, runner and predictor are in-test gRPC servers that speak the real protocol and do what
a test says (or, on autopilot, the plain thing); the depot is a loopback HTTP server over a real blob folder.
"""

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx2
import openai
import pytest
import tokenizers
import uvicorn
from prometheus_client import CollectorRegistry
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from harness.quick import quick_disk  # noqa: F401 (a fixture)
from harness.waiting import PATIENCE_S, soon  # noqa: F401 (of all that is here)
from weft.artifacts.blobs import BlobStore
from weft.artifacts.digest import FileEntry, build_manifest, hex_of
from weft.wire.channels import Outbox, both_ways
from weft.wire.v1 import (
    common_pb2,
    predictor_pb2,
    predictor_pb2_grpc,
    runner_pb2,
    runner_pb2_grpc,
    scheduler_pb2,
    scheduler_pb2_grpc,
)
from weft_gateway.app import build_app
from weft_gateway.bounded_http import BoundedHttp
from weft_gateway.gateway import Gateway
from weft_gateway.serve import check_serving
from weft_gateway.settings import Settings

TEMPLATE = "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}</s>{% endfor %}<|assistant|>"
ANSWER = "Grüße, dear reader \N{SLIGHTLY SMILING FACE}!"


async def until(condition: Callable[[], Any]) -> Any:
    """For what has no event to await: the first true value of a condition."""
    async with asyncio.timeout(PATIENCE_S):
        while not (value := condition()):  # noqa: ASYNC110 (nothing to wait on)
            await asyncio.sleep(0.002)
    return value


async def opened(http: httpx2.AsyncClient, body: dict[str, Any], path: str = "/v1/completions") -> httpx2.Response:
    """A response whose status has come and whose body is still to be read. Close it to go away."""
    return await http.send(http.build_request("POST", path, json=body), stream=True)


def train_tokenizer() -> tokenizers.Tokenizer:
    """A small byte-level BPE with control tokens, as Llama 3 and Qwen have them."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["hello dear reader, hello world"] * 8, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


class FakeDepot:
    """Blobs by digest over HTTP, from a real blob folder."""

    def __init__(self, folder: Path) -> None:
        self.blobs = BlobStore(folder)
        self.asked: list[str] = []
        depot = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                digest = self.path.removeprefix("/v1/blobs/")
                depot.asked.append(digest)
                found = digest.startswith("sha256:") and len(hex_of(digest)) == 64 and depot.blobs.has(digest)
                body = depot.blobs.read(digest, max_bytes=1 << 26) if found else b""
                self.send_response(200 if found else 404)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def add_model(self, files: dict[str, bytes]) -> str:
        entries = [FileEntry(n, hex_of(self.blobs.put(data)), len(data)) for n, data in files.items()]
        manifest = build_manifest("model", entries)
        return self.blobs.put(manifest.to_bytes())

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class FakeScheduler(scheduler_pb2_grpc.SchedulerServicer):
    """Records what the gateway says; on autopilot assigns every submit to `runner` and acknowledges outcomes."""

    def __init__(self) -> None:
        self.routes = scheduler_pb2.Routes()
        self.runner: FakeRunner | None = None
        self.autopilot = True
        self.acknowledges = True
        self.counter, self.term = 0, 1
        self.outbox: Outbox[scheduler_pb2.SchedulerToGateway] = Outbox()
        self.inbox: asyncio.Queue[scheduler_pb2.GatewayToScheduler] = asyncio.Queue()
        self.outcomes: dict[str, common_pb2.Outcome] = {}
        self.streams = 0

    async def Gateway(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        self.streams += 1
        self.outbox = Outbox()
        if self.routes.version:
            self.outbox.put(scheduler_pb2.SchedulerToGateway(routes=self.routes))
        async for message in both_ways(request_iterator, context, self.outbox, self._take):
            yield message

    def _take(self, message: scheduler_pb2.GatewayToScheduler) -> None:
        self.inbox.put_nowait(message)
        if message.HasField("outcome"):
            known = self.outcomes.setdefault(message.outcome.request_id, message.outcome)
            assert known == message.outcome, "a second, different outcome"
            if self.acknowledges:
                self.send(outcome_ack=scheduler_pb2.OutcomeAck(request_ids=[message.outcome.request_id]))
        if self.autopilot and message.HasField("submit"):
            self.assign(message.submit.request_id)
        if self.autopilot and message.HasField("failed"):
            self.assign(message.failed.request_id)

    def send(self, **message: Any) -> None:
        self.outbox.put(scheduler_pb2.SchedulerToGateway(**message))

    def epoch(self) -> common_pb2.Epoch:
        return common_pb2.Epoch(term=self.term, counter=self.counter)

    def assign(self, request_id: str, runner: "FakeRunner | None" = None) -> common_pb2.Epoch:
        target = runner or self.runner
        assert target
        self.counter += 1
        assign = scheduler_pb2.Assign(
            request_id=request_id, epoch=self.epoch(), runner=target.id, address=target.address, reservation_tokens=8
        )
        self.send(assign=assign)
        return self.epoch()

    def tell_routes(self, routes: scheduler_pb2.Routes) -> None:
        self.routes = routes
        self.send(routes=routes)

    async def next(self, kind: str) -> Any:
        """The next message of that kind; others before it are passed over."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                message = await self.inbox.get()
                if message.WhichOneof("message") == kind:
                    return getattr(message, kind)


class FakeRunner(runner_pb2_grpc.RunnerServicer):
    """Records what the gateway says; on autopilot answers every Start with `answer`, a token per step."""

    def __init__(self, uuid: str) -> None:
        self.id = common_pb2.RunnerId(uuid=uuid, incarnation=f"{uuid}-1")
        self.address = ""
        self.autopilot = True
        self.answer: Callable[[runner_pb2.Start], Sequence[int]] = lambda _: ()
        self.outboxes: list[Outbox[runner_pb2.RunnerToGateway]] = []
        self.inbox: asyncio.Queue[runner_pb2.GatewayToRunner] = asyncio.Queue()
        self.iteration = 0
        self.closed = 0  # sessions that have ended
        self.silent = False

    async def Session(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        outbox: Outbox[runner_pb2.RunnerToGateway] = Outbox()
        self.outboxes.append(outbox)
        try:
            async for message in both_ways(request_iterator, context, outbox, self._take):
                yield message
        finally:
            self.closed += 1

    def _take(self, message: runner_pb2.GatewayToRunner) -> None:
        self.inbox.put_nowait(message)
        if message.HasField("hello") and not self.silent:
            self.send(ready=runner_pb2.SessionReady(runner=self.id))
        if self.autopilot and message.HasField("start"):
            self.answer_whole(message.start)

    def send(self, **message: Any) -> None:
        self.outboxes[-1].put(runner_pb2.RunnerToGateway(**message))

    def answer_whole(self, start: runner_pb2.Start) -> None:
        done = len(start.emitted_tokens)
        tokens = list(self.answer(start))[: start.max_tokens]
        for position in range(done, len(tokens)):
            self.step(start, position, [tokens[position]])
        ends = common_pb2.FINISH_REASON_LENGTH if len(tokens) == start.max_tokens else common_pb2.FINISH_REASON_EOS
        self.step(start, len(tokens), [], ends)

    def step(
        self, start: runner_pb2.Start, position: int, tokens: Sequence[int], finish: Any = 0, doublings: int = 0
    ) -> None:
        self.iteration += 1
        sequence = runner_pb2.SequenceTokens(
            request_id=start.request_id,
            epoch=start.epoch,
            position=position,
            tokens=tokens,
            finish_reason=finish,
            doublings=doublings,
            logprobs=[likely(start, position + i, token) for i, token in enumerate(tokens) if start.sampling.logprobs],
        )
        self.send(step=runner_pb2.Step(iteration=self.iteration, sequences=[sequence]))

    async def next(self, kind: str) -> Any:
        """The next message of that kind; others before it are passed over."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                message = await self.inbox.get()
                if message.WhichOneof("message") == kind:
                    return getattr(message, kind)

    def break_sessions(self) -> None:
        """As if the process died: every stream of it ends at once."""
        for outbox in self.outboxes:
            outbox.close()


def likely(start: runner_pb2.Start, position: int, token: int) -> runner_pb2.TokenLogprob:
    """By position: what was chosen, and with it as many alternatives as were asked for, the chosen one first."""
    own = -position / 8
    top = range(start.sampling.top_logprobs)
    return runner_pb2.TokenLogprob(
        logprob=own, top_tokens=[token + i for i in top], top_logprobs=[own - i / 2 for i in top]
    )


class FakePredictor(predictor_pb2_grpc.PredictorServicer):
    """Predicts 7 and 21 for everything; can be held up to see what gathers."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.go = asyncio.Event()
        self.go.set()
        self.fails = False

    async def Predict(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.batches.append([item.request_id for item in request.items])
        await self.go.wait()
        if self.fails:
            await context.abort(grpc.StatusCode.INTERNAL, "no model")
        items = [predictor_pb2.Prediction(request_id=i.request_id, p50_tokens=7, p90_tokens=21) for i in request.items]
        return predictor_pb2.PredictResponse(items=items, model_version="v1")


@asynccontextmanager
async def grpc_server(register: Callable[[grpc.aio.Server], None], at: str = "127.0.0.1:0") -> AsyncIterator[str]:
    server = grpc.aio.server()
    register(server)
    port = server.add_insecure_port(at)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


@asynccontextmanager
async def runner_server(runner: FakeRunner) -> AsyncIterator[FakeRunner]:
    async with grpc_server(lambda s: runner_pb2_grpc.add_RunnerServicer_to_server(runner, s)) as address:
        runner.address = address
        yield runner


class Server(uvicorn.Server):
    """uvicorn's, without its pauses of a tenth of a second, three of them at every end."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.leave = asyncio.Event()

    async def main_loop(self) -> None:
        await self.on_tick(0)
        await self.leave.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        if tasks := set(self.server_state.tasks):
            _, late = await asyncio.wait(tasks, timeout=1.0)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        connections: list[Any] = list(self.server_state.connections)
        for connection in connections:
            connection.transport.abort()


@dataclass
class World:
    """Everything a test can turn."""

    depot: FakeDepot
    scheduler: FakeScheduler
    runner: FakeRunner
    predictor: FakePredictor
    tokenizer: tokenizers.Tokenizer
    base_digest: str
    scheduler_address: str = ""
    predictor_address: str = ""
    gateway: Gateway = field(default=None)  # type: ignore[assignment]
    url: str = ""
    server: Server = field(default=None)  # type: ignore[assignment]
    pool: httpx2.AsyncClient = field(default=None)  # type: ignore[assignment]

    def routes(self, version: int = 1, **fields: Any) -> scheduler_pb2.Routes:
        """A pool `team/base` with its base model and two adapters of different tenants."""
        pool = scheduler_pb2.PoolRoute(
            pool="team/base",
            base_digest=self.base_digest,
            base_model_name="tiny",
            max_context_tokens=512,
            ready_runners=1,
        )
        routes = [
            scheduler_pb2.Route(model_name="tiny", namespace="team", pool="team/base", created_unix_s=100),
            scheduler_pb2.Route(
                model_name="acme/upper", namespace="acme", pool="team/base", adapter_digest="sha256:" + "a" * 64, rank=8
            ),
            scheduler_pb2.Route(
                model_name="rival/secret", namespace="rival", pool="team/base", adapter_digest="sha256:" + "b" * 64
            ),
        ]
        return scheduler_pb2.Routes(version=version, routes=routes, pools=[pool], keys_known=True, **fields)

    def tokens(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def settings(self, tmp_path: Path, **changes: Any) -> Settings:
        values: dict[str, Any] = {
            "http": "127.0.0.1:0",
            "scheduler": self.scheduler_address,
            "predictor": self.predictor_address,
            "depot": self.depot.url,
            "data_dir": tmp_path / "data",
            "auth": False,
            "hold_seconds": 600.0,
            "predict_ms": 5000,
            "connect_seconds": 60.0,
        }
        return Settings(**(values | changes))

    def client(self, **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(**(self._options() | {"http_client": self.pool} | options))

    def sync_client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(**(self._options() | options))

    def _options(self) -> dict[str, Any]:
        return {"base_url": f"{self.url}/v1", "api_key": "unused", "max_retries": 0, "timeout": PATIENCE_S}

    def http(self) -> httpx2.AsyncClient:
        return httpx2.AsyncClient(base_url=self.url, timeout=PATIENCE_S)

    def outcome(self) -> common_pb2.Outcome:
        """The only outcome there is."""
        (outcome,) = self.scheduler.outcomes.values()
        return outcome

    async def settled(self) -> None:
        """Every request has ended and every outcome is acknowledged."""
        await until(lambda: not self.gateway.serving.in_flight and not len(self.gateway.serving.outcomes))
        check_serving(self.gateway.serving)


@pytest.fixture(scope="session")
def tokenizer() -> tokenizers.Tokenizer:
    return train_tokenizer()


@pytest.fixture
def depot(tmp_path: Path) -> Iterator[FakeDepot]:
    server = FakeDepot(tmp_path / "depot")
    yield server
    server.close()


@pytest.fixture
async def parts(depot: FakeDepot, tokenizer: tokenizers.Tokenizer) -> AsyncIterator[World]:
    """The fakes, running, without a gateway."""
    files = {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": json.dumps({"bos_token": "<s>", "eos_token": {"content": "</s>"}}).encode(),
        "chat_template.jinja": TEMPLATE.encode(),
        "model.safetensors": b"weights that a gateway never asks for",
    }
    world = World(depot, FakeScheduler(), FakeRunner("runner-1"), FakePredictor(), tokenizer, depot.add_model(files))
    world.scheduler.runner = world.runner
    world.scheduler.routes = world.routes()
    world.runner.answer = lambda _: world.tokens(ANSWER)
    add_scheduler = scheduler_pb2_grpc.add_SchedulerServicer_to_server
    add_predictor = predictor_pb2_grpc.add_PredictorServicer_to_server
    async with (
        grpc_server(lambda s: add_scheduler(world.scheduler, s)) as world.scheduler_address,
        grpc_server(lambda s: add_predictor(world.predictor, s)) as world.predictor_address,
        runner_server(world.runner),
    ):
        yield world


@asynccontextmanager
async def serving(world: World, settings: Settings) -> AsyncIterator[World]:
    """The real gateway on a real socket, in this event loop."""
    listener = socket.create_server(("127.0.0.1", 0))
    gateway = Gateway(settings, registry=CollectorRegistry())
    config = uvicorn.Config(build_app(gateway), lifespan="off", log_config=None, http=BoundedHttp, ws="none")
    server = world.server = Server(config)
    world.gateway, world.url = gateway, f"http://127.0.0.1:{listener.getsockname()[1]}"
    async with gateway.running(), httpx2.AsyncClient(timeout=PATIENCE_S) as world.pool:
        http = asyncio.create_task(server._serve([listener]))
        try:
            await until(lambda: server.started)
            yield world
        finally:
            server.leave.set()
            await http


@pytest.fixture
async def world(parts: World, tmp_path: Path) -> AsyncIterator[World]:
    """Fakes and a ready gateway without keys."""
    async with serving(parts, parts.settings(tmp_path)):
        await until(lambda: parts.gateway.unready() is None)
        yield parts
