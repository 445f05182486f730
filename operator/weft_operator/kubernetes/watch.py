"""Watches, and the admission server, through kopf: embedded, in this process's loop, with separate registries.

kopf does the hard parts of streams: lists in chunks, bookmarks, dead connections, lost versions. It does nothing else:
none of its handlers writes, posts or leaves an annotation. Two kopf operators run side by side because their rights
differ. The first watches adapters, pools and nodes in the whole cluster. The second watches children of pools, only in
the namespaces of pools.

If a part of kopf ends, this process ends (`WatchEnded`): a silently dead watch would be worse.
"""

import asyncio
import logging
import ssl
from collections.abc import Callable, Collection, Mapping
from typing import Any

import kopf
from kubernetes.aio.client import Configuration

from weft.trust import accept_private_authorities
from weft_operator.core.resources import Object
from weft_operator.core.state import ObjectKey
from weft_operator.errors import KubernetesError
from weft_operator.kubernetes.client import CHILDREN, PODS, SELECTOR, ResourceKind, key_of

CHUNK = 500
STOP_S = 3.0

OnEvent = Callable[[Object], Any]
OnGone = Callable[[ObjectKey, str], Any]


class _NoDiffs(kopf.DiffBaseStorage):
    """A store without content, for handlers of events: kopf would copy each object to compare it later."""

    def build(self, **_: Any) -> kopf.BodyEssence:
        return kopf.BodyEssence()

    def fetch(self, **_: Any) -> kopf.BodyEssence | None:
        return None

    def store(self, **_: Any) -> None:
        raise AssertionError("no handler of kopf's writes")


class WatchEnded(KubernetesError):
    """A watch stopped for good: the API server refuses it, or kopf failed."""


class KubernetesWatches:
    """The watches of a replica. `on_object(object)` and `on_gone(key, uid)` are called on the event loop.

    `on_start` is called when kopf has started: kopf has then taken the process's signals for itself.
    """

    def __init__(
        self, configuration: Configuration, *, on_object: OnEvent, on_gone: OnGone, on_start: Callable[[], None]
    ) -> None:
        self._configuration = configuration
        self._on_object, self._on_gone, self._on_start = on_object, on_gone, on_start

    def registry(self, resources: Collection[ResourceKind]) -> kopf.OperatorRegistry:
        """Make a kopf registry with handlers for these resources. Callers may add handlers."""
        registry = kopf.OperatorRegistry()
        kopf.on.login(registry=registry, id="login")(self._login)
        for resource in resources:
            self._watch(registry, resource)
        return registry

    async def run_own(self, registry: kopf.OperatorRegistry, server: kopf.WebhookServer | None) -> None:
        """Watch in the whole cluster with the handlers of `registry`; serve admission if there is a server."""
        settings = watch_only_settings(selected=())
        settings.admission.server = server
        await self._run("objects", registry, settings, clusterwide=True)

    async def run_owned(self, namespaces: Collection[str]) -> None:
        """Watch children of pools and their pods, in the namespaces of pools."""
        resources = (*CHILDREN, PODS)
        await self._run("children", self.registry(resources), watch_only_settings(resources), namespaces=namespaces)

    async def _run(
        self, name: str, registry: kopf.OperatorRegistry, settings: kopf.OperatorSettings, **options: Any
    ) -> None:
        """Run a kopf operator until cancelled.

        `kopf.operator()` would not do: when it ends, it cancels every younger task of the loop. Raises WatchEnded.
        """
        # An identity is for peering, and peering is off. kopf's default identity needs a user with the uid; a pod has
        # none.
        identity: Any = name
        tasks = await kopf.spawn_tasks(
            registry=registry, settings=settings, standalone=True, identity=identity, **options
        )
        self._on_start()
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            raise WatchEnded(f"kopf ({name}) has ended: {_first_error(done)}")
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=STOP_S)

    def _watch(self, registry: kopf.OperatorRegistry, resource: ResourceKind) -> None:
        async def on_event(event: Mapping[str, Any], **_: Any) -> None:
            # Objects of a list have no kind.
            obj: dict[str, Any] = {**event["object"], "apiVersion": resource.api_version, "kind": resource.kind}
            if event["type"] == "DELETED":
                self._on_gone(key_of(obj), obj["metadata"]["uid"])
            else:
                self._on_object(obj)

        on = kopf.on.event(
            group=resource.group,
            version=resource.version,
            plural=resource.plural,
            registry=registry,
            id=f"watch-{resource.plural}",
        )
        on(on_event)

    async def _login(self, **_kopf: Any) -> kopf.ConnectionInfo:
        """Give kopf credentials. After a refused token kopf asks again, and the token is read again."""
        configuration: Any = self._configuration
        scheme, _, token = (await configuration.get_api_key_with_prefix("BearerToken") or "").partition(" ")
        return Connection(
            server=configuration.host,
            ca_path=configuration.ssl_ca_cert,
            ca_data=configuration.ca_cert_data,
            insecure=not configuration.verify_ssl,
            scheme=scheme.capitalize() or None,
            token=token or None,
            certificate_path=configuration.cert_file,
            private_key_path=configuration.key_file,
        )


class Connection(kopf.ConnectionInfo):
    """A connection to the API server, for certificates of any issuer."""

    def as_ssl_context(self) -> ssl.SSLContext:
        return accept_private_authorities(super().as_ssl_context())


def watch_only_settings(selected: Collection[ResourceKind]) -> kopf.OperatorSettings:
    """Make kopf's settings: it watches and serves; `selected` are filtered by our label, on the server's side."""
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.scanning.disabled = True  # CRDs and namespaces are not observed: the operator asks for no rights on them
    settings.watching.chunk_size = CHUNK
    settings.process.ultimate_exiting_timeout = None
    settings.persistence.diffbase_storage = _NoDiffs()
    for resource in selected:
        settings.watching.label_selectors[resource.group, resource.version, resource.plural] = SELECTOR
    return settings


def silence_kopf_logs() -> None:
    """Silence kopf, because it logs every event at INFO."""
    for name in ("kopf", "kopf.objects", "aiohttp.access"):
        logging.getLogger(name).setLevel(logging.WARNING)


def _first_error(done: Collection[asyncio.Task[Any]]) -> str:
    errors = (task.exception() for task in done if not task.cancelled())
    return next((repr(error) for error in errors if error), "without an error")
