"""The aggregated metrics API: HTTPS for the kube-apiserver, and for nobody else.

Certificate, key and the request-header CA are read again while the process runs; each new connection is made with what
is right then. Discovery is answered at all times; values only while the scheduler tells them (503 otherwise: an
autoscaler that hears nothing leaves the number as it is).
"""

import asyncio
import logging
import ssl
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from aiohttp import web

from weft.process import CannotStart, listen
from weft.telemetry.logs import kv
from weft_operator.errors import NoEffect
from weft_operator.kubernetes import external, front_proxy
from weft_operator.kubernetes.client import Api
from weft_operator.kubernetes.errors import KubernetesError
from weft_operator.kubernetes.external import Demand
from weft_operator.kubernetes.front_proxy import FrontProxy, NoFrontProxy, Refused
from weft_operator.kubernetes.resources import CONFIGMAPS
from weft_operator.kubernetes.selectors import BadSelector

log = logging.getLogger(__name__)

REFRESH_S = 30.0

Pools = Callable[[], Iterable[tuple[str, Demand]] | None]  # None: not known just now


class MetricsApi:
    """One server. `pools` tells the present demand."""

    def __init__(self, api: Api, address: str, tls_dir: Path, pools: Pools, *, refresh_s: float = REFRESH_S) -> None:
        """Raises AddressInUse."""
        self._api, self._tls_dir, self._pools, self._refresh_s = api, tls_dir, pools, refresh_s
        self._socket = listen(address, "--metrics-api")
        self._proxy: FrontProxy | None = None
        self._context: ssl.SSLContext | None = None
        self.listens = asyncio.Event()  # from then on requests are answered

    @property
    def port(self) -> int:
        return self._socket.getsockname()[1]

    async def run(self) -> None:
        """Serve until cancelled. Raises CannotStart where certificates or the request-header CA are missing."""
        await self._refresh()
        if self._context is None:
            raise CannotStart(f"--metrics-api: {self._tls_dir} or the request-header CA cannot be used: see the log")
        runner = web.AppRunner(self._app(), handle_signals=False, access_log=None)
        await runner.setup()
        try:
            site = web.SockSite(runner, self._socket, ssl_context=_ReloadingContext(lambda: self._context))
            await site.start()
            self.listens.set()
            while True:
                await asyncio.sleep(self._refresh_s)
                await self._refresh()
        finally:
            await runner.cleanup()

    def _app(self) -> web.Application:
        app = web.Application(middlewares=[self._guard])
        app.router.add_get(external.ROOT, self._group)
        app.router.add_get(f"{external.ROOT}/{external.VERSION}", self._resources)
        app.router.add_get(f"{external.ROOT}/{external.VERSION}/namespaces/{{namespace}}/{{metric}}", self._values)
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Callable[[web.Request], Any]) -> web.StreamResponse:
        transport = request.transport
        certificate = transport.get_extra_info("peercert") if transport else None
        assert self._proxy is not None
        if refused := front_proxy.refuse(self._proxy, certificate, request.headers):
            log.warning("a request is refused", extra=kv(path=request.path, status=refused.code, why=refused.message))
            return _status(refused)
        try:
            return await handler(request)
        except web.HTTPException as error:
            return _status(Refused(error.status, error.reason.replace(" ", ""), f"{request.method} {request.path}"))

    async def _group(self, request: web.Request) -> web.Response:  # noqa: ARG002 (aiohttp's form)
        return web.json_response(external.api_group())

    async def _resources(self, request: web.Request) -> web.Response:  # noqa: ARG002 (aiohttp's form)
        return web.json_response(external.api_resources())

    async def _values(self, request: web.Request) -> web.Response:
        namespace, metric = request.match_info["namespace"], request.match_info["metric"]
        selector = request.query.get("labelSelector", "")
        pools = self._pools()
        if pools is None:
            return _status(Refused(503, "ServiceUnavailable", "the scheduler is away"))
        try:
            return web.json_response(external.values(metric, namespace, selector, pools, time.time()))
        except external.UnknownMetric as error:
            return _status(Refused(404, "NotFound", str(error)))
        except BadSelector as error:
            return _status(Refused(400, "BadRequest", str(error)))

    async def _refresh(self) -> None:
        """Take in what files and ConfigMap say now; what cannot be read leaves things as they are."""
        try:
            configmap = await self._api.get(CONFIGMAPS, front_proxy.NAMESPACE, front_proxy.NAME)
            proxy = front_proxy.read_front_proxy(configmap)
            certfile, keyfile = (str(self._tls_dir / name) for name in ("tls.crt", "tls.key"))
            self._context = front_proxy.server_context(proxy, certfile, keyfile)
            self._proxy = proxy
        except (NoFrontProxy, KubernetesError, NoEffect, OSError, ssl.SSLError) as error:
            log.error("the metrics API cannot renew whom it believes", extra=kv(error=str(error)))


class _ReloadingContext(ssl.SSLContext):
    """Hands each new connection to the context that is right then: asyncio only ever wraps with a context."""

    _of: Callable[[], ssl.SSLContext | None]

    def __new__(cls, of: Callable[[], ssl.SSLContext | None]) -> "_ReloadingContext":
        self = super().__new__(cls, ssl.PROTOCOL_TLS_SERVER)
        self._of = of
        return self

    def __init__(self, of: Callable[[], ssl.SSLContext | None]) -> None:  # noqa: ARG002 (taken by __new__)
        super().__init__()

    def wrap_bio(self, *args: Any, **kwargs: Any) -> ssl.SSLObject:
        context = self._of()
        assert context is not None
        return context.wrap_bio(*args, **kwargs)


def _status(refused: Refused) -> web.Response:
    body = {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "code": refused.code,
        "reason": refused.reason,
        "message": refused.message,
    }
    return web.json_response(body, status=refused.code)
