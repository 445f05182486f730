"""A reverse proxy before a real API server, for what a real one does only now and then.

It can fall silent (watches stay open and tell nothing), it can tell of the past (lists are answered as of a version
that is over, and watches go on from there), and a hook sees each write before and after the API server has carried it
out: there a test ends the operator. Plain HTTP on loopback; the token of the operator is passed on. It runs
on a loop in a thread of its own.
"""

import asyncio
import json
import ssl
import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import aiohttp
from aiohttp import web
from yarl import URL

from harness.cluster.cluster import Cluster
from harness.waiting import PATIENCE_S
from weft_devcluster.access import Access

HOP = ("Host", "Content-Length", "Transfer-Encoding", "Connection", "Content-Encoding")
WRITES = ("POST", "PUT", "PATCH", "DELETE")


@dataclass(frozen=True)
class Write:
    """One writing request on its way."""

    method: str
    path: str


class Gone(Exception):
    """Raised by a hook: whoever writes is gone, and the request is not carried out."""


Hook = Callable[[Write, Literal["before", "after"]], None]


class ApiProxy:
    """The proxy. `hook` is called in the proxy's thread; the request waits for it."""

    def __init__(self, control_plane: Cluster, access: Access, folder: Path) -> None:
        self._control_plane, self._access = control_plane, access
        self.kubeconfig = folder / "proxy.kubeconfig"
        self.hook: Hook | None = None
        self.watched: set[str] = set()  # plurals of which a watch was ever open
        self._past: dict[str, int] = {}  # by plural: the version that its lists are of
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="API proxy", daemon=True)
        self._up = threading.Event()

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._up.wait(PATIENCE_S), "the proxy does not start"
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(PATIENCE_S)

    def mute(self) -> None:
        """Let no watch tell anything from now on, and none end."""
        self._loop.call_soon_threadsafe(self._speaks.clear)

    def rewind(self, version: int, resources: Collection[str]) -> None:
        """Answer lists of these resources (plurals) from now on as of that version. Reads of one object are as ever."""
        self._past = dict.fromkeys(resources, version)

    def tell_the_truth(self) -> None:
        """Answer lists as they are, and let watches tell what they have missed."""
        self._past = {}
        self._loop.call_soon_threadsafe(self._speaks.set)

    async def _run(self) -> None:
        self._loop, self._stop, self._speaks = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
        self._speaks.set()
        app = web.Application(client_max_size=1 << 24)
        app.router.add_route("*", "/{path:.*}", self._handle)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self._write_kubeconfig(runner.addresses[0][1])
        context = ssl.create_default_context(cafile=str(self._control_plane.ca))
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=context, limit=0), timeout=aiohttp.ClientTimeout(total=None)
        ) as self._session:
            self._up.set()
            await self._stop.wait()
            await runner.cleanup()

    def _write_kubeconfig(self, port: int) -> None:
        content: dict[str, Any] = json.loads(self._access.kubeconfig.read_text())
        content["clusters"][0]["cluster"] = {"server": f"http://127.0.0.1:{port}"}
        self.kubeconfig.write_text(json.dumps(content))

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        write = Write(request.method, request.path) if request.method in WRITES else None
        try:
            self._call(write, "before")
        except Gone:
            return web.Response(status=503)
        body = await request.read()
        headers = {name: value for name, value in request.headers.items() if name not in HOP}
        url = URL(f"{self._control_plane.url}{request.raw_path}", encoded=True).update_query(self._view(request))
        async with self._session.request(request.method, url, data=body or None, headers=headers) as answer:
            passed = {name: value for name, value in answer.headers.items() if name not in HOP}
            if request.query.get("watch") == "true":
                return await self._stream(request, answer, passed)
            content = await answer.read()
            self._call(write, "after")
            return web.Response(status=answer.status, headers=passed, body=content)

    async def _stream(
        self, request: web.Request, answer: aiohttp.ClientResponse, headers: dict[str, str]
    ) -> web.StreamResponse:
        response = web.StreamResponse(status=answer.status, headers=headers)
        await response.prepare(request)
        self.watched.add(request.path.rpartition("/")[2])
        with suppress(ConnectionResetError):  # whoever watched is gone
            async for chunk in answer.content.iter_any():
                await self._speaks.wait()
                await response.write(chunk)
        return response

    def _view(self, request: web.Request) -> dict[str, str]:
        """Return what a request has to say to see what it shall see. Chunks of a list are of the first one's view."""
        version = self._past.get(request.path.rpartition("/")[2])
        if version is None or request.method != "GET" or {"watch", "continue"} & set(request.query):
            return {}
        return {"resourceVersion": str(version), "resourceVersionMatch": "Exact"}

    def _call(self, write: Write | None, when: Literal["before", "after"]) -> None:
        if write is not None and self.hook is not None:
            self.hook(write, when)
