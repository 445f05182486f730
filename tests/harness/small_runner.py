"""A small random model, random adapters and a depot on loopback: real files, real safetensors, real HTTP.

Faked: the depot's process (a folder of blobs behind `http.server`, the same paths) and the gateways and supervisor at
the other end of the streams (they speak the real protobuf contracts over real sockets).
"""

import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from harness.loopback import LoopbackServer, Request
from harness.native_library import native_library
from harness.ranks import settings_of
from harness.runner_machine import flat, session, start_of
from weft.artifacts.adapter_config import parse_adapter_config
from weft.artifacts.digest import FileEntry, build_manifest
from weft.domain.adapter import DesiredChange
from weft.domain.ids import Epoch
from weft.domain.machine import Connected, Kind, Peer, Received
from weft.domain.model.config import parse_spec
from weft.domain.model.spec import ModelSpec
from weft.domain.request import SessionHello, Start, Stop
from weft.domain.runner import RunnerOrder
from weft_runner.core import Batch, BatchLimits, PoolLimits, Runner
from weft_runner.core.drafts.drafter import Search
from weft_runner.errors import ArtifactUnknown
from weft_runner.executors import ModelSource, make_executor
from weft_runner.model import AdapterFiles, Executor, Grammars
from weft_runner.shell import AdapterPool, Engine, Output

SMALL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ATTENTION = PROJECTIONS[:4]


def random_tensors(spec: ModelSpec, seed: int) -> dict[str, torch.Tensor]:
    """Weights large enough that answers differ from token to token."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * (2.0 / shape[-1] ** 0.5)

    tensors = {"model.embed_tokens.weight": normal(spec.vocab_size, spec.hidden_size)}
    for layer in range(spec.layers):
        prefix = f"model.layers.{layer}"
        for name in PROJECTIONS:
            n_in, n_out = spec.projection(name)
            block = "self_attn" if name in ATTENTION else "mlp"
            tensors[f"{prefix}.{block}.{name}.weight"] = normal(n_out, n_in)
        tensors[f"{prefix}.input_layernorm.weight"] = torch.ones(spec.hidden_size)
        tensors[f"{prefix}.post_attention_layernorm.weight"] = torch.ones(spec.hidden_size)
    tensors["model.norm.weight"] = torch.ones(spec.hidden_size)
    if not spec.tied_embeddings:
        tensors["lm_head.weight"] = normal(spec.vocab_size, spec.hidden_size)
    return tensors


def adapter_tensors(spec: ModelSpec, seed: int, rank: int, modules: tuple[str, ...]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 + seed)
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(spec.layers):
        for name in modules:
            n_in, n_out = spec.projection(name)
            block = "self_attn" if name in ATTENTION else "mlp"
            key = f"base_model.model.model.layers.{layer}.{block}.{name}"
            tensors[f"{key}.lora_A.weight"] = torch.randn(rank, n_in, generator=generator) / n_in**0.5
            tensors[f"{key}.lora_B.weight"] = torch.randn(n_out, rank, generator=generator) * 0.5 / rank**0.5
    return tensors


@dataclass
class Depot:
    """Blobs in memory behind HTTP; `requests` counts what was asked for."""

    blobs: dict[str, bytes] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    asked: threading.Event = field(default_factory=threading.Event)
    refusals: int = 0  # further requests that are answered 503
    url: str = ""

    def publish(self, kind: Any, folder: Path) -> str:
        """A folder -> its digest."""
        entries = []
        for path in sorted(folder.iterdir()):
            data = path.read_bytes()
            sha256 = hashlib.sha256(data).hexdigest()
            self.blobs[f"sha256:{sha256}"] = data
            entries.append(FileEntry(path.name, sha256, len(data)))
        manifest = build_manifest(kind, entries)
        self.blobs[manifest.digest] = manifest.to_bytes()
        return manifest.digest


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Operators on models this small are shorter than waking a second thread."""
    torch.set_num_threads(1)


@contextmanager
def serving_depot() -> Iterator[Depot]:
    """A depot on loopback."""
    depot = Depot()

    def answer(request: Request) -> tuple[int, bytes]:
        digest = request.path.rpartition("/")[2]
        depot.requests.append(digest)
        depot.asked.set()
        depot.refusals, refused = max(0, depot.refusals - 1), depot.refusals > 0
        body = depot.blobs.get(digest)
        return (503, b"") if refused else (404, b"") if body is None else (200, body)

    server = LoopbackServer(answer)
    depot.url = server.url
    try:
        yield depot
    finally:
        server.close()


