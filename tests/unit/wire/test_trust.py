"""Servers outside of Weft whose authority does not write all that RFC 5280 wants: every client of them takes those."""

import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest
from kubernetes import client
from kubernetes.aio.client import ApiClient

from harness.certificates import Authority
from weft.leadership.lease_api import load_configuration
from weft_depot.credentials import api_client
from weft_depot.sources import RetryPolicy, SourceHttp
from weft_gateway.shell import OidcConfig, context_for
from weft_operator.kubernetes import Connection

HOST = "server.example"
KUBECONFIG = """
apiVersion: v1
kind: Config
current-context: c
contexts: [{name: c, context: {cluster: k, user: u}}]
clusters: [{name: k, cluster: {server: "https://server.example", certificate-authority: CA}}]
users: [{name: u, user: {token: t}}]
"""


@pytest.fixture(autouse=True)
def strict_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contexts as 3.13 makes them, on every Python."""
    make = ssl.create_default_context

    def strict(*args: Any, **kwargs: Any) -> ssl.SSLContext:
        context = make(*args, **kwargs)
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        return context

    monkeypatch.setattr(ssl, "create_default_context", strict)


async def of_api_server(ca: Path) -> ssl.SSLContext:
    kubeconfig = ca.with_name("kubeconfig")
    kubeconfig.write_text(KUBECONFIG.replace("CA", str(ca)))
    async with ApiClient(await load_configuration(str(kubeconfig))) as api:
        return api.rest_client.ssl_context


async def of_watches(ca: Path) -> ssl.SSLContext:
    return Connection(server=f"https://{HOST}", ca_path=str(ca)).as_ssl_context()


async def of_secrets(ca: Path) -> ssl.SSLContext:
    configuration: Any = client.Configuration()
    configuration.ssl_ca_cert = str(ca)
    return api_client(configuration).rest_client.pool_manager.connection_pool_kw["ssl_context"]


async def of_issuers(ca: Path) -> ssl.SSLContext:
    return context_for(OidcConfig("https://issuer", "weft", "namespace", ca=ca))


async def of_sources(ca: Path) -> ssl.SSLContext:
    given: list[Any] = []

    class Client(httpx2.Client):
        def __init__(self, *, verify: Any, **kwargs: Any) -> None:
            given.append(verify)
            super().__init__(verify=verify, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(ca))
        patch.setattr(httpx2, "Client", Client)
        SourceHttp(RetryPolicy()).close()
    return given[0]


CLIENTS: dict[str, Callable[[Path], Awaitable[ssl.SSLContext]]] = {
    "API server": of_api_server, "watches": of_watches, "secrets": of_secrets, "issuers": of_issuers,
    "sources": of_sources,
}  # fmt: skip


def shake_hands(context: ssl.SSLContext, authority: Authority, folder: Path, name: str = HOST) -> None:
    """Raises SSLError."""
    for file, pem in zip(("crt", "key"), authority.issue(name), strict=True):
        (folder / file).write_bytes(pem)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(folder / "crt", folder / "key")
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    one = context.wrap_bio(to_client, to_server, server_hostname=HOST)
    other = server.wrap_bio(to_server, to_client, server_side=True)
    for end in (one, other, one, other):
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            continue


@pytest.mark.parametrize("of", CLIENTS)
async def test_a_private_authority_is_trusted_whether_or_not_it_writes_all_that_a_standard_wants(tmp_path: Path, of):
    ca, bare = tmp_path / "ca.crt", Authority(bare=True)
    ca.write_bytes(bare.pem)
    context = await CLIENTS[of](ca)
    shake_hands(context, bare, tmp_path)
    with pytest.raises(ssl.SSLError, match="certificate verify failed"):
        shake_hands(context, Authority(bare=True), tmp_path)
    with pytest.raises(ssl.SSLError, match="Hostname mismatch"):
        shake_hands(context, bare, tmp_path, "another.example")


def test_a_python_that_is_strict_refuses_it(tmp_path: Path):
    """What the clients are kept from."""
    bare = Authority(bare=True)
    with pytest.raises(ssl.SSLError, match="certificate verify failed"):
        shake_hands(ssl.create_default_context(cadata=bare.pem.decode()), bare, tmp_path)
    whole = Authority()
    shake_hands(ssl.create_default_context(cadata=whole.pem.decode()), whole, tmp_path)
