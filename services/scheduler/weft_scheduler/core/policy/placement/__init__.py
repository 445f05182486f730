"""Where a request runs. `POLICIES` names the placement policies."""

from weft_scheduler.core.policy.placement.policy import PlacementPolicy
from weft_scheduler.core.policy.placement.punica import Punica

POLICIES: dict[str, type[PlacementPolicy]] = {"punica": Punica}
