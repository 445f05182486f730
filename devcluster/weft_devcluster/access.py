"""Ways into an API server: fixed users by token, and kubeconfigs."""

import base64
import json
import secrets
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Access:
    """One way into the API server; without a `token`, by what the kubeconfig says."""

    user: str
    token: str = field(repr=False)
    kubeconfig: Path


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The address of the API server, and who signed its certificate."""

    url: str
    ca: Path


class Users:
    """The users that exist from the start, in the file that the API server reads once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tokens: dict[str, str] = {}
        self._lines: list[str] = []
        self.file = folder / "tokens.csv"

    def add(self, user: str, group: str = "") -> None:
        self._tokens[user] = secrets.token_hex(16)
        self._lines.append(f'{self._tokens[user]},{user},{user},"{group}"\n')
        self.file.touch(mode=0o600)
        self.file.write_text("".join(self._lines))

    def access(self, user: str, endpoint: Endpoint) -> Access:
        return access(self._folder, user, self._tokens[user], endpoint)


def access(folder: Path, user: str, token: str, endpoint: Endpoint) -> Access:
    """Write the kubeconfig of a token."""
    authority = base64.b64encode(endpoint.ca.read_bytes()).decode()
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [
            {"name": "weft-test", "cluster": {"server": endpoint.url, "certificate-authority-data": authority}}
        ],
        "users": [{"name": user, "user": {"token": token}}],
        "contexts": [{"name": "weft-test", "context": {"cluster": "weft-test", "user": user}}],
        "current-context": "weft-test",
    }
    path = folder / f"{user.replace(':', '-')}.kubeconfig"
    path.touch(mode=0o600)
    path.write_text(json.dumps(content, indent=1))
    return Access(user, token, path)
