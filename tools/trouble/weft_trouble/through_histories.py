"""Run `weft bench histories` on a stack of our own."""

import asyncio
import contextlib
import hashlib
import itertools
import random
import sqlite3
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc.aio
import httpx2

from weft.artifacts.digest import FileEntry, build_manifest
from weft.wire.v1 import supervisor_pb2 as pb
from weft.wire.v1.supervisor_pb2_grpc import AdminStub
from weft_cli.errors import NotThere
from weft_stage.errors import StackFailed
from weft_stage.lines import Line, Origin
from weft_stage.own_gateway import own_gateway
from weft_stage.stack import CONFIG, WEIGHTS, Stack, copy_adapter
from weft_stage.waiting import until
from weft_trouble.histories import REVOKED_S, Applied, Deleted, History, KeyUsed, Read, Revoked, SeenReady, lines
from weft_trouble.soak_activities import ADAPTER, CONTENTS, GONE_S, NAMESPACE, adapter_spec
from weft_trouble.through_soak import manifests as made_manifests

NAMES, READERS, KEYS = 4, 8, 2
PATIENCE_S, POLL_S, STORED_S = 120.0, 0.02, 60.0
MODEL_DIGEST = "x-weft-model-digest"


async def measure(
    folder: Path, origin: Origin, seed: int, *, minutes: float, say: Callable[[str], None]
) -> tuple[list[Line], History]:
    """Record for `minutes`, then check. Raises StackFailed."""
    manifests = made_manifests(folder / "manifests")
    with Stack(manifests, folder / "data", "--auth") as stack:
        stack.key = await asyncio.to_thread(stack.create_key, NAMESPACE)
        await asyncio.to_thread(stack.wait_for_models)
        async with (
            own_gateway(stack, folder, "--auth") as second,
            grpc.aio.insecure_channel(stack.address("supervisor")) as channel,
        ):
            gateways = stack.url, f"http://{second.probes}"
            clients = Clients(stack, gateways, AdminStub(channel), manifests, seed)
            await clients.run(minutes * 60)
            outcomes = await clients.stored()
    wrong = [*clients.history.check(), *clients.trouble]
    for sentence in wrong:
        say(f"wrong: {sentence}")
    return list(lines(origin, clients.history, wrong, outcomes)), clients.history


