"""Files of tenants: rows in the store, bytes in file storage, quotas, and deletion of remains."""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any

from sqlalchemy.ext.asyncio import AsyncEngine

from weft.domain.batch import MAX_FILE_BYTES, NewFile, StoredFile
from weft.store import files
from weft.store.errors import OverQuota, StoreUnavailable
from weft.tasks import run_to_end
from weft.telemetry.logs import kv
from weft.wire.errors import PeerError
from weft_batch import metrics
from weft_batch.core.input_lines import COMPRESSED, compression
from weft_batch.errors import StorageError
from weft_batch.storage import FileStorage, FileWriter

MAGIC_BYTES = max(map(len, COMPRESSED))
MAX_REMOVED = 500  # files per transaction
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TenantQuotas:
    """Quotas of a tenant, and limits of a batch: constants, except `tenant_bytes`, which depends on the volume."""

    max_lines: int = 50_000  # of a batch, as at OpenAI
    max_line_bytes: int = 1 << 20  # a line is read completely; a text of this size exceeds most contexts
    max_file_bytes: int = MAX_FILE_BYTES
    tenant_bytes: int = 10 << 30  # of all files, outputs included, and stored responses
    tenant_files: int = 1_000  # outputs included; bounds the work of a list and of a sweep
    tenant_batches: int = 64  # unfinished; more would wait for each other
    tenant_responses: int = 10_000  # the newest, so that clients without deletions do not fill the store
    response_hours: int = 720  # a response can be continued for 30 days, as at OpenAI


class TenantFiles:
    """The files of tenants. A single event loop owns it. `spawn` starts background work."""

    def __init__(
        self, engine: AsyncEngine, term: int, storage: FileStorage, limits: TenantQuotas,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:  # fmt: skip
        self._engine, self._term, self._storage, self._limits, self._spawn = engine, term, storage, limits, spawn
        self._uploading: dict[str, int] = {}  # namespace: bytes of incomplete uploads
        self._broken_off: dict[str, FileWriter] = {}  # by file: interrupted uploads to remove
        self._removing = False

    async def upload(self, new: NewFile, parts: AsyncIterator[NewFile | bytes]) -> StoredFile:
        """Stream the parts into storage. Any early end leaves no file. Return the stored file.

        Raises PeerError, OverQuota, Conflict, Superseded, StoreUnavailable, StorageError.
        """
        file_id, limits, size, is_complete = draw_file_id(), self._limits, 0, False
        writer = self._storage.writer(file_id)
        try:
            stored = await files.begin(
                self._engine, self._term, new, file_id, now_unix_ms=now_unix_ms(), max_files=limits.tenant_files
            )
            start = b""
            async for chunk in parts:
                if isinstance(chunk, NewFile):
                    raise PeerError("an upload has one header")
                is_complete = not chunk
                if len(start) < MAGIC_BYTES and (packed := compression(start := (start + chunk)[:MAGIC_BYTES])):
                    raise PeerError(f"the file is packed with {packed}; send the JSON lines themselves")
                size += len(chunk)
                metrics.UPLOADED_BYTES.inc(len(chunk))
                other_uploads = self._count_upload(new.namespace, len(chunk)) - size
                if size > limits.max_file_bytes:
                    raise OverQuota(f"the file is larger than {limits.max_file_bytes} bytes")
                if stored + other_uploads + size > limits.tenant_bytes:
                    raise files.over_bytes(stored + other_uploads + size, limits.tenant_bytes)
                await run_to_end(asyncio.to_thread(writer.write, chunk))
            if not is_complete:  # a cancelled call also ends the stream
                raise PeerError("the upload broke off")
            await run_to_end(asyncio.to_thread(writer.close))
            return await files.complete(self._engine, self._term, file_id, size, max_bytes=limits.tenant_bytes)
        except BaseException:
            self._broken_off[file_id] = writer
            if not self._removing:
                self._removing = True
                self._spawn(self._remove_broken_off())
            raise
        finally:
            self._count_upload(new.namespace, -size)

    def _count_upload(self, namespace: str, size: int) -> int:
        """Add to the tenant's bytes in incomplete uploads. Return the new sum."""
        now = self._uploading.get(namespace, 0) + size
        if now:
            self._uploading[namespace] = now
        else:
            self._uploading.pop(namespace, None)
        return now

    async def _remove_broken_off(self) -> None:
        """Remove the remains of interrupted uploads, all waiting uploads at once.

        For any number of interrupted uploads, live requests wait for at most a thread and two transactions.
        """
        try:
            while self._broken_off:
                batch = dict(islice(self._broken_off.items(), MAX_REMOVED))
                for file_id in batch:
                    del self._broken_off[file_id]
                await asyncio.to_thread(_abandon, batch.values())
                try:
                    await self._remove(await files.mark_abandoned(self._engine, batch.keys()))
                except StoreUnavailable as error:  # the sweep removes them
                    log.warning("uploads not removed yet", extra=kv(files=len(batch), error=error))
        finally:
            self._removing = False

    async def _remove(self, file_ids: Collection[str]) -> None:
        """Delete the bytes, then the rows with their names. The sweep removes failures later."""
        deleted = await asyncio.to_thread(self._delete_bytes, file_ids)
        try:
            await files.forget(self._engine, deleted)
        except StoreUnavailable as error:
            metrics.STORE_FAILURES.inc()
            log.warning("files not forgotten yet", extra=kv(files=len(deleted), error=error))

    def _delete_bytes(self, file_ids: Collection[str]) -> list[str]:
        """Delete the bytes of files. Return the files with deleted bytes."""
        deleted = list[str]()
        for file_id in file_ids:
            try:
                self._storage.delete(file_id)
                deleted.append(file_id)
            except StorageError as error:
                metrics.STORE_FAILURES.inc()
                log.warning("file not deleted yet", extra=kv(file_id=file_id, error=error))
        return deleted

    async def delete(self, namespace: str, file_id: str) -> StoredFile:
        """Delete a file. Raises Absent, Conflict, Superseded, StoreUnavailable."""
        file = await files.mark_deleting(self._engine, self._term, namespace, file_id)
        await self._remove([file.file_id])
        return file

    async def sweep(self, before_unix_ms: int) -> None:
        """Delete marked files, and incomplete files begun before `before_unix_ms`. Raises StoreUnavailable."""
        left = await files.list_abandoned(self._engine, before_unix_ms=before_unix_ms)
        await self._remove(await files.mark_abandoned(self._engine, left))


def _abandon(writers: Iterable[FileWriter]) -> None:
    for writer in writers:
        writer.abandon()


def now_unix_ms() -> int:
    return time.time_ns() // 1_000_000


def draw_file_id() -> str:
    return f"file-{secrets.token_hex(16)}"
