"""TCP links that can be cut and stalled: the proxy through which a process dials its peers.

A process with `environment` reaches every gRPC peer through here (gRPC asks a proxy with CONNECT), whatever address it
dials; what it speaks besides gRPC is given an address of `forward`. A cut is in the middle of a message where one
passes: half of the next bytes still arrive, then both ends see a reset. A stalled link keeps its connections, and new
ones are accepted; no byte passes until it goes on.
"""

import asyncio
import contextlib
import socket
import struct
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Self

CHUNK_BYTES = 1 << 16
HEAD_S = 10.0
CUT_S = 0.2  # so long a cut waits for bytes to cut in half
LINGER_RESET = struct.pack("ii", 1, 0)
LOOPBACK = "127.0.0.1"
Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Serve = Callable[[Ends], Awaitable[None]]
Edit = Callable[[bytes], bytes]  # of what comes -> what is passed on
Edits = Callable[[], tuple[Edit, Edit]]  # of a connection: to the target, and from it


@dataclass(eq=False, slots=True)
class Connection:
    """Two sockets and what is copied between them."""

    client: Ends
    peer: Ends
    edits: tuple[Edit, Edit]
    cutting: bool = False
    over: asyncio.Event = field(default_factory=asyncio.Event)

    async def copy(self, flowing: asyncio.Event) -> None:
        """Both ways, until both have ended."""
        there, back = self.edits
        to_peer = self._one_way(self.client, self.peer, flowing, there)
        try:
            await asyncio.gather(to_peer, self._one_way(self.peer, self.client, flowing, back))
        finally:
            self.reset()

    def reset(self) -> None:
        """Both ends see a reset, and nothing that was on its way."""
        for _, writer in (self.client, self.peer):
            if (sock := writer.get_extra_info("socket")) is not None and not writer.is_closing():
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_RESET)
            writer.transport.abort()
        self.over.set()

    async def _one_way(self, source: Ends, to: Ends, flowing: asyncio.Event, edit: Edit) -> None:
        try:
            while data := await source[0].read(CHUNK_BYTES):
                await flowing.wait()
                data = edit(data)
                to[1].write(data[: len(data) // 2] if self.cutting else data)
                await to[1].drain()
                if self.cutting:
                    return self.reset()
            to[1].write_eof()
        except OSError:
            self.reset()


class Links:
    """The links of one process, by the address HOST:PORT of the peer. Open for the length of `async with`."""

    def __init__(self) -> None:
        self._connections: dict[str, set[Connection]] = {}
        self._flowing: dict[str, asyncio.Event] = {}
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
        """An address that leads to the target; `at`: where to listen, HOST:PORT; `edits`: of each connection."""
        return await self._listen(lambda client: self._join(client, target, edits=edits), at)

    def count(self, target: str) -> int:
        """Connections to the target."""
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

    def stall(self, target: str) -> None:
        """No byte passes from now on."""
        self._passing(target).clear()

    def resume(self, target: str) -> None:
        """What waited passes."""
        self._passing(target).set()

    def _passing(self, target: str) -> asyncio.Event:
        if target not in self._flowing:
            self._flowing[target] = asyncio.Event()
            self._flowing[target].set()
        return self._flowing[target]

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
        """CONNECT HOST:PORT, then its bytes."""
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
        passing = self._passing(target)
        await passing.wait()
        host, _, port = target.rpartition(":")
        connection = Connection(client, await asyncio.open_connection(host, int(port)), edits())
        client[1].write(greeting)
        self._connections.setdefault(target, set()).add(connection)
        try:
            await connection.copy(passing)
        finally:
            self._connections[target].discard(connection)
