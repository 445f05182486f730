"""The check of calls to a gRPC server under TLS: the role in a certificate allows it, or it is refused by name."""

import contextlib
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from weft.wire.roles import CALLERS, Role, refusal, roles_of

DNS_NAMES = "peer_dns"  # of the alternative names only those: another kind may spell a role and be none
Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Any]]


class RoleInterceptor(grpc.aio.ServerInterceptor):  # pyright: ignore[reportMissingTypeArgument] (generic in the stubs alone)
    """Refuses with PERMISSION_DENIED (another role) or UNAUTHENTICATED (a certificate without a role)."""

    async def intercept_service(self, continuation: Continuation, handler_call_details: Any) -> Any:
        handler, method = await continuation(handler_call_details), handler_call_details.method
        if handler is None:
            return None  # no such method here: UNIMPLEMENTED
        return _guarded(handler, method, CALLERS.get(method, frozenset()))


def _guarded(handler: Any, method: str, allowed: frozenset[Role]) -> Any:
    """Put a check before a handler."""
    kind, wrap = _KINDS[handler.request_streaming, handler.response_streaming]
    make = getattr(grpc, f"{kind}_rpc_method_handler")
    checked = wrap(getattr(handler, kind), method, allowed)
    return make(checked, handler.request_deserializer, handler.response_serializer)


def _unary(inner: Any, method: str, allowed: frozenset[Role]) -> Any:
    async def call(request: Any, context: Any) -> Any:
        await _check(context, method, allowed)
        return await inner(request, context)

    return call


def _stream(inner: Any, method: str, allowed: frozenset[Role]) -> Any:
    async def call(request: Any, context: Any) -> AsyncIterator[Any]:
        await _check(context, method, allowed)
        async with contextlib.aclosing(inner(request, context)) as answers:
            async for answer in answers:
                yield answer

    async def call_and_write(request: Any, context: Any) -> None:  # the health service's Watch writes by itself
        await _check(context, method, allowed)
        await inner(request, context)

    return call if inspect.isasyncgenfunction(inner) else call_and_write


_KINDS = {  # (request streams, answer streams)
    (False, False): ("unary_unary", _unary),
    (False, True): ("unary_stream", _stream),
    (True, False): ("stream_unary", _unary),
    (True, True): ("stream_stream", _stream),
}


def peer_names(context: Any) -> list[str]:
    """The DNS names in the caller's certificate; none without TLS."""
    return [name.decode(errors="replace") for name in context.auth_context().get(DNS_NAMES, ())]


async def _check(context: Any, method: str, allowed: frozenset[Role]) -> None:
    roles = roles_of(peer_names(context))
    if (message := refusal(roles, allowed, method)) is None:
        return
    code = grpc.StatusCode.PERMISSION_DENIED if roles else grpc.StatusCode.UNAUTHENTICATED
    await context.abort(code, message)
