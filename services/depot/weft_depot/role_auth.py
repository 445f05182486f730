"""Role-based access under TLS: the roles in a connection's certificate admit its requests, or refuse them with a
reason."""

import asyncio
import ssl
from collections.abc import MutableMapping
from typing import Any

from starlette.responses import JSONResponse
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from weft.wire.roles import ANYONE, DEPOT_CALLERS, Role, refusal, roles_of

Scope = MutableMapping[str, Any]
Base: Any = AutoHTTPProtocol  # httptools if it is installed, else h11


class TlsPeerHttp(Base):
    """A connection. uvicorn creates an instance for each connection, after the handshake."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self.app = RoleMiddleware(self.app, roles_of(_dns_names(transport.get_extra_info("ssl_object"))))


class RoleMiddleware:
    """A check of the path against the caller's roles, in front of the application."""

    def __init__(self, app: Any, roles: frozenset[Role]) -> None:
        self._app, self._roles = app, roles

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and (reason := refusal(self._roles, callers(scope["path"]), scope["path"])):
            status = 403 if self._roles else 401
            await JSONResponse({"reason": "PermissionDenied", "message": reason}, status)(scope, receive, send)
            return
        await self._app(scope, receive, send)


def callers(path: str) -> frozenset[Role]:
    """Return the roles that may request a path. Below /v1 only paths in the table are allowed."""
    parts = path.split("/", 3)
    if parts[1:2] != ["v1"]:
        return ANYONE  # probes and metrics, or nothing at all
    return DEPOT_CALLERS.get("/v1/" + "".join(parts[2:3]), frozenset())


def _dns_names(connection: ssl.SSLObject | None) -> list[str]:
    names: Any = ((connection and connection.getpeercert()) or {}).get("subjectAltName", ())
    return [value for kind, value in names if kind == "DNS"]
