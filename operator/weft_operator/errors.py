"""What can go wrong.

OperatorError
├── DepotUnavailable     the depot did not answer: ask again later
│   └── DepotFailed      the depot answered with an error, or with an invalid answer
├── SupervisorUnavailable  the supervisor did not answer, or refused: ask again later
├── StaleWrite           a fenced write met a different version of the object, or no object: plan again
│   ├── ChildExists      an unreported object has a child's name; carries the object: plan again with it
│   ├── ObjectNotFound   404: the object or the resource does not exist
│   ├── VersionConflict  409: the object's version has changed since the write was planned
│   └── AlreadyExists    409: the object to create exists already
├── ChildRefused         the API server refuses a child of a pool: try again later
├── KubernetesError
│   ├── ApiFailed        the API server refused a request; carries status, reason and message: plan again later
│   └── ApiUnreachable   the API server did not answer in time: ask again later
├── LocalApiError        a refused request to the local API; carries status, reason and causes
│   ├── Invalid (422)    the object breaks the schema or a rule; every cause names its field
│   ├── LocalNotFound (404)
│   ├── LocalConflict (409)  the object has changed since the client read it
│   ├── LocalBadRequest (400)
│   └── Expired (410)    a watch from a forgotten version: list again
└── StackError           `weft up` cannot continue
    ├── FileRootGone     the data directory names a folder of `file:` URIs, and the folder is missing
    ├── PortInUse
    ├── StoreDamaged     objects.json cannot be read
    └── ComponentFailed  a component ended before it was ready; carries its last words
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


class OperatorError(Exception):
    """Root of the operator's errors."""


class DepotUnavailable(OperatorError):
    """The depot did not answer, or not as it should."""


class DepotFailed(DepotUnavailable):
    """The depot answered a request with an error or with an invalid answer."""


class SupervisorUnavailable(OperatorError):
    """The supervisor did not answer, or not as it should. It may have carried out the request."""


class StaleWrite(OperatorError):
    """A fenced write met a newer version of the object, or the object is gone."""


class ChildExists(StaleWrite):
    """An unreported object has the name of a pool's child. The planner decides the next step."""

    def __init__(self, obj: Mapping[str, Any]) -> None:
        super().__init__(f"{obj['kind']} {obj['metadata']['name']} is there, and no watch reports it as the pool's")
        self.obj = obj


class ObjectNotFound(StaleWrite):
    """The object or the resource does not exist."""


class VersionConflict(StaleWrite):
    """The object has another version than the write was made from."""


class AlreadyExists(StaleWrite):
    """The object to create exists already."""


class KubernetesError(OperatorError):
    """Root of errors of an API server."""


class ApiFailed(KubernetesError):
    """The API server refused a request."""

    def __init__(self, request: str, status: int, reason: str, message: str) -> None:
        super().__init__(f"{request}: {status} {reason}: {message}")
        self.status, self.reason, self.message = status, reason, message


class ApiUnreachable(KubernetesError):
    """The API server did not answer, or not in time. Whether a write was carried out is not known."""


class ChildRefused(OperatorError):
    """The API server refuses a child of a pool."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


@dataclass(frozen=True, slots=True)
class Cause:
    """A fault of an object. `field` is a path like spec.lora.maxRank."""

    field: str
    message: str


class LocalApiError(OperatorError):
    """A refused request, in the form of the Kubernetes API: status code, reason, message, causes."""

    code = 500
    reason = "InternalError"

    def __init__(self, message: str, causes: tuple[Cause, ...] = ()) -> None:
        super().__init__(message)
        self.message, self.causes = message, causes

    def body(self) -> dict[str, object]:
        """Make the `Status` object."""
        causes = [{"field": cause.field, "message": cause.message} for cause in self.causes]
        return {
            "kind": "Status",
            "apiVersion": "v1",
            "status": "Failure",
            "code": self.code,
            "reason": self.reason,
            "message": self.message,
            "details": {"causes": causes},
        }


class Invalid(LocalApiError):
    code, reason = 422, "Invalid"


class LocalNotFound(LocalApiError):
    code, reason = 404, "NotFound"


class LocalConflict(LocalApiError):
    code, reason = 409, "Conflict"


class LocalBadRequest(LocalApiError):
    code, reason = 400, "BadRequest"


class Expired(LocalApiError):
    code, reason = 410, "Expired"


class StackError(OperatorError):
    """`weft up` cannot continue. The message has the fault, its place and the remedy. `exit_code` is the exit code of
    the command.
    """

    exit_code = 1


class FileRootGone(StackError):
    exit_code = 2


class PortInUse(StackError):
    exit_code = 2


class StoreDamaged(StackError):
    exit_code = 2


class ComponentFailed(StackError):
    exit_code = 1
