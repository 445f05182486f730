"""Callers by JSON Web Tokens of an OpenID Connect issuer, e.g. the cluster's: a service account is its namespace.

The issuer's keys (JWKS, RFC 7517) are fetched at the start, then every `REFRESH_S`, and when a token names a key that
is not known, but never more often than every `MIN_INTERVAL_S`: tokens with invented keys cost the issuer nothing, and
are refused until then. No request waits for a fetch. While the issuer cannot be reached the keys that are known stay in
force.

Only signatures are taken, of the algorithms in `ALGORITHMS`: neither "none" nor one whose key is a shared secret (RFC
8725, section 3.1). Issuer, audience and expiry are checked.
"""

import asyncio
import contextlib
import logging
import re
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import jwt
import orjson

from weft.telemetry.logs import kv
from weft.trust import accept_private_authorities

ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
KEY_TYPES = frozenset(("RSA", "EC", "OKP"))
MAX_TOKEN_CHARS = 8192
MAX_KEYS = 64
MAX_DOCUMENT_BYTES = 256 << 10
FETCH_S, REFRESH_S, MIN_INTERVAL_S = 10.0, 600.0, 10.0
LEEWAY_S = 30.0  # between the clocks of issuer and gateway
DISCOVERY = "/.well-known/openid-configuration"
NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
log = logging.getLogger(__name__)


class BadToken(Exception):
    """The token is not valid here. The message is for the caller, and says nothing that the token does not."""


class KeyPending(Exception):
    """The token's key is not known yet: the issuer is being asked."""


class BadIssuer(Exception):
    """The issuer's documents are invalid. The message has the fault."""


@dataclass(frozen=True, slots=True)
class OidcConfig:
    """Whose tokens are taken. `namespace_claim`: a path into the claims, its parts apart by "/"."""

    issuer: str
    audience: str
    namespace_claim: str
    jwks_url: str = ""  # "": as the issuer's discovery document says
    ca: Path | None = None  # None: the system's


class TokenVerifier:
    """The issuer's keys, and tokens checked against them. One event loop owns it."""

    def __init__(
        self, config: OidcConfig, clock: Callable[[], float], *, min_interval_s: float = MIN_INTERVAL_S
    ) -> None:
        self._config, self._clock, self._min_interval_s = config, clock, min_interval_s
        self._keys: dict[str, jwt.PyJWK] = {}
        self._wake = asyncio.Event()
        self._asked_at = float("-inf")

    def namespace_of(self, token: str) -> str:
        """Return the namespace in a valid token, an RFC 1123 label like namespaces of keys. Raises BadToken,
        KeyPending.
        """
        if len(token) > MAX_TOKEN_CHARS:
            raise BadToken("the token is too long")
        try:
            header = jwt.get_unverified_header(token)
            if header.get("alg") not in ALGORITHMS:
                raise BadToken("the token's algorithm is not taken")
            claims = jwt.decode(
                token,
                self._key(header.get("kid")),
                algorithms=ALGORITHMS,
                audience=self._config.audience,
                issuer=self._config.issuer,
                leeway=LEEWAY_S,
                options={"require": ["exp", "iss", "aud"]},
            )
        except jwt.PyJWTError as error:
            raise BadToken(f"the token is not valid: {error}") from error
        namespace = _claim(claims, self._config.namespace_claim)
        if not isinstance(namespace, str) or not namespace:
            raise BadToken(f"the token has no claim {self._config.namespace_claim}")
        if not NAMESPACE.fullmatch(namespace):  # other processes refuse one that is too long, and with it the stream
            raise BadToken(f"its claim {self._config.namespace_claim} is not a DNS label")
        return namespace

    async def run(self) -> None:
        """Keep the keys until cancelled."""
        async with httpx2.AsyncClient(
            verify=context_for(self._config), timeout=FETCH_S, follow_redirects=False
        ) as client:
            while True:
                self._asked_at = self._clock()
                try:
                    async with asyncio.timeout(FETCH_S):
                        self._keys = await self._fetched(client)
                except (httpx2.HTTPError, httpx2.InvalidURL, OSError, TimeoutError, BadIssuer) as error:
                    log.warning("the issuer's keys are not renewed", extra=kv(issuer=self._config.issuer, error=error))
                self._wake.clear()
                await asyncio.sleep(self._min_interval_s)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(REFRESH_S if self._keys else self._min_interval_s):
                        await self._wake.wait()

    def _key(self, key_id: object) -> jwt.PyJWK:
        """Raises BadToken, KeyPending."""
        if isinstance(key_id, str) and (key := self._keys.get(key_id)) is not None:
            return key
        if not self._keys or self._clock() - self._asked_at >= self._min_interval_s:
            self._wake.set()
            raise KeyPending
        raise BadToken("the token's key is not one of its issuer's")

    async def _fetched(self, client: httpx2.AsyncClient) -> dict[str, jwt.PyJWK]:
        """Raises BadIssuer, httpx2.HTTPError."""
        url = self._config.jwks_url
        if not url:
            document = await _document(client, self._config.issuer.rstrip("/") + DISCOVERY)
            if document.get("issuer") != self._config.issuer:
                raise BadIssuer("its discovery document is another issuer's")
            url = str(document.get("jwks_uri", ""))
            if self._config.issuer.startswith("https://") and not url.startswith("https://"):
                raise BadIssuer("its keys are not at an https:// URL")
        listed = (await _document(client, url)).get("keys")
        if not isinstance(listed, list):
            raise BadIssuer("its document of keys has no list of keys")
        keys = dict[str, jwt.PyJWK]()
        for key in listed[:MAX_KEYS]:
            if isinstance(key, dict) and key.get("kty") in KEY_TYPES and key.get("use", "sig") == "sig":
                # of a kind that is not taken: the others are
                with contextlib.suppress(jwt.PyJWTError, NotImplementedError, TypeError, ValueError):
                    keys[str(key.get("kid", ""))] = jwt.PyJWK(key)
        if not keys:
            raise BadIssuer("it has no key that is taken")
        return keys


def context_for(config: OidcConfig) -> ssl.SSLContext:
    """Make the TLS context with the trusted certificates of the issuer's server."""
    return accept_private_authorities(ssl.create_default_context(cafile=config.ca))


async def _document(client: httpx2.AsyncClient, url: str) -> dict[str, Any]:
    """Raises BadIssuer, httpx2.HTTPError."""
    body = bytearray()
    async with client.stream("GET", url) as response:
        response.raise_for_status()
        async for chunk in response.aiter_bytes():
            body += chunk
            if len(body) > MAX_DOCUMENT_BYTES:
                raise BadIssuer(f"{url} has more than {MAX_DOCUMENT_BYTES} bytes")
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BadIssuer(f"{url} is no JSON") from error
    if not isinstance(value, dict):
        raise BadIssuer(f"{url} is no JSON object")
    return value


def _claim(claims: Any, path: str) -> object:
    for part in path.split("/"):
        claims = claims.get(part) if isinstance(claims, dict) else None
    return claims
