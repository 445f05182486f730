"""The objects of a local stack, through its controller's socket: adapters that clients load and unload by request."""

import contextlib
import json
from collections.abc import AsyncGenerator, Mapping
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

    async def changes(self, obj: Object) -> AsyncGenerator[Object]:
        """Give the LoRAAdapter of that name as it is now, and after each change; ObjectRefused: it is deleted."""
        uid, endless = obj["metadata"]["uid"], httpx2.Timeout(TIMEOUT_S, read=None)
        async with self._client() as http, http.stream("GET", "/v1/watch", timeout=endless) as events:
            yield await self._ask("GET", _path_of(obj))  # behind the beginning of the watch: nothing is between
            async for line in events.aiter_lines():
                if uid not in line and '"ERROR"' not in line:  # others are not parsed
                    continue
                event: Any = json.loads(line)
                if event["type"] == "ERROR":  # too slow a reader
                    raise ConnectionError(event["object"]["message"])
                if event["object"]["metadata"]["uid"] != uid:
                    continue
                if event["type"] == "DELETED":
                    raise ObjectRefused("it was deleted meanwhile")
                yield event["object"]
        raise ConnectionError("the controller ended a watch")

    async def apply(self, obj: Object) -> Object:
        """Make the object so; returns it as it is stored."""
        return (await self._ask("POST", "/v1/apply", obj))["object"]

    async def delete_adapter(self, obj: Object) -> None:
        """Delete the LoRAAdapter with this name and namespace."""
        await self._ask("DELETE", _path_of(obj))

    async def _ask(self, method: str, path: str, body: Object | None = None) -> Any:
        async with self._client() as http:
            response = await http.request(method, path, json=body)
        value = response.json()
        if response.is_error:
            raise ObjectRefused(str(value.get("message", "")))
        return value

    @contextlib.asynccontextmanager
    async def _client(self) -> AsyncGenerator[httpx2.AsyncClient]:
        with socket_name(self._path) as name:
            transport = httpx2.AsyncHTTPTransport(uds=name)
            async with httpx2.AsyncClient(base_url="http://stack", transport=transport, timeout=TIMEOUT_S) as http:
                yield http


def _path_of(obj: Object) -> str:
    return f"/v1/loraadapters/{obj['metadata']['namespace']}/{obj['metadata']['name']}"
