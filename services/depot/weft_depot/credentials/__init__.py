# pyright: reportUnusedImport=false
"""Credentials by `credentialsRef`: a Secret of the requesting namespace. Only the depot reads it.

A secret's values never appear in a message, log, URI or signature. Only its fingerprint outlives a resolve. It shows
whether two reads used the same rights. Tests also import the names of the submodules from here. They are imported on
first use, since Kubernetes's client takes a second.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

from weft.artifacts.errors import Reason, Refused
from weft_depot.object_names import is_namespace, is_object_name, quoted_name

if TYPE_CHECKING:
    from weft_depot.credentials.folder import FolderSecrets  # noqa: F401
    from weft_depot.credentials.kubernetes import KubernetesConfigMaps, KubernetesSecrets, api_client  # noqa: F401

_LATER = {"folder": "FolderSecrets", "kubernetes": "KubernetesConfigMaps KubernetesSecrets api_client"}
MAX_VALUE_BYTES = 1 << 14


@dataclass(frozen=True, slots=True)
class Secret:
    """The entries of one Secret. `name` is `namespace/name`, quoted for messages."""

    name: str
    values: Mapping[str, bytes] = field(repr=False)

    @property
    def fingerprint(self) -> str:
        """A text, equal for equal contents. Tokens and keys are too random to be guessed from it."""
        digest = hashlib.sha256()
        for name, value in sorted(self.values.items()):
            for part in (name.encode(), value):
                digest.update(len(part).to_bytes(8, "big") + part)
        return digest.hexdigest()

    def text(self, key: str) -> str | None:
        """Read an entry, without the blanks and line ends that editors add. Return None if it is missing.

        The message of a refusal never quotes a value. Raises Refused(SecretInvalid) if the value cannot be a token or
        key.
        """
        raw = self.values.get(key)
        if raw is None:
            return None
        value = raw.strip()
        if not value or len(value) > MAX_VALUE_BYTES or not value.isascii() or not value.decode().isprintable():
            raise self.invalid(f"its key {key!r} is empty, too long, or holds characters not allowed in credentials")
        return value.decode()

    def invalid(self, reason: str) -> Refused:
        return Refused(Reason.SECRET_INVALID, f"Secret {self.name}: {reason}")


class Secrets(Protocol):
    """A source of Secrets. A call blocks, for a bounded time."""

    def read(self, namespace: str, name: str) -> Secret:
        """Read a Secret. Raises Refused (SecretMissing, SecretForbidden, SecretInvalid), Unavailable."""
        ...


class NoSecrets:
    """A depot without Secrets."""

    def read(self, namespace: str, name: str) -> Secret:
        raise Refused(
            Reason.SECRET_FORBIDDEN,
            f"Secret {quoted_name(namespace, name)} is not read: this depot was started with --secrets none; "
            "remove credentialsRef, or start it with --secrets kubernetes or a folder",
        )


def check_names(namespace: str, name: str) -> None:
    """Check that both are valid names of a namespace and a Secret, since they become paths. Raises
    Refused(SecretInvalid)."""
    if not is_namespace(namespace) or not is_object_name(name):
        raise Refused(
            Reason.SECRET_INVALID,
            f"Secret {quoted_name(namespace, name)}: credentialsRef.name is the name of a Secret in the same namespace "
            "(lower-case letters, digits, '-' and '.')",
        )


def __getattr__(name: str) -> Any:
    """Import a source of Secrets. Raises AttributeError."""
    for module, names in _LATER.items():
        if name in names.split():
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(name)
