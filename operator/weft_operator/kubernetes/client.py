"""Requests to the API server: resources and paths in, JSON out, errors translated once.

A request is a single attempt. The caller decides whether and when to repeat it: after the planner's pause, or the
resync's period. The credentials come from `kubernetes.aio`: the pod's service account (its token is read again as it
rotates), or a kubeconfig outside of a cluster.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import aiohttp
from kubernetes.aio.client import ApiClient, Configuration

from weft.domain.text import sanitize
from weft_operator.core.children import MANAGED_BY, MANAGER
from weft_operator.core.resources import Object
from weft_operator.core.state import ObjectKey
from weft_operator.errors import AlreadyExists, ApiFailed, ApiUnreachable, ObjectNotFound, StaleWrite, VersionConflict

SELECTOR = f"{MANAGED_BY}={MANAGER}"


@dataclass(frozen=True, slots=True)
class ResourceKind:
    """A kind of object, as the API's paths name it. `group` is empty for the core API."""

    group: str
    version: str
    plural: str
    kind: str

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str | None = None, name: str | None = None, subresource: str | None = None) -> str:
        """Return the path of an object, or of a list (of a namespace, or of the cluster)."""
        root = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        parts = [root, *(("namespaces", namespace) if namespace else ()), self.plural, name, subresource]
        return "/".join(part for part in parts if part)


ADAPTERS = ResourceKind("serving.weft.dev", "v1alpha1", "loraadapters", "LoRAAdapter")
POOLS = ResourceKind("serving.weft.dev", "v1alpha1", "servingpools", "ServingPool")
KEYS = ResourceKind("serving.weft.dev", "v1alpha1", "apikeys", "APIKey")
SECRETS = ResourceKind("", "v1", "secrets", "Secret")
DEPLOYMENTS = ResourceKind("apps", "v1", "deployments", "Deployment")
STATEFUL_SETS = ResourceKind("apps", "v1", "statefulsets", "StatefulSet")
NETWORK_POLICIES = ResourceKind("networking.k8s.io", "v1", "networkpolicies", "NetworkPolicy")
SERVICES = ResourceKind("", "v1", "services", "Service")
ACCOUNTS = ResourceKind("", "v1", "serviceaccounts", "ServiceAccount")
BUDGETS = ResourceKind("policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget")
PODS = ResourceKind("", "v1", "pods", "Pod")
NODES = ResourceKind("", "v1", "nodes", "Node")
EVENTS = ResourceKind("events.k8s.io", "v1", "events", "Event")

OWN = (ADAPTERS, POOLS)
WATCHED = (*OWN, KEYS)  # everywhere
CHILDREN = (DEPLOYMENTS, STATEFUL_SETS, SERVICES, BUDGETS, ACCOUNTS, NETWORK_POLICIES)
BY_KIND: Mapping[str, ResourceKind] = {resource.kind: resource for resource in (*WATCHED, *CHILDREN, PODS, NODES)}


def key_of(obj: Object) -> ObjectKey:
    """The key of an object as the API server gives it; a node has no namespace."""
    metadata = obj["metadata"]
    return ObjectKey(obj["kind"], metadata.get("namespace", ""), metadata["name"])


READ_S = 30.0
CHUNK = 500
MERGE_PATCH = "application/merge-patch+json"
APPLY_PATCH = "application/apply-patch+yaml"
METADATA_ONLY = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"


class KubeApi:
    """A pool of HTTP connections to an API server. Close it with `aclose()`."""

    def __init__(self, configuration: Configuration) -> None:
        self.configuration = configuration
        self._client = ApiClient(configuration)
        self._client.user_agent = "weft-operator"

    async def aclose(self) -> None:
        await self._client.close()

    async def get(self, resource: ResourceKind, namespace: str, name: str) -> Object | None:
        """Read an object; None if it does not exist."""
        try:
            return await self.request("GET", resource.path(namespace, name))
        except ObjectNotFound:
            return None

    async def pages(
        self, resource: ResourceKind, namespace: str | None, *, selector: str = "", metadata_only: bool = False
    ) -> AsyncIterator[tuple[Object, ...]]:
        """List objects in chunks of a consistent version. Yield at least one page, even if empty.

        Raises ApiFailed with status 410 if the list takes so long that the server forgets its version.
        """
        query = {"limit": str(CHUNK), **({"labelSelector": selector} if selector else {})}
        accept = METADATA_ONLY if metadata_only else "application/json"
        while True:
            reply = await self.request("GET", resource.path(namespace), query=query, accept=accept)
            type_fields = {"apiVersion": resource.api_version, "kind": resource.kind}  # items do not say it themselves
            yield tuple({**item, **type_fields} for item in reply["items"] or ())
            token = reply["metadata"].get("continue")
            if not token:
                return
            query["continue"] = token

    async def request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: object = None,
        content_type: str = "application/json",
        accept: str = "application/json",
        timeout_s: float = READ_S,
    ) -> Any:
        """Make an HTTP request. Raises ObjectNotFound, VersionConflict, AlreadyExists, ApiFailed, ApiUnreachable."""
        headers = {"Accept": accept, "Content-Type": content_type}
        try:
            async with asyncio.timeout(timeout_s):
                _, url, header_params, data, _ = await self._client.param_serialize(
                    method,
                    path,
                    query_params=list((query or {}).items()),
                    header_params=headers,
                    body=body,
                    auth_settings=["BearerToken"],
                )
                answer = await self._client.call_api(method, url, header_params, data, _request_timeout=timeout_s)
                content = cast("bytes", await answer.read())
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ApiUnreachable(f"{method} {path}: {error!r}") from error
        if 200 <= answer.status < 300:
            return json.loads(content) if content else {}
        raise _refusal(f"{method} {path}", answer.status, content)


def _refusal(request: str, status: int, content: bytes) -> StaleWrite | ApiFailed:
    reason, message = "", content[:500].decode(errors="replace")
    try:
        reply: Any = json.loads(content)
        reason, message = str(reply.get("reason") or ""), str(reply.get("message") or "")
    except (ValueError, AttributeError):
        pass  # not a Status: the message has its text
    text = sanitize(message[:500])
    if status == 404:
        return ObjectNotFound(f"{request}: {text}")
    if status == 409:
        kind = AlreadyExists if reason == "AlreadyExists" else VersionConflict
        return kind(f"{request}: {text}")
    return ApiFailed(request, status, sanitize(reason), text)
