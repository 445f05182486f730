"""What only the leader does: plan, write, and tell the scheduler, from the election to the end of the process."""

import asyncio
import logging
import time
from collections.abc import Iterator
from typing import Any

from weft.telemetry.logs import kv
from weft.wire.tls import Tls
from weft_operator.depot_client import DepotClient
from weft_operator.kubernetes.audit import Audit
from weft_operator.kubernetes.client import Api
from weft_operator.kubernetes.election import Election
from weft_operator.kubernetes.errors import KubernetesError
from weft_operator.kubernetes.feed import Feed
from weft_operator.kubernetes.kube import KubeBackend
from weft_operator.kubernetes.lease import Terms
from weft_operator.kubernetes.metrics import Metrics
from weft_operator.kubernetes.mirror import Mirror
from weft_operator.kubernetes.resources import OWN
from weft_operator.kubernetes.settings import Settings
from weft_operator.observe import AdapterReport, PoolReport
from weft_operator.plan import Policy
from weft_operator.reconcile import Controller
from weft_operator.registry_client import RegistryClient
from weft_operator.resources import Object
from weft_operator.site import Site

log = logging.getLogger(__name__)

RETRY_S = 2.0


class Leader:
    """The leader's half of a replica. `run()` waits for its turn first."""

    def __init__(
        self,
        settings: Settings,
        site: Site,
        api: Api,
        tls: Tls | None,
        mirror: Mirror,
        election: Election,
        terms: Terms,
        identity: str,
        metrics: Metrics,
        audit: Audit,
    ) -> None:
        self._settings, self._tls, self._mirror, self._election = settings, tls, mirror, election
        self._metrics, self._audit = metrics, audit
        self._policy = Policy(site=site, pool_namespaces=frozenset(settings.namespaces))
        self._backend = KubeBackend(
            api, mirror, lead=election.require, write_s=terms.write_s, instance=identity, clock=time.time
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
        told = _Told()
        registry = RegistryClient(
            self._settings.scheduler, on_pool=told.pool, on_adapter=told.adapter, term=term, tls=self._tls
        )
        controller = Controller(self._backend, depot, registry, policy=self._policy, meter=self._metrics)
        told.controller = controller
        controller.load(self._objects(), nothing_runs=False)
        Feed(controller).connect(self._mirror)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(controller.run(), name="controller")
                tasks.create_task(registry.run(), name="registry")
        finally:
            await depot.aclose()

    async def _until_current(self) -> None:
        """A replica that waited knows what its watches have told it, and they may be late.

        Whoever led before writes no more, so lists that are asked for now have everything it wrote.
        """
        while True:
            try:
                return await self._audit.catch_up()
            except KubernetesError as error:
                log.warning("leading, and waiting for lists", extra=kv(error=str(error)))
            await asyncio.sleep(RETRY_S)

    def _objects(self) -> Iterator[Object]:
        return (obj for resource in OWN for obj in self._mirror.of_kind(resource.kind))


class _Told:
    """The scheduler's word, for a controller that is made after the stream."""

    controller: Any = None

    def pool(self, pool: str, report: PoolReport) -> None:
        self.controller.on_pool_report(pool, report)

    def adapter(self, uid: str, report: AdapterReport) -> None:
        self.controller.on_adapter_report(uid, report)
