"""One replica of the operator: the work of every replica, and the work of the leader.

Every replica watches and judges admission, so the API server may ask any replica. The leader holds the Lease. Only the
leader plans, writes, and updates the scheduler, under its term. A replica leads at most once in its life. If it may
have lost leadership, or a watch has ended, the process ends and is started again.
"""

import asyncio
import logging
import signal
import time
from collections.abc import Coroutine
from functools import partial
from math import inf
from typing import Any

from weft.domain.routes import AdapterStatus, PoolStatus
from weft.leadership.election import Election, new_identity
from weft.leadership.errors import LeadershipLost
from weft.leadership.lease import LeaseTimings
from weft.leadership.lease_api import LeaseApi, load_configuration
from weft.process import CannotStart
from weft.telemetry.logs import kv
from weft.wire.tls import Tls, load_tls
from weft_operator.controller.depot_client import DepotClient
from weft_operator.controller.key_registry import KeyRegistry
from weft_operator.controller.keys import KeyController
from weft_operator.controller.loop import Controller
from weft_operator.controller.registry_client import RegistryClient
from weft_operator.core.resources import Object, Ref, parse
from weft_operator.core.state import DesiredState, OperatorPolicy
from weft_operator.errors import KubernetesError, ObjectNotFound
from weft_operator.kubernetes import admission
from weft_operator.kubernetes.admission import AdmissionServer
from weft_operator.kubernetes.backend import KubernetesBackend
from weft_operator.kubernetes.cache import ObjectCache
from weft_operator.kubernetes.client import ADAPTERS, BY_KIND, KEYS, NODES, WATCHED, KubeApi, key_of
from weft_operator.kubernetes.crd_check import check_crds
from weft_operator.kubernetes.event_mapping import OWN_KINDS, EventMapper
from weft_operator.kubernetes.events import EventRecorder
from weft_operator.kubernetes.key_secrets import KeySecrets
from weft_operator.kubernetes.observability import Metrics, OperatorProbes
from weft_operator.kubernetes.resync import CacheAudit, watch_scopes
from weft_operator.kubernetes.settings import Settings, read_runner_defaults
from weft_operator.kubernetes.watch import KubernetesWatches, silence_kopf_logs

log = logging.getLogger(__name__)

# A leader silent for so long is replaced, as in client-go. Serving does not wait for a leader.
LEASE_S = 15.0
AUDIT_S = 60.0  # between two comparisons of the watches with lists; a watch rarely loses an event
DRAIN_S = 5.0  # admission is served on for so long after SIGTERM: then the Service leads nobody here any more
RETRY_S = 2.0
BEAT_S = 1.0
GRACE_OF_PERIOD = 0.1  # the share of a resync's period allowed for an event on its way
MAX_GRACE_S = 5.0


async def run(settings: Settings) -> int:
    """Run the process. Returns 0 after SIGTERM, 1 when it has to be started anew. Raises CannotStart."""
    stop = asyncio.Event()
    install_signal_handlers(stop)
    silence_kopf_logs()
    tls = load_tls(settings.tls_dir, "operator")
    api = KubeApi(await load_configuration())
    try:
        return await Manager(settings, api, tls, stop).run()
    finally:
        await api.aclose()


def install_signal_handlers(stop: asyncio.Event) -> None:
    """Have SIGTERM and SIGINT set `stop`. Call it again after each library that takes them for itself."""
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, stop.set)


