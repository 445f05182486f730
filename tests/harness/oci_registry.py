"""A real OCI registry for tests: distribution's, thrice over one folder: open to all, with Basic, and with tokens.

What is pushed to the open one (by ORAS' client) is pulled from any of them.
"""

import base64
import contextlib
import datetime
import json
import time
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import jwt
import oras.client
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from harness.loopback import Handler, LoopbackServer
from harness.ports import free_port
from harness.s3_server import listens
from harness.waiting import wait_until
from weft_devcluster.processes import Process
from weft_devcluster.tools import path as tool

USER, PASSWORD = "puller", "pull-me"
# bcrypt of PASSWORD, which the registry asks for.
_HTPASSWD = f"{USER}:$2b$05$abcdefghijklmnopqrstuuBp.n58v886n7kD7.z9i0nzqxtQ8I2P.\n"
SERVICE, ISSUER = "weft-test-registry", "weft-test-tokens"


@dataclass
class OciRegistry:
    """HOST:PORT of each; repositories below `private/` need credentials at the one with tokens."""

    open: str
    basic: str
    token: str
    tokens: list[str] = field(default_factory=list)  # the scopes that were asked for

    def push(self, repository: str, tag: str, *files: Path) -> str:
        """Push files as `oras push` does; the manifest's digest."""
        client = oras.client.OrasClient(hostname=self.open, insecure=True)
        answer = client.push(
            target=f"{self.open}/{repository}:{tag}",
            files=[str(path) for path in files],
            disable_path_validation=True,
            quiet=True,
        )
        return str(answer.headers["Docker-Content-Digest"])


@contextlib.contextmanager
def oci_registry(folder: Path) -> Generator[OciRegistry]:
    """Raises ToolMissing where the registry is not built."""
    command = tool("registry")
    (folder / "htpasswd").write_text(_HTPASSWD)
    tokens, (key, certificate) = list[str](), _self_signed()
    (folder / "issuer.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(_token_server(key, certificate, tokens))
        auths = {
            "open": {},
            "basic": {"htpasswd": {"realm": "weft", "path": str(folder / "htpasswd")}},
            "token": {
                "token": {
                    "realm": f"{server}/token",
                    "service": SERVICE,
                    "issuer": ISSUER,
                    "rootcertbundle": str(folder / "issuer.pem"),
                }
            },
        }
        hosts = {name: stack.enter_context(_registry(command, folder, name, auth)) for name, auth in auths.items()}
        yield OciRegistry(**hosts, tokens=tokens)


@contextlib.contextmanager
def _registry(command: Path, folder: Path, name: str, auth: dict[str, object]) -> Generator[str]:
    port = free_port()
    config = {
        "version": 0.1,
        "log": {"level": "warn"},
        "storage": {"filesystem": {"rootdirectory": str(folder / "storage")}},
        "http": {"addr": f"127.0.0.1:{port}"},
        **({"auth": auth} if auth else {}),
    }
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps(config))
    process = Process(f"registry-{name}", [command, "serve", path], folder, {"OTEL_TRACES_EXPORTER": "none"})
    try:
        wait_until(lambda: listens(port, process), f"the registry {name} listens")
        yield f"127.0.0.1:{port}"
    finally:
        process.end()


@contextlib.contextmanager
def _token_server(key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate, asked: list[str]) -> Generator[str]:
    """Gives tokens as the registry's specification says: anonymous ones may pull what is not private."""
    allowed = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
    chain = [base64.b64encode(certificate.public_bytes(serialization.Encoding.DER)).decode()]

    class TokenHandler(Handler):
        def answer(self) -> None:
            query = {name: values[0] for name, values in parse_qs(urlsplit(self.path).query).items()}
            credentials = self.headers.get("authorization", "")
            if credentials and credentials != f"Basic {allowed}":
                self.send_error(401)
                return
            asked.append(query["scope"])
            kind, name, _ = query["scope"].split(":")
            may = bool(credentials) or not name.startswith("private/")
            now = int(time.time())
            claims = {
                "iss": ISSUER, "sub": "", "aud": query["service"], "jti": str(now),
                "exp": now + 300, "nbf": now - 60, "iat": now,
                "access": [{"type": kind, "name": name, "actions": ["pull"]}] if may else [],
            }  # fmt: skip
            body = json.dumps({"token": jwt.encode(claims, key, algorithm="ES256", headers={"x5c": chain})}).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    with contextlib.closing(LoopbackServer(TokenHandler)) as server:
        yield server.url


def _self_signed() -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, ISSUER)])
    day = datetime.timedelta(days=1)
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    builder = builder.serial_number(x509.random_serial_number()).not_valid_before(now - day).not_valid_after(now + day)
    return key, builder.sign(key, hashes.SHA256())