@pytest.fixture
def depot() -> Iterator[Depot]:
    with serving_depot() as depot:
        yield depot


@dataclass
class World:
    """A folder with a base and adapters, and a `Source` of them."""

    root: Path
    config: dict[str, Any]

    @property
    def spec(self) -> ModelSpec:
        return parse_spec(self.config)

    @property
    def base(self) -> Path:
        return self.root / "base"

    def write_base(self, seed: int = 0) -> Path:
        self.base.mkdir(parents=True)
        (self.base / "config.json").write_text(json.dumps(self.config))
        save_file(random_tensors(self.spec, seed), self.base / "model.safetensors")
        return self.base

    def write_adapter(
        self, name: str, *, seed: int = 1, rank: int = 4, modules: tuple[str, ...] = PROJECTIONS, **config: Any
    ) -> Path:
        folder = self.root / name
        folder.mkdir(parents=True)
        save_file(adapter_tensors(self.spec, seed, rank, modules), folder / "adapter_model.safetensors")
        fields = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(modules), **config}
        (folder / "adapter_config.json").write_text(json.dumps(fields))
        return folder

    # ---- Source

    def adapter(self, digest: str) -> AdapterFiles:
        folder = self.root / digest
        if not folder.exists():
            raise ArtifactUnknown(f"there is no {digest}")
        config = parse_adapter_config((folder / "adapter_config.json").read_bytes())
        return AdapterFiles(folder / "adapter_model.safetensors", config)

    def retain(self, digests: frozenset[str]) -> None:
        del digests

    def on_disk(self) -> tuple[str, ...]:
        return ()


@pytest.fixture
def world(tmp_path: Path) -> World:
    """A small base model on disk."""
    world = World(tmp_path / "world", dict(SMALL))
    world.write_base()
    return world


@pytest.fixture
def small_config() -> dict[str, Any]:
    return dict(SMALL)


def executor_of(
    files: dict[str, Path],
    spec: ModelSpec,
    limits: PoolLimits,
    *,
    kind: str = "reference",
    threads: int = 1,
    **flags: Any,
) -> Executor:
    """Make an executor as a runner does: `reference`, or `cpu` (skips the test where none can be built)."""
    if kind == "cpu":
        native_library()
    sizes = {"kv_pages": limits.total_pages, "page_tokens": limits.page_tokens, "max_adapters": limits.max_adapters}
    return make_executor(settings_of(executor=kind, **sizes, **flags), ModelSource(spec, files, threads))