class Clients:
    """Publishers, readers and makers of keys, and what they saw."""

    def __init__(self, stack: Stack, gateways: Sequence[str], admin: AdminStub, manifests: Path, seed: int) -> None:
        self.history, self.trouble = History(), list[str]()
        self._stack, self._admin, self._manifests, self._rng = stack, admin, manifests, random.Random(seed)
        headers = {"Authorization": f"Bearer {stack.key}"}
        limits = httpx2.Limits(max_connections=None)
        self._gateways = [
            httpx2.AsyncClient(base_url=url, headers=headers, timeout=PATIENCE_S, limits=limits, trust_env=False)
            for url in gateways
        ]
        self._numbers = itertools.count()
        self._accepted = 0
        self._turns = {name: asyncio.Lock() for name in self._names}  # of who changes it
        self._lives = dict.fromkeys(self._names, -1)  # the present one of each name, or the last
        self._uids = dict[str, int]()  # of an object, which life of its name it is
        self._alive = set[str]()

    @property
    def _names(self) -> list[str]:
        return [f"kept-{number}" for number in range(NAMES)]

    async def run(self, seconds: float) -> None:
        """Run everything at once; what fails is trouble, and the others go on."""
        over = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            for name in self._names:
                tasks.create_task(self._loop(over, self._live, name))
                tasks.create_task(self._loop(over, self._publish_beside, name))
                tasks.create_task(self._loop(over, self._look, name))
            for _ in range(READERS):
                tasks.create_task(self._loop(over, self._read, ""))
            for _ in range(KEYS):
                tasks.create_task(self._loop(over, self._key, ""))
            await asyncio.sleep(seconds)
            over.set()
        await asyncio.gather(*(gateway.aclose() for gateway in self._gateways))

    async def stored(self) -> dict[str, int]:
        """Return the outcomes of what was accepted once the store has no more to come, or after `STORED_S`."""
        path, found = self._stack.data_dir / "supervisor" / "weft.sqlite", dict[str, int]()

        async def all_there() -> bool:
            found.update(await asyncio.to_thread(_counted, path))
            return found["outcomes of them"] >= self._accepted and found["usage"] >= found["outcomes"]

        with contextlib.suppress(StackFailed):  # what is missing is said below
            await until(all_there, "an outcome of each request", STORED_S, POLL_S)
        if found["outcomes of them"] != self._accepted:
            self.trouble.append(f"{self._accepted} requests were accepted, {found['outcomes of them']} have an outcome")
        if found["usage"] != found["outcomes"]:
            self.trouble.append(f"usage counts {found['usage']} requests, there are {found['outcomes']} outcomes")
        return {"requests accepted": self._accepted, **found}

    async def _loop(self, over: asyncio.Event, act: Callable[[str, random.Random], Awaitable[None]], name: str) -> None:
        rng = random.Random(self._rng.getrandbits(64))
        while not over.is_set():
            try:
                await act(name, rng)
            except (httpx2.HTTPError, StackFailed, grpc.aio.AioRpcError) as error:
                self.trouble.append(f"{act.__name__.strip('_')} {name}: {error!r}")
            await asyncio.sleep(rng.expovariate(1 / 0.02))

    # ------------------------------------------------------------------------------------------- objects

    async def _live(self, name: str, rng: random.Random) -> None:
        """Live the life of a name: applied, changed a few times, deleted, gone."""
        for _ in range(rng.randrange(1, 5)):
            await self._publish(name, rng)
            await self._until_ready(name)
            await asyncio.sleep(rng.expovariate(1 / 0.3))
        async with self._turns[name]:
            self._alive.discard(name)
            obj = {**ADAPTER, "metadata": {"name": name, "namespace": NAMESPACE}}
            begin = time.monotonic()
            await asyncio.to_thread(lambda: list(self._stack.controller.delete([obj])))
            await until(lambda: self._gone(name), f"{name} gone", PATIENCE_S, POLL_S)
            await asyncio.sleep(GONE_S)
            self.history.deleted.append(Deleted(name, self._lives[name], begin, time.monotonic()))

    async def _publish_beside(self, name: str, rng: random.Random) -> None:
        """Publish the same adapter as another publisher, which does not make it."""
        await asyncio.sleep(rng.expovariate(1 / 0.5))
        await self._publish(name, rng, makes=False)

    async def _publish(self, name: str, rng: random.Random, *, makes: bool = True) -> None:
        """Publish a content that is new; `makes`: also the adapter, if it is not there."""
        number = next(self._numbers)
        content = self._manifests / "adapters" / f"content-{number}"
        copy_adapter(self._manifests / "adapters" / rng.choice(CONTENTS), content, content.name)
        digest = _digest(content)
        async with self._turns[name]:
            if name not in self._alive:
                if not makes:
                    return
                self._lives[name] += 1
            metadata, spec = {"name": name, "namespace": NAMESPACE}, adapter_spec(content.name)
            begin, obj = time.monotonic(), {**ADAPTER, "metadata": metadata, "spec": spec}
            (answer,) = await asyncio.to_thread(lambda: list(self._stack.controller.apply([obj])))
            if not isinstance(answer, str):
                raise StackFailed(f"{name} was not applied: {answer}")
            made = await self._object(name)
            assert made is not None
            self._alive.add(name)
            self._uids[made["metadata"]["uid"]] = self._lives[name]
            applied = Applied(name, self._lives[name], made["metadata"]["generation"], digest, begin)
            self.history.applied.append(applied)

    async def _until_ready(self, name: str) -> None:
        """Wait until the newest generation is Ready."""
        await until(lambda: self._ready(name), f"{name} Ready", PATIENCE_S, POLL_S)

    async def _look(self, name: str, _: random.Random) -> None:
        await self._ready(name)

    async def _gone(self, name: str) -> bool:
        return await self._object(name) is None

    async def _ready(self, name: str) -> bool:
        """Note what is Ready now. Returns whether that is the newest generation."""
        obj = await self._object(name)
        if obj is None or (life := self._uids.get(obj["metadata"]["uid"])) is None:
            return False
        for one in obj.get("status", {}).get("conditions", ()):
            if one["type"] == "Ready" and one["status"] == "True" and "deletionTimestamp" not in obj["metadata"]:
                self.history.ready.append(SeenReady(name, life, one["observedGeneration"], time.monotonic()))
                return one["observedGeneration"] == obj["metadata"]["generation"]
        return False

    async def _object(self, name: str) -> dict[str, Any] | None:
        with contextlib.suppress(NotThere):
            return await asyncio.to_thread(self._stack.controller.get, "loraadapters", NAMESPACE, name)
        return None

    # ------------------------------------------------------------------------------------------- requests, keys

    async def _read(self, _: str, rng: random.Random) -> None:
        name = rng.choice(self._names)
        begin = time.monotonic()
        answer, _gateway = await self._send(f"{NAMESPACE}/{name}")
        end = time.monotonic()
        if answer.status_code not in (200, 404):
            raise StackFailed(f"{name}: HTTP {answer.status_code}: {answer.text[:300]}")
        self.history.reads.append(Read(name, begin, end, answer.headers.get(MODEL_DIGEST, "")))

    async def _key(self, _: str, rng: random.Random) -> None:
        made = await self._admin.CreateKey(pb.CreateKeyRequest(namespace=NAMESPACE, note="history"), timeout=PATIENCE_S)
        end = time.monotonic() + rng.uniform(1.0, 3.0)
        while time.monotonic() < end:
            await self._use(made.key, made.key_id)
        begin = time.monotonic()
        await self._admin.RevokeKey(pb.RevokeKeyRequest(key_id=made.key_id), timeout=PATIENCE_S)
        self.history.revoked.append(Revoked(made.key_id, begin, time.monotonic()))
        end = time.monotonic() + REVOKED_S + 1.0
        while time.monotonic() < end:
            await self._use(made.key, made.key_id)

    async def _use(self, key: str, key_id: str) -> None:
        begin = time.monotonic()
        answer, gateway = await self._send("weft-quickstart", key)
        self.history.used.append(KeyUsed(key_id, begin, time.monotonic(), answer.status_code == 200, gateway))
        await asyncio.sleep(POLL_S)

    async def _send(self, model: str, key: str = "") -> tuple[httpx2.Response, int]:
        """Send a request. Returns the answer, and the number of the gateway that gave it; gateways take turns."""
        number = next(self._numbers)
        headers, gateway = {"X-Request-Id": f"history-{number}"}, number % len(self._gateways)
        headers |= {"Authorization": f"Bearer {key}"} if key else {}
        body = {"model": model, "prompt": "the red fox", "max_tokens": 2, "temperature": 0}
        answer = await self._gateways[gateway].post("/v1/completions", json=body, headers=headers)
        self._accepted += answer.status_code == 200
        return answer, gateway


def _counted(path: Path) -> dict[str, int]:
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=STORED_S)) as store:
        count = "SELECT count(*) FROM outcomes"
        return {
            "outcomes": store.execute(count).fetchone()[0],
            "outcomes of them": store.execute(f"{count} WHERE request_id LIKE 'history-%'").fetchone()[0],
            "usage": store.execute("SELECT coalesce(sum(requests), 0) FROM usage").fetchone()[0],
        }


def _digest(folder: Path) -> str:
    """Return the digest of an adapter in a folder, as the depot finds it."""
    return build_manifest("adapter", list(_entries(folder))).digest


def _entries(folder: Path) -> Iterator[FileEntry]:
    for name in (CONFIG, WEIGHTS):
        content = (folder / name).read_bytes()
        yield FileEntry(name, hashlib.sha256(content).hexdigest(), len(content))
