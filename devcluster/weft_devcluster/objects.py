"""An API server's objects as values, by the dynamic client of the `kubernetes` package."""

import contextlib
import json
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

from kubernetes.client import ApiClient
from kubernetes.client.exceptions import ApiException
from kubernetes.dynamic import DynamicClient
from kubernetes.dynamic.resource import Resource, ResourceList

from weft_devcluster.errors import Refused
from weft_devcluster.waiting import PATIENCE_S, wait_until

Json = dict[str, Any]

WATCH_S = 30


class Objects:
    """A client, which speaks to the API server when it is first needed. May be used by several threads."""

    def __init__(self, client: ApiClient, folder: Path) -> None:
        """Take the client. `folder` takes what is known of the server's resources."""
        self._client, self._cache = client, folder / "discovery.json"
        self._dynamic: DynamicClient | None = None
        self._known: dict[str, Resource] = {}

    def close(self) -> None:
        self._client.close()

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        content: str = "application/json",
        query: Mapping[str, str] | None = None,
    ) -> Json:
        """Make one request. Raises Refused if it fails, and urllib3's errors where there is no answer."""
        with _refusals(f"{method} {path}"):
            return self._client_of_all().request(
                method,
                path,
                body,
                content_type=content,
                query_params=list((query or {}).items()),
                serializer=_as_it_is,
                _request_timeout=PATIENCE_S,
            )

    def until(self, kind: str, name: str, namespace: str, holds: Callable[[Json | None], bool], what: str) -> None:
        """Watch an object until it holds of it (None: there is none). Raises TimeoutError."""
        resource = self.resource(kind)

        def seen() -> Iterator[Json | None]:
            listed = self.request("GET", path_of(resource, namespace), query={"fieldSelector": f"metadata.name={name}"})
            yield next(iter(listed["items"]), None)
            since = listed["metadata"]["resourceVersion"]
            try:
                events: Any = self._client_of_all().watch(
                    resource, namespace or None, name, resource_version=since, timeout=WATCH_S
                )
                for event in events:
                    yield None if event["type"] == "DELETED" else event["raw_object"]
            except ApiException as error:
                if error.status != 410:  # that version is forgotten
                    raise

        wait_until(lambda: any(map(holds, seen())), what)

    def resource(self, name: str) -> Resource:
        """Find a resource by kind, plural, singular or short name, with or without `.GROUP`. Waits for one that is not
        served yet."""

        def is_known() -> bool:
            if name.lower() not in self._known:
                self._discover()
            return name.lower() in self._known

        wait_until(is_known, f"the API server serves {name}")
        return self._known[name.lower()]

    def _client_of_all(self) -> DynamicClient:
        if self._dynamic is None:
            self._dynamic = DynamicClient(self._client, cache_file=str(self._cache))
        return self._dynamic

    def _discover(self) -> None:
        known: dict[str, Resource] = {}
        resources = self._client_of_all().resources
        resources.invalidate_cache()
        for resource in (found for group in resources for found in group):
            if isinstance(resource, ResourceList):
                continue
            names = [resource.kind, resource.name, resource.singular_name, *(resource.short_names or ())]
            for name in (name.lower() for name in names if name):
                for qualified in (name, f"{name}.{resource.group}", f"{name}.{resource.group_version}"):
                    known.setdefault(qualified, resource)  # groups come in the server's order of preference
        self._known = known


def _as_it_is(_: object, answer: Json) -> Json:
    return answer


def path_of(resource: Resource, namespace: str, name: str = "") -> str:
    """Make the path of one object, or of all (of a namespace, or everywhere)."""
    return resource.path(name=name or None, namespace=namespace or None)


@contextlib.contextmanager
def _refusals(request: str) -> Generator[None]:
    try:
        yield
    except ApiException as error:
        raise Refused(request, _message(error), error.status or 0) from error


def _message(error: ApiException) -> str:
    try:
        return json.loads(error.body or "")["message"]
    except (ValueError, KeyError, TypeError):
        return str(error.body or error.reason)
