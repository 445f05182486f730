"""What can go wrong between the operator and an API server.

KubernetesError
├── ApiFailed         the API server refused a request; carries status, reason and its message: planned again later
└── ApiUnreachable    it did not answer in time: asked again later

StaleWrite (`weft_operator.errors`): no failure, the plan was made from another world
├── ObjectNotFound    404: there is no such object, or no such resource
├── VersionConflict   409: the object has another version than the write was made from
└── AlreadyExists     409: an object that was to be created is there
"""

from weft_operator.errors import OperatorError, StaleWrite


class KubernetesError(OperatorError):
    """Root of the shell's errors."""


class ApiFailed(KubernetesError):
    """The API server's refusal."""

    def __init__(self, what: str, status: int, reason: str, message: str) -> None:
        super().__init__(f"{what}: {status} {reason}: {message}")
        self.status, self.reason, self.message = status, reason, message


class ApiUnreachable(KubernetesError):
    """No answer, or none in time. Whether a write was carried out is not known."""


class ObjectNotFound(StaleWrite):
    """There is no such object, or no such resource."""


class VersionConflict(StaleWrite):
    """The object has another version than the write was made from."""


class AlreadyExists(StaleWrite):
    """An object that was to be created is there."""
