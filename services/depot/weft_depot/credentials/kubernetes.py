"""Secrets and ConfigMaps of the cluster: one GET of a single object with the pod's service account.

Nothing is listed, watched or kept.
"""

import base64
import binascii
import re
import ssl
from typing import TYPE_CHECKING, Any, Literal

import urllib3
from kubernetes import client, config
from kubernetes.client.exceptions import ApiException

from weft.artifacts.errors import ArtifactError, Reason, Refused, Unavailable
from weft.chat_template import TEMPLATE_FILE
from weft.process import CannotStart
from weft.trust import accept_private_authorities
from weft_depot import config_maps
from weft_depot.credentials import Secret, check_names
from weft_depot.object_names import quoted_name

if TYPE_CHECKING:  # its import takes a second of CPU time: only readers of Secrets pay for it
    from kubernetes.client import CoreV1Api

CONNECT_S, READ_S = 3.0, 7.0
_REASONS = {
    "Secret": (Reason.SECRET_MISSING, Reason.SECRET_FORBIDDEN),
    "ConfigMap": (Reason.CONFIG_MAP_MISSING, Reason.CONFIG_MAP_FORBIDDEN),
}
_ACCOUNT = re.compile(r"system:serviceaccount:([a-z0-9-]+):([a-z0-9.-]+)", re.ASCII)


class KubernetesSecrets:
    """The cluster's Secrets through one client with a rotating token, for any thread."""

    def __init__(self, api: "CoreV1Api") -> None:
        self._api = api

    def read(self, namespace: str, name: str) -> Secret:
        """Read a Secret. Raises Refused (SecretMissing, SecretForbidden, SecretInvalid), Unavailable."""
        check_names(namespace, name)
        called = quoted_name(namespace, name)
        try:
            secret: Any = self._api.read_namespaced_secret(name, namespace, _request_timeout=(CONNECT_S, READ_S))
        except ApiException as error:
            raise _refused(error, "Secret", namespace, name) from None  # its text quotes the complete answer
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise _silent(error, "Secret", called) from None
        return Secret(called, {key: _decoded(value, key, called) for key, value in (secret.data or {}).items()})


class KubernetesConfigMaps:
    """The cluster's ConfigMaps, read as `KubernetesSecrets` does."""

    def __init__(self, api: "CoreV1Api") -> None:
        self._api = api

    def read(self, namespace: str, name: str) -> str:
        """Read a ConfigMap's entry. Raises Refused (ConfigMapMissing, ConfigMapForbidden), Unavailable."""
        config_maps.check_names(namespace, name)
        called = quoted_name(namespace, name)
        try:
            entry: Any = self._api.read_namespaced_config_map(name, namespace, _request_timeout=(CONNECT_S, READ_S))
        except ApiException as error:
            raise _refused(error, "ConfigMap", namespace, name) from None
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise _silent(error, "ConfigMap", called) from None
        if not (text := (entry.data or {}).get(TEMPLATE_FILE)):
            reason = f"ConfigMap {called} has no text under {TEMPLATE_FILE} in its data"
            raise Refused(Reason.CONFIG_MAP_MISSING, reason)
        return text


def in_cluster(flag: str) -> "CoreV1Api":
    """Return a client with the service account of this pod. Raises CannotStart outside of a pod."""
    configuration = client.Configuration()
    try:
        config.load_incluster_config(client_configuration=configuration)
    except config.ConfigException as error:
        raise CannotStart(
            f"{flag} kubernetes: {error}: run the depot in a pod that mounts its service account's token, "
            f"or take {flag} none"
        ) from error
    configuration.retries = 1  # the operator asks again
    return client.CoreV1Api(api_client(configuration))


def api_client(configuration: client.Configuration) -> client.ApiClient:
    """Return a client of the API server, for certificates of any issuer (`weft.trust`)."""
    made = client.ApiClient(configuration)
    if configuration.verify_ssl:
        pool: Any = made.rest_client.pool_manager
        pool.connection_pool_kw["ssl_context"] = accept_private_authorities(
            ssl.create_default_context(cafile=configuration.ssl_ca_cert)
        )
    return made


def _silent(error: Exception, kind: str, called: str) -> Unavailable:
    return Unavailable(f"{kind} {called}: the API server does not answer ({type(error).__name__})")


def _refused(error: ApiException, kind: Literal["Secret", "ConfigMap"], namespace: str, name: str) -> ArtifactError:
    called, (missing, forbidden) = quoted_name(namespace, name), _REASONS[kind]
    if error.status == 404:
        return Refused(missing, f"{kind} {called} does not exist; create it in the namespace of the referring object")
    if error.status == 403:
        return Refused(forbidden, _grant(str(error.body), kind, namespace, name))
    return Unavailable(f"{kind} {called}: the API server answered {error.status} {error.reason}")


def _grant(body: str, kind: str, namespace: str, name: str) -> str:
    """Return the message with the commands to grant access to the object. The API server's refusal names the depot's
    account."""
    match = _ACCOUNT.search(body)
    account = f"{match[1]}:{match[2]}" if match else "NAMESPACE:SERVICEACCOUNT (of the depot)"
    role, resource = f"weft-depot-{name}"[:63].rstrip("-."), f"{kind.lower()}s"
    return (
        f"the depot may not read {kind} {quoted_name(namespace, name)}; the owner of the namespace grants access with: "
        f"kubectl create role {role} -n {namespace} --verb=get --resource={resource} --resource-name={name} && "
        f"kubectl create rolebinding {role} -n {namespace} --role={role} --serviceaccount={account}"
    )


def _decoded(value: str, key: str, called: str) -> bytes:
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError) as error:
        raise Refused(Reason.SECRET_INVALID, f"Secret {called}: its key {key!r} is not base64") from error
