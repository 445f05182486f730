"""`depot:sha256:...`: an adapter that the requesting namespace has uploaded to this depot (`weft_depot.uploads`)."""

import contextlib
from collections.abc import Generator, Mapping
from typing import BinaryIO

from weft.artifacts.blobs import BlobStore
from weft.artifacts.depot_api import ResolveRequest, source_key
from weft.artifacts.digest import Manifest, parse_digest
from weft.artifacts.errors import BadDigest, Reason, Refused, UnknownDigest
from weft_depot.resolution_cache import ResolutionCache
from weft_depot.sources.source import Marks
from weft_depot.staging import BlobFiles


class UploadedSource:
    """The uploads, by their digests. A namespace reads only its uploads."""

    accepted_options: frozenset[str] = frozenset()
    remote = False

    def __init__(self, store: BlobStore, resolutions: ResolutionCache) -> None:
        self._store, self._resolutions = store, resolutions

    def host(self, _: ResolveRequest, /) -> str:  # all uploads are in this depot
        return "depot"

    @contextlib.contextmanager
    def open(self, request: ResolveRequest, *_: object) -> Generator["UploadedSnapshot"]:
        """Open an upload. Raises Refused: BadURI, SourceNotFound."""
        uri = f"depot:{request.path}"
        try:
            digest = parse_digest(request.path)
        except BadDigest as error:
            raise Refused(Reason.BAD_URI, f"{uri[:200]!r}: {error.message}") from error
        if self._resolutions.find("adapter", source_key(uri, request.namespace)) is None:
            raise Refused(Reason.SOURCE_NOT_FOUND, _missing(request))
        try:
            manifest = self._store.manifest(digest)
        except UnknownDigest as error:
            raise Refused(Reason.SOURCE_NOT_FOUND, _missing(request)) from error
        yield UploadedSnapshot(self._store, manifest)


class UploadedSnapshot:
    """The files of an upload. They never change."""

    marks: Marks | None = None

    def __init__(self, store: BlobStore, manifest: Manifest) -> None:
        self._files = BlobFiles(store, manifest)
        self.sizes: Mapping[str, int] = self._files.sizes
        self.signature: str | None = manifest.digest
        self.expected_sha256: Mapping[str, str] = {entry.name: entry.sha256 for entry in manifest.files}

    def open(self, name: str) -> BinaryIO:
        return self._files.open(name)

    def unchanged(self, _: bool = False, /) -> bool:
        return True


def _missing(request: ResolveRequest) -> str:
    return (
        f"namespace {request.namespace} has uploaded no adapter {request.path[:71]}, or it was removed: "
        "an upload is kept for a few minutes unless a LoRAAdapter names it; upload it again"
    )
