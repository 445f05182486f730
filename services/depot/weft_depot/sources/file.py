"""`file:relative/path`: a folder below the depot's file root."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from weft.artifacts.depot_api import ResolveRequest
from weft.artifacts.errors import Reason, Refused
from weft_depot.credentials import Secret
from weft_depot.files import FileFilter
from weft_depot.sources.folder import FolderSnapshot, Root
from weft_depot.sources.source import relative_parts


class FileSource:
    """Folders below a root."""

    accepted_options: frozenset[str] = frozenset()
    remote = False

    def __init__(self, root: Path, *, wall_ns: Callable[[], int] = time.time_ns) -> None:
        """Set the root. `wall_ns` is the clock of the file system's time stamps."""
        self._root = Root(root, "the file root", wall_ns)

    def host(self, _: ResolveRequest, /) -> str:  # all files are on the same host
        return "file"

    def open(
        self, request: ResolveRequest, _: Secret | None, file_filter: FileFilter, /
    ) -> AbstractContextManager[FolderSnapshot]:
        """Open a folder. Raises Refused: BadURI, SourceNotFound, TooLarge."""
        uri = f"file:{request.path}"
        if request.path.startswith("/"):
            raise Refused(Reason.BAD_URI, f"{uri[:200]!r} is absolute; write the path below the file root")
        return self._root.open(Path(*relative_parts(request.path, uri)), uri, file_filter)
