"""A resolve, from URI to digest. Blocking: runs in a worker thread.

    list -> validate headers -> [Validated] -> copy and hash -> one state? -> validate the copy -> NaN scan -> publish

The headers of a remote source are read with small ranges: nothing large moves before the verdict.

The copy is validated before it is published, so a change of the source in between is harmless. A source that changed
during the copy is read once more, then refused. Nothing is visible before all checks have passed.
"""

import contextlib
import hashlib
import shutil
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from weft.artifacts.blobs import BlobStore, Lease
from weft.artifacts.depot_api import BaseRef, OperationStatus, ResolveRequest, Verdict
from weft.artifacts.digest import Digest, FileEntry, Manifest, build_manifest, from_hex, hex_of
from weft.artifacts.errors import ArtifactError, Damaged, DepotFull, Reason, Refused, UnknownDigest
from weft.chat_template import TEMPLATE_FILE
from weft.domain.model.generation import token_ids
from weft.files import is_disk_full
from weft.telemetry.progress import ByteProgress
from weft_depot.artifact_layout import (
    ArtifactLimits,
    BaseModel,
    check_weights_finite,
    file_filter,
    read_shape,
    reader,
    select_files,
    template_fault,
    validate,
)
from weft_depot.config_maps import ConfigMaps, NoConfigMaps
from weft_depot.core.fair_queue import QueueKey
from weft_depot.credentials import NoSecrets, Secret, Secrets
from weft_depot.files import Files
from weft_depot.resolution_cache import CachedResolution, ResolutionCache
from weft_depot.sources.source import ArtifactSource, Snapshot, check_uri, source_of
from weft_depot.staging import BlobFiles, FileSubset, StagedFiles
from weft_depot.watches import Watches

TOKENIZERS = 2  # cached, of bases: some 20 MB each
TEMPLATES = 4096  # with cached faults
READS = 2  # of a source that changes during the read


