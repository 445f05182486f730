"""Where a request runs. `POLICIES` names the placements; each answers with a runner or with nobody."""

from weft_scheduler.core.placement.punica import Ask, Placement, Punica

POLICIES: dict[str, type[Placement]] = {"punica": Punica}

__all__ = ["POLICIES", "Ask", "Placement", "Punica"]
