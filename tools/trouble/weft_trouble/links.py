"""TCP links that can be cut, stalled and made bad: the proxy through which a process dials its peers.

A process with `environment` reaches every gRPC peer through here (gRPC asks a proxy with CONNECT), whatever address it
dials; what it speaks besides gRPC is given an address of `forward`. A cut is in the middle of a message where one
passes: half of the next bytes still arrive, then both ends see a reset. A stalled link keeps its connections, and new
ones are accepted; no byte passes until it goes on, in both directions or in one. A slow link delays every byte, a
narrow one lets few pass a second. An abandoned connection stays open at both ends, and what is written into it is gone.
"""

import asyncio
import contextlib
import random
import socket
import struct
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Self

CHUNK_BYTES = 1 << 16
MAX_PIECES = 64  # of CHUNK_BYTES, on their way in one direction of a connection
HEAD_S = 10.0
CUT_S = 0.2  # so long a cut waits for bytes to cut in half
LINGER_RESET = struct.pack("ii", 1, 0)
LOOPBACK = "127.0.0.1"
Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Serve = Callable[[Ends], Awaitable[None]]
Edit = Callable[[bytes], bytes]  # of what comes -> what is passed on
Edits = Callable[[], tuple[Edit, Edit]]  # of a connection: to the target, and from it


@dataclass(frozen=True, slots=True)
class Quality:
    """How bytes pass: `delay_s` late (and up to `jitter_s` more, at random), at most `bytes_per_s` a second; 0: any."""

    delay_s: float = 0.0
    jitter_s: float = 0.0
    bytes_per_s: float = 0.0


class Direction:
    """One direction of all connections to a target."""

    def __init__(self) -> None:
        self.flowing = asyncio.Event()
        self.flowing.set()
        self.quality = Quality()
        self._free_at = 0.0  # when a narrow link has passed what it has

    def due(self, size: int, now: float, rng: random.Random) -> float:
        """Return when `size` bytes that come now have passed."""
        quality = self.quality
        if quality.bytes_per_s:
            self._free_at = max(self._free_at, now) + size / quality.bytes_per_s
            now = self._free_at
        return now + quality.delay_s + rng.uniform(0.0, quality.jitter_s)