@dataclass(frozen=True, slots=True)
class Resolver:
    """A resolver of requests into blobs. Called from any thread."""

    sources: Mapping[str, ArtifactSource]
    store: BlobStore
    resolutions: ResolutionCache
    limits: ArtifactLimits = field(default_factory=ArtifactLimits)
    secrets: Secrets = field(default_factory=NoSecrets)
    config_maps: ConfigMaps = field(default_factory=NoConfigMaps)
    watches: Watches = field(init=False)
    token_ids: Callable[[Manifest], Mapping[str, int]] = field(init=False)  # cached: a tokenizer takes 0.3 s
    fault_of: Callable[[Manifest, Manifest], str] = field(init=False)  # cached: a bad template takes a second
    now: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        object.__setattr__(self, "watches", Watches(self.store.names, self.store.holds, self.now))
        object.__setattr__(self, "token_ids", lru_cache(TOKENIZERS)(self._token_ids))
        object.__setattr__(self, "fault_of", lru_cache(TEMPLATES)(self._fault_of))

    def queue_key(self, request: ResolveRequest) -> QueueKey:
        """Return the key of the jobs that share threads with a request."""
        if request.kind == "template":
            return QueueKey("templates", request.namespace)
        try:
            return QueueKey(source_of(self.sources, request).host(request), request.namespace)
        except ArtifactError:
            return QueueKey("refused", request.namespace)  # ends at once, by the same check

    def resolve(
        self,
        request: ResolveRequest,
        lease: Lease,
        validated: Callable[[Verdict], None],
        check_cancelled: Callable[[], None],
        progress: ByteProgress | None = None,
    ) -> OperationStatus:
        """Fetch the artifact of a request. Its blobs are then stored, and named in `lease`. `validated` is called once,
        after the headers.

        The watch of a remote source only shows whether the depot still holds the artifact.

        `check_cancelled` is called before each chunk of work and may raise to stop. `progress` counts the bytes. Raises
        ArtifactError, OSError of the disk.
        """
        if request.kind == "template":
            return self._resolve_template(request, lease, validated)
        base = self._base(request.base, lease)
        source = source_of(self.sources, request)
        ctx = ResolveContext(request, base, lease, validated, check_cancelled, progress or ByteProgress())
        if source.remote and (recent := self._recent(ctx)):
            return OperationStatus("Fetched", recent.digest, watch=recent.digest)
        if name := request.credentials:  # read each time: a Secret can change or be withdrawn
            ctx.secret = self.secrets.read(request.namespace, name)
        for _ in range(READS):
            with (
                source.open(request, ctx.secret, file_filter(request.kind)) as snapshot,
                _unless_changed(snapshot),
                disk_errors(),
            ):
                manifest = self._unchanged(ctx, snapshot) or self._copy(ctx, snapshot)
                self.resolutions.mark_resolved(request.key, self.now())
                watch = self._watch(source, request, snapshot, manifest)
                return OperationStatus("Fetched", manifest.digest, watch=watch)
        raise Refused(Reason.DIGEST_MISMATCH, f"{request.uri} changed during the read; try again when it is at rest")

    def _resolve_template(
        self, request: ResolveRequest, lease: Lease, validated: Callable[[Verdict], None]
    ) -> OperationStatus:
        """Make the artifact of a chat template. A faulty template is also an artifact, with the fault in its
        verdict."""
        assert request.base is not None, "requests were checked"
        base = self._held_base(request.base, lease)
        check_uri(request)
        inline_text = request.text
        text = inline_text if inline_text is not None else self.config_maps.read(request.namespace, request.path)
        raw = text.encode("utf-8", "surrogatepass")
        manifest = build_manifest("template", [FileEntry(TEMPLATE_FILE, hashlib.sha256(raw).hexdigest(), len(raw))])
        if self._stored(manifest.digest, lease) is None:
            with disk_errors(), StagedFiles(self.store) as staged:
                staged.writer(TEMPLATE_FILE).write(raw)
                staged.publish(manifest, lease)
        fault = self.fault_of(manifest, base)
        owner = "Inline" if request.text is not None else "ConfigMap"
        validated({"from": owner, **({"fault": fault} if fault else {})})
        return OperationStatus("Fetched", manifest.digest, watch=manifest.digest)

    def _fault_of(self, template: Manifest, base: Manifest) -> str:
        with BlobFiles(self.store, template).open(TEMPLATE_FILE) as file:
            return template_fault(file.read(), BlobFiles(self.store, base))

    def _watch(
        self, source: ArtifactSource, request: ResolveRequest, snapshot: Snapshot, manifest: Manifest
    ) -> str | None:
        if source.remote:
            return manifest.digest
        if snapshot.marks is None:
            return None
        blobs = (hex_of(manifest.digest), *(file.sha256 for file in manifest.files))
        return self.watches.add(source.host(request), snapshot.marks, blobs)

    def _recent(self, ctx: "ResolveContext") -> Manifest | None:
        """Return the artifact of a recently answered request, without contact to its remote source, or None."""
        if not self.resolutions.is_recent(ctx.request.key, self.now()):
            return None
        entry = self.resolutions.find(ctx.request.kind, ctx.request.source)
        manifest = self._stored(entry.digest, ctx.lease) if entry else None
        if manifest:
            self._validate_held(ctx, manifest)
        return manifest

    def _unchanged(self, ctx: "ResolveContext", snapshot: Snapshot) -> Manifest | None:
        """Return the artifact of an unchanged source if its blobs are still here, or None. Only the request's demands
        are checked.

        Changed credentials first have to prove access to every file, with a read of a little of each.
        """
        entry = self.resolutions.find(ctx.request.kind, ctx.request.source)
        if entry is None or snapshot.signature is None or entry.signature != snapshot.signature:
            return None
        manifest = self._stored(entry.digest, ctx.lease)
        if manifest is None:
            return None
        if entry.reader != ctx.reader:
            for file in manifest.files:
                with snapshot.open(file.name) as opened:
                    opened.read(1)
            self._remember(ctx, snapshot, manifest)
        self._validate_held(ctx, manifest)
        return manifest

    def _validate_held(self, ctx: "ResolveContext", manifest: Manifest) -> None:
        ctx.validated(ctx.validate(BlobFiles(self.store, manifest)))
        ctx.check_digest(manifest)

    def _stored(self, digest: Digest, lease: Lease) -> Manifest | None:
        lease.name(digest)
        with contextlib.suppress(UnknownDigest, Damaged):
            manifest = self.store.manifest(digest)
            lease.name(*(entry.digest for entry in manifest.files))
            return manifest if self.store.holds(digest) else None
        return None

    def _copy(self, ctx: "ResolveContext", snapshot: Snapshot) -> Manifest:
        files = FileSubset(snapshot, select_files(ctx.request.kind, snapshot, self.limits))
        ctx.validated(ctx.validate(files))
        # Before the first byte: a download that cannot finish must not run for hours.
        size_bytes, free_bytes = sum(files.sizes.values()), shutil.disk_usage(self.store.root).free
        if size_bytes > free_bytes:
            raise DepotFull(f"{size_bytes} bytes do not fit the {free_bytes} free bytes of the depot's disk")
        expected = snapshot.expected_sha256
        ctx.lease.name(*map(from_hex, expected.values()))  # also keeps their partial files if the copy breaks off
        ctx.progress.begin("copying", size_bytes)
        with StagedFiles(self.store) as staged:
            for name in files.sizes:
                staged.copy(files, name, ctx.step, expected.get(name))
            manifest = staged.manifest(ctx.request.kind)
            previous, ctx.last_read = ctx.last_read, manifest.digest
            # Two reads gave the same bytes, without a write in between: only links, an owner or a mode changed.
            unchanged = snapshot.unchanged(manifest.digest == previous)
            if not unchanged or staged.sizes != files.sizes or not staged.check_expected(expected):
                raise _Changed
            ctx.validate(staged)
            ctx.progress.begin("checking", size_bytes)
            check_weights_finite(staged, files.sizes, ctx.step)
            ctx.check_digest(manifest)
            staged.publish(manifest, ctx.lease)
        self._remember(ctx, snapshot, manifest)
        return manifest

    def _remember(self, ctx: "ResolveContext", snapshot: Snapshot, manifest: Manifest) -> None:
        if snapshot.signature:
            request = ctx.request
            named = (request.kind, request.source, request.uri)
            self.resolutions.add(CachedResolution(*named, snapshot.signature, manifest.digest, ctx.reader))

    def _base(self, ref: BaseRef | None, lease: Lease) -> BaseModel | None:
        """Read the base's shape and names from its blobs. Raises Refused(SourceNotFound) if it is not here."""
        if ref is None:
            return None
        manifest = self._held_base(ref, lease)
        names = (ref.name, *ref.aliases, *self.resolutions.names(ref.digest)) if ref.name else ()
        shape = read_shape(BlobFiles(self.store, manifest))
        return BaseModel(shape, names, lambda text: self.token_ids(manifest).get(text))

    def _held_base(self, ref: BaseRef, lease: Lease) -> Manifest:
        manifest = self._stored(Digest(ref.digest), lease)
        if manifest is None or manifest.kind != "model":
            raise Refused(Reason.SOURCE_NOT_FOUND, f"the base {ref.digest} is not in this depot; resolve it first")
        return manifest

    def _token_ids(self, base: Manifest) -> Mapping[str, int]:
        return token_ids(reader(BlobFiles(self.store, base)))


