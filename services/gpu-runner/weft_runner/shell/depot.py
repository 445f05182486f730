"""Weights by digest: the depot behind `model.adapter_store.Source`, and the base model's files.

What is cached is compared with its SHA-256 whenever it is asked for, before anything maps it; what is damaged is
fetched again while those who need it wait, within PATIENCE.
"""

import logging
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from weft.artifacts.adapter_config import MAX_CONFIG_BYTES, parse_adapter_config
from weft.artifacts.blobs import BlobStore
from weft.artifacts.digest import Manifest
from weft.artifacts.errors import ArtifactError, Unavailable, UnknownDigest
from weft.artifacts.fetch import FetchLimits, Stopped, fetch
from weft.telemetry.logs import kv
from weft.telemetry.progress import ByteProgress
from weft.wire.tls import Tls
from weft_kernels.cpu.threads import cpu_quota
from weft_runner.errors import AdapterInvalid, ArtifactUnknown, ArtifactUnreachable, RunnerError
from weft_runner.model.adapter_store import AdapterFiles
from weft_runner.model.checkpoint import Files

log = logging.getLogger(__name__)
CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
SPARE = 5  # a fifth of the disk stays free of adapters that only a forecast names
# A depot that restarts ends no request: 15 s of pauses in all, while the sequences that need the adapter wait.
PATIENCE = FetchLimits(tries=12, timeout_s=5.0)


class DepotSource:
    """Blobs of the depot, cached in a folder of this runner. Blocking: called from threads that may wait."""

    def __init__(
        self,
        depot_url: str,
        folder: Path,
        base_digest: str,
        stopping: Callable[[], bool],
        pause: Callable[[float], None] = time.sleep,
        *,
        tls: Tls | None = None,
        on_damaged: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_damaged` is called from any thread for each cached file that was not what its digest says."""
        self._on_damaged = on_damaged
        self._url, self._base, self._stopping, self._pause = depot_url, base_digest, stopping, pause
        self._context = tls.client_context("depot") if tls else None
        self._blobs = BlobStore(folder)
        self._blobs.clean()

    def base(self, progress: ByteProgress | None = None) -> Files:
        """The base model's files by name; `progress` counts their bytes.

        Raises ArtifactUnknown, ArtifactUnreachable, AdapterInvalid.
        """
        manifest = self._fetch(self._base, threads=cpu_quota(), progress=progress)  # nothing runs beside it yet
        return {entry.name: self._blobs.file(manifest, entry.name) for entry in manifest.files}

    def adapter(self, digest: str) -> AdapterFiles:
        """See `Source.adapter`."""
        manifest = self._fetch(digest)
        self._blobs.mark_used(digest)
        try:
            config = self._blobs.read(manifest.file(CONFIG).digest, max_bytes=MAX_CONFIG_BYTES)
            return AdapterFiles(self._blobs.file(manifest, TENSORS), parse_adapter_config(config))
        except ArtifactError as error:
            raise AdapterInvalid(str(error)) from error

    def retain(self, digests: frozenset[str]) -> None:
        """Keep the base and these; a digest that is being fetched is protected by its own lease."""
        try:
            removed = self._blobs.retain((self._base, *digests))
        except ArtifactError as error:
            raise AdapterInvalid(str(error)) from error
        if removed:
            log.info("blobs removed", extra=kv(blobs=removed))

    def on_disk(self) -> tuple[str, ...]:
        """See `Source.on_disk`."""
        return tuple(self._blobs.artifacts("adapter"))

    def has_space(self) -> bool:
        """See `Source.has_space`."""
        usage = shutil.disk_usage(self._blobs.root)
        return usage.free > usage.total // SPARE

    def _fetch(self, digest: str, threads: int = 1, progress: ByteProgress | None = None) -> Manifest:
        try:
            return fetch(
                self._url,
                digest,
                self._blobs,
                limits=PATIENCE,
                pause=self._pause,
                stopping=self._stopping,
                context=self._context,
                on_damaged=self._on_damaged,
                threads=threads,
                progress=progress,
            )
        except (UnknownDigest, Unavailable, Stopped, ArtifactError, OSError) as error:
            raise _named(error, digest) from error


def _named(error: Exception, digest: str) -> RunnerError:
    match error:
        case UnknownDigest():
            return ArtifactUnknown(str(error))
        case Unavailable() | OSError():
            return ArtifactUnreachable(str(error))
        case Stopped():
            return ArtifactUnreachable(f"stopped while fetching {digest}")
        case _:
            return AdapterInvalid(str(error))
