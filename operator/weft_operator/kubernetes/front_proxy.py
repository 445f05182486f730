"""Whom an aggregated API believes: the API server itself, which asks on behalf of somebody it has authorised.

The kube-apiserver in front authenticates and authorises each request (RBAC on `external.metrics.k8s.io`), then forwards
it with a client certificate of the request-header CA and the user's name in headers. So the one question left here is
whether the peer is that front proxy. CA and allowed names are published in a ConfigMap.
https://kubernetes.io/docs/tasks/extend-kubernetes/configure-aggregation-layer/
"""

import json
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from weft_operator.kubernetes.errors import KubernetesError
from weft_operator.resources import Object

NAMESPACE, NAME = "kube-system", "extension-apiserver-authentication"
Certificate = Mapping[str, Any]  # as `ssl.SSLSocket.getpeercert()` gives it: verified


class NoFrontProxy(KubernetesError):
    """The API server does not publish a request-header CA: it runs without an aggregation layer."""


@dataclass(frozen=True, slots=True)
class FrontProxy:
    """Who may speak for others. No allowed names: every certificate of that CA."""

    ca_pem: str
    allowed_names: frozenset[str]
    user_headers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Refused:
    """Why a request is not answered: status code, reason and message of a `Status`."""

    code: int
    reason: str
    message: str


def read_front_proxy(configmap: Object | None) -> FrontProxy:
    """The published configuration. Raises NoFrontProxy."""
    data: Any = (configmap or {}).get("data") or {}
    ca = data.get("requestheader-client-ca-file")
    if not ca:
        raise NoFrontProxy(f"ConfigMap {NAMESPACE}/{NAME} has no requestheader-client-ca-file")
    try:
        names, headers = (
            json.loads(data.get(f"requestheader-{what}") or "[]") for what in ("allowed-names", "username-headers")
        )
        return FrontProxy(ca, frozenset(map(str, names)), tuple(map(str, headers)) or ("X-Remote-User",))
    except (ValueError, TypeError) as error:
        raise NoFrontProxy(f"ConfigMap {NAMESPACE}/{NAME} cannot be read: {error}") from error


def refuse(proxy: FrontProxy, certificate: Certificate | None, headers: Mapping[str, str]) -> Refused | None:
    """None: the request comes from the front proxy, for somebody. `headers` match whatever their case."""
    if not certificate:
        return Refused(401, "Unauthorized", "a client certificate of the request-header CA is needed")
    names = common_names(certificate)
    if proxy.allowed_names and not proxy.allowed_names & names:
        return Refused(403, "Forbidden", f"{', '.join(sorted(names)) or 'nobody'} is no allowed front proxy")
    if not any(headers.get(name) for name in proxy.user_headers):
        return Refused(401, "Unauthorized", f"no user is named in {' or '.join(proxy.user_headers)}")
    return None


def common_names(certificate: Certificate) -> frozenset[str]:
    """The subject's common names."""
    return frozenset(value for part in certificate.get("subject", ()) for name, value in part if name == "commonName")


def server_context(proxy: FrontProxy, certfile: str, keyfile: str) -> ssl.SSLContext:
    """TLS that asks for a client certificate, and ends a handshake with one of another CA. Raises OSError, SSLError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(certfile, keyfile)
    context.load_verify_locations(cadata=proxy.ca_pem)
    context.verify_mode = ssl.CERT_OPTIONAL  # without one: an answer that says what is missing
    return context
