"""What pools do just now, heard from the scheduler: a stream that only listens.

Every replica has its own, leader or not, so that every one of them can answer an autoscaler. It says nothing on the
stream: desired state, and the term that fences it, are the leader's.
"""

from collections.abc import Iterable

from weft.domain.routes import PoolStatus
from weft.wire.codec.registry import SCHEDULER_TO_REGISTRY
from weft.wire.streams import ClientStream, channel
from weft.wire.tls import Tls
from weft.wire.v1 import scheduler_pb2 as pb
from weft.wire.v1.scheduler_pb2_grpc import SchedulerStub
from weft_operator.kubernetes.external import Demand


class DemandWatch:
    """The present demand by pool; nothing while the scheduler is away, for an old word is worse than none."""

    def __init__(self, scheduler: str, tls: Tls | None = None) -> None:
        self._channel = channel(scheduler, tls, "scheduler")
        self._pools: dict[str, Demand] = {}
        self._link: ClientStream[pb.RegistryToScheduler, pb.SchedulerToRegistry] = ClientStream(
            "demand",
            SchedulerStub(self._channel).Registry,
            hello=lambda: (),
            on_message=self._heard,
            on_down=lambda _: self._pools.clear(),
        )

    @property
    def up(self) -> bool:
        return self._link.up

    def pools(self) -> Iterable[tuple[str, Demand]]:
        """("namespace/name", demand) of every pool that the scheduler has told of."""
        return self._pools.items()

    async def run(self) -> None:
        """Until cancelled."""
        try:
            await self._link.run()
        finally:
            self._link.close()
            await self._channel.close(None)

    def _heard(self, message: pb.SchedulerToRegistry) -> None:
        status = SCHEDULER_TO_REGISTRY.decode(message)
        if isinstance(status, PoolStatus):
            self._pools[status.pool] = Demand(
                demand_runners=status.demand_runners,
                queued=status.queued,
                running=status.running,
                total_pages=status.total_pages,
                reserved_pages=status.reserved_pages,
                phases=status.demand,
            )
