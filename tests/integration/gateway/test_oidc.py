"""Tokens of a real issuer over HTTP, with real keys; and those that an attacker would try."""

import asyncio
import base64
import contextlib
import hashlib
import hmac
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import jwt
import orjson
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from jwt.algorithms import ECAlgorithm, RSAAlgorithm

from harness.waiting import PATIENCE_S
from weft.domain.limits import LimitRule
from weft.domain.routes import KeyRoute, Routes, limits_entry
from weft_gateway.core import Principal, RouteIndex
from weft_gateway.errors import ServiceUnavailable, Unauthorized
from weft_gateway.shell import BadToken, KeyPending, OidcConfig, TokenVerifier, authenticate

AUDIENCE, CLAIM = "weft", "kubernetes.io/namespace"
MIN_S = 0.05
RSA, OTHER_RSA = (rsa.generate_private_key(65537, 2048) for _ in range(2))
EC = ec.generate_private_key(ec.SECP256R1())


class Issuer:
    """An HTTP server with a discovery document and keys."""

    def __init__(self) -> None:
        self.keys: list[dict[str, Any]] = [_jwk("rsa", RSA), _jwk("ec", EC)]
        self.url, self.named, self.keys_at, self.fetches, self.asked = "", "", "", 0, 0
        self.connections: list[asyncio.StreamWriter] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections.append(writer)
        with contextlib.suppress(asyncio.IncompleteReadError):  # the gateway has gone away
            await self.answer(reader, writer)
        writer.close()

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        path = (await reader.readuntil(b"\r\n\r\n")).split(b" ")[1]
        self.asked += 1
        if path == b"/keys":
            self.fetches += 1
            value: Any = {"keys": self.keys}
        else:
            value = {"issuer": self.named or self.url, "jwks_uri": self.keys_at or f"{self.url}/keys"}
        body = orjson.dumps(value)
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        await writer.drain()

    def claims(self, **changes: Any) -> dict[str, Any]:
        plain: dict[str, Any] = {
            "iss": self.url,
            "aud": [AUDIENCE],
            "exp": time.time() + 600,
            "kubernetes.io": {"namespace": "acme"},
        }
        return {name: value for name, value in (plain | changes).items() if value is not None}

    def token(self, key: Any = RSA, kid: str = "rsa", algorithm: str = "RS256", **changes: Any) -> str:
        return jwt.encode(self.claims(**changes), key, algorithm, headers={"kid": kid})


def _jwk(kid: str, key: Any) -> dict[str, Any]:
    of = RSAAlgorithm if isinstance(key, rsa.RSAPrivateKey) else ECAlgorithm
    return {**json.loads(of.to_jwk(key.public_key())), "kid": kid, "use": "sig"}


@pytest.fixture
async def issuer() -> AsyncIterator[Issuer]:
    made = Issuer()
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    made.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server:
        yield made
        for writer in made.connections:
            writer.transport.abort()


@pytest.fixture
async def verifier(issuer: Issuer) -> AsyncIterator[TokenVerifier]:
    made = TokenVerifier(OidcConfig(issuer.url, AUDIENCE, CLAIM), time.monotonic, min_interval_s=MIN_S)
    running = asyncio.create_task(made.run())
    yield made
    running.cancel()
    await asyncio.wait([running])


