"""Secrets on a single machine: DIR/NAMESPACE/NAME/KEY, a file for each value, readable only by the depot's user."""

import os
import stat
from pathlib import Path

from weft.artifacts.errors import Reason, Refused
from weft_depot.credentials import MAX_VALUE_BYTES, Secret, check_names
from weft_depot.object_names import quoted_name

MAX_KEYS = 64


class FolderSecrets:
    """Secrets in files below a folder. A file readable by other users is refused."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def read(self, namespace: str, name: str) -> Secret:
        """Read a Secret. Raises Refused: SecretMissing, SecretForbidden, SecretInvalid."""
        check_names(namespace, name)
        folder = self._root / namespace / name
        called = quoted_name(namespace, name)
        try:
            paths = [path for path in sorted(folder.iterdir()) if not path.name.startswith(".")]
            return Secret(called, {path.name: _value(path, called) for path in paths[:MAX_KEYS]})
        except (FileNotFoundError, NotADirectoryError) as error:
            raise Refused(
                Reason.SECRET_MISSING,
                f"Secret {called} does not exist; make the folder {namespace}/{name} below the --secrets folder, "
                "with a file for each key",
            ) from error
        except PermissionError as error:
            raise Refused(
                Reason.SECRET_FORBIDDEN, f"Secret {called} cannot be read by the depot's user; give it the files"
            ) from error


def _value(path: Path, called: str) -> bytes:
    """Read a value. Links are followed, since mounted Secrets consist of links. The mode of the opened file is
    checked."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _check_mode(os.fstat(descriptor).st_mode, path.name, called)
        return os.read(descriptor, MAX_VALUE_BYTES + 1)
    finally:
        os.close(descriptor)


def _check_mode(mode: int, key: str, called: str) -> None:
    if not stat.S_ISREG(mode):
        raise Refused(Reason.SECRET_INVALID, f"Secret {called}: {key!r} is not a regular file")
    if mode & 0o077:
        reason = f"other users may read the file {key!r} (mode {stat.S_IMODE(mode):o}); chmod 600 it"
        raise Refused(Reason.SECRET_FORBIDDEN, f"Secret {called}: {reason}")
