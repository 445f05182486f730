"""Requests that call no model begin in turn between callers: a flood of cheap requests stalls no stream.

A request for `/metrics` or `/v1/models` costs the event loop up to a millisecond. Twenty clients that repeat it would
take 20 ms in each turn of the loop, and a stream of tokens gets one message a turn. Requests that call a model take
their turn when their body is parsed (`shell.turnstile`).
"""

import asyncio
from collections.abc import Awaitable, Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from weft.turnstile import Turnstile
from weft_gateway.errors import ApiError
from weft_gateway.shell.app_state import AppState
from weft_gateway.shell.auth import authenticate
from weft_gateway.shell.turnstile import IN_LOOP


class CallerTurns:
    """ASGI middleware: at most `IN_LOOP` requests begin in a turn of the loop, half of them of a single caller.

    A caller is the namespace of an API key, or the client's address. `model_paths` are passed on at once.
    """

    def __init__(self, app: ASGIApp, state: AppState, model_paths: Iterable[str]) -> None:
        self._app, self._state, self._model_paths = app, state, frozenset(model_paths)
        self._turns = Turnstile(IN_LOOP)

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        passes = scope["type"] != "http" or scope["path"] in self._model_paths
        return (self._app if passes else self._in_turn)(scope, receive, send)

    async def _in_turn(self, scope: Scope, receive: Receive, send: Send) -> None:
        caller = self._caller_of(scope)
        await self._turns.enter(caller)
        asyncio.get_running_loop().call_soon(self._turns.leave, caller, 0.0)  # in the loop's next turn
        await self._app(scope, receive, send)

    def _caller_of(self, scope: Scope) -> str:
        key = dict(scope["headers"]).get(b"authorization", b"").decode("latin-1")
        try:
            namespace = authenticate(key, self._state.machine.routes, auth=self._state.settings.auth).namespace
        except ApiError:
            namespace = None
        return namespace or (scope["client"] or ("",))[0]
