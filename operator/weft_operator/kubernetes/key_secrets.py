"""Secrets of APIKeys: read by name, and made. They are never listed, watched, changed or deleted.

A new Secret is immutable, and its owner reference deletes it with its APIKey. After a read, only the hash of the key
goes further.
"""

from collections.abc import Callable

from weft_operator.core.api_keys import Key, Secret, UnreadSecret, secret_manifest, seen_secret
from weft_operator.errors import ApiFailed
from weft_operator.kubernetes.client import SECRETS, KubeApi

FORBIDDEN = 403


class KeySecrets:
    """The Secrets of APIKeys in a cluster.

    `lead()` raises LeadershipLost; it is called before each write. `write_s` bounds the time of a write.
    """

    def __init__(self, api: KubeApi, *, lead: Callable[[], None], write_s: float) -> None:
        self._api, self._lead, self._write_s = api, lead, write_s

    async def read(self, key: Key) -> Secret:
        """Read an APIKey's Secret. Raises ApiUnreachable, ApiFailed."""
        namespace = key.meta.ref.namespace
        try:
            return seen_secret(key, await self._api.get(SECRETS, namespace, key.secret))
        except ApiFailed as error:
            if error.status != FORBIDDEN:
                raise
            message = f"the operator may not read Secrets of namespace {namespace}"
            return UnreadSecret("SecretForbidden", f"{message}: {error.message}")

    async def create(self, key: Key, text: str) -> None:
        """Make the Secret of a fresh key. Raises AlreadyExists, ApiFailed, ApiUnreachable."""
        self._lead()
        path, body = SECRETS.path(key.meta.ref.namespace), secret_manifest(key, text)
        await self._api.request("POST", path, body=body, timeout_s=self._write_s)
