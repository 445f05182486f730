"""Authentication: an API key is a namespace. Keys are never stored nor logged; the route table has their SHA-256."""

import hashlib
import time
from collections.abc import Mapping
from enum import Enum, auto

from weft.domain.routes import KeyScope
from weft_gateway.core.routes import ANY_NAMESPACE, Principal, RouteIndex
from weft_gateway.errors import PermissionDenied, ServiceUnavailable, Unauthorized
from weft_gateway.shell.oidc import MAX_TOKEN_CHARS, BadToken, KeyPending, TokenVerifier

MAX_KEY_CHARS = 512
TOKEN_DOTS = 2  # of a JSON Web Token; a key has none


class Action(Enum):
    """What a request does, as far as a key's scope decides it."""

    INFER = auto()  # asks a model
    WRITE = auto()  # makes or deletes files and batches: their lines may ask every model of the namespace
    READ = auto()  # lists files and batches, without the content of files
    CONTENT = auto()  # reads the content of files: prompts and answers of every model of the namespace
    CONVERSE = auto()  # reads and deletes stored responses: those that this key made, where it is for some models
    LIST = auto()  # lists models
    METRICS = auto()
    PUBLISH = auto()  # loads and unloads adapters of every namespace by vLLM's requests


_ALLOWED: Mapping[KeyScope, frozenset[Action]] = {
    KeyScope.INFERENCE: frozenset(Action) - {Action.PUBLISH},
    KeyScope.READ_ONLY: frozenset((Action.READ, Action.LIST, Action.METRICS)),
    KeyScope.METRICS: frozenset((Action.METRICS,)),
    KeyScope.PLATFORM: frozenset((Action.LIST, Action.METRICS, Action.PUBLISH)),
}
_OF_EVERY_MODEL = frozenset((Action.WRITE, Action.READ, Action.CONTENT))


def authenticate(
    authorization: str | None, routes: RouteIndex, *, auth: bool, tokens: TokenVerifier | None = None
) -> Principal:
    """Return the caller of an Authorization header. `tokens`: accept an issuer's tokens, too.

    Looking up a hash leaks no timing about the key: an attacker cannot steer SHA-256 towards a stored value.
    Raises Unauthorized, or ServiceUnavailable while the keys are not known yet.
    """
    if not auth:
        return ANY_NAMESPACE
    key = _bearer(authorization, MAX_TOKEN_CHARS if tokens else MAX_KEY_CHARS)
    if tokens and key.count(".") == TOKEN_DOTS:
        return _of_token(key, routes, tokens)
    if not routes.keys_known:
        raise ServiceUnavailable(
            "The API keys are not known to this gateway yet.", code="keys_not_known", retry_after_ms=1000
        )
    key_hash = hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()
    principal = routes.principal_of(key_hash, time.time_ns() // 1_000_000)
    if principal is None:
        raise Unauthorized("This API key is not known, or has expired. `weft key create` makes one.")
    return principal


def check_scope(principal: Principal, action: Action) -> None:
    """Raises PermissionDenied."""
    if action not in _ALLOWED[principal.scope] and principal is not ANY_NAMESPACE:
        scopes = " or ".join(scope.value for scope, actions in _ALLOWED.items() if action in actions)
        text = f"Expected a key of scope {scopes}, got a key of scope {principal.scope.value}."
        instead = " A key of scope platform loads and unloads adapters; with this one, `weft push` sends an adapter."
        raise PermissionDenied(text + (instead if action is Action.PUBLISH else ""))
    if action in _OF_EVERY_MODEL and principal.models:
        text = "This API key is for some models of its namespace: files, batches and adapters need one that is for all."
        raise PermissionDenied(text)


def _of_token(token: str, routes: RouteIndex, tokens: TokenVerifier) -> Principal:
    """Find a token's namespace, with that namespace's limits. Raises Unauthorized, ServiceUnavailable."""
    try:
        namespace = tokens.namespace_of(token)
    except BadToken as error:
        raise Unauthorized(f"This token is not taken: {error}.") from error
    except KeyPending as error:
        text = "The keys of this token's issuer are being fetched."
        raise ServiceUnavailable(text, code="keys_not_known", retry_after_ms=1000) from error
    return Principal(namespace, limits=routes.limits_of(namespace))


def _bearer(authorization: str | None, max_chars: int) -> str:
    scheme, _, key = (authorization or "").partition(" ")
    key = key.strip()
    if scheme.lower() != "bearer" or not key or len(key) > max_chars:
        raise Unauthorized("An API key is needed: send the header `Authorization: Bearer KEY`.")
    return key
