"""`hf:org/name[/subfolder]`: files of a Hugging Face repository at a commit.

`revision` is a branch, a tag or a commit, `main` when unset. It is resolved to a commit once for each snapshot, and
everything is read at this commit. Files are identified by the hub's content ids, so a commit without a change of them
is not a new state. Code of a repository is never run. Only files on the depot's list are opened.
"""

import contextlib
import hashlib
import re
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO, cast

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from weft.artifacts.depot_api import ResolveRequest
from weft.artifacts.digest import MAX_FILE_BYTES, is_file_name
from weft.artifacts.errors import Reason, Refused, Unavailable
from weft.domain.text import quoted
from weft_depot.credentials import Secret
from weft_depot.files import FileFilter
from weft_depot.sources.hub import Hub, Repo
from weft_depot.sources.ranged import open_ranged
from weft_depot.sources.retry_policy import RetryPolicy
from weft_depot.sources.source import relative_parts

TOKEN_KEY = "token"  # noqa: S105 (the name of a key, not a token)
DEFAULT_REVISION = "main"
MAX_ENTRIES = 100_000  # of a complete repository
_COMMIT = re.compile(r"[0-9a-f]{40}", re.ASCII)
_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a commit: its path in the repository, its size, and the hub's id of its content."""

    path: str
    size_bytes: int
    content_id: str
    sha256: str | None  # of large files


class HfSource:
    """Repositories of a hub."""

    accepted_options = frozenset(("revision", "credentialsRef"))
    remote = True

    def __init__(self, hub: Hub, policy: RetryPolicy) -> None:
        self._hub, self._policy = hub, policy

    def host(self, _: ResolveRequest, /) -> str:  # all repositories are on the same host
        return f"hf {self._hub.host}"

    @contextlib.contextmanager
    def open(self, request: ResolveRequest, secret: Secret | None, file_filter: FileFilter) -> Generator["HubSnapshot"]:
        """Open a commit. Raises Refused: BadURI, SourceNotFound, SourceForbidden, SecretInvalid, TooLarge;
        Unavailable."""
        name, folder = _parse_path(request.path)
        repo = Repo(name, _token(secret))
        answer = self._hub.revision(repo, request.revision or DEFAULT_REVISION)
        sha, files = parse_revision(answer, folder, file_filter, f"hf:{request.path}")
        yield HubSnapshot(self._hub, self._policy, repo, sha, files)


class HubSnapshot:
    """Files of a commit. They never change."""

    marks = None

    def __init__(self, hub: Hub, policy: RetryPolicy, repo: Repo, sha: str, files: Mapping[str, HubFile]) -> None:
        self._hub, self._policy, self._repo, self._files = hub, policy, repo, files
        self.sha = sha
        self.sizes: Mapping[str, int] = {name: file.size_bytes for name, file in files.items()}
        self.expected_sha256: Mapping[str, str] = {name: f.sha256 for name, f in files.items() if f.sha256}

    @property
    def signature(self) -> str | None:
        """The names, sizes and content ids: hashes of the contents (git's, or SHA-256)."""
        ids = sorted((name, file.size_bytes, file.content_id) for name, file in self._files.items())
        return hashlib.sha256(repr(ids).encode()).hexdigest()

    def open(self, name: str) -> BinaryIO:
        file = self._files[name]
        fetch = partial(self._hub.fetch, self._repo, file.path, self.sha, file.size_bytes)
        return open_ranged(f"hf:{self._repo.name}/{file.path}", file.size_bytes, fetch, self._policy)

    def unchanged(self, _: bool = False, /) -> bool:
        return True  # a commit does not change


def parse_revision(
    answer: Mapping[str, Any], folder: str, file_filter: FileFilter, uri: str
) -> tuple[str, dict[str, HubFile]]:
    """Return the commit, and the selected files of a folder by plain name.

    Raises Refused: SourceNotFound (no such folder), TooLarge; Unavailable for an invalid answer.
    """
    sha, siblings = answer.get("sha"), answer.get("siblings")
    if not isinstance(sha, str) or not _COMMIT.fullmatch(sha) or not isinstance(siblings, list):
        raise Unavailable(f"{uri}: the hub's answer has no commit or no files: {quoted(answer, 200)}")
    rows = cast("list[object]", siblings)
    if len(rows) > MAX_ENTRIES:
        raise Refused(Reason.TOO_LARGE, f"{uri} has {len(rows)} files, the limit is {MAX_ENTRIES}")
    paths = [(row, _path_of(row)) for row in rows]
    below = [(row, path.removeprefix(folder)) for row, path in paths if path.startswith(folder)]
    if folder and not below:
        raise Refused(Reason.SOURCE_NOT_FOUND, f"{uri}: commit {sha} has no folder {quoted(folder, 200)}")
    return sha, {name: _file(row, uri) for row, name in below if is_file_name(name) and file_filter(name)}


def _path_of(row: object) -> str:
    path = cast("dict[str, object]", row).get("rfilename") if isinstance(row, dict) else None
    return path if isinstance(path, str) else ""


def _file(row: object, uri: str) -> HubFile:
    fields = cast("dict[str, Any]", row)
    path, lfs = fields["rfilename"], fields.get("lfs")
    sha256 = cast("dict[str, Any]", lfs).get("sha256") if isinstance(lfs, dict) else None
    content_id, size = sha256 or fields.get("blobId"), cast("object", fields.get("size"))
    if (
        not isinstance(content_id, str)
        or not content_id
        or not isinstance(size, int)
        or not 0 <= size <= MAX_FILE_BYTES
    ):
        raise Unavailable(f"{uri}: the hub gives no size or no content id of {quoted(path, 200)}")
    if sha256 is not None and not (isinstance(sha256, str) and _SHA256.fullmatch(sha256)):
        raise Unavailable(f"{uri}: the hub gives no SHA-256 of {quoted(path, 200)}")
    return HubFile(path, size, content_id, sha256)


def _parse_path(path: str) -> tuple[str, str]:
    """Split `org/name/some/folder` into (`org/name`, `some/folder/`). Raises Refused(BadURI)."""
    uri = f"hf:{path}"
    parts = relative_parts(path, uri)
    try:
        if len(parts) < 2:
            raise HFValidationError("it has no organisation")
        validate_repo_id("/".join(parts[:2]))
    except HFValidationError as error:
        reason = f"{quoted(uri, 200)} is not a repository ({error}); write hf:ORG/NAME or hf:ORG/NAME/FOLDER"
        raise Refused(Reason.BAD_URI, reason) from error
    return "/".join(parts[:2]), "".join(f"{part}/" for part in parts[2:])


def _token(secret: Secret | None) -> str | None:
    if secret is None:
        return None
    token = secret.text(TOKEN_KEY)
    if token is None:
        raise secret.invalid(f"it has no key {TOKEN_KEY!r}; hf: expects a Hugging Face token there")
    return token
