"""Secrets of the cluster: one GET of one Secret with the pod's service account. Nothing is listed, watched or kept."""

import base64
import binascii
import re
import ssl
from typing import TYPE_CHECKING, Any

import urllib3
from kubernetes import client, config
from kubernetes.client.exceptions import ApiException

from weft.artifacts.errors import Reason, Refused, Unavailable
from weft.process import CannotStart
from weft.trust import accept_private_authorities
from weft_depot.credentials import Secret, check_names, where

if TYPE_CHECKING:  # its import takes a second of CPU time: only who reads Secrets waits for it
    from kubernetes.client import CoreV1Api

CONNECT_S, READ_S = 3.0, 7.0
_ACCOUNT = re.compile(r"system:serviceaccount:([a-z0-9-]+):([a-z0-9.-]+)", re.ASCII)


class KubernetesSecrets:
    """Reads through one client, which any thread may use, and which takes its token again when that is rotated."""

    def __init__(self, api: "CoreV1Api") -> None:
        self._api = api

    def read(self, namespace: str, name: str) -> Secret:
        """Raises Refused (SecretMissing, SecretForbidden, SecretInvalid), Unavailable."""
        check_names(namespace, name)
        called = where(namespace, name)
        try:
            found: Any = self._api.read_namespaced_secret(name, namespace, _request_timeout=(CONNECT_S, READ_S))
        except ApiException as error:
            raise _refused(error, namespace, name) from None  # its text quotes the whole answer
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise Unavailable(f"Secret {called}: the API server does not answer ({type(error).__name__})") from None
        return Secret(called, {key: _decoded(value, key, called) for key, value in (found.data or {}).items()})


def in_cluster() -> KubernetesSecrets:
    """With the service account of this pod. Raises CannotStart outside of one."""
    configuration = client.Configuration()
    try:
        config.load_incluster_config(client_configuration=configuration)
    except config.ConfigException as error:
        raise CannotStart(
            f"--secrets kubernetes: {error}: run the depot in a pod that mounts its service account's token, "
            "or take --secrets none or a folder"
        ) from error
    configuration.retries = 1  # the operator asks again
    return KubernetesSecrets(client.CoreV1Api(api_client(configuration)))


def api_client(configuration: client.Configuration) -> client.ApiClient:
    """What asks the API server, whoever issued its certificate (`weft.trust`)."""
    made = client.ApiClient(configuration)
    if configuration.verify_ssl:
        pool: Any = made.rest_client.pool_manager
        pool.connection_pool_kw["ssl_context"] = accept_private_authorities(
            ssl.create_default_context(cafile=configuration.ssl_ca_cert)
        )
    return made


def _refused(error: ApiException, namespace: str, name: str) -> Refused | Unavailable:
    called = where(namespace, name)
    if error.status == 404:
        why = f"Secret {called} does not exist; create it in the namespace of the object that names it"
        return Refused(Reason.SECRET_MISSING, why)
    if error.status == 403:
        return Refused(Reason.SECRET_FORBIDDEN, _grant(str(error.body), namespace, name))
    return Unavailable(f"Secret {called}: the API server answered {error.status} {error.reason}")


def _grant(body: str, namespace: str, name: str) -> str:
    """What gives the depot this one Secret. The API server's refusal names the depot's account."""
    found = _ACCOUNT.search(body)
    account = f"{found[1]}:{found[2]}" if found else "NAMESPACE:SERVICEACCOUNT (of the depot)"
    role = f"weft-depot-{name}"[:63].rstrip("-.")
    return (
        f"the depot may not read Secret {where(namespace, name)}; who owns the namespace grants it with: "
        f"kubectl create role {role} -n {namespace} --verb=get --resource=secrets --resource-name={name} && "
        f"kubectl create rolebinding {role} -n {namespace} --role={role} --serviceaccount={account}"
    )


def _decoded(value: str, key: str, called: str) -> bytes:
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError) as error:
        raise Refused(Reason.SECRET_INVALID, f"Secret {called}: its key {key!r} is no base64") from error
