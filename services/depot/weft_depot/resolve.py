"""One resolve, from URI to digest. Blocking: runs in a worker thread.

    list -> judge headers -> [Validated] -> copy and hash -> one state? -> judge the copy -> NaN scan -> publish

Of a remote source, the headers are read with small ranges: nothing large moves before the verdict.

What is published was judged as a copy, so a source that changes meanwhile cannot slip anything in; one that changed
while it was copied is read once more, then refused. Nothing is visible before everything has passed.
"""

import contextlib
import errno
import shutil
import threading
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from weft.artifacts.blobs import BlobStore, Lease
from weft.artifacts.digest import Digest, Manifest, from_hex, hex_of
from weft.artifacts.errors import ArtifactError, Damaged, DepotFull, Reason, Refused, UnknownDigest
from weft_depot.contents import Base, Limits, check, check_weights_finite, choose, read_shape, wanted
from weft_depot.copies import BlobFiles, Copies, Selection
from weft_depot.core.fresh import Fresh
from weft_depot.core.lanes import Lane
from weft_depot.credentials import NoSecrets, Secrets
from weft_depot.remembered import Entry, Remembered
from weft_depot.requests import BaseRef, ResolveRequest
from weft_depot.sources import Files, Location, Snapshot, Source, source_of
from weft_depot.watched import Watched

Verdict = dict[str, Any]
READS = 2  # of a source that changes while it is read
_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, slots=True)
class Resolved:
    """What a source is. `watch`: the name of its present state in `watched`; None: only a resolve tells of a change."""

    digest: Digest
    watch: str | None = None


