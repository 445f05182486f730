import pytest
from sqlalchemy import text

from weft.domain.batch import KeptResponse, NewFile, Purpose
from weft.store import fencing_terms, files, responses
from weft.store.errors import Absent, Conflict, OverQuota

HOUR = 3_600_000


async def keep(engine, name, previous="", *, at=0, namespace="a", most=100, max_bytes=1000, body=b""):
    new = KeptResponse(namespace, name, previous, body or name.encode())
    await responses.keep(
        engine, new, now_unix_ms=at, expires_unix_ms=at + HOUR, max_responses=most, max_bytes=max_bytes
    )


async def chain(engine, name, *, at=1, namespace="a"):
    bodies = await responses.conversation(engine, namespace, name, now_unix_ms=at)
    return b" ".join(bodies).decode()


async def test_a_conversation_is_a_chain_and_of_its_tenant_alone(engine):
    await keep(engine, "r1")
    await keep(engine, "r2", "r1")
    await keep(engine, "r3", "r2")
    await keep(engine, "other", "r2")
    assert await chain(engine, "r3") == "r1 r2 r3"
    assert await chain(engine, "other") == "r1 r2 other"
    assert await responses.find(engine, "a", "r2", now_unix_ms=1) == b"r2"
    with pytest.raises(Absent):
        await chain(engine, "r3", namespace="b")
    await keep(engine, "theirs", "r2", namespace="b")
    with pytest.raises(Absent, match="r2"):
        await chain(engine, "theirs", namespace="b")
    await responses.remove(engine, "a", "r2")
    with pytest.raises(Absent, match="r2"):
        await chain(engine, "r3")
    with pytest.raises(Absent):
        await responses.remove(engine, "b", "r1")
    assert await chain(engine, "r1") == "r1"


async def test_a_response_ends_with_its_time_and_the_oldest_with_their_number(engine):
    await keep(engine, "old", at=0)
    await keep(engine, "new", "old", at=HOUR // 2)
    assert await chain(engine, "new", at=HOUR - 1) == "old new"
    with pytest.raises(Absent, match="old"):
        await chain(engine, "new", at=HOUR)
    assert await responses.forget(engine, now_unix_ms=HOUR) == 1
    assert await responses.forget(engine, now_unix_ms=HOUR) == 0
    for i in range(4):
        await keep(engine, f"n{i}", at=HOUR + i, most=3)
    await keep(engine, "theirs", namespace="b", at=HOUR)
    found = [await responses.find(engine, "a", f"n{i}", now_unix_ms=HOUR + 5) for i in range(1, 4)]
    assert found == [b"n1", b"n2", b"n3"]
    with pytest.raises(Absent):
        await responses.find(engine, "a", "n0", now_unix_ms=HOUR + 5)
    assert await chain(engine, "theirs", namespace="b", at=HOUR) == "theirs"


async def test_responses_and_files_of_a_tenant_share_its_bytes(engine):
    term = await fencing_terms.take(engine, "batch")
    new = NewFile("a", "f", Purpose.BATCH)
    await files.begin(engine, term, new, "file-1", now_unix_ms=0, max_files=9)
    await files.complete(engine, term, "file-1", 60, max_bytes=100)
    await keep(engine, "theirs", namespace="b", body=b"x" * 90, max_bytes=100)
    await keep(engine, "r1", body=b"x" * 40, max_bytes=100)
    with pytest.raises(OverQuota, match="101 bytes in all, the quota is 100"):
        await keep(engine, "r2", body=b"x", max_bytes=100)
    with pytest.raises(Absent):
        await responses.find(engine, "a", "r2", now_unix_ms=1)
    assert await files.begin(engine, term, new, "file-2", now_unix_ms=0, max_files=9) == 100
    with pytest.raises(OverQuota, match="101 bytes in all"):
        await files.complete(engine, term, "file-2", 1, max_bytes=100)
    await responses.remove(engine, "a", "r1")
    await files.complete(engine, term, "file-2", 1, max_bytes=100)


async def test_the_bytes_of_responses_are_summed_without_their_bodies(engine):
    async with engine.connect() as connection:
        if connection.dialect.name == "sqlite":  # a row's columns behind a body are reached over all of its pages
            query = "EXPLAIN QUERY PLAN SELECT sum(body_bytes) FROM responses WHERE namespace = 'a'"
            assert "USING COVERING INDEX" in str((await connection.execute(text(query))).all())


async def test_a_conversation_that_is_too_long_is_named(engine, monkeypatch):
    monkeypatch.setattr(responses, "MAX_DEPTH", 3)
    for i in range(4):
        await keep(engine, f"r{i}", f"r{i - 1}" if i else "")
    assert await chain(engine, "r2") == "r0 r1 r2"
    with pytest.raises(Conflict, match="too long"):
        await chain(engine, "r3")
    monkeypatch.setattr(responses, "MAX_CONVERSATION_BYTES", 5)
    with pytest.raises(Conflict, match="too long"):
        await chain(engine, "r2")
