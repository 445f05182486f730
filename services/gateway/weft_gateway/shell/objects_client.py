"""The objects of a local stack, through its controller's socket: adapters that clients load and unload by request."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx2

from weft.files import socket_name

Object = Mapping[str, Any]
TIMEOUT_S = 10.0


class ObjectRefused(Exception):
    """The controller does not take the change; the message says why."""


class ObjectsClient:
    """Talks to the controller of `weft up`. Every method raises ObjectRefused, httpx2.HTTPError, OSError."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def list(self, plural: str) -> list[Object]:
        """The objects of a kind, of every namespace."""
        return (await self._ask("GET", f"/v1/{plural}"))["items"]

    async def adapter(self, obj: Object) -> Object:
        """The LoRAAdapter of that name as it is now."""
        return await self._ask("GET", _path_of(obj))

    async def apply(self, obj: Object) -> Object:
        """Make the object so; returns it as it is stored."""
        return (await self._ask("POST", "/v1/apply", obj))["object"]

    async def delete_adapter(self, obj: Object) -> None:
        """Delete the LoRAAdapter of that name."""
        await self._ask("DELETE", _path_of(obj))

    async def _ask(self, method: str, path: str, body: Object | None = None) -> Any:
        with socket_name(self._path) as name:
            transport = httpx2.AsyncHTTPTransport(uds=name)
            async with httpx2.AsyncClient(base_url="http://stack", transport=transport, timeout=TIMEOUT_S) as http:
                response = await http.request(method, path, json=body)
        value = response.json()
        if response.is_error:
            raise ObjectRefused(str(value.get("message", "")))
        return value


def _path_of(obj: Object) -> str:
    return f"/v1/loraadapters/{obj['metadata']['namespace']}/{obj['metadata']['name']}"