@dataclass(eq=False, slots=True)
class Connection:
    """Two sockets and what is copied between them."""

    client: Ends
    peer: Ends
    edits: tuple[Edit, Edit]
    cutting: bool = False
    abandoned: bool = False
    over: asyncio.Event = field(default_factory=asyncio.Event)

    async def copy(self, there: Direction, back: Direction) -> None:
        """Copy both ways until both have ended."""
        to_peer, to_client = self.edits
        ways = (self.client, self.peer, there, to_peer), (self.peer, self.client, back, to_client)
        try:
            await asyncio.gather(*(self._one_way(*way) for way in ways))
        finally:
            self.reset()

    def reset(self) -> None:
        """Reset both ends, which lose what was on its way."""
        for _, writer in (self.client, self.peer):
            if (sock := writer.get_extra_info("socket")) is not None and not writer.is_closing():
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_RESET)
            writer.transport.abort()
        self.over.set()

    async def _one_way(self, source: Ends, to: Ends, direction: Direction, edit: Edit) -> None:
        """Copy pieces in their order, each once it is due. What waits is bounded by what a peer sends unread."""
        pieces = asyncio.Queue[tuple[float, bytes]](MAX_PIECES)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._read(source, direction, pieces))
            tasks.create_task(self._write(to, direction, edit, pieces))

    async def _read(self, source: Ends, direction: Direction, pieces: "asyncio.Queue[tuple[float, bytes]]") -> None:
        rng, data = random.Random(0), b"-"
        with contextlib.suppress(OSError):
            while data := await source[0].read(CHUNK_BYTES):
                await pieces.put((direction.due(len(data), time.monotonic(), rng), data))
        if data:
            self.reset()
        await pieces.put((0.0, b""))

    async def _write(
        self, to: Ends, direction: Direction, edit: Edit, pieces: "asyncio.Queue[tuple[float, bytes]]"
    ) -> None:
        try:
            while True:
                due, data = await pieces.get()
                if (wait_s := due - time.monotonic()) > 0:
                    await asyncio.sleep(wait_s)
                await direction.flowing.wait()
                if self.abandoned:
                    continue
                if not data:
                    return to[1].write_eof()
                data = edit(data)
                to[1].write(data[: len(data) // 2] if self.cutting else data)
                await to[1].drain()
                if self.cutting:
                    return self.reset()
        except OSError:
            self.reset()


class Links:
    """The links of one process, by the address HOST:PORT of the peer. Open for the length of `async with`."""

    def __init__(self) -> None:
        self._connections: dict[str, set[Connection]] = {}
        self._directions: dict[str, tuple[Direction, Direction]] = {}
        self._moved: dict[str, str] = {}
        self._servers = contextlib.ExitStack()
        self._tasks = set[asyncio.Task[None]]()
        self._proxy = ""

    async def __aenter__(self) -> Self:
        self._proxy = await self._listen(self._connect)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._servers.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def environment(self) -> Mapping[str, str]:
        """With it a process dials its gRPC peers through here."""
        return {"grpc_proxy": f"http://{self._proxy}", "no_grpc_proxy": ""}

    async def forward(self, target: str, at: str = f"{LOOPBACK}:0", edits: Edits = lambda: (bytes, bytes)) -> str:
        """Return an address that leads to the target; `at`: where to listen, HOST:PORT; `edits`: of each connection."""
        return await self._listen(lambda client: self._join(client, target, edits=edits), at)

    def count(self, target: str) -> int:
        """Count the connections to the target."""
        return len(self._connections.get(target, ()))

    async def cut(self, target: str) -> None:
        """End every connection to the target; new ones are made as before."""
        connections = list(self._connections.get(target, ()))
        for connection in connections:
            connection.cutting = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CUT_S):
                for connection in connections:
                    await connection.over.wait()
        for connection in connections:
            connection.reset()

    def stall(self, target: str, *, there: bool = True, back: bool = True) -> None:
        """Let no byte pass from now on, to the target, from it, or both."""
        for direction, stalled in zip(self._of(target), (there, back), strict=True):
            if stalled:
                direction.flowing.clear()

    def resume(self, target: str) -> None:
        """Let what waited pass, as well as ever."""
        for direction in self._of(target):
            direction.flowing.set()
            direction.quality = Quality()

    def degrade(self, target: str, quality: Quality) -> None:
        """Make both directions this bad from now on."""
        for direction in self._of(target):
            direction.quality = quality

    def abandon(self, target: str) -> None:
        """Lose, unseen, what is written into the connections that there are; new ones are whole."""
        for connection in self._connections.get(target, ()):
            connection.abandoned = True

    def move(self, target: str, to: str) -> None:
        """Lead new connections to the target to another address: it has taken the target's place."""
        self._moved[target] = to

    def _of(self, target: str) -> tuple[Direction, Direction]:
        return self._directions.setdefault(target, (Direction(), Direction()))

    async def _listen(self, serve: Serve, at: str = f"{LOOPBACK}:0") -> str:
        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.ensure_future(self._serve(serve, (reader, writer)))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        host, _, port = at.rpartition(":")
        server = await asyncio.start_server(accept, host, int(port))
        self._servers.callback(server.close)
        port = server.sockets[0].getsockname()[1]
        return f"{host}:{port}"

    async def _serve(self, serve: Serve, client: Ends) -> None:
        try:
            with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
                await serve(client)
        finally:
            client[1].transport.abort()

    async def _connect(self, client: Ends) -> None:
        """Serve a connection: CONNECT HOST:PORT, then its bytes."""
        async with asyncio.timeout(HEAD_S):
            head = await client[0].readuntil(b"\r\n\r\n")
        method, target, *_ = head.decode("latin-1").split(" ", 2)
        if method != "CONNECT":
            client[1].write(b"HTTP/1.1 405 Method Not Allowed\r\n\r\n")
            await client[1].drain()
            return
        await self._join(client, target, b"HTTP/1.1 200 Connected\r\n\r\n")

    async def _join(
        self, client: Ends, target: str, greeting: bytes = b"", edits: Edits = lambda: (bytes, bytes)
    ) -> None:
        there, back = self._of(target)
        await there.flowing.wait()
        await back.flowing.wait()
        host, _, port = self._moved.get(target, target).rpartition(":")
        connection = Connection(client, await asyncio.open_connection(host, int(port)), edits())
        client[1].write(greeting)
        self._connections.setdefault(target, set()).add(connection)
        try:
            await connection.copy(there, back)
        finally:
            self._connections[target].discard(connection)
