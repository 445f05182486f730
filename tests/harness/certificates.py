"""A certificate authority for tests: folders as `--tls-dir` takes them, replaced as a kubelet replaces a secret."""

import datetime
import secrets
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

HOUR = datetime.timedelta(hours=1)
SIGNS = x509.KeyUsage(
    key_cert_sign=True, crl_sign=True, digital_signature=False, content_commitment=False, key_encipherment=False,
    data_encipherment=False, key_agreement=False, encipher_only=False, decipher_only=False,
)  # fmt: skip
USES = (ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH)


class Authority:
    """Issues certificates with role names. Each has a key of its own.

    `bare`: without what RFC 5280 wants of issuers beside the constraint that lets them be one, as many private ones.
    """

    def __init__(self, name: str = "weft test", *, bare: bool = False) -> None:
        self._bare, self._key = bare, ec.generate_private_key(ec.SECP256R1())
        self._name = _named(f"{name} {secrets.token_hex(4)}")
        builder = self._builder(self._name, self._key, 24 * HOUR)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        if not bare:
            builder = builder.add_extension(SIGNS, critical=True).add_extension(self._key_identifier, critical=False)
        self.certificate = builder.sign(self._key, hashes.SHA256())

    @property
    def _key_identifier(self) -> x509.SubjectKeyIdentifier:
        return x509.SubjectKeyIdentifier.from_public_key(self._key.public_key())

    @property
    def pem(self) -> bytes:
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    def issue(self, *dns_names: str, valid: datetime.timedelta = HOUR) -> tuple[bytes, bytes]:
        """Issue a certificate; return it and its key in PEM. A negative `valid` is one that has expired."""
        key = ec.generate_private_key(ec.SECP256R1())
        builder = self._builder(_named(dns_names[0] if dns_names else "nobody"), key, valid)
        builder = builder.add_extension(x509.ExtendedKeyUsage(USES), critical=False)
        if dns_names:
            names = x509.SubjectAlternativeName([x509.DNSName(name) for name in dns_names])
            builder = builder.add_extension(names, critical=False)
        if not self._bare:
            issuer = x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(self._key_identifier)
            builder = builder.add_extension(issuer, critical=False)
        certificate = builder.sign(self._key, hashes.SHA256())
        return certificate.public_bytes(serialization.Encoding.PEM), key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )

    def _builder(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, valid: datetime.timedelta
    ) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        builder = x509.CertificateBuilder(self._name, subject, key.public_key(), x509.random_serial_number())
        return builder.not_valid_before(now - 2 * HOUR).not_valid_after(now + valid)

    def folder(self, folder: Path, *roles: str, valid: datetime.timedelta = HOUR, ca: bytes | None = None) -> Path:
        """Write, or replace at once, a folder for these roles."""
        certificate, key = self.issue(*(f"{role}.weft.internal" for role in roles), valid=valid)
        return mount(folder, {"tls.crt": certificate, "tls.key": key, "ca.crt": ca or self.pem})

    def folders(self, root: Path, roles: tuple[str, ...]) -> dict[str, Path]:
        """Write a folder for each role; the runner's is of pools in the namespace of `harness.fleet`."""
        names = {"runner": ("runner", "weft-system.runner")}
        return {role: self.folder(root / role, *names.get(role, (role,))) for role in roles}


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def mount(folder: Path, files: dict[str, bytes]) -> Path:
    """Write files as a kubelet mounts a secret: names link to `..data/NAME`, and `..data` is a link swapped at once."""
    folder.mkdir(parents=True, exist_ok=True)
    version = folder / f"..{secrets.token_hex(6)}"
    version.mkdir()
    for name, content in files.items():
        (version / name).write_bytes(content)
        if not (folder / name).is_symlink():
            (folder / name).symlink_to(Path("..data") / name)
    fresh = folder / "..data_tmp"
    fresh.symlink_to(version.name)
    fresh.replace(folder / "..data")
    return folder
