"""A client of the depot's HTTP API: resolve a source, list changed sources, and send the digests to keep."""

from collections.abc import Callable, Collection
from typing import Any, get_args

import httpx2

from weft.artifacts.depot_api import OperationStatus, ResolveRequest, State
from weft.domain.text import quoted, sanitize
from weft.wire.channels import fast_keepalive_socket_options
from weft.wire.tls import Tls
from weft_operator.errors import DepotFailed, DepotUnavailable

WAIT_S = 10.0  # one long poll; the operation may take longer
MAX_WAIT_S = 3600.0  # the longest retryAfterSeconds accepted from a depot
FIRST_WAIT_S = 1.0  # a fast answer, for example about an unchanged source, needs no second request
TIMEOUT_S = 30.0
AGAIN_LATER = (401, 403, 404, 429, 503)


class DepotClient:
    """A pool of HTTP connections to a depot. Close it with `aclose()`."""

    def __init__(self, url: str, tls: Tls | None = None) -> None:
        verify = tls.client_context("depot") if tls else True
        options = fast_keepalive_socket_options()
        transport = httpx2.AsyncHTTPTransport(verify=verify, trust_env=False, socket_options=options)
        self._http = httpx2.AsyncClient(base_url=url, timeout=TIMEOUT_S, transport=transport)

    async def aclose(self) -> None:
        await self._http.aclose()

    async def resolve(self, request: ResolveRequest, on_step: Callable[[OperationStatus], None]) -> OperationStatus:
        """Ask, then follow the operation to its end. `on_step` is called for each state on the way.

        A depot that fails on this one request is available: the failure belongs to the object, whose conditions report
        it. Raises DepotUnavailable.
        """
        try:
            params = {"wait_s": FIRST_WAIT_S}
            operation = await self._json("POST", "/v1/resolve", params=params, json=request.body())
            if "state" in operation:
                return parse_answer(operation)
            return await self._follow(f"/v1/operations/{operation.get('operation')}", on_step)
        except DepotFailed as error:
            return OperationStatus("Failed", reason="ResolveFailed", message=str(error))

    async def _follow(self, path: str, on_step: Callable[[OperationStatus], None]) -> OperationStatus:
        state = ""
        while True:
            answer = parse_answer(await self._json("GET", path, params={"wait_s": WAIT_S}))
            if answer.finished:
                return answer
            if answer.state != state:
                state = answer.state
                on_step(answer)

    async def retain(self, digests: frozenset[str]) -> None:
        """Send the complete list of digests to keep; the depot drops the rest. Raises DepotUnavailable."""
        await self._json("POST", "/v1/retain", json={"digests": sorted(digests)})

    async def changed(self, watches: Collection[str], wait_s: float) -> frozenset[str]:
        """Return the watches with a changed source, now or within `wait_s`.

        Raises DepotUnavailable.
        """
        params = {"wait_s": wait_s}
        answer = await self._json("POST", "/v1/changed", params=params, json={"watches": sorted(watches)})
        changed_watches = answer.get("changed")
        if not isinstance(changed_watches, list) or not all(isinstance(watch, str) for watch in changed_watches):
            raise DepotFailed(f"the depot's answer is not a list of changes: {quoted(answer, 200)}")
        return frozenset(changed_watches)

    async def _json(self, method: str, path: str, **kwargs: Any) -> dict[str, Any]:
        try:
            response = await self._http.request(method, path, **kwargs)
        except httpx2.HTTPError as error:
            raise DepotUnavailable(f"{method} {path}: {error!r}") from error
        body, status = _body(response), response.status_code
        if response.is_success and body is not None:
            return body
        if method == "POST" and (refused := rejection(status, body)):
            return refused
        message = f"the depot answered {method} {path} with {status}: {sanitize(response.text[:200])}"
        # 404: the depot forgot the operation in a restart; busy: ask later; 401, 403: our certificate is not the
        # operator's. None of them is about this request.
        raise DepotUnavailable(message) if status in AGAIN_LATER else DepotFailed(message)


def _body(response: httpx2.Response) -> dict[str, Any] | None:
    """Read the JSON object of an answer; None: it is none."""
    try:
        value: Any = response.json() if response.content else {}
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None  # pyright: ignore[reportUnknownVariableType]


def rejection(status: int, body: object) -> dict[str, Any] | None:
    """Read a 4xx with a reason as the answer of a Failed operation; None for different answers."""
    refused = 400 <= status < 500 and status not in AGAIN_LATER
    return {"state": "Failed", **body} if refused and isinstance(body, dict) and body.get("reason") else None


def parse_answer(body: dict[str, Any]) -> OperationStatus:
    """Read an operation as the depot reports it. Raises DepotFailed if the answer is invalid."""
    state: State | None = body.get("state")
    digest = body.get("digest")
    if state is None or state not in get_args(State) or (state == "Fetched" and not isinstance(digest, str)):
        raise DepotFailed(f"the depot's answer is not an operation: {quoted(body, 200)}")
    return OperationStatus(
        state=state,
        digest=digest,
        verdict=body.get("verdict"),
        reason=body.get("reason") or ("ResolveFailed" if state == "Failed" else ""),
        message=body.get("message") or "",
        watch=body.get("watch"),
        retry_after_s=_seconds(body.get("retryAfterSeconds")),
    )


def _seconds(value: object) -> float:
    return min(float(value), MAX_WAIT_S) if isinstance(value, int) and value > 0 else 0.0
