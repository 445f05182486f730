"""`pvc:claim/path`: a folder of a PersistentVolumeClaim of the requesting namespace.

Claims are mounted into the depot at ROOT/NAMESPACE/CLAIM. The namespace is the request's, never the URI's: no request
reads another namespace's claim; links that leave the claim are refused, wherever they lead.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from weft.artifacts.depot_api import ResolveRequest
from weft.artifacts.errors import Reason, Refused
from weft.domain.text import quoted
from weft_depot.credentials import Secret, is_namespace, is_object_name
from weft_depot.sources.folder import FolderSnapshot, Root
from weft_depot.sources.source import FileFilter, relative_parts


class PvcSource:
    """Claims below one folder."""

    accepted_options: frozenset[str] = frozenset()
    remote = False

    def __init__(self, root: Path, *, wall_ns: Callable[[], int] = time.time_ns) -> None:
        """Take the root. `wall_ns` is the clock of the file systems' time stamps."""
        self._root, self._wall_ns = root, wall_ns

    def host(self, request: ResolveRequest) -> str:
        """The claim: a share that hangs delays only what reads it."""
        return f"pvc {request.namespace}/{request.path.partition('/')[0]}"[:200]

    def open(
        self, request: ResolveRequest, _: Secret | None, file_filter: FileFilter, /
    ) -> AbstractContextManager[FolderSnapshot]:
        """Open a folder of a claim. Raises Refused: BadURI, SourceNotFound, TooLarge."""
        uri = f"pvc:{request.path}"
        claim, slash, rest = request.path.partition("/")
        if not is_object_name(claim) or not is_namespace(request.namespace):
            raise Refused(Reason.BAD_URI, f"{quoted(uri, 200)} names no claim; write pvc:CLAIM/PATH")
        path = Path(*relative_parts(rest, uri)) if slash else Path()
        root = self._root / request.namespace / claim
        if not root.is_dir():
            raise Refused(
                Reason.SOURCE_NOT_FOUND,
                f"the claim {claim} of namespace {request.namespace} is not mounted in the depot; "
                "who runs Weft mounts it at NAMESPACE/CLAIM below the depot's --pvc-root",
            )
        return Root(root, f"the claim {claim}", self._wall_ns).open(path, uri, file_filter)
