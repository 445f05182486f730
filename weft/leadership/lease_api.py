"""One Lease at an API server: read, made, replaced. One request is one attempt; the caller decides who repeats it, and
when.

The credentials are those of `kubernetes.aio`: the pod's service account, whose token is read again as it rotates, or a
kubeconfig (`KUBECONFIG`) outside of a cluster.
"""

import asyncio
import json
import os
from typing import Any, cast

import aiohttp
from kubernetes.aio import config as kube_config
from kubernetes.aio.client import ApiClient, Configuration

from weft.domain.text import sanitize
from weft.leadership.errors import LeaseChanged, LeaseUnavailable
from weft.process import CannotStart

Json = dict[str, Any]
API_VERSION, KIND = "coordination.k8s.io/v1", "Lease"
READ_S = 30.0
CONNECTIONS = 32


class NoCluster(CannotStart):
    """There is neither a service account nor a usable kubeconfig."""


async def load_configuration(kubeconfig: str = "") -> Configuration:
    """Load the credentials of that file, or of $KUBECONFIG, or of the pod's service account. Raises NoCluster."""
    kubeconfig = kubeconfig or os.environ.get("KUBECONFIG", "")
    configuration = Configuration()
    configuration.connection_pool_maxsize = CONNECTIONS
    configuration.disable_strict_ssl_verification = True  # see weft.trust
    try:
        if not kubeconfig:
            kube_config.load_incluster_config(client_configuration=configuration)
        else:
            await kube_config.load_kube_config(config_file=kubeconfig, client_configuration=configuration)
    except (kube_config.ConfigException, OSError) as error:
        origin = kubeconfig or "not in a pod with a service account"
        raise NoCluster(f"no credentials for an API server ({origin}: {error}): set KUBECONFIG to a file") from error
    return configuration


class LeaseApi:
    """The Lease `namespace`/`name`. Close it with `aclose()`."""

    def __init__(self, configuration: Configuration, namespace: str, name: str) -> None:
        self.namespace, self.name = namespace, name
        self._client = ApiClient(configuration)
        self._client.user_agent = "weft"
        self._all = f"/apis/{API_VERSION}/namespaces/{namespace}/leases"

    def __str__(self) -> str:
        return f"Lease {self.namespace}/{self.name}"

    async def aclose(self) -> None:
        await self._client.close()

    async def read(self) -> Json | None:
        """Read the Lease; None when there is none. Raises LeaseUnavailable."""
        try:
            return await self._request("GET", f"{self._all}/{self.name}", None, READ_S)
        except LeaseChanged:
            return None

    async def create(self, spec: Json, *, timeout_s: float) -> Json:
        """Make the Lease. Raises LeaseChanged when it is there, LeaseUnavailable."""
        return await self._request("POST", self._all, self._object(spec), timeout_s)

    async def replace(self, spec: Json, *, uid: str, version: str, timeout_s: float) -> Json:
        """Write the Lease over exactly this version; without `uid` a PUT would make a deleted one anew. Raises
        LeaseChanged, LeaseUnavailable."""
        body = self._object(spec, uid=uid, resourceVersion=version)
        return await self._request("PUT", f"{self._all}/{self.name}", body, timeout_s)

    def _object(self, spec: Json, **fence: str) -> Json:
        metadata = {"namespace": self.namespace, "name": self.name, **fence}
        return {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "spec": spec}

    async def _request(self, method: str, path: str, body: Json | None, timeout_s: float) -> Json:
        headers = {"Accept": "application/json", "Content-Type": "application/json"}
        try:
            async with asyncio.timeout(timeout_s):
                _, url, sent, data, _ = await self._client.param_serialize(
                    method, path, header_params=headers, body=body, auth_settings=["BearerToken"]
                )
                answer = await self._client.call_api(method, url, sent, data, _request_timeout=timeout_s)
                content = cast("bytes", await answer.read())
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise LeaseUnavailable(f"{self}: {method}: {error!r}") from error
        if 200 <= answer.status < 300:
            return json.loads(content)
        answered = sanitize(f"{self}: {method}: {answer.status} {content[:500].decode(errors='replace')}")
        raise LeaseChanged(answered) if answer.status in (404, 409) else LeaseUnavailable(answered, answer.status)
