"""Weights by digest: the depot behind `model.adapter_store.Source`, and the base model's files.

What is cached is compared with its SHA-256 whenever it is asked for, before anything maps it; what is damaged is
fetched again while those who need it wait, within PATIENCE.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from weft.artifacts.adapter_config import MAX_CONFIG_BYTES, parse_adapter_config
from weft.artifacts.blobs import BlobStore, Lease
from weft.artifacts.digest import Manifest
from weft.artifacts.errors import ArtifactError, Unavailable, UnknownDigest
from weft.artifacts.fetch import FetchLimits, Stopped, fetch
from weft.files import is_disk_full
from weft.process import DataDirUnusable
from weft.telemetry.logs import kv
from weft.telemetry.progress import ByteProgress
from weft.wire.tls import Tls
from weft_kernels.cpu.threads import cpu_quota
from weft_runner.errors import AdapterInvalid, ArtifactUnknown, ArtifactUnreachable, CacheFull, RunnerError
from weft_runner.model.adapter_store import AdapterFiles
from weft_runner.model.checkpoint import Files

log = logging.getLogger(__name__)
CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
# A depot that restarts ends no request: 15 s of pauses in all, while the sequences that need the adapter wait.
PATIENCE = FetchLimits(tries=12, timeout_s=5.0)


class DepotSource:
    """Blobs of the depot, cached in a folder of this runner or of several. Blocking: for threads that may wait."""

    def __init__(
        self,
        depot_url: str,
        folder: Path,
        base_digest: str,
        stopping: Callable[[], bool],
        pause: Callable[[float], None] = time.sleep,
        *,
        shared: bool = False,
        tls: Tls | None = None,
        on_damaged: Callable[[], None] = lambda: None,
        on_full: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`shared`: the folder is other runners' too. `on_damaged` is called from any thread for each cached file that
        was not what its digest says, `on_full` where the folder's disk has no room. Raises DataDirUnusable.
        """
        self._on_damaged, self._on_full, self._folder = on_damaged, on_full, folder
        self._url, self._base, self._stopping, self._pause = depot_url, base_digest, stopping, pause
        self._context = tls.client_context("depot") if tls else None
        try:
            self._shared, self._blobs = shared, BlobStore(folder, shared=shared)
            self._blobs.clean()
            if shared:  # the base has room, if what nobody needs can make it
                self._blobs.retain((base_digest,))
        except OSError as error:
            raise DataDirUnusable(f"the folder of blobs {folder} cannot be written to: {error.strerror}") from error
        self._base_lease, self._fetched = (
            self._blobs.lease(),
            deque[Lease](),
        )  # of the base; of adapters, of a shared folder

    def base(self, progress: ByteProgress | None = None) -> Files:
        """The base model's files by name; `progress` counts their bytes.

        Raises ArtifactUnknown, ArtifactUnreachable, AdapterInvalid.
        """
        lease = self._base_lease  # nothing runs beside it yet
        with self._disk_errors(self._base):
            manifest = self._fetch(self._base, lease, threads=cpu_quota(), progress=progress)
            if self._shared:
                self._blobs.mark_used(self._base, *(entry.digest for entry in manifest.files))
        return {entry.name: self._blobs.file(manifest, entry.name) for entry in manifest.files}

    def adapter(self, digest: str) -> AdapterFiles:
        with self._disk_errors(digest):
            lease = self._blobs.lease() if self._shared else None
            if lease is not None:
                self._fetched.append(lease)
            manifest = self._fetch(digest, lease)
            self._blobs.mark_used(digest, *(entry.digest for entry in manifest.files if self._shared))
        try:
            config = self._blobs.read(manifest.file(CONFIG).digest, max_bytes=MAX_CONFIG_BYTES)
            return AdapterFiles(self._blobs.file(manifest, TENSORS), parse_adapter_config(config))
        except ArtifactError as error:
            raise AdapterInvalid(str(error)) from error

    def retain(self, digests: frozenset[str]) -> None:
        """Keep the base and these digests. A digest in fetch is protected by its lease."""
        fetched = len(self._fetched)
        try:
            removed = self._blobs.retain((self._base, *digests))
        except ArtifactError as error:
            raise AdapterInvalid(str(error)) from error
        for _ in range(fetched):  # what of them is still wanted is among the digests now
            self._fetched.popleft().close()
        if removed:
            log.info("blobs removed", extra=kv(blobs=removed))

    def on_disk(self) -> tuple[str, ...]:
        return tuple(self._blobs.artifacts("adapter"))

    def _fetch(
        self, digest: str, lease: Lease | None, threads: int = 1, progress: ByteProgress | None = None
    ) -> Manifest:
        try:
            return fetch(
                self._url, digest, self._blobs, limits=PATIENCE, pause=self._pause, stopping=self._stopping,
                context=self._context, on_damaged=self._on_damaged, threads=threads, progress=progress, lease=lease,
            )  # fmt: skip
        except (UnknownDigest, Unavailable, Stopped, ArtifactError) as error:
            raise _named(error, digest) from error

    @contextmanager
    def _disk_errors(self, digest: str) -> Generator[None]:
        """Raises CacheFull, ArtifactUnreachable."""
        try:
            yield
        except OSError as error:
            if not is_disk_full(error):
                raise ArtifactUnreachable(str(error)) from error
            log.error("cache full: artifact not fetched", extra=kv(digest=digest, folder=self._folder, error=error))
            self._on_full("the disk of the cache is full")
            raise CacheFull(f"the disk of a runner's cache has no room for {digest}") from error


def _named(error: Exception, digest: str) -> RunnerError:
    match error:
        case UnknownDigest():
            return ArtifactUnknown(str(error))
        case Unavailable():
            return ArtifactUnreachable(str(error))
        case Stopped():
            return ArtifactUnreachable(f"stopped while fetching {digest}")
        case _:
            return AdapterInvalid(str(error))
