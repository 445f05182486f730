"""The process's parts put together: the request manager, the tokenizers, the batch service's client."""

import asyncio
import contextlib
import time
import weakref
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

import httpx2
from prometheus_client import REGISTRY, CollectorRegistry

from weft.domain.routes import PoolRoute, Route
from weft.telemetry.tracing import Tracer
from weft.wire.channels import fast_keepalive_socket_options
from weft.wire.tls import Tls
from weft_gateway.core.refusal_pacing import RefusalPacing
from weft_gateway.core.routes import Principal, UnknownVersion
from weft_gateway.errors import ModelNotFound
from weft_gateway.forms.grammar_checker import GrammarChecker
from weft_gateway.settings import GatewaySettings
from weft_gateway.shell.adapter_templates import AdapterTemplates
from weft_gateway.shell.batch_client import BatchClient
from weft_gateway.shell.objects_client import ObjectsClient
from weft_gateway.shell.oidc import OidcConfig, TokenVerifier
from weft_gateway.shell.request_manager import RequestManager
from weft_gateway.shell.tokenizer_cache import TokenizerCache
from weft_gateway.shell.turnstile import BoundedTurnstile, RequestTurns

MAX_GRAMMARS_WAITING = 64  # of a tenant


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """What a request loaded under a model's name: the LoRAAdapter, its content then, and the path."""

    uid: str
    digest: str
    path: str


class AppState:
    """The common state of all handlers. Create it inside the running event loop."""

    def __init__(
        self,
        settings: GatewaySettings,
        *,
        registry: CollectorRegistry = REGISTRY,
        tls: Tls | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self.settings, self.registry, self.tracer = settings, registry, tracer
        self.stopping = False  # what still arrives is answered; clients and balancers are sent elsewhere
        self.manager = RequestManager(settings, on_routes=self._on_routes, registry=registry, tls=tls)
        self.machine = self.manager.machine
        self.refusals = RefusalPacing()
        self.turns = RequestTurns(settings.max_in_flight)
        self.tokens = _verifier(settings)
        self.batch = BatchClient(settings.batch, tls)
        self.grammars = GrammarChecker(BoundedTurnstile(1, MAX_GRAMMARS_WAITING))
        self.objects = ObjectsClient(settings.objects) if settings.objects else None
        self.loaded: dict[str, LoadedAdapter] = {}  # by model name; loading another drops those that are gone
        self._routes_changed = asyncio.Event()
        self._loading = weakref.WeakValueDictionary[str, asyncio.Lock]()
        verify = tls.client_context("depot") if tls else True
        transport = httpx2.AsyncHTTPTransport(verify=verify, socket_options=fast_keepalive_socket_options())
        self.depot = httpx2.AsyncClient(base_url=settings.depot, timeout=10.0, transport=transport)
        self.templates = AdapterTemplates(self.depot)
        self.tokenizers = TokenizerCache(
            self.depot,
            settings.data_dir / "blobs",
            on_change=self.manager.feed,
            on_corrupt=self.manager.metrics.corrupt_artifacts.inc,
        )

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncGenerator["asyncio.Task[None]"]:
        """Keep the streams for the length of the block; the task ends early only by a bug."""
        task = asyncio.create_task(self._run(), name="request manager")
        try:
            yield task
        finally:
            task.cancel()
            await asyncio.wait([task])
            await self.tokenizers.close()
            await self.depot.aclose()
            await self.batch.close()
            await self.grammars.close()

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.manager.run(), name="streams")
            if self.tokens:
                tasks.create_task(self.tokens.run(), name="issuer's keys")

    def not_ready_reason(self) -> str | None:
        """Why requests should go to another gateway; None when they can be served here."""
        return "draining" if self.stopping else self.machine.admission.not_ready_reason()

    def model(self, name: str, principal: Principal) -> tuple[Route, PoolRoute]:
        """Return the route of a model for this caller, and the content pinned by `name`. Raises ModelNotFound."""
        try:
            location = self.machine.routes.find(name, principal)
        except UnknownVersion as error:
            raise ModelNotFound(name, str(error)) from error
        if location is None:
            raise ModelNotFound(name)
        return location

    def loading(self, name: str) -> asyncio.Lock:
        """The lock of an adapter's name: of two requests that load or unload it the second one sees the first's end."""
        return self._loading.setdefault(name, asyncio.Lock())

    async def routes_until(self, condition: Callable[[], bool]) -> None:
        """Wait until the route table is so."""
        while not condition():
            await self._routes_changed.wait()

    def _on_routes(self, pools_changed: bool) -> None:
        self._routes_changed.set()
        self._routes_changed = asyncio.Event()
        if pools_changed:
            self.tokenizers.sync({pool.base_digest for pool in self.machine.routes.pools.values() if pool.base_digest})


def _verifier(settings: GatewaySettings) -> TokenVerifier | None:
    if not settings.oidc_issuer:
        return None
    named = settings.oidc_issuer, settings.oidc_audience, settings.oidc_namespace_claim
    return TokenVerifier(OidcConfig(*named, settings.oidc_jwks_url, settings.oidc_ca), time.monotonic)
