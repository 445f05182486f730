"""The stack that `weft bench faults` strikes, and its moments.

Two runners of the quickstart's base with the slowest kernels, so that a phase lasts long enough to strike in it.
Streams go through a gateway of our own, which dials every peer through `links`; where asked, KV between runners passes
through them, too. What a phase waits for is reported by the runners: how many tokens of a sequence are in KV, whether
an adapter is loading, whether KV is in host memory.
"""

import asyncio
import contextlib
import itertools
import json
import os
import random
import shutil
import signal
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import grpc.aio
import yaml

from weft.domain.runner import RunnerBook, RunnerRole
from weft.wire.v1.supervisor_pb2_grpc import AdminStub
from weft_stage.errors import StackFailed
from weft_stage.linked_runner import RUNNER, behind
from weft_stage.own_gateway import own_gateway
from weft_stage.process import Process
from weft_stage.reports import books, listed
from weft_stage.scrape import scrape, total
from weft_stage.sse import WORDS
from weft_stage.stack import CONTROLLER, UP, Stack, copy_adapter, is_ready, quickstart
from weft_stage.waiting import until
from weft_trouble import fault_host, linked_up
from weft_trouble.fault_store import PostgresStore, SqliteStore, Store, small_disk_of_sqlite
from weft_trouble.fault_streams import Ask, Stream, Streams, Token, recorded
from weft_trouble.faults import CLIENT
from weft_trouble.links import Links

PATIENCE_S, POLL_S = 180.0, 0.01
RUNNERS, SEQUENCES, STREAMS, LATE = 2, 16, 10, 2
MODELS = ("weft-quickstart", "acme/upper", "acme/reverse-words", "initech/cipher")
COLD_OF = "upper"  # what every cold adapter computes
SLOW = {"WEFT_CPU_LEVEL": "portable"}
ADVANCED = {"maxSequences": SEQUENCES, "maxBatchTokens": 24, "reservation": "paged"}
# Long prompts come in small chunks, and none is found in the prefix cache: there are more of them than its pages hold.
# As many streams as fit take more pages than there are: nothing is reserved, and the latest are swapped out.
POOL = {"replicas": RUNNERS, "advanced": ADVANCED | {"kvPages": 320}}
SPLIT_POOL = POOL | {"phases": {"mode": "Split"}, "advanced": ADVANCED | {"kvPages": 1024}}
DECODE_TOKENS, LONG_TOKENS, COLD_TOKENS = 400, 24, 24
SPLIT_DECODE_TOKENS = 800  # apart from prompts 400 had come, four times of five, before a long prompt was handed over
LONG_CHARS, LONG_ASKS, LONG_STREAMS = 900, 24, 4
LEFT_TOKENS = 64  # of a prompt, at the least, when it is struck
TROUBLE = ("an invariant does not hold", "Traceback (most recent call last)")


@dataclass(frozen=True, slots=True)
class Moment:
    """The phase is on now. `runner`: the component where it is; `depot`: the process that waits for the strike.

    `token_runner`: in a split pool, the component that goes on with what `runner` computes.
    """

    runner: str
    depot: int | None = None
    token_runner: str = ""

    def release(self, struck: int | None = None) -> None:
        """Let the depot go on, unless it is itself what was `struck`."""
        if self.depot not in (None, struck):
            os.kill(self.depot, signal.SIGCONT)