class Manager:
    """The parts of one process."""

    def __init__(self, settings: Settings, api: KubeApi, tls: Tls | None, stop: asyncio.Event) -> None:
        """Make the parts. Raises CannotStart."""
        self._settings, self._api, self._stop = settings, api, stop
        policy = OperatorPolicy(
            defaults=read_runner_defaults(settings.runner_defaults),
            pool_namespaces=frozenset(settings.namespaces),
            shared_folders=settings.shared_folders,
            poll_s=settings.poll_seconds or inf,
        )
        self._metrics, self._cache, self._desired = Metrics(), ObjectCache(), DesiredState(policy)
        self._cache.listen(self._take_in)
        for kind in BY_KIND.keys() - {NODES.kind}:
            self._metrics.count_objects(kind, partial(self._cache.count, kind))
        self._resync = CacheAudit(
            api,
            self._cache,
            watch_scopes(settings.namespaces, nodes=settings.watch_nodes),
            period_s=AUDIT_S,
            grace_s=min(AUDIT_S * GRACE_OF_PERIOD, MAX_GRACE_S),
            on_late=lambda resource, count: self._metrics.late.labels(resource).inc(count),
            on_done=self._metrics.audits.inc,
        )
        terms, identity = LeaseTimings(LEASE_S), new_identity()
        self._lease = LeaseApi(api.configuration, settings.namespace, settings.lease)
        self._election = Election(self._lease, identity=identity, terms=terms)
        self._metrics.leader.set_function(lambda: float(self._election.leading))
        self._leader = Leader(
            settings, self._desired, api, tls, self._cache, self._election, terms, identity, self._metrics, self._resync
        )
        self._webhook = self._new_webhook()
        self._synced = asyncio.Event()
        self._waits_for: str | None = "it has just started"
        self._probes = OperatorProbes(settings.probes, self._unready, self._trouble)

    async def run(self) -> int:
        """Run until SIGTERM, or until a part of it ends."""
        self._probes.start()
        serving = [self._task(self._serve()), self._task(self._mark_alive())]
        leading = self._task(self._lead_once_known())
        stopping = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait([*serving, leading, stopping], return_when=asyncio.FIRST_COMPLETED)
            failed = _failure([*serving, leading])
            await self._resign(leading)
            if failed is None:
                await self._serve_on(serving)
        finally:
            await _cancelled([*serving, leading, stopping])
            await self._lease.aclose()
            self._probes.close()
        if isinstance(failed, CannotStart):
            raise failed
        return 0 if failed is None else 1

    # ------------------------------------------------------------------------------------------------- every replica

    async def _serve(self) -> None:
        """Run watches, admission and resync. Raises the error of the first failing part."""
        await self._until_known()
        async with asyncio.TaskGroup() as tasks:
            watches = KubernetesWatches(
                self._api.configuration,
                on_object=self._cache.put,
                on_gone=self._cache.drop,
                on_start=lambda: install_signal_handlers(self._stop),
            )
            registry = watches.registry((*WATCHED, NODES) if self._settings.watch_nodes else WATCHED)
            if self._webhook:
                admission.register(registry, self._desired)
            tasks.create_task(watches.run_own(registry, self._webhook), name="watch objects")
            tasks.create_task(watches.run_owned(self._settings.namespaces), name="watch children")
            tasks.create_task(self._resync.run(), name="resync")
            tasks.create_task(self._resync.settle_doubts(), name="doubts")
            tasks.create_task(check_crds(self._api, self._metrics.missing_fields), name="check CRDs")

    async def _until_known(self) -> None:
        """Wait for our resources to exist, then take in everything there is."""
        while True:
            try:
                await self._api.request("GET", f"/apis/{ADAPTERS.api_version}")
                self._waits_for = "the list of all objects"
                await self._resync.load()
            except ObjectNotFound:
                self._waits_for = "the CustomResourceDefinitions of serving.weft.dev: apply them"
            except KubernetesError as error:
                self._waits_for = str(error)
            else:
                self._waits_for = None
                self._synced.set()
                return
            log.warning("waiting", extra=kv(what=self._waits_for))
            await asyncio.sleep(RETRY_S)

    def _new_webhook(self) -> AdmissionServer | None:
        settings = self._settings
        if settings.webhook is None:
            return None
        assert settings.webhook_tls_dir is not None  # the settings have seen to it
        return AdmissionServer(settings.webhook, settings.webhook_tls_dir)

    def _take_in(self, obj: Object, deleted: bool) -> None:
        """Take a change for admission, because it judges by all objects. A leader's controller takes changes
        separately.
        """
        if obj["kind"] not in OWN_KINDS or self._leader.controls:
            return
        key = key_of(obj)
        ref = Ref(obj["kind"], key.namespace, key.name)
        if deleted:
            self._desired.drop(ref)
        else:
            self._desired.add(parse(obj, self._desired.get(ref)))

    async def _serve_on(self, serving: list[asyncio.Task[None]]) -> None:
        """Serve admission while this replica is removed from the Service's endpoints."""
        self._waits_for = "it is stopping"
        await asyncio.wait(serving, timeout=DRAIN_S, return_when=asyncio.FIRST_COMPLETED)

    def _unready(self) -> str | None:
        """Explain why this replica is not ready; None: it knows the cluster, and its webhook listens.

        A webhook that refuses connections would block every `kubectl apply`. A ready replica need not lead.
        """
        if (waits_for := self._waits_for) is not None:
            return waits_for
        if self._webhook and not self._webhook.listens.is_set():
            return "the admission webhook does not listen yet"
        return None

    async def _mark_alive(self) -> None:
        while True:
            self._probes.mark_alive()
            await asyncio.sleep(BEAT_S)

    def _trouble(self) -> str | None:
        return self._resync.watch_health.trouble(time.monotonic()) if self._waits_for is None else None

    # --------------------------------------------------------------------------------------------------- the leader

    async def _lead_once_known(self) -> None:
        await self._synced.wait()
        await self._leader.run()

    async def _resign(self, leading: asyncio.Task[None]) -> None:
        await _cancelled([leading])
        await self._election.release()

    def _task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return asyncio.create_task(work, name=work.__name__)


