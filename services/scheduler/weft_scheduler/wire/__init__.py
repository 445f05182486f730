"""protobuf <-> core types. What a peer may not send is PeerError; the core trusts what comes out of here."""

from weft_scheduler.wire.cluster import cluster_event, runner_report, to_supervisor
from weft_scheduler.wire.gateway import gateway_event, to_gateway
from weft_scheduler.wire.registry import registry_event, to_registry

__all__ = [
    "cluster_event",
    "gateway_event",
    "registry_event",
    "runner_report",
    "to_gateway",
    "to_registry",
    "to_supervisor",
]
