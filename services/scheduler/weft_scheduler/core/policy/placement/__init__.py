"""Where a request runs. `POLICIES` names the placement policies."""

from weft_scheduler.core.policy.placement.punica import PlacementPolicy, Punica

POLICIES: dict[str, type[PlacementPolicy]] = {"punica": Punica}
