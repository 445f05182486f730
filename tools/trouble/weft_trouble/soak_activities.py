"""What is done during `weft bench soak`, each activity in a loop of its own with choices of its own."""

import asyncio
import json
import random
import shutil
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2

from weft.domain.model.errors import Reason
from weft.wire.v1 import supervisor_pb2 as pb
from weft.wire.v1.supervisor_pb2_grpc import AdminStub
from weft_stage.errors import StackFailed
from weft_stage.sse import WORDS
from weft_stage.stack import Stack, copy_adapter
from weft_stage.waiting import until
from weft_trouble.fault_streams import Ask, Token

POOL = {"apiVersion": "serving.weft.dev/v1alpha1", "kind": "ServingPool"}
ADAPTER = {"apiVersion": "serving.weft.dev/v1alpha1", "kind": "LoRAAdapter"}
NAMESPACE, PLATFORM, MAIN_POOL, SPARE_POOL = "acme", "weft-system", "quickstart", "spare"
BASE, SPARE_BASE = "weft-quickstart", "weft-spare"
CONTENTS = ("upper", "reverse-words")
MODELS = (BASE, *(f"{NAMESPACE}/{content}" for content in CONTENTS))
ASKS, TOKENS = 24, 64
PATIENCE_S, POLL_S = 120.0, 0.05
GONE_S = 2.0  # after it nothing answers that was deleted or revoked
WRONG_BODIES: Sequence[tuple[str, Any]] = (
    ("/v1/completions", b"{"),
    ("/v1/completions", b'{"model": "weft-quickstart", "prompt": "\xff"}'),
    ("/v1/completions", {"prompt": "no model"}),
    ("/v1/completions", {"model": "acme/nothing", "prompt": "unknown model"}),
    ("/v1/completions", {"model": BASE, "prompt": "long " * 20_000}),
    ("/v1/completions", {"model": BASE, "prompt": "x", "max_tokens": -1}),
    ("/v1/completions", {"model": BASE, "prompt": "x", "temperature": "hot"}),
    ("/v1/chat/completions", {"model": BASE, "messages": []}),
    ("/v1/chat/completions", {"model": BASE, "messages": [{"role": "nobody", "content": "x"}]}),
    ("/v1/chat/completions", {"model": BASE, "messages": [{"role": "user", "content": "x"}], "tools": 3}),
)


