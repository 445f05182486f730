"""The wire: protobuf contracts (`weft.wire.v1`), streams that come back, servers that drain."""
