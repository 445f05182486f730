"""What can go wrong in the supervisor. (The store's errors: `weft.store.errors`.)

SupervisorError
├── ProtocolError   a peer broke the contract: its stream ends with INVALID_ARGUMENT
└── Superseded      a runner was replaced by a newer incarnation: its stream ends with FAILED_PRECONDITION
"""


class SupervisorError(Exception):
    """Root of the supervisor's errors."""


class ProtocolError(SupervisorError):
    """A peer sent what the contract does not allow."""


class Superseded(SupervisorError):
    """A newer incarnation of this runner's uuid is registered."""
