"""Outcomes on their way to the store: kept, bounded, until a supervisor has stored them; every step may be repeated.

A full ledger takes no more; the gateway keeps what was not acknowledged and tells it again on a new stream. So once
there is room again the streams of the gateways that were turned away are ended.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Kept:
    """An outcome, who sent it and its unread record."""

    gateway: str
    record: bytes


class Ledger:
    """Outcomes by request id, oldest first."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.kept: dict[str, Kept] = {}
        self.turned_away: set[str] = set()

    def keep(self, request_id: str, gateway: str, record: bytes) -> bool:
        """True if it is new and has to be forwarded. A repeated one only learns who asks for it now."""
        if request_id in self.kept:
            self.kept[request_id] = Kept(gateway, self.kept[request_id].record)
            return False
        if len(self.kept) >= self.limit:
            self.turned_away.add(gateway)
            return False
        self.kept[request_id] = Kept(gateway, record)
        return True

    def stored(self, request_ids: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
        """Forget what is in the store. Returns the ids to acknowledge by gateway."""
        acknowledged: dict[str, list[str]] = {}
        for request_id in request_ids:
            kept = self.kept.pop(request_id, None)
            if kept is not None:
                acknowledged.setdefault(kept.gateway, []).append(request_id)
        return {gateway: tuple(ids) for gateway, ids in acknowledged.items()}

    def call_again(self) -> list[str]:
        """The gateways to hear again, once half of the ledger is free."""
        if not self.turned_away or len(self.kept) * 2 > self.limit:
            return []
        gateways, self.turned_away = sorted(self.turned_away), set()
        return gateways
