"""How many output tokens a request reserves. `POLICIES` names the reservation policies."""

from weft_scheduler.core.policy.reservation.calibrated import (
    Calibrated,
    OutputLengthStats,
    ReservationPolicy,
    double_past,
    remaining_tokens,
)

POLICIES = {"calibrated": Calibrated}

__all__ = ["POLICIES", "Calibrated", "OutputLengthStats", "ReservationPolicy", "double_past", "remaining_tokens"]