class Refused(Exception):
    """The gateway's status and its words."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(f"{status}: {words[:300]}")
        self.status = status


class Wrong(Exception):
    """A promise that was broken."""


class Activities:
    """Everything that is done, until `until`; `right` and `wrong` say how it ended."""

    def __init__(self, stack: Stack, admin: AdminStub, manifests: Path, seed: int) -> None:
        self._stack, self._admin, self._manifests = stack, admin, manifests
        self._rng = random.Random(seed)
        limits = httpx2.Limits(max_connections=None)
        self._http = httpx2.AsyncClient(
            base_url=stack.url, headers={"Authorization": f"Bearer {stack.key}"}, timeout=PATIENCE_S, limits=limits,
            trust_env=False,
        )  # fmt: skip
        self._asks = [_ask(self._rng, number) for number in range(ASKS)]
        self._expected: dict[Ask, list[Token]] = {}
        self._versions = iter(range(10**9))
        self.right, self.wrong = Counter[str](), list[str]()

    async def record(self) -> None:
        """Record the answers when nothing else runs. Raises StackFailed."""
        for ask in self._asks:
            for model in MODELS:
                self._expected[replace(ask, model=model)] = await self._answer(replace(ask, model=model))

    async def run(self, streams: int, over: asyncio.Event) -> None:
        """Run all activities until `over` is set and each has come to its end."""
        loops: list[tuple[str, Callable[[random.Random], Awaitable[None]], float]] = [
            *[("streams", self._stream, 0.0)] * streams,
            *[("answers that clients leave", self._leave, 0.5)] * 2,
            *[("adapters that come, change and go", self._adapter, 1.0)] * 2,
            ("broken sources", self._broken_source, 5.0),
            ("keys made, used and revoked", self._key, 2.0),
            ("wrong requests", self._wrong_request, 0.2),
            ("pool to zero and back", self._scale, 20.0),
        ]
        try:
            async with asyncio.TaskGroup() as tasks:
                for name, activity, pause_s in loops:
                    rng = random.Random(self._rng.getrandbits(64))
                    tasks.create_task(self._repeat(name, activity, pause_s, rng, over))
        finally:
            await self._http.aclose()

    async def _repeat(
        self, name: str, activity: Callable[[random.Random], Awaitable[None]], pause_s: float, rng: random.Random,
        over: asyncio.Event,
    ) -> None:  # fmt: skip
        while not over.is_set():
            try:
                await activity(rng)
                self.right[name] += 1
            except (Wrong, Refused, httpx2.HTTPError, StackFailed) as error:
                self.wrong.append(f"{name}: {error!r}")
            await asyncio.sleep(rng.expovariate(1 / pause_s) if pause_s else 0)

    # ------------------------------------------------------------------------------------------- requests

    async def _stream(self, rng: random.Random) -> None:
        ask = replace(rng.choice(self._asks), model=rng.choice(MODELS))
        self._check(ask, ask, await self._answer(ask))

    async def _leave(self, rng: random.Random) -> None:
        """Leave a stream early and check that what came until then is right, too."""
        ask = replace(rng.choice(self._asks), model=rng.choice(MODELS))
        most = rng.randrange(TOKENS // 2)
        got = await self._answer(ask, most)
        _expect(got == self._expected[ask][: len(got)], f"{ask.model}: other tokens before the client left")

    async def _wrong_request(self, rng: random.Random) -> None:
        path, body = rng.choice(WRONG_BODIES)
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        answer = await self._http.post(path, content=content, headers={"Content-Type": "application/json"})
        _expect(400 <= answer.status_code < 500, f"{path} {content[:80]!r}: {answer.status_code} {answer.text[:300]}")
        _expect(answer.json()["error"]["message"], "an error without a message")

    def _check(self, ask: Ask, expected: Ask, got: Sequence[Token]) -> None:
        _expect(got == self._expected[expected], f"{ask.model}: other tokens than {expected.model} alone")

    async def _answer(self, ask: Ask, most: int | None = None, key: str | None = None) -> list[Token]:
        """Return an answer's tokens; leave it once there are `most`. Raises Refused, StackFailed, httpx2.HTTPError."""
        tokens = list[Token]()
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        async with self._http.stream("POST", "/v1/completions", json=ask.body(), headers=headers) as answer:
            if answer.status_code != 200:
                raise Refused(answer.status_code, (await answer.aread()).decode())
            async for line in answer.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise StackFailed(f"{ask.model}: {json.dumps(event['error'])}")
                for choice in event["choices"]:
                    if found := choice.get("logprobs"):
                        tokens += map(Token, found["tokens"], found["token_logprobs"])
                if most is not None and len(tokens) >= most:
                    break
        return tokens

    # ------------------------------------------------------------------------------------------- adapters

    async def _adapter(self, rng: random.Random) -> None:
        """Apply an adapter, change it twice, delete it: the newest Ready content answers, at the end none."""
        number = next(self._versions)
        name, ask = f"soak-{number % 50}-{number}", rng.choice(self._asks)
        folders = list[Path]()
        try:
            for content in rng.sample([*CONTENTS, *CONTENTS], k=3):
                folders.append(self._content(content, f"soak-{next(self._versions)}"))
                await self._apply(ADAPTER, NAMESPACE, name, adapter_spec(folders[-1].name))
                await self._until(lambda: self._is_ready("loraadapters", NAMESPACE, name), f"{name} Ready")
                own = replace(ask, model=f"{NAMESPACE}/{name}")
                self._check(own, replace(ask, model=f"{NAMESPACE}/{content}"), await self._answer(own))
        finally:
            await self._delete(ADAPTER, NAMESPACE, name)
            for folder in folders:
                shutil.rmtree(folder)
        await self._gone(replace(ask, model=f"{NAMESPACE}/{name}"))

    async def _broken_source(self, rng: random.Random) -> None:
        """Apply an adapter with a broken source and check that it is not Ready, with a reason, and answers nothing."""
        name = f"broken-{next(self._versions)}"
        folder = self._content(rng.choice(CONTENTS), name)
        config, weights = folder / "adapter_config.json", folder / "adapter_model.safetensors"
        match rng.choice(("missing", "config", "cut", "header")):
            case "missing":
                weights.unlink()
            case "config":
                config.write_text('{"peft_type": "LORA", "r": "many"}')
            case "cut":
                content = weights.read_bytes()
                weights.unlink()  # its content belongs to others
                weights.write_bytes(content[: len(content) // 2])
            case _:
                weights.unlink()
                weights.write_bytes(b"\xff" * 4096)
        try:
            await self._apply(ADAPTER, NAMESPACE, name, adapter_spec(name))
            await self._until(lambda: self._is_refused(name), f"{name} not Ready for a reason")
            await self._gone(replace(rng.choice(self._asks), model=f"{NAMESPACE}/{name}"))
        finally:
            await self._delete(ADAPTER, NAMESPACE, name)
            shutil.rmtree(folder)

    def _content(self, of: str, name: str) -> Path:
        """Write a new content that computes what another one does."""
        folder = self._manifests / "adapters" / name
        copy_adapter(self._manifests / "adapters" / of, folder, name)
        return folder

    async def _gone(self, ask: Ask) -> None:
        await asyncio.sleep(GONE_S)
        try:
            await self._answer(ask)
        except Refused as error:
            _expect(error.status == 404, f"{ask.model}: {error}")
        else:
            raise Wrong(f"{ask.model} answered")

    # ------------------------------------------------------------------------------------------- keys, pools

    async def _key(self, rng: random.Random) -> None:
        made = await self._admin.CreateKey(pb.CreateKeyRequest(namespace=NAMESPACE, note="soak"), timeout=PATIENCE_S)
        ask = replace(rng.choice(self._asks), model=BASE)
        await self._until(lambda: self._opens(made.key), "a new key known")
        self._check(ask, ask, await self._answer(ask, key=made.key))
        await self._admin.RevokeKey(pb.RevokeKeyRequest(key_id=made.key_id), timeout=PATIENCE_S)
        await asyncio.sleep(GONE_S)
        try:
            await self._answer(ask, key=made.key)
        except Refused as error:
            _expect(error.status == 401, f"a revoked key: {error}")
        else:
            raise Wrong(f"a revoked key opened something after {GONE_S} s")

    async def _opens(self, key: str) -> bool:
        answer = await self._http.get("/v1/models", headers={"Authorization": f"Bearer {key}"})
        return answer.status_code == 200

    async def _scale(self, rng: random.Random) -> None:
        ask = rng.choice(self._asks)
        for replicas in (1, 0):
            await self._apply(POOL, PLATFORM, SPARE_POOL, spare_pool(replicas))
            await self._until(lambda replicas=replicas: self._has(replicas), f"{SPARE_POOL} with {replicas} replicas")
            if replicas:
                self._check(ask, replace(ask, model=BASE), await self._answer(replace(ask, model=SPARE_BASE)))

    # ------------------------------------------------------------------------------------------- objects

    async def _apply(self, kind: dict[str, str], namespace: str, name: str, spec: dict[str, Any]) -> None:
        obj = {**kind, "metadata": {"name": name, "namespace": namespace}, "spec": spec}
        for answer in await asyncio.to_thread(lambda: list(self._stack.controller.apply([obj]))):
            _expect(isinstance(answer, str), f"{name} was not applied: {answer}")

    async def _delete(self, kind: dict[str, str], namespace: str, name: str) -> None:
        obj = {**kind, "metadata": {"name": name, "namespace": namespace}}
        await asyncio.to_thread(lambda: list(self._stack.controller.delete([obj])))

    async def _conditions(self, plural: str, namespace: str, name: str) -> Iterator[dict[str, Any]]:
        """Return the Ready conditions that are about the object as it is."""
        obj = await asyncio.to_thread(self._stack.controller.get, plural, namespace, name)
        generation, found = obj["metadata"]["generation"], obj.get("status", {}).get("conditions", [])
        return (one for one in found if one["observedGeneration"] == generation and one["type"] == "Ready")

    async def _is_ready(self, plural: str, namespace: str, name: str) -> bool:
        """Return whether the object is Ready. Raises Wrong if it is Ready with an older content."""
        found = list(await self._conditions(plural, namespace, name))
        for one in found:
            _expect(one["reason"] != "UpdateFailed", f"{name}: {one['message']}")
        return any(one["status"] == "True" for one in found)

    async def _is_refused(self, name: str) -> bool:
        found = await self._conditions("loraadapters", NAMESPACE, name)
        return any(one["status"] == "False" and one["reason"] in list(Reason) for one in found)

    async def _has(self, replicas: int) -> bool:
        pool = await asyncio.to_thread(self._stack.controller.get, "servingpools", PLATFORM, SPARE_POOL)
        ready = await self._is_ready("servingpools", PLATFORM, SPARE_POOL)
        return pool.get("status", {}).get("readyReplicas", 0) == replicas and (ready or not replicas)

    async def _until(self, holds: Callable[[], Awaitable[bool]], what: str) -> None:
        await until(holds, what, PATIENCE_S, POLL_S)


def _expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Wrong(otherwise)


def spare_pool(replicas: int) -> dict[str, Any]:
    """Return the spec of the pool that is scaled."""
    model = {"name": SPARE_BASE, "uri": "file:model"}
    return {"model": model, "replicas": replicas, "lora": {"maxRank": 32}, "allowedNamespaces": ["*"]}


def adapter_spec(folder: str) -> dict[str, Any]:
    return {"poolRef": {"name": MAIN_POOL, "namespace": PLATFORM}, "source": {"uri": f"file:adapters/{folder}"}}


def _ask(rng: random.Random, number: int) -> Ask:
    words = " ".join(rng.choices(WORDS, k=rng.randrange(4, 60)))
    return Ask(BASE, words, rng.randrange(8, TOKENS), float(number % 2), rng.getrandbits(32))
