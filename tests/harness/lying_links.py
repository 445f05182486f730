"""A runner that lies to others about KV: a link between honest ones that changes its messages as a test wants.

The other runner cannot see the difference. Pages pass as they are; where a lie announces more bytes of them than there
are, zeros are added.
"""

import contextlib
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from dataclasses import replace
from typing import Any

from harness.waiting import eventually
from weft.domain.kv_transfer import KvReady
from weft.wire.codec.direction import Direction
from weft.wire.codec.kv_transfer import KV_FROM_RECEIVER, KV_FROM_SENDER, KvPages
from weft_runner.shell.kv_connection import GOODBYE
from weft_runner.shell.kv_ring import NO_RING, TOKEN_BYTES
from weft_runner.shell.kv_transfer import PREFACE
from weft_stage.linked_runner import behind
from weft_stage.reports import runners
from weft_stage.stack import Stack
from weft_trouble.links import Edit, Links

Lie = Callable[[Any], Any]  # a message -> what the other runner gets
LENGTH = 4  # bytes before a frame
CLOSED = "stream of KV closed"  # what each end logs


def truth(message: Any) -> Any:
    return message


class KvMessages:
    """One way of a stream: bytes as they come, to those that are passed on. `preface`: bytes before the messages."""

    def __init__(self, direction: Direction[Any, Any], change: Lie, preface: int = 0) -> None:
        self._direction, self._change, self._preface = direction, change, preface
        self._data, self._pages, self._added, self._beside = bytearray(), 0, 0, False

    def edit(self, data: bytes) -> bytes:
        self._data += data
        out = bytearray()
        while (passed := self._next()) is not None:
            out += passed
        return bytes(out)

    def _next(self) -> bytes | None:
        """Return the next whole message, or bytes of pages; None: more has to come."""
        if self._preface:
            return self._begin()
        if self._pages and self._data:
            return self._take_pages()
        length = int.from_bytes(self._data[:LENGTH])
        if self._pages or len(self._data) < LENGTH + (length & ~GOODBYE):
            return None
        frame = self._take(LENGTH + (length & ~GOODBYE))
        return frame if length & GOODBYE else self._changed(frame[LENGTH:])

    def _begin(self) -> bytes | None:
        if len(self._data) < self._preface:
            return None
        preface, self._preface = self._take(self._preface), 0
        self._beside = not preface.endswith(NO_RING)  # pages pass through shared memory
        return preface

    def _take_pages(self) -> bytes:
        pages = self._take(min(self._pages, len(self._data)))
        self._pages -= len(pages)
        return pages if self._pages else pages + bytes(self._added)

    def _changed(self, frame: bytes) -> bytes:
        envelope = self._direction.envelope()
        envelope.ParseFromString(frame)
        message = self._direction.decode(envelope)
        other = self._change(message)
        if isinstance(message, KvPages) and not self._beside:
            self._pages, self._added = message.bytes, max(0, other.bytes - message.bytes)
        changed = frame if other == message else self._direction.encode(other).SerializeToString()
        return len(changed).to_bytes(LENGTH) + changed

    def _take(self, count: int) -> bytes:
        taken = bytes(self._data[:count])
        del self._data[:count]
        return taken


class LyingLinks:
    """Between the runners of a stack of `weft_stage.linked_runner`s; honest outside of `lying`.

    Ranks from 1 on are reached past the links.
    """

    def __init__(self, stack: Stack, links: Links, addresses: Sequence[str]) -> None:
        """Lead these links to runners. `addresses`: that runners were given of each other."""
        self._stack, self._links, self._addresses, self._lie = stack, links, addresses, truth

    async def listen(self) -> None:
        for address in self._addresses:
            await self._links.forward(behind(address), address, self._edits)

    async def cut(self) -> None:
        """Cut every stream; both ends have noticed when this returns: the next message is a hello."""
        targets = [behind(address) for address in self._addresses]
        closed = self.logged(CLOSED) + 2 * sum(map(self._links.count, targets))
        for target in targets:
            await self._links.cut(target)
        await self.until_logged(CLOSED, closed)

    @contextlib.contextmanager
    def lying(self, lie: Lie) -> Generator[None]:
        self._lie = lie
        try:
            yield
        finally:
            self._lie = truth

    def logged(self, words: str, component: str = "runner") -> int:
        """Count how many times components of that prefix have logged it."""
        logs = (self._stack.data_dir / "logs").glob(f"{component}*.log")
        return sum(log.read_text().count(words) for log in logs)

    async def until_logged(self, words: str, times: int = 1) -> None:
        """Wait until runners have logged these words `times` times."""

        async def so_often() -> bool:
            return self.logged(words) >= times

        await eventually(so_often)

    def _edits(self) -> tuple[Edit, Edit]:
        there = KvMessages(KV_FROM_SENDER, self._change, len(PREFACE) + TOKEN_BYTES)
        return there.edit, KvMessages(KV_FROM_RECEIVER, self._change).edit

    def _change(self, message: Any) -> Any:
        changed = self._lie(message)
        if isinstance(changed, KvReady):
            return replace(changed, shard_addresses=tuple(map(behind, changed.shard_addresses)))
        return changed


@contextlib.asynccontextmanager
async def lying_links(stack: Stack) -> AsyncGenerator[LyingLinks]:
    """Put links between all runners of the stack, once they are ready."""
    ready: list[str] = []

    async def all_ready() -> bool:
        listed = await runners(stack.address("supervisor"))
        ready[:] = [book.spec.kv_address for book in listed if book.figures.ready]
        return len(ready) == len(stack.names("runner"))

    await eventually(all_ready)
    async with Links() as links:
        made = LyingLinks(stack, links, ready)
        await made.listen()
        yield made