@dataclass(frozen=True, slots=True)
class Resolver:
    """Turns requests into blobs. Called from any thread."""

    sources: Mapping[str, Source]
    store: BlobStore
    remembered: Remembered
    limits: Limits = field(default_factory=Limits)
    secrets: Secrets = field(default_factory=NoSecrets)
    fresh: Fresh = field(default_factory=lambda: Fresh(0.0))
    watched: Watched = field(init=False)
    now: Callable[[], float] = time.monotonic
    lock: threading.Lock = field(default_factory=threading.Lock)  # of `fresh`

    def __post_init__(self) -> None:
        object.__setattr__(self, "watched", Watched(self.store.names))

    def lane(self, request: ResolveRequest) -> Lane:
        """What a request has to share threads with."""
        try:
            location = request.location()
            return Lane(source_of(self.sources, location).host(location), request.namespace)
        except ArtifactError:
            return Lane("refused", request.namespace)  # ends at once, by the same check

    def resolve(
        self, request: ResolveRequest, lease: Lease, validated: Callable[[Verdict], None], tick: Callable[[], None]
    ) -> Resolved:
        """The digest; its blobs are there and named in `lease`. `validated` is called once, after the headers.

        `tick` is called before each chunk of work and may raise to stop. Raises ArtifactError, OSError of the disk.
        """
        ask = _Ask(request, request.location(), self._base(request.base, lease), lease, _Once(validated), tick)
        source = source_of(self.sources, ask.location)
        if source.remote and (recent := self._recent(ask)):
            return Resolved(recent.digest)
        ask = replace(ask, location=self._with_secret(ask.location))
        for _ in range(READS):
            with source.open(ask.location, wanted(request.kind)) as snapshot, _unless_changed(snapshot), _disk():
                manifest = self._again(ask, snapshot) or self._copy(ask, snapshot)
                with self.lock:
                    self.fresh.see(request.key, self.now())
                return Resolved(manifest.digest, self._watch(source.host(ask.location), snapshot, manifest))
        raise Refused(Reason.DIGEST_MISMATCH, f"{request.uri} changed while it was read; try again when it is at rest")

    def _watch(self, host: str, snapshot: Snapshot, manifest: Manifest) -> str | None:
        if snapshot.marks is None:
            return None
        blobs = (hex_of(manifest.digest), *(file.sha256 for file in manifest.files))
        return self.watched.add(host, snapshot.marks, blobs)

    def _with_secret(self, location: Location) -> Location:
        """With the credentials that it names, which are read anew each time: a Secret can change or be withdrawn."""
        if location.credentials is None:
            return location
        return replace(location, secret=self.secrets.read(location.namespace, location.credentials))

    def _recent(self, ask: "_Ask") -> Manifest | None:
        """The same request was answered a moment ago: its source, which is not ours, is not bothered again."""
        with self.lock:
            fresh = self.fresh.is_fresh(ask.request.key, self.now())
        entry = self.remembered.find(ask.request.kind, ask.request.source) if fresh else None
        manifest = self._held(entry.digest, ask.lease) if entry else None
        if manifest:
            self._tell_held(ask, manifest)
        return manifest

    def _again(self, ask: "_Ask", snapshot: Snapshot) -> Manifest | None:
        """An unchanged source whose blobs are still here: only the request's own demands are checked.

        Credentials that have changed first show that they may read every file, by reading a little of each.
        """
        entry = self.remembered.find(ask.request.kind, ask.request.source)
        if entry is None or snapshot.signature is None or entry.signature != snapshot.signature:
            return None
        manifest = self._held(entry.digest, ask.lease)
        if manifest is None:
            return None
        if entry.reader != ask.reader:
            _prove_readable(Selection(snapshot, (file.name for file in manifest.files)))
            self._remember(ask, snapshot, manifest)
        self._tell_held(ask, manifest)
        return manifest

    def _tell_held(self, ask: "_Ask", manifest: Manifest) -> None:
        ask.check(BlobFiles(self.store, manifest), tell=True)
        _check_digest(ask.request, manifest)

    def _held(self, digest: Digest, lease: Lease) -> Manifest | None:
        lease.name(digest)
        with contextlib.suppress(UnknownDigest, Damaged):
            manifest = self.store.manifest(digest)
            lease.name(*(entry.digest for entry in manifest.files))
            return manifest if self.store.holds(digest) else None
        return None

    def _copy(self, ask: "_Ask", snapshot: Snapshot) -> Manifest:
        files = Selection(snapshot, choose(ask.request.kind, snapshot, self.limits))
        ask.check(files, tell=True)
        self._check_room(files)
        promised = snapshot.promised
        ask.lease.name(*map(from_hex, promised.values()))  # also what is left of it, should it break off
        with Copies(self.store) as copies:
            for name in files.sizes:
                copies.take(files, name, ask.tick, promised.get(name))
            if not snapshot.unchanged() or copies.sizes != files.sizes or not copies.check_promised(promised):
                raise _Changed
            ask.check(copies)
            check_weights_finite(copies, files.sizes, ask.tick)
            manifest = copies.manifest(ask.request.kind)
            _check_digest(ask.request, manifest)
            copies.publish(manifest, ask.lease)
        self._remember(ask, snapshot, manifest)
        return manifest

    def _check_room(self, files: Files) -> None:
        """Before the first byte: hours of a download that cannot end are no answer. Raises DepotFull."""
        wanted_bytes, free_bytes = sum(files.sizes.values()), shutil.disk_usage(self.store.root).free
        if wanted_bytes > free_bytes:
            raise DepotFull(f"{wanted_bytes} bytes do not fit the depot's disk, which has {free_bytes} free")

    def _remember(self, ask: "_Ask", snapshot: Snapshot, manifest: Manifest) -> None:
        if snapshot.signature:
            request = ask.request
            named = (request.kind, request.source, request.uri)
            self.remembered.add(Entry(*named, snapshot.signature, manifest.digest, ask.reader))

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


@dataclass(frozen=True, slots=True)
class _Ask:
    """One request on its way."""

    request: ResolveRequest
    location: Location
    base: Base | None
    lease: Lease
    told: "_Once"
    tick: Callable[[], None]

    @property
    def reader(self) -> str:
        """Who reads: a fingerprint of the credentials."""
        return self.location.secret.fingerprint if self.location.secret else ""

    def check(self, files: Files, *, tell: bool = False) -> None:
        """Headers and configs. Raises Refused."""
        verdict = check(self.request.kind, files, base=self.base, max_rank=self.request.max_rank)
        if tell:
            self.told(verdict)


@contextlib.contextmanager
def _disk() -> Generator[None]:
    """A full disk by its name. Raises DepotFull."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise DepotFull(f"the depot's disk is full: {error.strerror}") from error


def _prove_readable(files: Files) -> None:
    """Raises what the source says to who may not read one of them."""
    for name in files.sizes:
        with files.open(name) as file:
            file.read(1)


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
