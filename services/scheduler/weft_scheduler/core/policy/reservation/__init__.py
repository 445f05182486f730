"""How many output tokens a request reserves. `POLICIES` names the reservation policies."""

from weft_scheduler.core.policy.reservation.calibrated import Calibrated

POLICIES = {"calibrated": Calibrated}
