"""What can go wrong between the operator and an API server.

KubernetesError
├── ApiFailed         the API server refused a request; carries status, reason and its message: planned again later
├── ApiUnreachable    it did not answer in time: asked again later
└── LeadershipLost    another replica leads, or may lead by now: this process must not write any more and ends

A fenced write that meets a newer object, or none, is no failure: it raises `weft_operator.errors.NoEffect`.
"""

from weft_operator.errors import OperatorError


class KubernetesError(OperatorError):
    """Root of the shell's errors."""


class ApiFailed(KubernetesError):
    """The API server's refusal."""

    def __init__(self, what: str, status: int, reason: str, message: str) -> None:
        super().__init__(f"{what}: {status} {reason}: {message}")
        self.status, self.reason, self.message = status, reason, message


class ApiUnreachable(KubernetesError):
    """No answer, or none in time. Whether a write was carried out is not known."""


class LeadershipLost(KubernetesError):
    """The Lease is not this process's any more, or not for certain."""
