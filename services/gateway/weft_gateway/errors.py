"""The errors of the API, split by the caller's remedy.

    ApiError                  any answer in OpenAI's error shape
    |- BadRequest      400    correct the request (ParameterError: this parameter; BodyTimeout 408: send it at once)
    |- Unauthorized    401    send a valid key
    |- PermissionDenied 403   use a key of another scope
    |- ModelNotFound   404    ask for a model available to this key
    |- NotFound        404    ask for a file or batch available to this key
    |- TooLate        409    too late: the batch has ended
    |- TooLarge        413    send less
    |- UnsupportedMediaType 415 declare the body's media type
    |- Overloaded      429    try again after `retry_after_ms`
    |- LimitReached    429    try again after `retry_after_ms` (a limit of the key or its namespace)
    |- QuotaSpent      429    wait for the next day, or ask for a higher quota
    |- ServiceUnavailable 503    try again: a missing part is expected back
    |- QuotaReached    429    delete files, or wait for batches to end
    |- InsufficientStorage 507 try again after making room on the disk named by the code
    |- NotConfigured   501    configure the missing part of the installation
    `- Internal        500    report a bug

The core names a fault by a `Failure`. Only `from_failure` translates it.
"""

import math
from collections.abc import Mapping

import orjson

from weft_gateway.core.events import Failure

INVALID, RATE_LIMIT, SERVER = "invalid_request_error", "rate_limit_error", "server_error"

_ANTHROPIC: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class ApiError(Exception):
    """An HTTP error with OpenAI's body `{"error": {message, type, param, code}}`."""

    status, kind, code, retry = 500, SERVER, "internal_error", False

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        status: int | None = None,
        retry_after_ms: int = 0,
    ) -> None:
        super().__init__(message)
        self.message, self.param, self.retry_after_ms = message, param, retry_after_ms
        self.code, self.status = code or self.code, status or self.status

    def body(self) -> bytes:
        """Return the JSON for clients, before or after the first byte."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return orjson.dumps({"error": error})

    def anthropic_body(self) -> bytes:
        """Return the error as JSON in Anthropic's form."""
        kind = _ANTHROPIC.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")
        return orjson.dumps({"type": "error", "error": {"type": kind, "message": self.message}})

    def headers(self) -> dict[str, str]:
        """Return the content type and the headers for the official client's retry logic."""
        headers = {"content-type": "application/json", "x-should-retry": "true" if self.retry else "false"}
        if self.retry_after_ms:
            headers["retry-after"] = str(math.ceil(self.retry_after_ms / 1000))
            headers["retry-after-ms"] = str(self.retry_after_ms)
        return headers


class BadRequest(ApiError):
    """A faulty request, for the client to correct."""

    status, kind, code = 400, INVALID, "invalid_request"


class ParameterError(BadRequest):
    """A wrong parameter of a request; `param` names it."""

    code = "invalid_parameter"


class BodyTimeout(BadRequest):
    """A late body. The connection ends: reading the rest of the body would serve no purpose."""

    status, code = 408, "timeout"

    def headers(self) -> dict[str, str]:
        return super().headers() | {"connection": "close"}


class Unauthorized(ApiError):
    """A request without a key, or with an unknown key."""

    status, kind, code = 401, "authentication_error", "invalid_api_key"

    def headers(self) -> dict[str, str]:
        return super().headers() | {"www-authenticate": "Bearer"}


class PermissionDenied(ApiError):
    """A valid key with a scope too small for the request."""

    status, kind, code = 403, INVALID, "missing_scope"


class ModelNotFound(ApiError):
    """A model missing for this caller. Another tenant's model gives exactly the same answer."""

    status, kind, code = 404, INVALID, "model_not_found"

    def __init__(self, model: str, message: str = "") -> None:
        """`message`: the fault, unless the model is missing."""
        missing = (
            f"The model {model[:256]!r} does not exist or is not available to this key; "
            "GET /v1/models lists the available models."
        )
        super().__init__(message or missing, param="model")


class NotFound(ApiError):
    """A file or batch missing for this caller. Another tenant's file gives exactly the same answer."""

    status, kind, code = 404, INVALID, "not_found"


class TooLate(ApiError):
    """A request forbidden by the state of its object."""

    status, kind, code = 409, INVALID, "conflict"


class TooLarge(ApiError):
    """A body larger than its bound."""

    status, kind, code = 413, INVALID, "request_too_large"


class UnsupportedMediaType(ApiError):
    """A body declared as a media type unknown to the endpoint."""

    status, kind, code = 415, INVALID, "unsupported_media_type"


class ClientDisconnected(BadRequest):
    """A request without a client to wait for its answer."""

    def __init__(self) -> None:
        super().__init__("The client went away.", code="client_gone", status=499)


class Overloaded(ApiError):
    """A reached bound of this system; retry later."""

    status, kind, code, retry = 429, RATE_LIMIT, "rate_limit_exceeded", True


class LimitReached(ApiError):
    """A reached limit of the key or its namespace. `metric`: OpenAI's type of the error, "requests" or "tokens"."""

    status, code, retry = 429, "rate_limit_exceeded", True

    def __init__(self, message: str, metric: str, headers: Mapping[str, str], *, retry_after_ms: int) -> None:
        super().__init__(message, retry_after_ms=retry_after_ms)
        self.kind, self._headers = metric, headers

    def headers(self) -> dict[str, str]:
        return super().headers() | {**self._headers}


class QuotaSpent(ApiError):
    """The spent daily tokens of a namespace. A retry today changes nothing."""

    status, kind, code = 429, "insufficient_quota", "insufficient_quota"


class ServiceUnavailable(ApiError):
    """A missing part of the system, expected back soon."""

    status, kind, code, retry = 503, SERVER, "unavailable", True


class QuotaReached(ApiError):
    """A tenant's reached quota of the Batch API. A retry changes nothing."""

    status, kind, code = 429, RATE_LIMIT, "quota_exceeded"


class InsufficientStorage(ApiError):
    """A full disk of this installation; `code` names the disk."""

    status, kind, code = 507, SERVER, "storage_full"


class NotConfigured(ApiError):
    """A part of the API not configured in this installation."""

    status, code = 501, "not_configured"


class Internal(ApiError):
    """A bug of Weft, to be reported."""


_STATUS: Mapping[str, type[ApiError]] = {
    "queue_full": Overloaded,
    "slo_unattainable": Overloaded,
    "rate_limit_exceeded": Overloaded,
    "too_large": BadRequest,
    "model_not_found": BadRequest,
    "adapter_failed": Internal,
    "runner_full": InsufficientStorage,
    "grammar_failed": BadRequest,
    "internal_error": Internal,
}
_STATUS_CODE = {"model_not_found": 404}


def from_failure(failure: Failure) -> ApiError:
    """Return the HTTP error of a named failure; 503 for failures outside the table."""
    kind = _STATUS.get(failure.code, ServiceUnavailable)
    return kind(
        failure.message, code=failure.code, status=_STATUS_CODE.get(failure.code), retry_after_ms=failure.retry_after_ms
    )
