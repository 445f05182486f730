"""The resources that the shell reads and writes, and their paths in the API.

Everything else that the operator needs of a resource (who may be named how, what it means) is the planner's.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from weft_operator.core.children import MANAGER
from weft_operator.core.resources import Object
from weft_operator.core.state import ObjectKey

MANAGED_BY = "app.kubernetes.io/managed-by"
SELECTOR = f"{MANAGED_BY}={MANAGER}"


@dataclass(frozen=True, slots=True)
class Resource:
    """A kind of object, as the API's paths name it. `group` is empty for the core API."""

    group: str
    version: str
    plural: str
    kind: str

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str | None = None, name: str | None = None, subresource: str | None = None) -> str:
        """The path of a list (of one namespace or of all) or of an object."""
        root = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        parts = [root, *(("namespaces", namespace) if namespace else ()), self.plural, name, subresource]
        return "/".join(part for part in parts if part)


ADAPTERS = Resource("serving.weft.dev", "v1alpha1", "loraadapters", "LoRAAdapter")
POOLS = Resource("serving.weft.dev", "v1alpha1", "servingpools", "ServingPool")
DEPLOYMENTS = Resource("apps", "v1", "deployments", "Deployment")
STATEFUL_SETS = Resource("apps", "v1", "statefulsets", "StatefulSet")
NETWORK_POLICIES = Resource("networking.k8s.io", "v1", "networkpolicies", "NetworkPolicy")
SERVICES = Resource("", "v1", "services", "Service")
ACCOUNTS = Resource("", "v1", "serviceaccounts", "ServiceAccount")
BUDGETS = Resource("policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget")
PODS = Resource("", "v1", "pods", "Pod")
EVENTS = Resource("events.k8s.io", "v1", "events", "Event")

OWN = (ADAPTERS, POOLS)
CHILDREN = (DEPLOYMENTS, STATEFUL_SETS, SERVICES, BUDGETS, ACCOUNTS, NETWORK_POLICIES)
BY_KIND: Mapping[str, Resource] = {resource.kind: resource for resource in (*OWN, *CHILDREN, PODS)}


def key_of(obj: Object) -> ObjectKey:
    """The key of an object as the API server gives it."""
    metadata = obj["metadata"]
    return ObjectKey(obj["kind"], metadata["namespace"], metadata["name"])


def version_of(obj: Object) -> int | None:
    """The resourceVersion as the number that it is (API servers compare them so since 1.35); None: not a number."""
    text: Any = obj["metadata"].get("resourceVersion")
    return int(text) if isinstance(text, str) and text.isdecimal() else None
