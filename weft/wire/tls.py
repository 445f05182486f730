"""Mutual TLS between Weft's processes: one folder of three files, read again when they change.

`tls.crt` (this process's certificate, its chain after it), `tls.key`, `ca.crt` (who may be believed): the names of a
Kubernetes TLS secret. A certificate says its holder's role by the DNS name `ROLE.weft.internal`; peers check that name
and not the address, since pods come and go. A connection keeps what it began with; the next one begins with the files
as they are then. Files that cannot be used, or are half-way replaced, leave the ones before in force.

Standard library only: the runner imports it.
"""

import logging
import os
import ssl
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.process import CannotStart
from weft.telemetry.logs import kv
from weft.wire.roles import DOMAIN, Role, dns_name

FILES = ("tls.crt", "tls.key", "ca.crt")
READS = 5  # of files that change while they are read
log = logging.getLogger(__name__)

Signature = tuple[tuple[int, int, int, int], ...]


class TlsUnusable(CannotStart):
    """The files of `--tls-dir` make no working mutual TLS. The message names the file and the reason."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """The three files at one moment. `version` grows with each change; contexts are made of the same bytes."""

    version: int
    certificate: bytes
    key: bytes
    ca: bytes
    client: ssl.SSLContext
    server: ssl.SSLContext


class Tls:
    """The material of one process. Any thread may ask."""

    def __init__(self, folder: Path, role: Role, namespace: str = "") -> None:
        """Read the files. `namespace`: of a runner's pool. Raises TlsUnusable."""
        self.folder = folder
        self.role: Role = role
        self._name = dns_name(role, namespace)  # that peers ask for
        self._lock = threading.Lock()
        self._seen, self._material = _read(folder, self._name, 1)

    def present(self) -> TlsFiles:
        """Read what a new connection uses. Costs three `stat` calls while nothing changes."""
        with self._lock:
            seen = _signature(self.folder)
            if seen is not None and seen != self._seen:
                self._read_again(seen)
            return self._material

    def client_context(self, peer: Role) -> ssl.SSLContext:
        """The context for connections to a peer of that role. It stays right when the files change."""
        return _ReloadingContext.made(ssl.PROTOCOL_TLS_CLIENT, lambda: self.present().client, dns_name(peer))

    def server_context(self) -> ssl.SSLContext:
        """The context for a listening socket: clients show a certificate. It stays right when the files change."""
        return _ReloadingContext.made(ssl.PROTOCOL_TLS_SERVER, lambda: self.present().server, None)

    def _read_again(self, seen: Signature) -> None:
        """Read the files again. An unusable set is reported once; the next change is read again."""
        try:
            self._seen, self._material = _read(self.folder, self._name, self._material.version + 1)
            log.info("certificates read again", extra=kv(tls_dir=self.folder))
        except TlsUnusable as error:
            self._seen = seen
            log.error("new certificates are unusable: the ones before stay", extra=kv(error=error))


def load_tls(folder: Path | None, role: Role, namespace: str = "") -> Tls | None:
    """Load the process's material; None (plain text) without a folder. Raises TlsUnusable."""
    return None if folder is None else Tls(folder, role, namespace)


class _ReloadingContext(ssl.SSLContext):
    """Hands each new connection to the context that is right now, with the peer's name where it is a client's.

    Event loops and http.client only ever wrap connections with a context: that is where the present one steps in.
    """

    _make: Callable[[], ssl.SSLContext]
    _peer: str | None

    @classmethod
    def made(cls, protocol: int, make: Callable[[], ssl.SSLContext], peer: str | None) -> "_ReloadingContext":
        self = cls(protocol)
        self._make, self._peer = make, peer
        return self

    def wrap_socket(self, sock: Any, server_side: bool = False, *args: Any, **kwargs: Any) -> ssl.SSLSocket:
        return self._make().wrap_socket(sock, server_side, *args, **self._named(kwargs))

    def wrap_bio(self, incoming: Any, outgoing: Any, server_side: bool = False, *args: Any, **kw: Any) -> ssl.SSLObject:
        named = {"server_hostname": args[0], **kw} if args else kw  # (asyncio names it, others do not)
        return self._make().wrap_bio(incoming, outgoing, server_side, **self._named(named))

    def _named(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        return kwargs if self._peer is None else {**kwargs, "server_hostname": self._peer}


def _read(folder: Path, name: str, version: int) -> tuple[Signature, TlsFiles]:
    """Read the files, all of one moment: a secret volume swaps them while they are read."""
    for left in reversed(range(READS)):
        signature = _signature(folder)
        try:
            material = _material(folder, name, version)
        except TlsUnusable:
            if not left or signature == _signature(folder):
                raise
            continue
        if signature is not None and signature == _signature(folder):
            return signature, material
    raise TlsUnusable(f"--tls-dir {folder}: its files keep changing while they are read")


def _signature(folder: Path) -> Signature | None:
    """A value that changes with the files' content; None while one is not there."""
    try:
        stats = [os.stat(folder / name) for name in FILES]  # noqa: PTH116 (hot: once for each connection)
    except OSError:
        return None
    return tuple((stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_size) for stat in stats)


def _material(folder: Path, name: str, version: int) -> TlsFiles:
    read: list[bytes] = []
    for file in FILES:
        try:
            read.append((folder / file).read_bytes())
        except OSError as error:
            raise TlsUnusable(f"--tls-dir {folder}: {file}: {error.strerror or error}") from error
    client, server = (_context(folder, kind) for kind in (ssl.PROTOCOL_TLS_CLIENT, ssl.PROTOCOL_TLS_SERVER))
    material = TlsFiles(version, *read, client=client, server=server)
    _try_out(folder, name, material)
    return material


def _context(folder: Path, protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_verify_locations(folder / "ca.crt")
    except (ssl.SSLError, OSError) as error:
        raise TlsUnusable(f"--tls-dir {folder}: ca.crt: {_reason(error)}") from error
    try:
        context.load_cert_chain(folder / "tls.crt", folder / "tls.key", password=lambda: b"")
    except (ssl.SSLError, OSError) as error:
        raise TlsUnusable(f"--tls-dir {folder}: tls.crt with tls.key: {_reason(error)}") from error
    return context


def _try_out(folder: Path, name: str, material: TlsFiles) -> None:
    """Try the handshake that peers of this CA will make, in memory: what they would refuse is told here, by name."""
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = material.client.wrap_bio(to_client, to_server, server_hostname=name)
    server = material.server.wrap_bio(to_server, to_client, server_side=True)
    try:
        for end in (client, server, client, server):
            with suppress(ssl.SSLWantReadError):
                end.do_handshake()
    except ssl.SSLError as error:
        raise TlsUnusable(
            f"--tls-dir {folder}: tls.crt under ca.crt, as {name.removesuffix(DOMAIN)}: {_reason(error)}"
        ) from error


def _reason(error: Exception) -> str:
    """OpenSSL's words without its source lines."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    if isinstance(error, ssl.SSLError):
        return _HINTS.get(error.reason or "", (error.reason or str(error)).replace("_", " ").lower())
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


_HINTS = {
    "KEY_VALUES_MISMATCH": "the key does not belong to the certificate",
    "NO_CERTIFICATE_OR_CRL_FOUND": "no certificate in PEM",
}
