"""An authority of a test cluster and what it signs. Keys live in the cluster's own folder and die with it."""

import datetime
import ipaddress
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

DAYS = 30


class Authority:
    """A certificate authority with its files `NAME.crt` and `NAME.key` in `folder`."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._key = folder, ec.generate_private_key(ec.SECP256R1())
        self._name = _subject(name, None)
        usage = x509.KeyUsage(
            digital_signature=True, key_cert_sign=True, crl_sign=True, content_commitment=False, key_encipherment=False,
            data_encipherment=False, key_agreement=False, encipher_only=False, decipher_only=False,
        )  # fmt: skip
        builder = _builder(self._name, self._name, self._key.public_key())
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        self._certificate = builder.add_extension(usage, critical=True).sign(self._key, hashes.SHA256())
        self.crt = _write(folder / f"{name}.crt", self._certificate.public_bytes(serialization.Encoding.PEM))

    def issue(self, name: str, common_name: str, hosts: Sequence[str] = (), group: str | None = None) -> "Pair":
        """Issue a certificate for servers and clients, for these names and addresses; `group` is Kubernetes' group."""
        key = ec.generate_private_key(ec.SECP256R1())
        builder = _builder(_subject(common_name, group), self._name, key.public_key())
        builder = builder.add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False
        )
        if hosts:
            builder = builder.add_extension(x509.SubjectAlternativeName([_host(host) for host in hosts]), False)
        signed = builder.sign(self._key, hashes.SHA256())
        crt = _write(self._folder / f"{name}.crt", signed.public_bytes(serialization.Encoding.PEM))
        return Pair(crt, _write(self._folder / f"{name}.key", _pem(key)))


class Pair:
    """The two files of a certificate."""

    def __init__(self, crt: Path, key: Path) -> None:
        self.crt, self.key = crt, key


def signing_key(folder: Path, name: str) -> Path:
    """Make an RSA key that service account tokens are signed with."""
    return _write(folder / name, _pem(rsa.generate_private_key(public_exponent=65537, key_size=2048)))


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=DAYS))
    )


def _subject(common_name: str, group: str | None) -> x509.Name:
    attributes = [x509.NameAttribute(NameOID.COMMON_NAME, common_name)]
    if group is not None:
        attributes.insert(0, x509.NameAttribute(NameOID.ORGANIZATION_NAME, group))
    return x509.Name(attributes)


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _pem(key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
    )


def _write(path: Path, content: bytes) -> Path:
    path.touch(mode=0o600)
    path.write_bytes(content)
    return path
