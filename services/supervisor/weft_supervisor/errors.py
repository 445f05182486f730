"""What a runner is refused for, beside a message outside the contract. (The store's errors: `weft.store.errors`.)

PeerError (weft.wire)   a runner broke the contract: its stream ends with INVALID_ARGUMENT
+-- NotItsOwn           it speaks for a pool or a runner that its certificate does not cover: PERMISSION_DENIED
+-- Superseded          it was replaced by a newer incarnation: FAILED_PRECONDITION
"""

import grpc

from weft.wire.errors import PeerError


class NotItsOwn(PeerError):
    """A runner's certificate is for the runners of other namespaces."""

    code = grpc.StatusCode.PERMISSION_DENIED


class Superseded(PeerError):
    """A newer incarnation of this runner's uuid is registered."""

    code = grpc.StatusCode.FAILED_PRECONDITION