class Stage:
    """The stack, the gateway with its links, and the undisturbed answers. Made by `stage()`."""

    def __init__(
        self, stack: Stack, gateway: Process, links: Links, admin: AdminStub, seed: int, cold: int, split: bool
    ) -> None:
        self.stack, self.gateway, self.links, self._admin = stack, gateway, links, admin
        self.url = f"http://{gateway.probes}"  # where clients reach it
        self._roles = {RunnerRole.PROMPT, RunnerRole.TOKEN} if split else {RunnerRole.MIXED}
        rng = random.Random(seed)
        decode_tokens = SPLIT_DECODE_TOKENS if split else DECODE_TOKENS
        self._decode = [_ask(rng, n, 40, decode_tokens) for n in range(RUNNERS * SEQUENCES)]
        self.late = [_ask(rng, n, 40, COLD_TOKENS) for n in range(10)]
        self._long = [_ask(rng, n, LONG_CHARS, LONG_TOKENS) for n in range(LONG_ASKS)]
        self._cold = [replace(_ask(rng, n, 40, COLD_TOKENS), model=f"acme/{COLD_OF}") for n in range(LATE)]
        self._next_long, self._cold_models = 0, iter(range(cold))
        self.answers: dict[Ask, list[Token]] = {}
        self.kv_peers: list[str] = []  # where linked runners take KV
        self.store: Store = SqliteStore(stack.data_dir / "supervisor" / "weft.sqlite")
        self.mesh: dict[str, Links] = {"gateway": links}  # by source
        self.host: Path | None = None  # by which disks, clocks and memory are struck
        self._applied = itertools.count()

    # ------------------------------------------------------------------------------------------- answers

    async def record(self) -> None:
        """Record the answers of an undisturbed run. Raises StackFailed."""
        self.answers = await recorded(self.url, [*self._decode, *self.late, *self._cold, *self._long])

    def expected(self, ask: Ask) -> list[Token]:
        """Return the answer of an undisturbed run. A cold adapter is a copy of one that has answered."""
        return self.answers[replace(ask, model=f"acme/{COLD_OF}") if ask.model.startswith("acme/cold-") else ask]

    # ------------------------------------------------------------------------------------------- moments

    async def in_decode(self, streams: Streams) -> Moment | None:
        """Wait until every stream has tokens and none has ended."""
        running = streams.start(self._decode[:STREAMS])
        await streams.until(lambda: all(len(stream.tokens) >= 5 or stream.ended for stream in running))
        if any(stream.ended for stream in running):
            return None
        busiest = max(await self.runners(), key=lambda book: len(book.sequences))
        return Moment(busiest.spec.name)

    async def in_prefill(self, streams: Streams) -> Moment | None:
        """Wait until a long prompt is in KV in part, beside streams that have tokens."""
        if await self.in_decode(streams) is None:
            return None
        requests = [self._long[(self._next_long + n) % LONG_ASKS] for n in range(LONG_STREAMS)]
        self._next_long += LONG_STREAMS
        prompts = streams.start(requests)

        def begun(book: RunnerBook) -> bool:
            progress = dict(zip(book.sequences, book.progress, strict=False))
            return any(
                0 < progress[key] < len(prompt.ask.prompt) - LEFT_TOKENS
                for prompt in prompts
                if not prompt.tokens
                for key in _sequences(book, prompt)
                if key in progress
            )

        return await self._until_reported(begun, prompts)

    async def in_transfer(self, streams: Streams, share: float) -> Moment | None:
        """Wait until `share` of a long prompt is computed on the prompt runner and leaves; 1: until the hand-over."""
        if await self.in_decode(streams) is None:
            return None
        requests = [self._long[(self._next_long + n) % LONG_ASKS] for n in range(LONG_STREAMS)]
        self._next_long += LONG_STREAMS
        prompts = streams.start(requests)
        while not all(stream.ended for stream in prompts):
            found = await self.runners()
            by_role = {book.figures.role: book for book in found}
            on_prompt, on_token = by_role.get(RunnerRole.PROMPT), by_role.get(RunnerRole.TOKEN)
            if on_prompt is None or on_token is None:
                return None  # its roles are others: after a fault they come back
            moment = Moment(on_prompt.spec.name, token_runner=on_token.spec.name)
            progress = dict(zip(on_prompt.sequences, on_prompt.progress, strict=False))
            for prompt in prompts:
                done = max((progress.get(key, 0) for key in _sequences(on_prompt, prompt)), default=0)
                handed_over = bool(prompt.tokens) and not prompt.ended and len(prompt.tokens) > 1
                if handed_over if share >= 1 else share * len(prompt.ask.prompt) <= done and done and not prompt.tokens:
                    return moment
            await asyncio.sleep(POLL_S)
        return None

    async def in_loading(self, streams: Streams) -> Moment | None:
        """Wait until an adapter that no runner has is being loaded, beside streams that have tokens.

        The depot stands still meanwhile, and goes on after the strike.
        """
        if await self.in_decode(streams) is None:
            return None
        depot = self.stack.pid("depot")
        os.kill(depot, signal.SIGSTOP)
        model = f"acme/cold-{next(self._cold_models)}"
        waiting = streams.start([replace(ask, model=model) for ask in self._cold])

        def loading(book: RunnerBook) -> bool:
            wanted = {book.sequences[key].adapter for stream in waiting for key in _sequences(book, stream)}
            return any(digest in book.adapters and book.adapters[digest].loading for digest in wanted)

        try:
            moment = await self._until_reported(loading, waiting)
        except BaseException:
            os.kill(depot, signal.SIGCONT)
            raise
        assert moment is not None, "streams ended without their adapter"
        return replace(moment, depot=depot)

    async def in_swapping(self, streams: Streams) -> Moment | None:
        """Wait until KV of a sequence is in host memory, or on its way there or back."""
        running = streams.start(self._decode)
        probes = {name: self.stack.components()[name]["probes"] for name in self.stack.names("runner")}
        while not any(stream.ended for stream in running):
            for name, address in probes.items():
                if total(await asyncio.to_thread(scrape, address), "weft_runner_swapped_sequences"):
                    return Moment(name)
            await asyncio.sleep(POLL_S)
        return None

    async def _until_reported(self, holds: Callable[[RunnerBook], bool], streams: Sequence[Stream]) -> Moment | None:
        """Wait for the moment in which a runner's report says so. None: the streams ended without."""
        while not all(stream.ended for stream in streams):
            for book in await self.runners():
                if holds(book):
                    return Moment(book.spec.name)
            await asyncio.sleep(POLL_S)
        return None

    def peer(self, component: str) -> str:
        """Return the address where a component serves its peers, HOST:PORT."""
        if component == "gateway":
            return self.gateway.probes
        return self.stack.components()[component]["listen"]

    def files(self, component: str) -> Path:
        """Return the folder where a component writes; the controller's, as its process sees it, has everything."""
        data = self.stack.data_dir
        if component.startswith("runner-"):
            return data / "runners" / component.removeprefix("runner-")
        return {"gateway": data.parent / "gateway", CONTROLLER: data}.get(component, data / component)

    async def link_runners(self) -> None:
        """Let what runners send each other pass through links from now on."""
        for book in await self.runners():
            self.kv_peers.append(behind(book.spec.kv_address))
            await self.links.forward(self.kv_peers[-1], book.spec.kv_address)

    async def runners(self) -> list[RunnerBook]:
        return books(await listed(self._admin))

    async def apply_adapter(self) -> str:
        """Apply an adapter that is new. Returns its name."""
        name = f"new-{next(self._applied)}"
        manifests = self.stack.data_dir.parent / "manifests"
        copy_adapter(manifests / "adapters" / COLD_OF, manifests / "adapters" / name, name)
        obj = await asyncio.to_thread(self.stack.controller.get, "loraadapters", "acme", COLD_OF)
        spec = obj["spec"] | {"source": {"uri": f"file:adapters/{name}"}}
        new = {key: obj[key] for key in ("apiVersion", "kind")} | {
            "metadata": {"name": name, "namespace": "acme"}, "spec": spec,
        }  # fmt: skip
        for answer in await asyncio.to_thread(lambda: list(self.stack.controller.apply([new]))):
            if not isinstance(answer, str):
                raise StackFailed(f"{name}: {answer}")
        return name

    async def adapter_ready(self, name: str) -> None:
        """Wait until an adapter becomes Ready. Raises StackFailed."""

        async def ready() -> bool:
            return is_ready(await asyncio.to_thread(self.stack.controller.get, "loraadapters", "acme", name))

        await self._eventually(ready, f"{name} Ready")

    # ------------------------------------------------------------------------------------------- after a strike

    async def healthy(self, streams: Streams, replaced: int | None) -> None:
        """Wait until all is ready, idle and stored. `replaced`: the process that was killed. Raises StackFailed."""
        await self.ready(replaced)
        await self._eventually(self._idle, "idle again")
        await self._eventually(lambda: self._stored(streams), "an outcome of each stream")

    async def ready(self, replaced: int | None) -> None:
        """Wait until every component and every runner is ready. Raises StackFailed."""
        await self._eventually(lambda: self._ready(replaced), "ready")

    async def _ready(self, replaced: int | None) -> bool:
        components = self.stack.components().values()
        if any(one["phase"] != "Ready" or one["pid"] in (None, replaced) for one in components):
            return False
        reported = await self.runners()
        roles = {one.figures.role for one in reported}
        ready = all(one.figures.ready and not one.figures.draining for one in reported)
        return len(reported) == RUNNERS and ready and roles == self._roles

    async def _idle(self) -> bool:
        samples = await asyncio.to_thread(self.gateway.samples)
        left = total(samples, "weft_gateway_outcomes_unacked") + total(samples, "weft_gateway_in_flight")
        found = await self.runners()
        whole = all(book.figures.free_pages == book.spec.total_pages for book in found)
        return not left and whole and not any(book.sequences for book in found)

    async def _stored(self, streams: Streams) -> bool:
        return await self.store.outcomes(streams.name) == len(streams.all) and await self.store.balances()

    async def _eventually(self, holds: Callable[[], Awaitable[bool]], what: str) -> None:
        await until(holds, f"{what}; {self.stack.data_dir} has the logs", PATIENCE_S, 5 * POLL_S)

    @contextlib.contextmanager
    def no_trouble(self) -> Generator[None]:
        """Watch the logs of the block. Raises StackFailed if one tells of a broken invariant or has a traceback."""
        logs = [*(self.stack.data_dir / "logs").glob("*.log"), self.gateway.log]
        sizes = {log: log.stat().st_size for log in logs}
        yield
        for log, size in sizes.items():
            written = log.read_bytes()[size:].decode(errors="replace") if log.stat().st_size >= size else ""
            for line in written.splitlines():
                if any(word in line for word in TROUBLE):
                    raise StackFailed(f"{log}: {line}")


