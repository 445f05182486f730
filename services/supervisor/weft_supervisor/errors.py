"""What can go wrong in the supervisor. (The store's errors: `weft.store.errors`.)

SupervisorError
├── ProtocolError   a peer broke the contract: its stream ends with INVALID_ARGUMENT
├── NotItsPool      a runner says it is of a pool that its certificate does not cover: PERMISSION_DENIED
└── Superseded      a runner was replaced by a newer incarnation: its stream ends with FAILED_PRECONDITION
"""


class SupervisorError(Exception):
    """Root of the supervisor's errors."""


class ProtocolError(SupervisorError):
    """A peer sent what the contract does not allow."""


class NotItsPool(SupervisorError):
    """A runner's certificate is for the pools of other namespaces."""


class Superseded(SupervisorError):
    """A newer incarnation of this runner's uuid is registered."""
