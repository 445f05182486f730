"""Adapters uploaded to the depot, as by trainers that publish a content after each step.

An adapter's files in a form become an artifact with the URI `depot:DIGEST`, only for the namespace of the upload.
Checks without a base model run before the artifact becomes visible. The fit to a base is checked by the resolve of the
URI, as for every source. An upload not named by any adapter is removed once its operation is forgotten.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Collection

from weft.artifacts.blobs import BlobWriter, Lease
from weft.artifacts.depot_api import source_key
from weft.artifacts.digest import Manifest
from weft.artifacts.errors import DepotFull, Reason, Refused
from weft.domain.text import quoted
from weft.tasks import run_to_end
from weft.wire.multipart import Part, Piece
from weft_depot.artifact_layout import ADAPTER_FILES, check_upload, check_weights_finite
from weft_depot.resolution_cache import CachedResolution
from weft_depot.resolve import Resolver, disk_errors
from weft_depot.staging import StagedFiles

SCHEME = "depot"
WRITE_BYTES = 1 << 20  # of a write to the disk
MAX_UNNAMED_ADAPTERS = 4  # of a namespace, each of the largest size, until an object names them


class UnnamedUploads:
    """The bytes of uploads by namespace, from their first byte until an object names them or they are forgotten."""

    def __init__(self, max_bytes: int) -> None:
        """`max_bytes`: the maximum for a namespace."""
        self._max_bytes = max_bytes
        self._bytes = Counter[str]()
        self._uploads: dict[str, tuple[str, int]] = {}  # operation: namespace, bytes
        self._digests: dict[str, str] = {}  # operation: digest

    async def counted(self, operation: str, namespace: str, pieces: AsyncIterator[Piece]) -> AsyncGenerator[Piece]:
        """Pass an upload's pieces on. Raises DepotFull once its namespace has too many bytes."""
        async for piece in pieces:
            if isinstance(piece, bytes):
                self._bytes[namespace] += len(piece)
                _, previous_bytes = self._uploads.get(operation, (namespace, 0))
                self._uploads[operation] = namespace, previous_bytes + len(piece)
                if self._bytes[namespace] > self._max_bytes:
                    raise DepotFull(
                        f"expected at most {self._max_bytes} bytes of uploads not named by an adapter of namespace "
                        f"{namespace!r}, got more; name them in a LoRAAdapter, or try again in some minutes"
                    )
            yield piece

    def publish(self, operation: str, digest: str) -> None:
        """Record the content of a complete upload."""
        self._digests[operation] = digest

    def name(self, digests: Collection[str]) -> None:
        """Forget uploads with content named by objects."""
        for operation in [operation for operation, digest in self._digests.items() if digest in digests]:
            self.forget(operation)

    def forget(self, operation: str) -> None:
        """Forget an upload. An unknown operation is harmless."""
        self._digests.pop(operation, None)
        namespace, size_bytes = self._uploads.pop(operation, ("", 0))
        self._bytes[namespace] -= size_bytes
        if not self._bytes[namespace]:
            del self._bytes[namespace]


async def receive(resolver: Resolver, namespace: str, pieces: AsyncIterator[Piece], lease: Lease) -> Manifest:
    """Publish the adapter in a form. Its blobs are named in `lease`. Return its manifest.

    Raises Refused (MissingFile, TooLarge, ConfigInvalid, NotFinite, ... of the files), DepotFull, FormError, and
    OSError of the disk.
    """
    with disk_errors(), StagedFiles(resolver.store) as staged:
        left = resolver.limits.adapter_bytes
        async for piece in pieces:
            assert isinstance(piece, Part), "the previous part has been read"
            name = piece.filename or piece.name
            if name not in ADAPTER_FILES or name in staged.sizes:
                wrong = "comes twice" if name in ADAPTER_FILES else f"is not one of {', '.join(ADAPTER_FILES)}"
                raise Refused(Reason.MISSING_FILE, f"the file {quoted(name, 80)} of the form {wrong}")
            left -= await _write(staged.writer(name), pieces, left)
        await run_to_end(asyncio.to_thread(staged.finish))
        return await run_to_end(asyncio.to_thread(_publish, resolver, namespace, staged, lease))


async def _write(writer: BlobWriter, pieces: AsyncIterator[Piece], most_bytes: int) -> int:
    """Write a file to its end. Return its bytes. Raises Refused(TooLarge)."""
    waiting = bytearray()
    while (piece := await anext(pieces)) is not None:
        assert isinstance(piece, bytes), "a part ends before another begins"
        waiting += piece
        if writer.size_bytes + len(waiting) > most_bytes:
            raise Refused(Reason.TOO_LARGE, "the files are larger than an adapter may be")
        if len(waiting) >= WRITE_BYTES:
            await run_to_end(asyncio.to_thread(writer.write, bytes(waiting)))
            waiting.clear()
    await run_to_end(asyncio.to_thread(writer.write, bytes(waiting)))
    return writer.size_bytes


def _publish(resolver: Resolver, namespace: str, staged: StagedFiles, lease: Lease) -> Manifest:
    check_upload(staged)
    check_weights_finite(staged, staged.sizes, lambda _: None)
    manifest = staged.manifest("adapter")
    staged.publish(manifest, lease)
    uri = f"{SCHEME}:{manifest.digest}"
    resolution = CachedResolution("adapter", source_key(uri, namespace), uri, manifest.digest, manifest.digest)
    resolver.resolutions.add(resolution, durable=True)  # the owner of the upload is stored only here
    return manifest
