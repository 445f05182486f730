"""One resolve, from URI to digest. Blocking: runs in a worker thread.

    list -> judge headers -> [Validated] -> copy and hash -> one state? -> judge the copy -> NaN scan -> publish

What is published was judged as a copy, so a source that changes meanwhile cannot slip anything in; one that changed
while it was copied is read once more, then refused. Nothing is visible before everything has passed.
"""

import contextlib
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any

from weft.artifacts.blobs import BlobStore, Lease
from weft.artifacts.digest import Digest, Manifest
from weft.artifacts.errors import Reason, Refused, UnknownDigest
from weft_depot.contents import Base, Limits, check, check_weights_finite, choose, read_shape, wanted
from weft_depot.copies import BlobFiles, Copies, Selection
from weft_depot.remembered import Entry, Remembered
from weft_depot.requests import BaseRef, ResolveRequest
from weft_depot.sources import Snapshot, Source, open_source

Verdict = dict[str, Any]
READS = 2  # of a source that changes while it is read


@dataclass(frozen=True, slots=True)
class Resolver:
    """Turns requests into blobs."""

    sources: Mapping[str, Source]
    store: BlobStore
    remembered: Remembered
    limits: Limits = field(default_factory=Limits)

    def resolve(
        self, request: ResolveRequest, lease: Lease, validated: Callable[[Verdict], None], tick: Callable[[], None]
    ) -> Digest:
        """The digest; its blobs are there and named in `lease`. `validated` is called once, after the headers.

        `tick` is called before each chunk of work and may raise to stop. Raises ArtifactError, OSError of the disk.
        """
        base = self._base(request.base, lease)
        told = _Once(validated)
        for _ in range(READS):
            opened = open_source(self.sources, request.location(), wanted(request.kind))
            with opened as snapshot, _unless_changed(snapshot):
                manifest = self._again(request, base, snapshot, lease, told)
                manifest = manifest or self._copy(request, base, snapshot, lease, told, tick)
                return manifest.digest
        raise Refused(Reason.DIGEST_MISMATCH, f"{request.uri} changed while it was read; try again when it is at rest")

    def _again(
        self, request: ResolveRequest, base: Base | None, snapshot: Snapshot, lease: Lease, told: "_Once"
    ) -> Manifest | None:
        """An unchanged source whose blobs are still here: only the request's own demands are checked."""
        digest = self.remembered.digest(request.kind, request.source, snapshot.signature)
        if digest is None:
            return None
        manifest = self._held(digest, lease)
        if manifest is None:
            return None
        told(check(request.kind, BlobFiles(self.store, manifest), base=base, max_rank=request.max_rank))
        _check_digest(request, manifest)
        return manifest

    def _held(self, digest: Digest, lease: Lease) -> Manifest | None:
        lease.name(digest)
        with contextlib.suppress(UnknownDigest):
            manifest = self.store.manifest(digest)
            lease.name(*(entry.digest for entry in manifest.files))
            return manifest if self.store.holds(digest) else None
        return None

    def _copy(
        self,
        request: ResolveRequest,
        base: Base | None,
        snapshot: Snapshot,
        lease: Lease,
        told: "_Once",
        tick: Callable[[], None],
    ) -> Manifest:
        files = Selection(snapshot, choose(request.kind, snapshot, self.limits))
        told(check(request.kind, files, base=base, max_rank=request.max_rank))
        with Copies(self.store) as copies:
            for name in files.sizes:
                copies.take(files, name, tick)
            if not snapshot.unchanged() or copies.sizes != files.sizes:
                raise _Changed
            check(request.kind, copies, base=base, max_rank=request.max_rank)
            check_weights_finite(copies, files.sizes, tick)
            manifest = copies.manifest(request.kind)
            _check_digest(request, manifest)
            copies.publish(manifest, lease)
        self._remember(request, snapshot, manifest)
        return manifest

    def _remember(self, request: ResolveRequest, snapshot: Snapshot, manifest: Manifest) -> None:
        if snapshot.signature:
            entry = Entry(request.kind, request.source, request.uri, snapshot.signature, manifest.digest)
            self.remembered.add(entry)

    def _base(self, ref: BaseRef | None, lease: Lease) -> Base | None:
        """The base's shape and names, from its blobs. Raises Refused(SourceNotFound) when it is not here."""
        if ref is None:
            return None
        manifest = self._held(Digest(ref.digest), lease)
        if manifest is None or manifest.kind != "model":
            raise Refused(Reason.SOURCE_NOT_FOUND, f"the base {ref.digest} is not in this depot; resolve it first")
        names = (ref.name, *ref.aliases, *self.remembered.names(ref.digest)) if ref.name else ()
        return Base(read_shape(BlobFiles(self.store, manifest)), names)


class _Changed(Exception):
    """The source is not what it was when it was opened."""


@contextlib.contextmanager
def _unless_changed(snapshot: Snapshot) -> Generator[None]:
    """Swallows what a changing source led to: that says nothing about its next state. All other errors pass."""
    try:
        yield
    except _Changed:
        return
    except Refused:
        if snapshot.unchanged():
            raise


class _Once:
    """Tells the verdict the first time; a second reading tells nobody twice."""

    def __init__(self, tell: Callable[[Verdict], None]) -> None:
        self._tell: Callable[[Verdict], None] | None = tell

    def __call__(self, verdict: Verdict) -> None:
        if self._tell:
            self._tell(verdict)
            self._tell = None


def _check_digest(request: ResolveRequest, manifest: Manifest) -> None:
    if request.digest and request.digest != manifest.digest:
        raise Refused(
            Reason.DIGEST_MISMATCH, f"{request.uri} has {manifest.digest}, the request asks for {request.digest}"
        )
