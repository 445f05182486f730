"""Objects of an API server as a watch tells them, and waiting for what they come to say."""

import asyncio
import json
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from types import MethodType
from typing import Any

from kubernetes.aio import watch
from kubernetes.aio.client import ApiException

from weft_stage.errors import NotInTime

Object = dict[str, Any]
Holds = Callable[[Object], bool]
Progress = Callable[[int], None]  # hears of how many more
Listen = Callable[[Object, bool], None]  # the object, and whether it is gone
GONE_VERSION = 410


@dataclass(slots=True)
class _Waiter:
    pending: set[str]
    holds: Callable[[Object | None], bool]
    done: asyncio.Future[float]
    on_progress: Progress

    def hear(self, name: str, obj: Object | None) -> None:
        if self.done.done():
            return
        before = len(self.pending)
        if self.holds(obj):
            self.pending.discard(name)
        else:
            self.pending.add(name)
        self.on_progress(before - len(self.pending))
        if not self.pending:
            self.done.set_result(time.perf_counter())


class Following:
    """One list and its watch. `listing` is a list method of a client's API, called with these arguments."""

    def __init__(self, listing: MethodType, *arguments: str, listen: Listen | None = None, **options: str) -> None:
        self._listing, self._arguments, self._options, self._listen = listing, arguments, options, listen
        self.objects: dict[str, Object] = {}
        self.listed = asyncio.Event()
        self._waiters: list[tuple[frozenset[str], _Waiter]] = []

    async def run(self) -> None:
        """Until cancelled. Raises ApiException for a refusal."""
        while True:
            version = await self._list()
            with suppress(TimeoutError):  # the connection's own end: list again
                await self._watch(version)

    async def until(
        self, names: Collection[str], holds: Holds, timeout_s: float, on_progress: Progress = lambda _: None
    ) -> float:
        """When (`time.perf_counter`) all of them were there and it held for each at once. Raises NotInTime."""
        return await self._wait(names, lambda obj: obj is not None and holds(obj), timeout_s, on_progress)

    async def until_gone(self, name: str, timeout_s: float) -> float:
        """When that object was gone. Raises NotInTime."""
        return await self._wait([name], lambda obj: obj is None, timeout_s, lambda _: None)

    async def _wait(
        self, names: Collection[str], holds: Callable[[Object | None], bool], timeout_s: float, on_progress: Progress
    ) -> float:
        waiter = _Waiter(set(names), holds, asyncio.get_running_loop().create_future(), on_progress)
        entry = frozenset(names), waiter
        self._waiters.append(entry)
        try:
            for name in names:
                waiter.hear(name, self.objects.get(name))
            async with asyncio.timeout(timeout_s):
                return await waiter.done
        except TimeoutError:
            some = {name: (self.objects.get(name) or {}).get("status") for name in sorted(waiter.pending)[:2]}
            raise NotInTime(f"not within {timeout_s:.0f} s: {len(waiter.pending)} of {len(names)}, as {some}") from None
        finally:
            self._waiters.remove(entry)

    async def _list(self) -> str:
        # As the API writes it: of most kinds the client would make models, which nobody here reads.
        listing: Any = getattr(self._listing.__self__, f"{self._listing.__name__}_without_preload_content")
        answer = await listing(*self._arguments, **self._options)
        listed = json.loads(await answer.read())
        items: dict[str, Object] = {item["metadata"]["name"]: item for item in listed["items"]}
        for name in self.objects.keys() - items.keys():
            self._hear(self.objects[name], gone=True)
        for item in items.values():
            self._hear(item, gone=False)
        self.listed.set()
        return listed["metadata"]["resourceVersion"]

    async def _watch(self, version: str) -> None:
        try:
            stream: Any = watch.Watch("object")
            async for event in stream.stream(
                self._listing, *self._arguments, resource_version=version, **self._options
            ):
                if event["type"] in ("ADDED", "MODIFIED", "DELETED"):
                    self._hear(event["raw_object"], gone=event["type"] == "DELETED")
        except ApiException as error:
            if error.status != GONE_VERSION:
                raise

    def _hear(self, obj: Object, *, gone: bool) -> None:
        name = obj["metadata"]["name"]
        if gone:
            self.objects.pop(name, None)
        else:
            self.objects[name] = obj
        if self._listen:
            self._listen(obj, gone)
        for names, waiter in list(self._waiters):
            if name in names:
                waiter.hear(name, None if gone else obj)
