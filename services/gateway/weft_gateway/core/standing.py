"""Whether an adapter answers now, and if not, the reason in a sentence for its owner."""

from collections.abc import Sequence
from dataclasses import dataclass

from weft.domain.adapter import Tier
from weft.domain.fleet import FleetAdapter, FleetReport
from weft.domain.routes import PoolRoute


@dataclass(frozen=True, slots=True)
class Standing:
    """The state of an adapter: served, waiting (requests are held) or failing (no runner could load it). `reason`:
    empty if served."""

    state: str
    reason: str = ""


def standing(pool: PoolRoute | None, places: Sequence[FleetAdapter], hold_s: float, *, scheduler_up: bool) -> Standing:
    """Tell whether a routed adapter answers. `places`: its places at runners; `hold_s`: a request's longest wait."""
    if not scheduler_up:
        return Standing("waiting", "The scheduler is not connected: new requests wait until it is.")
    if pool is None:
        return Standing("waiting", "Its pool is not known here yet.")
    if not pool.ready_runners:
        return Standing(
            "waiting", f"Pool {pool.name} has no ready runner: a request waits up to {hold_s:g} s for a runner."
        )
    errors = [place.error for place in places if place.error]
    if errors and not any(place.tier is Tier.DEVICE for place in places):
        return Standing("failing", f"A runner could not load it: {errors[0]}")
    return Standing("served")


def places_by_digest(fleet: FleetReport) -> dict[str, list[FleetAdapter]]:
    """Return, by digest, the places of each adapter at the listed runners."""
    places: dict[str, list[FleetAdapter]] = {}
    for runner in fleet.runners:
        for adapter in runner.adapters:
            places.setdefault(adapter.digest, []).append(adapter)
    return places
