"""Rows of tenants' files. Their bytes are in the batch service's file storage, under their ids.

A file's row exists before its bytes and after them: "writing" until it is complete, "deleting" until its bytes are
deleted. After any end of a process, the rows show the bytes left to delete.
"""

from collections.abc import Collection
from typing import Any

from sqlalchemy import ColumnElement, and_, delete, func, insert, or_, select, update
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from weft.domain.batch import ENDED, NewFile, Page, Purpose, StoredFile
from weft.store import fencing_terms
from weft.store.errors import Absent, Conflict, OverQuota
from weft.store.models import BatchRow, FileRow, ResponseRow
from weft.store.transactions import transact

ROLE = "batch"  # changes of files and batches hold its term
WRITING, READY, DELETING = "writing", "ready", "deleting"


async def begin(engine: AsyncEngine, term: int, new: NewFile, file_id: str, *, now_unix_ms: int, max_files: int) -> int:
    """Record a file to write. Return the bytes already stored by its tenant, responses included.

    Raises OverQuota, Superseded, StoreUnavailable.
    """

    async def write(connection: AsyncConnection) -> int:
        await fencing_terms.hold(connection, ROLE, term)
        files, stored = await used(connection, new.namespace)
        if new.purpose is Purpose.BATCH and files >= max_files:
            raise OverQuota(f"{files} files are stored, the quota is {max_files}; delete some")
        await connection.execute(
            insert(FileRow).values(
                file_id=file_id,
                namespace=new.namespace,
                filename=new.filename,
                purpose=new.purpose.value,
                bytes=0,
                created_unix_ms=now_unix_ms,
                state=WRITING,
            )
        )
        return stored

    return await transact(engine, write)


async def complete(engine: AsyncEngine, term: int, file_id: str, size: int, *, max_bytes: int) -> StoredFile:
    """Record that a file's bytes are in storage. Raises OverQuota (the tenant would exceed `max_bytes`), Conflict (it
    was taken for abandoned), Superseded, StoreUnavailable."""

    async def write(connection: AsyncConnection) -> StoredFile:
        await fencing_terms.hold(connection, ROLE, term)
        namespace = select(FileRow.namespace).where(FileRow.file_id == file_id)
        _, stored = await used(connection, (await connection.execute(namespace)).scalar_one_or_none() or "")
        if stored + size > max_bytes:
            raise over_bytes(stored + size, max_bytes)
        return await make_ready(connection, file_id, size)

    return await transact(engine, write)


def over_bytes(stored: int, max_bytes: int) -> OverQuota:
    text = f"files and stored responses would have {stored} bytes in all, the quota is {max_bytes}; delete some"
    return OverQuota(text)


async def make_ready(connection: AsyncConnection, file_id: str, size: int) -> StoredFile:
    """Make a file visible, within a transaction. Raises Conflict if its row was swept."""
    changed = (
        update(FileRow)
        .where(FileRow.file_id == file_id, FileRow.state == WRITING)
        .values(state=READY, bytes=size)
        .returning(*_SHOWN)
    )
    if (row := (await connection.execute(changed)).first()) is None:
        raise Conflict("the file took too long to write; send it again")
    return _stored(row)


async def find(engine: AsyncEngine, namespace: str, file_id: str) -> StoredFile:
    """Read the row of a file. Raises Absent, StoreUnavailable."""

    async def read(connection: AsyncConnection) -> StoredFile:
        return await find_within(connection, namespace, file_id)

    return await transact(engine, read)


async def find_within(connection: AsyncConnection, namespace: str, file_id: str) -> StoredFile:
    """Read the row of a file within a transaction. Raises Absent."""
    row = (await connection.execute(select(*_SHOWN).where(*_is(namespace, file_id)))).first()
    if row is None:
        raise no_file(file_id)
    return _stored(row)


async def list_page(engine: AsyncEngine, page: Page) -> tuple[list[StoredFile], bool]:
    """List a page of a tenant's files, and return whether there are more. Raises Absent (`after`), StoreUnavailable."""

    async def read(connection: AsyncConnection) -> tuple[list[StoredFile], bool]:
        query = select(*_SHOWN).where(FileRow.namespace == page.namespace, FileRow.state == READY)
        if page.purpose is not None:
            query = query.where(FileRow.purpose == page.purpose.value)
        if page.after:
            anchor = select(FileRow.created_unix_ms).where(*_is(page.namespace, page.after))
            anchor_unix_ms = (await connection.execute(anchor)).scalar_one_or_none()
            if anchor_unix_ms is None:
                raise no_file(page.after)
            query = query.where(behind(page, FileRow.created_unix_ms, FileRow.file_id, anchor_unix_ms))
        rows = (await connection.execute(order_page(page, query, FileRow.created_unix_ms, FileRow.file_id))).all()
        return [_stored(row) for row in rows[: page.limit]], len(rows) > page.limit

    return await transact(engine, read)