async def _cancelled(tasks: list[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _failure(tasks: list[asyncio.Task[None]]) -> BaseException | None:
    """Log the first part that ended by itself, and return its error."""
    for task in tasks:
        if task.done() and not task.cancelled():
            error = _innermost(task.exception() or RuntimeError(f"{task.get_name()} has ended"))
            expected = isinstance(error, LeadershipLost | KubernetesError | CannotStart)
            log.error(
                "ending: a part of the operator has ended",
                extra=kv(part=task.get_name(), error=repr(error)),
                exc_info=None if expected else error,
            )
            return error
    return None


def _innermost(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


class Leader:
    """The leader's half of a replica. `run()` waits for its turn first."""

    def __init__(
        self,
        settings: Settings,
        desired: DesiredState,
        api: KubeApi,
        tls: Tls | None,
        cache: ObjectCache,
        election: Election,
        terms: LeaseTimings,
        identity: str,
        metrics: Metrics,
        resync: CacheAudit,
    ) -> None:
        self._settings, self._tls, self._cache, self._election = settings, tls, cache, election
        self._metrics, self._resync, self._api, self._write_s = metrics, resync, api, terms.write_s
        self._desired = desired
        self.controls = False  # the controller keeps `desired`
        self._events = EventRecorder(
            api, lead=election.require, write_s=terms.write_s, instance=identity, clock=time.time
        )
        self._backend = KubernetesBackend(
            api, cache, self._events, lead=election.require, write_s=terms.write_s, observe=metrics.api_wrote
        )

    async def run(self) -> None:
        """Wait for the Lease, then lead until cancelled. Raises LeadershipLost."""
        term = await self._election.acquire()
        self._metrics.term.set(term)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._election.hold(), name="lease")
            tasks.create_task(self._control(term), name="control")

    async def _control(self, term: int) -> None:
        """Run the planner from the present knowledge. It includes all writes of earlier leaders."""
        await self._until_current()
        depot = DepotClient(self._settings.depot, self._tls)
        reports = _Reports()
        registry = RegistryClient(
            self._settings.scheduler, on_pool=reports.pool, on_adapter=reports.adapter, term=term, tls=self._tls
        )
        controller = Controller(self._backend, depot, registry, desired=self._desired, metrics=self._metrics)
        reports.controller = controller
        EventMapper(controller).connect(self._cache)
        self.controls = True
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(controller.run(), name="controller")
                tasks.create_task(registry.run(), name="registry")
                tasks.create_task(self._events.run(), name="events")
                if self._settings.supervisor is not None:
                    tasks.create_task(self._reconcile_keys(self._settings.supervisor), name="keys")
        finally:
            await depot.aclose()

    async def _reconcile_keys(self, supervisor: str) -> None:
        """Reconcile the APIKeys, until cancelled."""
        lead, write_s = self._election.require, self._write_s
        registry = KeyRegistry(supervisor, self._tls, lead=lead, call_s=write_s)
        keys = KeyController(
            self._backend,
            KeySecrets(self._api, lead=lead, write_s=write_s),
            registry,
            namespaces=self._settings.served_key_namespaces,
            metrics=self._metrics,
        )
        for obj in self._cache.of_kind(KEYS.kind):
            keys.on_object(obj, False)
        self._cache.listen(keys.on_object)
        try:
            await keys.run()
        finally:
            await registry.aclose()

    async def _until_current(self) -> None:
        """Read the objects whose watches may be late: a waiting replica knows only reported objects.

        Earlier leaders write no more, so new lists contain all their writes.
        """
        while True:
            try:
                return await self._resync.catch_up()
            except KubernetesError as error:
                log.warning("leading, and waiting for lists", extra=kv(error=str(error)))
            await asyncio.sleep(RETRY_S)


class _Reports:
    """A receiver of the scheduler's reports, for a controller made after the stream."""

    controller: Any = None

    def pool(self, pool: str, report: PoolStatus) -> None:
        self.controller.on_pool_report(pool, report)

    def adapter(self, uid: str, report: AdapterStatus) -> None:
        self.controller.on_adapter_report(uid, report)
