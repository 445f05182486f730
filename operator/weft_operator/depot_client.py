"""The depot's HTTP API, as far as the operator needs it: resolve, and the list of what to keep."""

from collections.abc import Callable
from typing import Any

import httpx2

from weft_operator.errors import DepotUnavailable
from weft_operator.resolution import Answer, Request

WAIT_S = 10.0  # one long poll; an operation itself may take as long as it takes
TIMEOUT_S = 30.0


class DepotClient:
    """One connection pool to one depot. Close it with `aclose()`."""

    def __init__(self, url: str) -> None:
        self._http = httpx2.AsyncClient(base_url=url, timeout=TIMEOUT_S, trust_env=False)

    async def aclose(self) -> None:
        await self._http.aclose()

    async def resolve(self, request: Request, on_step: Callable[[Answer], None]) -> Answer:
        """Ask, then follow the operation to its end. `on_step` hears of each state on the way.

        Raises DepotUnavailable.
        """
        operation = await self._json("POST", "/v1/resolve", json=request.body())
        if "state" in operation:
            return parse_answer(operation)
        path, state = f"/v1/operations/{operation.get('operation')}", ""
        while True:
            answer = parse_answer(await self._json("GET", path, params={"wait_s": WAIT_S}))
            if answer.finished:
                return answer
            if answer.state != state:
                state = answer.state
                on_step(answer)

    async def retain(self, digests: frozenset[str]) -> None:
        """Tell the complete list of what to keep; the depot drops the rest. Raises DepotUnavailable."""
        await self._json("POST", "/v1/retain", json={"digests": sorted(digests)})

    async def _json(self, method: str, path: str, **kwargs: Any) -> dict[str, Any]:
        try:
            response = await self._http.request(method, path, **kwargs)
            body: Any = response.json() if response.content else {}
        except (httpx2.HTTPError, ValueError) as error:
            raise DepotUnavailable(f"{method} {path}: {error!r}") from error
        if response.is_success and isinstance(body, dict):
            return body
        refused = refusal(response.status_code, body)
        if refused is None:
            raise DepotUnavailable(f"{method} {path}: {response.status_code} {response.text[:200]}")
        return refused


def refusal(status: int, body: object) -> dict[str, Any] | None:
    """A 4xx with a reason is the depot's word on the request, as good as a Failed operation; None: it is not one."""
    if 400 <= status < 500 and isinstance(body, dict) and body.get("reason"):
        return {"state": "Failed", **body}
    return None


def parse_answer(body: dict[str, Any]) -> Answer:
    """An operation as the depot tells it. Raises DepotUnavailable for what is none."""
    try:
        return Answer(
            state=body["state"],
            digest=body.get("digest"),
            verdict=body.get("verdict"),
            reason=body.get("reason") or ("Unknown" if body["state"] == "Failed" else ""),
            message=body.get("message") or "",
        )
    except KeyError as error:
        raise DepotUnavailable(f"not an operation: {body!r}") from error