async def mark_deleting(engine: AsyncEngine, term: int, namespace: str, file_id: str) -> StoredFile:
    """Hide a file for good. Raises Absent, Conflict (an unfinished batch reads it), Superseded, StoreUnavailable."""

    async def write(connection: AsyncConnection) -> StoredFile:
        await fencing_terms.hold(connection, ROLE, term)
        file = await find_within(connection, namespace, file_id)
        ended = [status.value for status in ENDED]
        uses = select(BatchRow.batch_id).where(BatchRow.input_file_id == file_id, BatchRow.status.not_in(ended))
        if (batch_id := (await connection.execute(uses.limit(1))).scalar_one_or_none()) is not None:
            raise Conflict(f"file {file_id} is the input of {batch_id}, an unfinished batch; cancel it first")
        await connection.execute(update(FileRow).where(FileRow.file_id == file_id).values(state=DELETING))
        return file

    return await transact(engine, write)


async def list_abandoned(engine: AsyncEngine, *, before_unix_ms: int, max_files: int = 100) -> list[str]:
    """List files with bytes to delete: marked as deleting, or begun before `before_unix_ms` and never complete."""
    left = or_(FileRow.state == DELETING, and_(FileRow.state == WRITING, FileRow.created_unix_ms < before_unix_ms))

    async def read(connection: AsyncConnection) -> list[str]:
        return list((await connection.execute(select(FileRow.file_id).where(left).limit(max_files))).scalars())

    return await transact(engine, read)


async def mark_abandoned(engine: AsyncEngine, file_ids: Collection[str]) -> list[str]:
    """Mark incomplete files, so that a running writer cannot complete them. Return the incomplete files.

    Raises StoreUnavailable.
    """

    async def write(connection: AsyncConnection) -> list[str]:
        unfinished = update(FileRow).where(FileRow.file_id.in_(file_ids), FileRow.state != READY)
        marked = await connection.execute(unfinished.values(state=DELETING).returning(FileRow.file_id))
        return [*marked.scalars()]

    return await transact(engine, write)


async def forget(engine: AsyncEngine, file_ids: Collection[str]) -> None:
    """Remove the rows of files with deleted bytes. Raises StoreUnavailable."""

    async def write(connection: AsyncConnection) -> None:
        await connection.execute(delete(FileRow).where(FileRow.file_id.in_(file_ids), FileRow.state == DELETING))

    await transact(engine, write)


def behind(page: Page, created: Any, row_id: Any, anchor_unix_ms: int) -> ColumnElement[bool]:
    """Return the condition for rows after the row `page.after`, created at `anchor_unix_ms`, in a list."""
    if page.oldest_first:
        return or_(created > anchor_unix_ms, and_(created == anchor_unix_ms, row_id > page.after))
    return or_(created < anchor_unix_ms, and_(created == anchor_unix_ms, row_id < page.after))


def order_page(page: Page, query: Any, created: Any, row_id: Any) -> Any:
    """Order a page's rows, and ask for one additional row, which shows whether there are more."""
    order = (created, row_id) if page.oldest_first else (created.desc(), row_id.desc())
    return query.order_by(*order).limit(page.limit + 1)


def no_file(file_id: str) -> Absent:
    return Absent(f"no file with the id {file_id[:100]!r}")


def _is(namespace: str, file_id: str) -> tuple[ColumnElement[bool], ...]:
    return FileRow.file_id == file_id, FileRow.namespace == namespace, FileRow.state == READY


async def used(connection: AsyncConnection, namespace: str) -> tuple[int, int]:
    """Count a tenant's files, and sum the bytes of files and stored responses, within a transaction.

    A deleted or interrupted file does not count.
    """
    query = select(func.count(), func.coalesce(func.sum(FileRow.bytes), 0))
    files, stored = (
        await connection.execute(query.where(FileRow.namespace == namespace, FileRow.state != DELETING))
    ).one()
    of_responses = select(func.coalesce(func.sum(ResponseRow.body_bytes), 0)).where(ResponseRow.namespace == namespace)
    return int(files), int(stored) + int((await connection.execute(of_responses)).scalar_one())


_SHOWN = (FileRow.file_id, FileRow.filename, FileRow.purpose, FileRow.bytes, FileRow.created_unix_ms)


def _stored(row: Any) -> StoredFile:
    return StoredFile(row.file_id, row.filename, Purpose(row.purpose), row.bytes, row.created_unix_ms // 1000)
