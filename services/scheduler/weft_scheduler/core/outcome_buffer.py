"""Outcomes on their way to the store: kept, bounded, until a supervisor has stored them; every step may be repeated.

A full buffer takes no more; the gateway keeps what was not acknowledged and sends it again on a new stream. So once
there is space again the streams of the gateways that were rejected are closed.
"""

from weft.domain.request import OutcomeReport


class OutcomeBuffer:
    """Outcomes by request id, oldest first."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.outcomes: dict[str, tuple[str, OutcomeReport]] = {}  # with the gateway that waits for the acknowledgement
        self.rejected_gateways: set[str] = set()

    def add(self, report: OutcomeReport, gateway: str) -> bool:
        """Store an outcome. Return True for a new outcome to forward. A repeated outcome only changes the gateway to
        acknowledge.
        """
        stored = self.outcomes.get(report.request_id)
        if stored is not None:
            self.outcomes[report.request_id] = (gateway, stored[1])
            return False
        if len(self.outcomes) >= self.limit:
            self.rejected_gateways.add(gateway)
            return False
        self.outcomes[report.request_id] = (gateway, report)
        return True

    def forget_gateway(self, gateway: str) -> None:
        """Expect no acknowledgement of a gateway with an ended stream. Its next stream sends everything again."""
        self.rejected_gateways.discard(gateway)

    def stored(self, request_ids: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
        """Forget stored outcomes. Return the ids to acknowledge by gateway."""
        acknowledged: dict[str, list[str]] = {}
        for request_id in request_ids:
            outcome = self.outcomes.pop(request_id, None)
            if outcome is not None:
                acknowledged.setdefault(outcome[0], []).append(request_id)
        return {gateway: tuple(ids) for gateway, ids in acknowledged.items()}

    def take_retries(self) -> list[str]:
        """Return the rejected gateways, once half of the buffer is free, and forget them."""
        if not self.rejected_gateways or len(self.outcomes) * 2 > self.limit:
            return []
        gateways, self.rejected_gateways = sorted(self.rejected_gateways), set()
        return gateways
