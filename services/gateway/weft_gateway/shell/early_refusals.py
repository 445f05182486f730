"""Requests of callers that nobody knows, or that are over a limit, refused by their head alone: no body is read.

What is not refused here goes the whole way (`openai.prepare.submit`), which also finds limits of some models alone.
Refusals of both kinds wait for their turn among those of their tenant, or of all who are not known
(`core.refusal_pacing`).
"""

import asyncio
import logging
from collections.abc import Iterable, Mapping
from functools import partial

from weft.telemetry.logs import kv
from weft_gateway.core.refusal_pacing import AT_ONCE, RefusalPace
from weft_gateway.errors import ApiError, LimitReached, QuotaSpent, Unauthorized
from weft_gateway.openai import messages
from weft_gateway.shell.app_state import AppState
from weft_gateway.shell.auth import TOKEN_DOTS, Action, authenticate, check_scope
from weft_gateway.shell.bounded_http import Dismissal, response_bytes
from weft_gateway.shell.request_ids import Ids, ids_of

PACED = (LimitReached, QuotaSpent, Unauthorized)
log = logging.getLogger(__name__)


class EarlyRefusals:
    """Looks at the head of each request; called by its connection. `paths`: of the ways to call a model."""

    def __init__(self, state: AppState, paths: Iterable[str]) -> None:
        self._state, self._paths = state, frozenset(path.encode() for path in paths)
        self.routes, self.auth = state.machine.routes, state.settings.auth  # without limits and keys nobody need ask

    def dismissal(self, method: bytes, url: bytes, headers: Mapping[bytes, bytes]) -> Dismissal | None:
        """Return the answer to a request of an unknown caller, or of a caller without a free place, for any model.

        None: others say what is to be said. A foreign page's request wants more headers than these, an issuer's token
        is verified once, and a process that stops closes its connections.
        """
        state, path = self._state, url.partition(b"?")[0]
        if method != b"POST" or path not in self._paths:
            return None
        key = headers.get(b"authorization") or b"Bearer " + headers.get(b"x-api-key", b"")
        if b"origin" in headers or (state.tokens and key.count(b".") == TOKEN_DOTS) or state.stopping:
            return None
        namespace: str | None = None
        try:
            caller = authenticate(key.decode("latin-1"), self.routes, auth=self.auth)
            namespace = caller.tenant
            check_scope(caller, Action.INFER)
            state.manager.limits.check_caller(caller)
        except PACED as error:
            return self._dismissed(namespace, ids_of(headers.get(b"x-request-id", b"")), path.decode(), error)
        except ApiError:
            return None
        return None

    def _dismissed(self, namespace: str | None, ids: Ids, path: str, error: ApiError) -> Dismissal:
        state, tenant = self._state, namespace or ""
        state.manager.count_answer(None, namespace, error.status, error.code)
        pace = state.refusals.begin(tenant, state.manager.clock())
        if pace is AT_ONCE:
            log_refusal(ids, error, {"namespace": tenant or None})
        body, headers = refusal_of(error, path, pace)
        answer = response_bytes(error.status, headers | {"x-request-id": ids.client_request_id}, body)
        return Dismissal(answer, pace.hold_s, pace.closes, partial(state.refusals.end, tenant))


async def await_turn(state: AppState, namespace: str | None, error: ApiError) -> RefusalPace:
    """Let a refusal wait in its tenant's turn, if refusals of this kind are paced."""
    if not isinstance(error, PACED):
        return AT_ONCE
    pace = state.refusals.begin(tenant := namespace or "", state.manager.clock())
    if pace.hold_s:
        try:
            await asyncio.sleep(pace.hold_s)
        finally:
            state.refusals.end(tenant)
    return pace


def refusal_of(error: ApiError, path: str, pace: RefusalPace) -> tuple[bytes, dict[str, str]]:
    """Return body and headers of an error's answer, in the form of the API that was called."""
    body = error.anthropic_body() if path.startswith(messages.PATH) else error.body()
    return body, error.headers() | ({"connection": "close"} if pace.closes else {})


def log_refusal(ids: Ids, error: ApiError, about: Mapping[str, object]) -> None:
    """Log a refusal. In a flood only immediate answers are logged, as a sample."""
    fields = {key: value for key, value in about.items() if value is not None}
    log.info("refused", extra=kv(request_id=ids.request_id, status=error.status, code=error.code, **fields))
