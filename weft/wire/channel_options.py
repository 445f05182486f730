"""What every channel and every server of Weft has in common: keepalive and bounds."""

from typing import Any

CHANNEL_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 2_000),  # what one attempt may take at least, handshake and all: not a pause
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.use_local_subchannel_pool", 1),
    # A peer that was scheduled anew has another address behind its name; gRPC would ask for it every 30 s only.
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),
]
