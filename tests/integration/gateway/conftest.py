"""The real gateway between fakes at its narrow seams.

Real: the gateway's app under uvicorn on a real socket, its gRPC clients, its tokenizer and template code, the official
`openai` client. Its peers are those of `harness.gateway_peers`.
"""

import asyncio
import hashlib
import json
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
import tokenizers
from prometheus_client import CollectorRegistry

from harness import byte_tokenizer
from harness.gateway_peers import FakeDepot, FakePredictor, FakeRunner, FakeScheduler, runner_server
from harness.grpc_server import listening
from harness.quick import quick_disk  # noqa: F401 (a fixture)
from harness.waiting import PATIENCE_S, soon, until  # noqa: F401 (of all that is here)
from weft.domain.machine import TICK
from weft.wire.quiet_server import QuietServer
from weft.wire.v1 import common_pb2, predictor_pb2_grpc, scheduler_pb2, scheduler_pb2_grpc
from weft_gateway.core import GatewayConfig
from weft_gateway.main import MAX_CONNECTIONS, server_config
from weft_gateway.settings import GatewaySettings
from weft_gateway.shell import AppState, ConnectionBound, app_state, request_manager

TEMPLATE = "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}</s>{% endfor %}<|assistant|>"
HELLO: Any = [{"role": "user", "content": "hello"}]
ANSWER = "Grüße, dear reader \N{SLIGHTLY SMILING FACE}!"


async def opened(http: httpx2.AsyncClient, body: dict[str, Any], path: str = "/v1/completions") -> httpx2.Response:
    """A response whose status has come and whose body is still to be read. Close it to go away."""
    return await http.send(http.build_request("POST", path, json=body), stream=True)


def key_route(key: str, namespace: str = "", **fields: Any) -> scheduler_pb2.KeyRoute:
    """A key as the scheduler tells of it."""
    return scheduler_pb2.KeyRoute(
        key_hash=hashlib.sha256(key.encode()).hexdigest(), namespace=namespace, **({"key_id": key} | fields)
    )


class Server(QuietServer):
    """Without uvicorn's pauses of a tenth of a second, three of them at every end."""

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
    gateway: AppState = field(default=None)  # type: ignore[assignment]
    url: str = ""
    server: Server = field(default=None)  # type: ignore[assignment]
    pool: httpx2.AsyncClient = field(default=None)  # type: ignore[assignment]
    skipped_s: float = 0.0
    stopped_at_s: float | None = None  # a clock that stands still

    def clock(self) -> float:
        """Return the seconds of the gateway's clock."""
        return self.skipped_s + (time.monotonic() if self.stopped_at_s is None else self.stopped_at_s)

    def skip_hold(self) -> None:
        """Let the time pass on the gateway's clock for which it holds a request."""
        self.skipped_s += self.gateway.settings.hold_seconds
        self.gateway.manager.feed(TICK)

    def routes(self, version: int = 1, **fields: Any) -> scheduler_pb2.Routes:
        """A pool `team/base` with its base model and two adapters of different tenants."""
        made = scheduler_pb2.Routes(version=version, full=True, keys_known=True, **fields)
        base = {"base_digest": self.base_digest, "base_model_name": "tiny", "max_context_tokens": 512}
        made.pools.add(name="team/base", ready_runners=1, **base)
        made.routes.add(model_name="tiny", namespace="team", pool="team/base", created_unix_s=100)
        for name, digit, rank in (("acme/upper", "a", 8), ("rival/secret", "b", 0)):
            of = {"namespace": name.partition("/")[0], "digest": "sha256:" + digit * 64, "rank": rank}
            made.routes.add(model_name=name, pool="team/base", **of)
        return made

    def serve_model(self, template: str, *special: str) -> None:
        """Make a base model of this chat template, with these special tokens more, the pool's."""
        if special:
            self.tokenizer = tokenizers.Tokenizer.from_str(self.tokenizer.to_str())
            self.tokenizer.add_special_tokens(list(special))
        files = {"tokenizer.json": self.tokenizer.to_str(), "chat_template.jinja": template}
        self.base_digest = self.depot.add_model({name: text.encode() for name, text in files.items()})
        self.scheduler.routes = self.routes()

    async def prompt(self) -> str:
        """Return the text of the next prompt that the runner gets."""
        return self.tokenizer.decode((await self.runner.next("start")).prompt)

    def tokens(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def settings(self, tmp_path: Path, **changes: Any) -> GatewaySettings:
        values: dict[str, Any] = {
            "http": "127.0.0.1:0",
            "scheduler": self.scheduler_address,
            "predictor": self.predictor_address,
            "depot": self.depot.url,
            "data_dir": tmp_path / "data",
            "auth": False,
            "allowed_hosts": ["x"],  # of requests that tests write themselves
            "hold_seconds": 600.0,
            "predict_ms": 5000,
        }
        return GatewaySettings(**(values | changes))

    def client(self, **options: Any) -> openai.AsyncOpenAI:
        usual = {"base_url": f"{self.url}/v1", "api_key": "unused", "max_retries": 0, "timeout": PATIENCE_S}
        return openai.AsyncOpenAI(**(usual | {"http_client": self.pool} | options))

    def http(self) -> httpx2.AsyncClient:
        return httpx2.AsyncClient(base_url=self.url, timeout=PATIENCE_S)

    def outcome(self) -> common_pb2.Outcome:
        """The only outcome there is."""
        (outcome,) = self.scheduler.outcomes.values()
        return outcome

    async def settled(self) -> None:
        """Every request has ended and every outcome is acknowledged."""
        await until(lambda: not self.gateway.machine.admission.in_flight and not self.gateway.machine.outcomes)
        self.gateway.machine.check()


@pytest.fixture(scope="session")
def tokenizer() -> tokenizers.Tokenizer:
    special = ("<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>")
    return byte_tokenizer.train("hello dear reader, hello world", special, 400)


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
        listening(lambda s: add_scheduler(world.scheduler, s)) as world.scheduler_address,
        listening(lambda s: add_predictor(world.predictor, s)) as world.predictor_address,
        runner_server(world.runner),
    ):
        yield world


@asynccontextmanager
async def serving(
    world: World, settings: GatewaySettings, *, ready: bool = True, connections: int = MAX_CONNECTIONS, **times: float
) -> AsyncIterator[World]:
    """The real gateway on a real socket, in this event loop; `ready`: once it is. `times`: of its configuration."""
    listener = socket.create_server(("127.0.0.1", 0))
    with pytest.MonkeyPatch.context() as constants:
        constants.setattr(request_manager, "GatewayConfig", partial(GatewayConfig, connect_s=60.0, **times))
        constants.setattr(app_state, "RequestManager", partial(request_manager.RequestManager, clock=world.clock))
        gateway = AppState(settings, registry=CollectorRegistry())
    server = world.server = Server(server_config(gateway, ConnectionBound(connections)))
    world.gateway, world.url = gateway, f"http://127.0.0.1:{listener.getsockname()[1]}"
    async with gateway.running(), httpx2.AsyncClient(timeout=PATIENCE_S) as world.pool:
        http = asyncio.create_task(server._serve([listener]))
        try:
            await until(lambda: server.started and (not ready or not gateway.machine.admission.not_ready_reason()))
            yield world
        finally:
            server.should_exit = True
            await http


@pytest.fixture
async def world(parts: World, tmp_path: Path) -> AsyncIterator[World]:
    """Fakes and a ready gateway without keys."""
    async with serving(parts, parts.settings(tmp_path)):
        yield parts