async def namespace_of(verifier: TokenVerifier, token: str) -> str:
    """Return the namespace as a client learns it that tries again until the token's key is known."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            with contextlib.suppress(KeyPending, BadToken):
                return verifier.namespace_of(token)
            await asyncio.sleep(MIN_S)


async def refused_for_two_rounds(issuer: Issuer, verifier: TokenVerifier, documents: int) -> None:
    """Wait until the documents of two rounds are fetched: the verifier has read the first ones. No key is known."""
    asked = issuer.asked
    async with asyncio.timeout(PATIENCE_S):
        while issuer.asked < asked + 2 * documents:
            with pytest.raises(KeyPending):
                verifier.namespace_of(issuer.token())
            await asyncio.sleep(MIN_S / 10)


def _hs256_with_the_public_key(issuer: Issuer) -> str:
    """Make the confusion of RFC 8725, section 2.1. The library itself refuses to make such a token."""
    public = RSA.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    parts = [{"alg": "HS256", "kid": "rsa"}, issuer.claims()]
    text = b".".join(base64.urlsafe_b64encode(orjson.dumps(part)).rstrip(b"=") for part in parts)
    return (text + b"." + base64.urlsafe_b64encode(hmac.digest(public, text, hashlib.sha256)).rstrip(b"=")).decode()


async def test_a_service_accounts_token_is_its_namespace(issuer: Issuer, verifier: TokenVerifier) -> None:
    assert await namespace_of(verifier, issuer.token()) == "acme"
    assert await namespace_of(verifier, issuer.token(EC, "ec", "ES256", aud=AUDIENCE)) == "acme"


@pytest.mark.parametrize(
    "changes",
    [
        {"exp": 1},
        {"exp": None},
        {"nbf": 1 << 40},
        {"aud": "other"},
        {"aud": None},
        {"iss": "http://127.0.0.1:1"},
        {"key": OTHER_RSA},
        {"key": EC, "algorithm": "ES256"},
        {"algorithm": "none", "key": None},
        {"algorithm": "HS256", "key": "k" * 32},
        {"kubernetes.io": None},
        {"kubernetes.io": "acme"},
        {"kubernetes.io": {"namespace": ["acme"]}},
        {"kubernetes.io": {"namespace": "a" * 400}},
        {"kubernetes.io": {"namespace": "../acme"}},
        {"padding": "x" * 9000},
    ],
)
async def test_a_token_that_is_not_in_order_is_refused(
    issuer: Issuer, verifier: TokenVerifier, changes: dict[str, Any]
) -> None:
    assert await namespace_of(verifier, issuer.token()) == "acme"
    with pytest.raises(BadToken):
        verifier.namespace_of(issuer.token(**changes))


async def test_a_public_key_is_no_shared_secret(issuer: Issuer, verifier: TokenVerifier) -> None:
    assert await namespace_of(verifier, issuer.token()) == "acme"
    for token in (_hs256_with_the_public_key(issuer), "a.b.c", "..", issuer.token()[:-8]):
        with pytest.raises(BadToken):
            verifier.namespace_of(token)


async def test_a_new_key_is_learnt_and_invented_ones_cost_the_issuer_nothing(
    issuer: Issuer, verifier: TokenVerifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await namespace_of(verifier, issuer.token()) == "acme"
    issuer.keys = [_jwk("new", OTHER_RSA)]
    assert await namespace_of(verifier, issuer.token(OTHER_RSA, "new")) == "acme"
    with pytest.raises((BadToken, KeyPending)):
        verifier.namespace_of(issuer.token())
    before = issuer.fetches
    monkeypatch.setattr(verifier, "_clock", lambda: verifier._asked_at)  # the interval does not end
    for i in range(1000):
        with pytest.raises(BadToken):
            verifier.namespace_of(issuer.token(EC, f"invented-{i}", "ES256"))
        await asyncio.sleep(0)
    assert issuer.fetches - before <= 1, "the token before may have begun a fetch"


async def test_another_issuers_document_and_shared_secrets_give_no_key(issuer: Issuer) -> None:
    secret = {"kty": "oct", "kid": "rsa", "k": "c2VjcmV0LXNlY3JldC1zZWNyZXQtc2VjcmV0LTEyMzQ"}
    for named, keys in (("http://other", issuer.keys), ("", [secret])):
        issuer.named, issuer.keys = named, keys
        verifier = TokenVerifier(OidcConfig(issuer.url, AUDIENCE, CLAIM), time.monotonic, min_interval_s=MIN_S)
        running = asyncio.create_task(verifier.run())
        await refused_for_two_rounds(issuer, verifier, documents=2)
        running.cancel()


async def test_odd_documents_of_the_issuer_end_nothing(issuer: Issuer) -> None:
    good, issuer.keys_at = issuer.keys, "http://[::1"
    verifier = TokenVerifier(OidcConfig(issuer.url, AUDIENCE, CLAIM), time.monotonic, min_interval_s=MIN_S)
    running = asyncio.create_task(verifier.run())
    await refused_for_two_rounds(issuer, verifier, documents=1)
    issuer.keys_at = ""
    issuer.keys = [{"kty": "RSA", "kid": "a", "alg": "none"}, {"kty": "RSA", "kid": "b", "alg": ["RS256"]}, *good]
    assert await namespace_of(verifier, issuer.token()) == "acme"
    running.cancel()


async def test_a_token_is_its_namespaces_caller_beside_keys(issuer: Issuer, verifier: TokenVerifier) -> None:
    rule = LimitRule("namespace/acme", concurrent=1)
    routes = RouteIndex(keys_known=True)
    routes.take(Routes(1, True, keys=(KeyRoute(limits_entry("acme"), "", "", limits=(rule,)),), keys_known=True))
    with pytest.raises(ServiceUnavailable):
        authenticate(f"Bearer {issuer.token()}", routes, auth=True, tokens=verifier)
    await namespace_of(verifier, issuer.token())
    assert authenticate(f"Bearer {issuer.token()}", routes, auth=True, tokens=verifier) == Principal(
        "acme", limits=(rule,)
    )
    for token in (issuer.token(exp=1), "weft-1-unknown"):
        with pytest.raises(Unauthorized):
            authenticate(f"Bearer {token}", routes, auth=True, tokens=verifier)
    with pytest.raises(Unauthorized):
        authenticate(f"Bearer {issuer.token()}", routes, auth=True)
