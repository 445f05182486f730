"""Where a request runs. `POLICIES` names the placement policies."""

from weft_scheduler.core.policy.placement.punica import (
    PlacementPolicy,
    PlacementRequest,
    Punica,
    RunnerLoad,
    placement_score,
)
from weft_scheduler.core.policy.placement.runner_index import RunnerShape

POLICIES: dict[str, type[PlacementPolicy]] = {"punica": Punica}

__all__ = [
    "POLICIES",
    "PlacementPolicy",
    "PlacementRequest",
    "Punica",
    "RunnerLoad",
    "RunnerShape",
    "placement_score",
]