@dataclass(slots=True)
class ResolveContext:
    """A request and the state of its resolve."""

    request: ResolveRequest
    base: BaseModel | None
    lease: Lease
    on_validated: Callable[[Verdict], None] | None
    check_cancelled: Callable[[], None]
    progress: ByteProgress
    secret: Secret | None = None  # of the request's credentials, once read
    last_read: Digest | None = None  # of a source that changed during the read

    def step(self, count: int) -> None:
        """Count the next `count` bytes. Raises to stop the work."""
        self.check_cancelled()
        self.progress.add(count)

    def validated(self, verdict: Verdict) -> None:
        """Pass on the first verdict, not the verdict of a second reading of the source."""
        callback, self.on_validated = self.on_validated, None
        if callback:
            callback(verdict)

    @property
    def reader(self) -> str:
        """The fingerprint of the credentials in use; empty: none."""
        return self.secret.fingerprint if self.secret else ""

    def validate(self, files: Files) -> Verdict:
        """Check headers and configs. Raises Refused."""
        return validate(self.request.kind, files, base=self.base, max_rank=self.request.max_rank)

    def check_digest(self, manifest: Manifest) -> None:
        request = self.request
        if request.digest and request.digest != manifest.digest:
            reason = f"{request.uri} has {manifest.digest}, the request asks for {request.digest}"
            raise Refused(Reason.DIGEST_MISMATCH, reason)


class _Changed(Exception):
    """The source has changed since it was opened."""


@contextlib.contextmanager
def _unless_changed(snapshot: Snapshot) -> Generator[None]:
    """Drop the errors of a changing source: they may not apply to its next state. Further errors pass."""
    try:
        yield
    except _Changed:
        return
    except Refused:
        if snapshot.unchanged(True):  # except links: they do not affect the content
            raise


@contextlib.contextmanager
def disk_errors() -> Generator[None]:
    """Turn the OSError of a full disk into DepotFull."""
    try:
        yield
    except OSError as error:
        if not is_disk_full(error):
            raise
        raise DepotFull(f"the depot's disk is full: {error.strerror}") from error
