"""`pvc:claim/path`: a folder of a PersistentVolumeClaim of the requesting namespace.

Claims are mounted into the depot at ROOT/NAMESPACE/CLAIM. The namespace comes from the request, never from the URI: a
request cannot read a claim of a foreign namespace. Links out of the claim are refused.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from weft.artifacts.depot_api import ResolveRequest
from weft.artifacts.errors import Reason, Refused
from weft.domain.text import quoted
from weft_depot.credentials import Secret
from weft_depot.files import FileFilter
from weft_depot.object_names import is_namespace, is_object_name
from weft_depot.sources.folder import FolderSnapshot, Root
from weft_depot.sources.source import relative_parts


class PvcSource:
    """Claims below a folder."""

    accepted_options: frozenset[str] = frozenset()
    remote = False

    def __init__(self, root: Path, *, wall_ns: Callable[[], int] = time.time_ns) -> None:
        """Set the root. `wall_ns` is the clock of the file systems' time stamps."""
        self._root, self._wall_ns = root, wall_ns

    def host(self, request: ResolveRequest) -> str:
        """Return the name of the claim: a hanging share delays only its readers."""
        return f"pvc {request.namespace}/{request.path.partition('/')[0]}"[:200]

    def open(
        self, request: ResolveRequest, _: Secret | None, file_filter: FileFilter, /
    ) -> AbstractContextManager[FolderSnapshot]:
        """Open a folder of a claim. Raises Refused: BadURI, SourceNotFound, TooLarge."""
        uri = f"pvc:{request.path}"
        claim, slash, rest = request.path.partition("/")
        if not is_object_name(claim) or not is_namespace(request.namespace):
            raise Refused(Reason.BAD_URI, f"{quoted(uri, 200)} does not name a claim; write pvc:CLAIM/PATH")
        path = Path(*relative_parts(rest, uri)) if slash else Path()
        root = self._root / request.namespace / claim
        if not root.is_dir():
            raise Refused(
                Reason.SOURCE_NOT_FOUND,
                f"the claim {claim} of namespace {request.namespace} is not mounted in the depot; "
                "the platform's administrator mounts it at NAMESPACE/CLAIM below the depot's --pvc-root",
            )
        return Root(root, f"the claim {claim}", self._wall_ns).open(path, uri, file_filter)