class Driver:
    """An engine driven beat by beat on the test's own thread: nothing runs that the test did not ask for."""

    def __init__(
        self, world: World, source: Any = None, make_executor: Callable[..., Any] | None = None,
        search: Search | None = None, *, checks_drafts: bool = False, **limits: Any,
    ) -> None:  # fmt: skip
        files = {path.name: path for path in world.base.iterdir()}
        spec = parse_spec(json.loads(files["config.json"].read_text()))
        sizes = {"total_pages": 64, "page_tokens": 4, "max_sequences": 32, "max_adapters": 4, **limits}
        context = min(spec.max_positions, sizes["total_pages"] * sizes["page_tokens"])
        found = {"vocab_size": spec.vocab_size, "eos": spec.eos, "max_context_tokens": context, "batch": BatchLimits()}
        self.limits = PoolLimits(**found | sizes)
        executor = (make_executor or executor_of)(files, spec, self.limits)
        self.outputs: list[Output] = []
        self.paused: list[int] = []  # sequences, at each output
        self.swapped: list[int] = []
        self.skipped_s = 0.0
        self.engine = Engine(
            Runner(self.limits, search=search, checks_drafts=checks_drafts),
            executor,
            lambda post: AdapterPool(executor.adapters, 64, source or world, post),
            self._take,
            clock=lambda: time.monotonic() + self.skipped_s,
            grammars=Grammars(files.get("tokenizer.json"), spec.vocab_size, spec.eos),
        )
        self.pool = self.engine.runner.pool
        self._counter = 0
        self._connected: set[int] = set()

    def request(self, key: str, prompt: list[int], max_tokens: int = 8, adapter: str = "", **fields: Any) -> Start:
        self._counter += 1
        fields.setdefault("epoch", Epoch(1, self._counter))
        epoch = fields.pop("epoch")
        start = start_of(key, epoch.counter, prompt, max_tokens, adapter=adapter, **fields)
        return replace(start, epoch=epoch)

    def post(self, *events: Any, owner: int = 1) -> None:
        """Events of the machine; a gateway's messages come in the session of that number."""
        for event in events:
            if isinstance(event, Start | Stop):
                if owner not in self._connected:
                    self._connected.add(owner)
                    self.engine.post(Connected(session(owner), SessionHello("g", "")))
                event = Received(session(owner), event)
            elif isinstance(event, DesiredChange):
                event = Received(Peer(Kind.SUPERVISOR, "s"), RunnerOrder(event))
            self.engine.post(event)

    def ask(self, *given: Any, **fields: Any) -> None:
        """Post a request, as `request` makes it."""
        self.post(self.request(*given, **fields))

    def run(self, key: str, *given: Any, **fields: Any) -> list[int]:
        """Post a request, and beat until nothing is left. Returns its answer."""
        self.ask(key, *given, **fields)
        self.finish()
        return self.answer(key)

    def change_logits(self, change: Callable[[Any, Any], Any]) -> None:
        """Sample from what `change` makes of each step and its logits."""
        run = self.engine.executor.run
        self.engine.executor.run = lambda step: change(step, run(step))  # type: ignore[method-assign]

    def beat(self, times: int = 1) -> None:
        for _ in range(times):
            self.engine.run_once()

    def finish(self, limit: int = 10_000) -> None:
        """Beat until nothing is left. A beat with nothing to run waits for the loader, so this needs no sleep."""
        for _ in range(limit):
            self.engine.run_once()
            if not self.pool.sequences and not self.engine.runner.grammars.waiting:
                return
        raise AssertionError(f"{len(self.pool.sequences)} sequences are left")

    def _take(self, output: Output) -> None:
        self.outputs.append(output)
        self.paused.append(len(self.pool.reservations.paused))
        self.swapped.append(self.pool.swap.num_swapped_out)

    @property
    def events(self) -> list[Any]:
        return [message for output in self.outputs for message in flat(output.sends)]

    @property
    def batches(self) -> list[Batch]:
        """What ran, in order."""
        return [output.done.step.batch for output in self.outputs if output.done is not None]

    @property
    def status(self) -> Any:
        """The latest."""
        return next(output.status for output in reversed(self.outputs) if output.status is not None)

    def answer(self, key: str) -> list[int]:
        """The tokens of one request, each position once."""
        tokens: dict[int, int] = {}
        for event in self.events:
            if event.request_id == key and hasattr(event, "tokens"):
                for offset, token in enumerate(event.tokens):
                    assert event.position + offset not in tokens, "a token came twice"
                    tokens[event.position + offset] = token
        return [tokens[position] for position in sorted(tokens)]

    def ending(self, key: str) -> Any:
        """The last event of a request."""
        return [event for event in self.events if event.request_id == key][-1]


class LaggingThreads:
    """Threads of grammars: each job is done `lags` beats after it was asked for, by turns."""

    def __init__(self, lags: Sequence[int]) -> None:
        self._lags, self._jobs = cycle(lags), list[tuple[int, Callable[[], None]]]()

    def put(self, job: Callable[[], None], *, long: bool) -> None:
        self._jobs.append((next(self._lags), job))
        self.beat(0)

    def beat(self, beats: int) -> None:
        jobs, self._jobs = [(lag - beats, job) for lag, job in self._jobs], []
        for lag, job in jobs:
            job() if lag <= 0 else self._jobs.append((lag, job))

    def close(self) -> None:
        pass


@pytest.fixture
def make_driver() -> Iterator[Callable[..., Driver]]:
    """Make drivers over any model; their loader threads end with the test."""
    made: list[Driver] = []

    def make(world: World, source: Any = None, **how: Any) -> Driver:
        made.append(Driver(world, source, **how))
        return made[-1]

    yield make
    for driver in made:
        driver.engine.close()


@pytest.fixture
def drive(world: World, make_driver: Callable[..., Driver]) -> Callable[..., Driver]:
    """Make drivers over the small model."""
    return partial(make_driver, world)


@pytest.fixture(scope="session")
def new_world() -> type[World]:
    return World
