"""Messages of weft.domain <-> protobuf, once for all processes. Decoding bounds every value and raises PeerError.

A direction of a contract is a `Direction`: `encode(message)` gives the envelope that gRPC sends, `decode(envelope)` the
message. The comments of `weft/wire/v1/*.proto` are the contract.
"""
