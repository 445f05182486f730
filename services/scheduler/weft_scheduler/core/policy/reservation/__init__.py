"""The output tokens that a request reserves. `RESERVATION_POLICIES` names the reservation policies."""

from collections.abc import Mapping

from weft_scheduler.core.policy.reservation.policies import (
    BucketEdge,
    Calibrated,
    Constant,
    Maximum,
    Paged,
    Pooled,
    ReservationPolicy,
)

RESERVATION_POLICIES: Mapping[str, type[ReservationPolicy]] = {
    "calibrated": Calibrated,
    "constant": Constant,
    "max": Maximum,
    "paged": Paged,
    "pooled": Pooled,
    "s3": BucketEdge,
}