def _sequences(book: RunnerBook, stream: Stream) -> Iterator[str]:
    return (key for key in book.sequences if key.startswith(f"{stream.request_id}-"))


def _ask(rng: random.Random, number: int, chars: int, max_tokens: int) -> Ask:
    """Draw a request: in turn greedy and sampled, in turn over the models."""
    words = " ".join(rng.choices(WORDS, k=chars // 3))[:chars]
    return Ask(MODELS[number % len(MODELS)], words, max_tokens, float(number // len(MODELS) % 2), rng.getrandbits(32))


@contextlib.asynccontextmanager
async def sqlite_stage(folder: Path, seed: int, cold: int) -> AsyncGenerator[Stage]:
    """Start a stack as `stage` does, with the supervisor's file on a small disk."""
    manifests = _manifests(folder / "manifests", cold, POOL)
    with small_disk_of_sqlite(folder / "data"), Stack(manifests, folder / "data", environment=SLOW) as stack:
        async with _on(stack, folder, seed, cold) as made:
            await made.record()
            yield made


@contextlib.asynccontextmanager
async def postgresql_stage(folder: Path, seed: int, cold: int) -> AsyncGenerator[Stage]:
    """Start a stack as `stage` does, with the store in PostgreSQL."""
    manifests = _manifests(folder / "manifests", cold, POOL)
    async with Links() as links, contextlib.AsyncExitStack() as ends:
        store = PostgresStore(ends.enter_context(_open_folder()) / "disk", links)
        async with store.running() as url:
            environment = {**SLOW, "WEFT_SUPERVISOR__DATABASE": url}
            with Stack(manifests, folder / "data", environment=environment) as stack:
                async with _on(stack, folder, seed, cold) as made:
                    made.store = store
                    await made.record()
                    yield made


@contextlib.contextmanager
def _open_folder() -> Generator[Path]:
    """Make a temporary folder that other users can get to: PostgreSQL has a user of its own."""
    with TemporaryDirectory(prefix="weft-bench-postgresql-") as made:
        folder = Path(made)
        folder.chmod(0o711)
        yield folder


@contextlib.asynccontextmanager
async def meshed_stage(folder: Path, seed: int, cold: int, *, hosted: bool = False) -> AsyncGenerator[Stage]:
    """Start a stack as `stage` does, with links between all processes. `hosted`: a fault can strike the host, too."""
    host = fault_host.make(folder / "host") if hosted else None
    manifests = _manifests(folder / "manifests", cold, POOL)
    async with contextlib.AsyncExitStack() as ends:
        mesh = {source: await ends.enter_async_context(Links()) for source in linked_up.SOURCES}
        proxies = {source: links.environment["grpc_proxy"].removeprefix("http://") for source, links in mesh.items()}
        environment = {**SLOW, **mesh[linked_up.CONTROLLER].environment, linked_up.VARIABLE: json.dumps(proxies)}
        if host:
            environment |= {linked_up.HOST_VARIABLE: str(host), **fault_host.environment(host, CONTROLLER)}
        up = (*linked_up.UP, "--")
        with Stack(manifests, folder / "data", environment=environment, up=up) as stack:
            while not stack.components():
                stack.require_alive()
                await asyncio.sleep(POLL_S)
            depot = stack.address("depot").removeprefix("http://")
            for source, links in mesh.items():
                await links.forward(depot, linked_up.depot_of(source, depot))
            async with _on(stack, folder, seed, cold, host=host) as made:
                clients = await ends.enter_async_context(Links())
                made.mesh |= {**mesh, CLIENT: clients}
                made.url = f"http://{await clients.forward(made.gateway.probes)}"
                made.host = host
                await made.record()
                yield made


@contextlib.asynccontextmanager
async def stage(
    folder: Path, seed: int, cold: int, *, split: bool = False, kv_links: bool = False
) -> AsyncGenerator[Stage]:
    """Start a stack in `folder` with `cold` adapters that no runner has, and record the answers of an undisturbed run.

    `kv_links`: between runners, too.
    """
    manifests = _manifests(folder / "manifests", cold, SPLIT_POOL if split else POOL)
    with Stack(manifests, folder / "data", environment=SLOW, up=(*RUNNER, "--") if kv_links else UP) as stack:
        async with _on(stack, folder, seed, cold, split=split) as made:
            if kv_links:
                await made.link_runners()
            await made.record()
            yield made


@contextlib.asynccontextmanager
async def _on(
    stack: Stack, folder: Path, seed: int, cold: int, *, split: bool = False, host: Path | None = None
) -> AsyncGenerator[Stage]:
    """Start a gateway of our own beside the stack, and wait until everything is ready."""
    await asyncio.to_thread(stack.wait_for_models)
    supervisor = grpc.aio.insecure_channel(stack.address("supervisor"))
    async with Links() as links, _gateway(stack, links, folder, host) as gateway, supervisor as channel:
        made = Stage(stack, gateway, links, AdminStub(channel), seed, cold, split)
        await made.ready(None)
        yield made


@contextlib.asynccontextmanager
async def _gateway(stack: Stack, links: Links, folder: Path, host: Path | None) -> AsyncGenerator[Process]:
    """Start a second gateway of the stack, whose peers are behind links."""
    depot = await links.forward(stack.address("depot").removeprefix("http://"))
    environment = {**links.environment, **(fault_host.environment(host, "gateway") if host else {})}
    async with own_gateway(stack, folder, "--no-auth", depot_url=f"http://{depot}", environment=environment) as made:
        yield made


def _manifests(folder: Path, cold: int, changes: Mapping[str, object]) -> Path:
    """Write the quickstart with two runners, and copies of an adapter that differ in their digest alone."""
    shutil.copytree(quickstart(), folder)
    pool = yaml.safe_load((folder / "01-pool.yaml").read_text())
    pool["spec"] |= changes
    (folder / "01-pool.yaml").write_text(yaml.safe_dump(pool))
    adapters = list(yaml.safe_load_all((folder / "acme.yaml").read_text()))
    for number in range(cold):
        name = f"cold-{number}"
        copy_adapter(folder / "adapters" / COLD_OF, folder / "adapters" / name, name)
        metadata, spec = {"name": name, "namespace": "acme"}, adapters[0]["spec"]
        adapters.append(
            adapters[0] | {"metadata": metadata, "spec": spec | {"source": {"uri": f"file:adapters/{name}"}}}
        )
    (folder / "acme.yaml").write_text(yaml.safe_dump_all(adapters))
    return folder
