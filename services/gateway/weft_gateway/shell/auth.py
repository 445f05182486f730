"""Authentication: an API key is a namespace. Keys are never stored nor logged; the route table has their SHA-256."""

import hashlib

from weft_gateway.core.routes import ANY_NAMESPACE, Principal, RouteIndex
from weft_gateway.errors import ServiceUnavailable, Unauthorized

MAX_KEY_CHARS = 512


def authenticate(authorization: str | None, routes: RouteIndex, *, auth: bool) -> Principal:
    """The caller behind an Authorization header.

    Looking up a hash leaks no timing about the key: an attacker cannot steer SHA-256 towards a stored value.
    Raises Unauthorized, or ServiceUnavailable while the keys are not known yet.
    """
    if not auth:
        return ANY_NAMESPACE
    key = _bearer(authorization)
    if not routes.keys_known:
        raise ServiceUnavailable(
            "The API keys are not known to this gateway yet.", code="keys_not_known", retry_after_ms=1000
        )
    principal = routes.principal_of(hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest())
    if principal is None:
        raise Unauthorized("This API key is not known. `weft key create` makes one.")
    return principal


def _bearer(authorization: str | None) -> str:
    scheme, _, key = (authorization or "").partition(" ")
    key = key.strip()
    if scheme.lower() != "bearer" or not key or len(key) > MAX_KEY_CHARS:
        raise Unauthorized("An API key is needed: send the header `Authorization: Bearer KEY`.")
    return key
