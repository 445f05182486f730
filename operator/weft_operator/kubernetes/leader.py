"""What only the leader does: plan, write, and publish to the scheduler, from the election to the end of the process."""

import asyncio
import logging
import time
from collections.abc import Iterator
from typing import Any

from weft.leadership.election import Election
from weft.leadership.lease import LeaseTimings
from weft.telemetry.logs import kv
from weft.wire.tls import Tls
from weft_operator.controller.depot_client import DepotClient
from weft_operator.controller.loop import Controller
from weft_operator.controller.registry_client import RegistryClient
from weft_operator.core.resources import Object
from weft_operator.core.runner_defaults import RunnerDefaults
from weft_operator.core.state import AdapterReport, Policy, PoolReport
from weft_operator.kubernetes.backend import KubernetesBackend
from weft_operator.kubernetes.cache import ObjectCache
from weft_operator.kubernetes.client import Api
from weft_operator.kubernetes.errors import KubernetesError
from weft_operator.kubernetes.event_mapping import EventMapper
from weft_operator.kubernetes.metrics import Metrics
from weft_operator.kubernetes.resources import OWN
from weft_operator.kubernetes.resync import Resync
from weft_operator.kubernetes.settings import Settings

log = logging.getLogger(__name__)

RETRY_S = 2.0


class Leader:
    """The leader's half of a replica. `run()` waits for its turn first."""

    def __init__(
        self,
        settings: Settings,
        defaults: RunnerDefaults,
        api: Api,
        tls: Tls | None,
        cache: ObjectCache,
        election: Election,
        terms: LeaseTimings,
        identity: str,
        metrics: Metrics,
        resync: Resync,
    ) -> None:
        self._settings, self._tls, self._cache, self._election = settings, tls, cache, election
        self._metrics, self._resync = metrics, resync
        self._policy = Policy(defaults=defaults, pool_namespaces=frozenset(settings.namespaces))
        self._backend = KubernetesBackend(
            api, cache, lead=election.require, write_s=terms.write_s, instance=identity, clock=time.time
        )

    async def run(self) -> None:
        """Wait for the Lease, then lead until cancelled. Raises LeadershipLost."""
        term = await self._election.acquire()
        self._metrics.term.set(term)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._election.hold(), name="lease")
            tasks.create_task(self._control(term), name="control")

    async def _control(self, term: int) -> None:
        """The planner, from all that is known now: at least all that leaders before have written."""
        await self._until_current()
        depot = DepotClient(self._settings.depot, self._tls)
        reports = _Reports()
        registry = RegistryClient(
            self._settings.scheduler, on_pool=reports.pool, on_adapter=reports.adapter, term=term, tls=self._tls
        )
        controller = Controller(self._backend, depot, registry, policy=self._policy, metrics=self._metrics)
        reports.controller = controller
        controller.load(self._objects(), nothing_runs=False)
        EventMapper(controller).connect(self._cache)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(controller.run(), name="controller")
                tasks.create_task(registry.run(), name="registry")
        finally:
            await depot.aclose()

    async def _until_current(self) -> None:
        """A replica that waited knows what its watches have reported, and they may be late.

        Whoever led before writes no more, so lists that are asked for now have everything it wrote.
        """
        while True:
            try:
                return await self._resync.catch_up()
            except KubernetesError as error:
                log.warning("leading, and waiting for lists", extra=kv(error=str(error)))
            await asyncio.sleep(RETRY_S)

    def _objects(self) -> Iterator[Object]:
        return (obj for resource in OWN for obj in self._cache.of_kind(resource.kind))


class _Reports:
    """The scheduler's word, for a controller that is made after the stream."""

    controller: Any = None

    def pool(self, pool: str, report: PoolReport) -> None:
        self.controller.on_pool_report(pool, report)

    def adapter(self, uid: str, report: AdapterReport) -> None:
        self.controller.on_adapter_report(uid, report)
