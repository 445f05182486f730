"""Requests of callers that are over a limit, refused by their head alone: no body is read, and no model looked up.

What is not refused here goes the whole way (`openai.prepare.submit`), which also finds limits of some models alone.
Refusals of both kinds wait for their turn (`core.refusal_pacing`).
"""

import asyncio
import logging
from collections.abc import Iterable, Mapping
from functools import partial

from weft.telemetry.logs import kv
from weft_gateway.core.refusal_pacing import RefusalPace
from weft_gateway.core.routes import Principal
from weft_gateway.errors import ApiError, LimitReached, QuotaSpent
from weft_gateway.openai import messages
from weft_gateway.shell.app_state import AppState
from weft_gateway.shell.auth import TOKEN_DOTS, Action, authenticate, check_scope
from weft_gateway.shell.bounded_http import Dismissal, response_bytes
from weft_gateway.shell.request_ids import Ids, ids_of

log = logging.getLogger(__name__)


class EarlyRefusals:
    """Looks at the head of each request; called by its connection. `paths`: of the ways to call a model."""

    def __init__(self, state: AppState, paths: Iterable[str]) -> None:
        self._state, self._paths = state, frozenset(path.encode() for path in paths)
        self.routes = state.machine.routes  # without limits nobody needs to ask

    def dismissal(self, method: bytes, url: bytes, headers: Iterable[tuple[bytes, bytes]]) -> Dismissal | None:
        """Return the answer to a request whose caller has no place for one more, whatever the model.

        None: others say what is to be said. A foreign page's request wants more headers than these, an issuer's token
        is verified once, and a process that stops closes its connections.
        """
        state, path, given = self._state, url.partition(b"?")[0], dict(headers)
        if method != b"POST" or path not in self._paths:
            return None
        key = given.get(b"authorization") or b"Bearer " + given.get(b"x-api-key", b"")
        if b"origin" in given or (state.tokens and key.count(b".") == TOKEN_DOTS) or state.stopping:
            return None
        try:
            caller = authenticate(key.decode("latin-1"), self.routes, auth=state.settings.auth)
            check_scope(caller, Action.INFER)
        except ApiError:
            return None
        try:
            state.manager.limits.check_caller(caller)
        except (LimitReached, QuotaSpent) as error:
            return self._dismissed(caller, ids_of(given.get(b"x-request-id", b"")), path.decode(), error)
        return None

    def _dismissed(self, caller: Principal, ids: Ids, path: str, error: ApiError) -> Dismissal:
        state, tenant = self._state, caller.namespace or ""
        state.manager.count_answer(None, tenant, error.status, error.code)
        pace = state.refusals.begin(tenant, state.manager.clock())
        if not pace.hold_s:
            log_refusal(ids, error, {"namespace": tenant or None})
        body, headers = refusal_of(error, path, pace)
        answer = response_bytes(error.status, headers | {"x-request-id": ids.client_request_id}, body)
        return Dismissal(answer, pace.hold_s, pace.closes, partial(state.refusals.end, tenant))


async def await_turn(state: AppState, namespace: str | None) -> RefusalPace:
    """Let a refusal wait for its turn among those of its tenant."""
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
    """Log what was refused; of a flood only what is answered at once, which is enough."""
    known = {key: value for key, value in about.items() if value is not None}
    log.info("refused", extra=kv(request_id=ids.request_id, status=error.status, code=error.code, **known))
