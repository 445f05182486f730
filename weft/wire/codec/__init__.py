"""Messages of weft.domain <-> protobuf, once for all processes. Decoding bounds every value and raises PeerError.

A direction of a contract is a `Direction`: `encode(message)` gives the envelope that gRPC sends, `decode(envelope)` the
message. The comments of `weft/wire/v1/*.proto` are the contract.
"""

# ruff: noqa: F401

from weft.wire.codec.cluster import (
    RUNNER_TO_SUPERVISOR,
    SCHEDULER_TO_SUPERVISOR,
    SUPERVISOR_TO_RUNNER,
    SUPERVISOR_TO_SCHEDULER,
    fill_reported,
    read_reported,
)
from weft.wire.codec.direction import Direction
from weft.wire.codec.registry import REGISTRY_TO_SCHEDULER, SCHEDULER_TO_REGISTRY
from weft.wire.codec.scheduling import (
    GATEWAY_TO_SCHEDULER,
    SCHEDULER_TO_GATEWAY,
    outcome_bytes,
    outcome_from_bytes,
)
from weft.wire.codec.session import GATEWAY_TO_RUNNER, RUNNER_TO_GATEWAY
