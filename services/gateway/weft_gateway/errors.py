"""The errors of the API, split by what the caller can do.

    ApiError                  any answer in OpenAI's error shape
    |- BadRequest      400    correct the request (ParameterError: this parameter; BodyTimeout 408: send it at once)
    |- Unauthorized    401    send a valid key
    |- PermissionDenied 403   use a key of another scope
    |- ModelNotFound   404    ask for a model that is there for this key
    |- NotFound        404    ask for a file or batch that is there for this key
    |- TooLate        409    too late: the batch has ended
    |- TooLarge        413    send less
    |- UnsupportedMediaType 415 declare the body as what it is
    |- Overloaded      429    try again after `retry_after_ms`
    |- LimitReached    429    try again after `retry_after_ms` (a limit of the key or its namespace)
    |- QuotaSpent      429    wait for the next day, or ask for a higher quota
    |- ServiceUnavailable 503    try again: something is missing that is expected back
    |- QuotaReached    429    delete files, or wait for batches to end
    |- InsufficientStorage 507 try again once there is room on the disk that the code names
    |- NotConfigured   501    configure what this installation lacks
    `- Internal        500    report a bug

The core names what fails by a `Failure`; `from_failure` translates it, here and nowhere else.
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
    """An HTTP status with OpenAI's `{"error": {message, type, param, code}}`."""

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
        """The JSON that clients parse, before or after the first byte."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return orjson.dumps({"error": error})

    def anthropic_body(self) -> bytes:
        """The same in Anthropic's form."""
        kind = _ANTHROPIC.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")
        return orjson.dumps({"type": "error", "error": {"type": kind, "message": self.message}})

    def headers(self) -> dict[str, str]:
        """Content type and what the official client's retry logic reads."""
        headers = {"content-type": "application/json", "x-should-retry": "true" if self.retry else "false"}
        if self.retry_after_ms:
            headers["retry-after"] = str(math.ceil(self.retry_after_ms / 1000))
            headers["retry-after-ms"] = str(self.retry_after_ms)
        return headers


class BadRequest(ApiError):
    """The request has to be corrected."""

    status, kind, code = 400, INVALID, "invalid_request"


class ParameterError(BadRequest):
    """One parameter is wrong; `param` names it."""

    code = "invalid_parameter"


class BodyTimeout(BadRequest):
    """The body did not arrive in time. The connection ends: reading the rest of the body would serve nothing."""

    status, code = 408, "timeout"

    def headers(self) -> dict[str, str]:
        return super().headers() | {"connection": "close"}


class Unauthorized(ApiError):
    """No key, or one that is not known."""

    status, kind, code = 401, "authentication_error", "invalid_api_key"

    def headers(self) -> dict[str, str]:
        return super().headers() | {"www-authenticate": "Bearer"}


class PermissionDenied(ApiError):
    """The key is valid, and its scope does not have what is asked for."""

    status, kind, code = 403, INVALID, "missing_scope"


class ModelNotFound(ApiError):
    """This caller has no such model. The answer for another tenant's model is exactly the same."""

    status, kind, code = 404, INVALID, "model_not_found"

    def __init__(self, model: str, message: str = "") -> None:
        """`message`: what else is wrong than that this caller has no such model."""
        missing = (
            f"The model {model[:256]!r} does not exist or is not available to this key; "
            "GET /v1/models lists those that are."
        )
        super().__init__(message or missing, param="model")


class NotFound(ApiError):
    """This caller has no such file or batch. The answer for another tenant's is exactly the same."""

    status, kind, code = 404, INVALID, "not_found"


class TooLate(ApiError):
    """What is asked for is in a state that forbids it."""

    status, kind, code = 409, INVALID, "conflict"


class TooLarge(ApiError):
    """The body is beyond its bound."""

    status, kind, code = 413, INVALID, "request_too_large"


class UnsupportedMediaType(ApiError):
    """The body is not declared as what the endpoint takes."""

    status, kind, code = 415, INVALID, "unsupported_media_type"


class ClientDisconnected(BadRequest):
    """Nobody waits for the answer any more."""

    def __init__(self) -> None:
        super().__init__("The client went away.", code="client_gone", status=499)


class Overloaded(ApiError):
    """A bound of this system is reached; retry later."""

    status, kind, code, retry = 429, RATE_LIMIT, "rate_limit_exceeded", True


class LimitReached(ApiError):
    """A limit of the key or its namespace. `metric`: OpenAI's type of the error, "requests" or "tokens"."""

    status, code, retry = 429, "rate_limit_exceeded", True

    def __init__(self, message: str, metric: str, headers: Mapping[str, str], *, retry_after_ms: int) -> None:
        super().__init__(message, retry_after_ms=retry_after_ms)
        self.kind, self._headers = metric, headers

    def headers(self) -> dict[str, str]:
        return super().headers() | {**self._headers}


class QuotaSpent(ApiError):
    """The namespace's tokens of the day are used up. Another try today changes nothing."""

    status, kind, code = 429, "insufficient_quota", "insufficient_quota"


class ServiceUnavailable(ApiError):
    """Something that is expected back is missing."""

    status, kind, code, retry = 503, SERVER, "unavailable", True


class QuotaReached(ApiError):
    """A tenant's quota of the Batch API. Another try changes nothing."""

    status, kind, code = 429, RATE_LIMIT, "quota_exceeded"


class InsufficientStorage(ApiError):
    """A disk of this installation has no room for what the request has to write; `code` says which."""

    status, kind, code = 507, SERVER, "storage_full"


class NotConfigured(ApiError):
    """This installation lacks what the request needs."""

    status, code = 501, "not_configured"


class Internal(ApiError):
    """A bug of ours."""


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
    """The HTTP error of a named failure; what is not in the table is a 503."""
    kind = _STATUS.get(failure.code, ServiceUnavailable)
    return kind(
        failure.message, code=failure.code, status=_STATUS_CODE.get(failure.code), retry_after_ms=failure.retry_after_ms
    )
