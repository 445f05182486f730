"""What the registry and the gateways were told last, so that only changes are told."""

from dataclasses import dataclass

from weft_scheduler.core.effects import AdapterStatus, PoolStatus
from weft_scheduler.core.values import Route, RouteTable


@dataclass(frozen=True, slots=True)
class Departure:
    """Where an adapter was served. Both empty: not known here."""

    pool: str = ""
    digest: str = ""


class Told:
    """Cleared where somebody new has to be told everything."""

    def __init__(self) -> None:
        self.pools: dict[str, PoolStatus] = {}
        self.adapters: dict[str, AdapterStatus] = {}
        self.unsaid: dict[str, None] = {}  # adapter uids to look at, in order
        self.departures: dict[str, Departure] = {}  # by uid: the registry waits for the word that it is gone
        self.table: RouteTable | None = None
        self.routes: tuple[Route, ...] = ()
        self.routed: frozenset[str] = frozenset()  # uids in the table

    def clear_statuses(self) -> None:
        self.pools.clear()
        self.adapters.clear()
        self.unsaid.clear()
