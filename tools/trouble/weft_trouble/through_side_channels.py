"""Run `weft bench side-channels` on a stack of our own."""

import asyncio
import random
import secrets
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx2

from weft_stage.errors import StackFailed
from weft_stage.lines import Line, Origin
from weft_stage.sse import WORDS
from weft_stage.stack import Stack, quickstart
from weft_trouble.side_channels import FOREIGN, KEY, LOAD, NAME, OWN, Timed, lines

ASKING, OTHER, MODEL = "acme", "initech", "weft-quickstart"
FOREIGN_ADAPTER = f"{OTHER}/cipher"
LONG_WORDS, STREAMS, TURNS, TIMEOUT_S = 160, 8, 10, 120.0
Asks = Callable[[], Awaitable[float]]


async def measure(requests: int, seed: int, origin: Origin, say: Callable[[str], None]) -> list[Line]:
    """Time `requests` requests of each kind. Raises StackFailed, httpx2.HTTPError."""
    with TemporaryDirectory(prefix="weft-bench-") as scratch, Stack(quickstart(), Path(scratch), "--auth") as stack:
        keys = await asyncio.to_thread(lambda: [stack.create_key(tenant) for tenant in (ASKING, OTHER)])
        stack.key = keys[0]
        await asyncio.to_thread(stack.wait_for_models)
        async with AsyncExitStack() as ends:
            asking, other = [await ends.enter_async_context(_client(stack.url, key)) for key in keys]
            tenants, found = Tenants(asking, other, keys[1], random.Random(seed)), list[Line]()
            for what, quicker, slower in tenants.secrets():
                say(what)
                found += lines(origin, await _timed(what, quicker, slower, requests))
            say(LOAD)
            return [*found, *lines(origin, await tenants.under_load(requests))]


def _client(url: str, key: str) -> httpx2.AsyncClient:
    headers = {"Authorization": f"Bearer {key}"}
    limits = httpx2.Limits(max_connections=None)
    return httpx2.AsyncClient(base_url=url, headers=headers, timeout=TIMEOUT_S, limits=limits, trust_env=False)


async def _timed(what: str, quicker: Asks, slower: Asks, requests: int) -> Timed:
    """Time both kinds in turn, so that what the machine does meanwhile is done to both."""
    of_quicker, of_slower = list[float](), list[float]()
    for _ in range(requests):
        of_quicker.append(await quicker())
        of_slower.append(await slower())
    return Timed(what, of_quicker, of_slower)


class Tenants:
    """One that asks, and another one with secrets."""

    def __init__(
        self, asking: httpx2.AsyncClient, other: httpx2.AsyncClient, others_key: str, rng: random.Random
    ) -> None:
        self._asking, self._other, self._others_key, self._rng = asking, other, others_key, rng

    def secrets(self) -> list[tuple[str, Asks, Asks]]:
        """Return what there is to learn, and both kinds of requests."""

        async def again(first: httpx2.AsyncClient) -> float:
            prompt = self._prompt()
            await _ask(first, prompt)
            return await _ask(self._asking, prompt)

        async def fresh() -> float:
            await _ask(self._other, self._prompt())  # as much is done before as for the other kind
            return await _ask(self._asking, self._prompt())

        async def named(model: str) -> float:
            return await _ask(self._asking, "x", model=model, status=404)

        half, rest = len(self._others_key) // 2, len(self._others_key) - len(self._others_key) // 2
        prefix = self._others_key.partition("-")[0] + "-"

        def wrong(begins: str) -> str:
            return (begins + secrets.token_hex(half + rest))[: half + rest]

        async def keyed(key: str) -> float:
            return await _ask(self._asking, "x", status=401, key=key)

        return [
            (OWN, lambda: again(self._asking), fresh),
            (FOREIGN, lambda: again(self._other), fresh),
            (NAME, lambda: named(FOREIGN_ADAPTER), lambda: named(f"{OTHER}/{secrets.token_hex(3)}")),
            (KEY, lambda: keyed(wrong(self._others_key[:half])), lambda: keyed(wrong(prefix))),
        ]

    async def under_load(self, requests: int) -> Timed:
        """Time requests alone and beside the other one's streams, in turns."""
        alone, beside = list[float](), list[float]()
        for _ in range(TURNS):
            for _ in range(requests // TURNS):
                alone.append(await _ask(self._asking, self._prompt()))
            over = asyncio.Event()
            async with asyncio.TaskGroup() as tasks:
                for _ in range(STREAMS):
                    tasks.create_task(self._load(over))
                for _ in range(requests // TURNS):
                    beside.append(await _ask(self._asking, self._prompt()))
                over.set()
        return Timed(LOAD, alone, beside)

    async def _load(self, over: asyncio.Event) -> None:
        while not over.is_set():
            await _ask(self._other, self._prompt(), max_tokens=64)

    def _prompt(self) -> str:
        return " ".join(self._rng.choices(WORDS, k=LONG_WORDS))


async def _ask(
    http: httpx2.AsyncClient, prompt: str, *, model: str = MODEL, status: int = 200, key: str = "", max_tokens: int = 1
) -> float:
    """Time a request, in seconds. Raises StackFailed for another status."""
    body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    begun = time.perf_counter()
    answer = await http.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"} if key else {})
    spent = time.perf_counter() - begun
    if answer.status_code != status:
        raise StackFailed(f"{model}: HTTP {answer.status_code} instead of {status}: {answer.text[:300]}")
    return spent
