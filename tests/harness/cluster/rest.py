"""The API server's objects without a process for every question: names of resources by discovery, answers as values."""

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlencode

import urllib3

from harness import waiting
from harness.cluster.errors import Refused

Json = dict[str, Any]

DISCOVERY = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"
WATCH_S = 30
CONNECTIONS = 16


class Resource(NamedTuple):
    """A resource as its server tells of it."""

    kind: str
    api_version: str
    plural: str
    namespaced: bool

    def path(self, namespace: str, name: str = "") -> str:
        """Of one object, or of all (of a namespace, or everywhere)."""
        start = f"/apis/{self.api_version}" if "/" in self.api_version else f"/api/{self.api_version}"
        within = f"/namespaces/{namespace}" if self.namespaced and namespace else ""
        return f"{start}{within}/{self.plural}" + (f"/{name}" if name else "")


class Rest:
    """One way in. May be used by several threads."""

    def __init__(self, url: str, ca: Path, token: str) -> None:
        self._url, self._headers = url, {"Authorization": f"Bearer {token}"}
        self._pool = urllib3.PoolManager(ca_certs=str(ca), maxsize=CONNECTIONS, retries=False)
        self._known: dict[str, Resource] = {}
        self._lock = threading.Lock()

    def close(self) -> None:
        self._pool.clear()

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        content: str = "application/json",
        query: Mapping[str, str] | None = None,
        accept: str = "application/json",
    ) -> urllib3.BaseHTTPResponse:
        """The answer, read. Raises Refused for one that is no success, and urllib3's errors where there is none."""
        answer = self._send(method, path, body, content, query, accept, stream=False)
        if answer.status >= 400:
            raise Refused(f"{method} {path}", _message(answer.data), answer.status)
        return answer

    def json(self, method: str, path: str, body: Any = None, **options: Any) -> Json:
        return json.loads(self.request(method, path, body, **options).data)

    def watch(self, path: str, query: Mapping[str, str]) -> Iterator[Json]:
        """The events of a watch, as long as the server tells any."""
        asked = {**query, "watch": "true", "timeoutSeconds": str(WATCH_S)}
        answer = self._send("GET", path, None, "", asked, "application/json", stream=True)
        try:
            left = b""
            for part in answer.stream(1 << 16):
                *lines, left = (left + part).split(b"\n")
                yield from map(json.loads, lines)
        finally:
            answer.close()

    def until(self, path: str, name: str, holds: Callable[[Json | None], bool], what: str) -> None:
        """Watch the object `name` of a collection until it holds of it (None: there is none). Raises TimeoutError."""
        query = {"fieldSelector": f"metadata.name={name}"}

        def seen() -> Iterator[Json | None]:
            listed = self.json("GET", path, query=query)
            yield next(iter(listed["items"]), None)
            for event in self.watch(path, {**query, "resourceVersion": listed["metadata"]["resourceVersion"]}):
                if event["type"] == "ERROR":
                    return  # that version is forgotten
                yield None if event["type"] == "DELETED" else event["object"]

        waiting.wait_until(lambda: any(map(holds, seen())), what)

    def resource(self, name: str) -> Resource:
        """By kind, plural, singular or short name, with or without `.GROUP`. Waits for one that is not served yet."""

        def is_known() -> bool:
            if name.lower() not in self._known:
                self._discover()
            return name.lower() in self._known

        waiting.wait_until(is_known, f"the API server serves {name}")
        return self._known[name.lower()]

    def _send(
        self,
        method: str,
        path: str,
        body: Any,
        content: str,
        query: Mapping[str, str] | None,
        accept: str,
        *,
        stream: bool,
    ) -> urllib3.BaseHTTPResponse:
        url = self._url + path + (f"?{urlencode(query)}" if query else "")
        headers = {**self._headers, "Accept": accept} | ({"Content-Type": content} if body is not None else {})
        sent = None if body is None else json.dumps(body).encode()
        return self._pool.request(
            method,
            url,
            body=sent,
            headers=headers,
            timeout=urllib3.Timeout(waiting.PATIENCE_S),
            preload_content=not stream,
            redirect=False,
        )

    def _discover(self) -> None:
        known: dict[str, Resource] = {}
        for root in ("/api", "/apis"):
            for group in self.json("GET", root, accept=DISCOVERY)["items"]:
                for resource, names in _resources(group):
                    for name in names:
                        known.setdefault(name, resource)  # groups come in the server's order of preference
        with self._lock:
            self._known = known


def _resources(group: Json) -> Iterator[tuple[Resource, list[str]]]:
    """Every resource of a group's versions, the preferred one first, and the names that it is called by."""
    group_name = group["metadata"].get("name", "")
    for version in group["versions"]:
        api_version = f"{group_name}/{version['version']}" if group_name else version["version"]
        for found in version.get("resources", ()):  # none while an aggregated API is away
            kind = found["responseKind"]["kind"]
            resource = Resource(kind, api_version, found["resource"], found["scope"] == "Namespaced")
            names = [found["resource"], kind.lower(), found.get("singularResource", ""), *found.get("shortNames", ())]
            qualified = f"{found['resource']}.{group_name}"
            yield resource, [*(name for name in names if name), qualified, f"{kind.lower()}.{api_version}"]


def _message(content: bytes) -> str:
    try:
        return json.loads(content)["message"]
    except (ValueError, KeyError, TypeError):
        return content.decode(errors="replace")
