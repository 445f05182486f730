"""Files on S3: a real server, read and written by parts; nothing is left of what broke off."""

import pytest

from harness.s3_server import ROOT_KEYS, s3_server
from tests.integration.batch.conftest import input_file, serving
from weft.domain.batch import BatchStatus
from weft_batch import storage_s3
from weft_batch.errors import BytesMissing, StorageUnavailable
from weft_batch.storage_s3 import PART_BYTES, S3NotUsable, S3Storage, parse_place, read_keys
from weft_devcluster.tools import ToolMissing


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    try:
        with s3_server(tmp_path_factory.mktemp("s3")) as running:
            running.bucket("files")
            yield running
    except ToolMissing as error:
        pytest.skip(str(error))


@pytest.fixture
def s3(server, tmp_path):
    for name, value in ROOT_KEYS.items():
        (tmp_path / name).write_bytes(value + b"\n")
    keys = read_keys(tmp_path)
    return S3Storage("s3://files/weft/batch", endpoint=server.url, region="us-east-1", keys=keys)


def names(server) -> list[str]:
    found = server.client.list_objects_v2(Bucket="files")
    return sorted(row["Key"] for row in found.get("Contents", ()))


@pytest.mark.parametrize("size", [0, 10, PART_BYTES, 2 * PART_BYTES + 5])
def test_a_file_appears_whole_once_it_is_closed_and_is_read_by_ranges(server, s3, size) -> None:
    content = bytes(range(256)) * (size // 256 + 1)
    writer = s3.writer("f")
    for at in range(0, size, 1 << 20):
        writer.write(content[at : min(at + (1 << 20), size)])
    assert names(server) == []
    writer.close()
    assert names(server) == ["weft/batch/f"]
    assert s3.read("f", 0, size + 10) == content[:size]
    if size:
        assert s3.read("f", size - 1, 10) == content[size - 1 : size]
    assert s3.read("f", size, 10) == b""
    s3.delete("f")
    assert names(server) == []


def test_what_broke_off_is_deleted_by_its_name(server, s3) -> None:
    for name, left in (("abandoned", True), ("killed", False)):
        writer = s3.writer(name)
        writer.write(b"x" * PART_BYTES)
        if left:
            writer.abandon()
        s3.delete(name)
    uploads = server.client.list_multipart_uploads(Bucket="files", Prefix="weft/batch/")
    assert (uploads.get("Uploads", []), names(server)) == ([], [])


def test_errors_are_ours_and_quote_nothing_signed(s3, monkeypatch) -> None:
    with pytest.raises(BytesMissing):
        s3.read("never", 0, 1)
    s3.delete("never")
    monkeypatch.setattr(storage_s3, "CONNECT_S", 0.5)
    keys = {"accessKeyId": "wrong", "secretAccessKey": "hush-hush"}
    wrong = S3Storage("s3://files", endpoint=s3._client.meta.endpoint_url, region="us-east-1", keys=keys)
    away = S3Storage("s3://files", endpoint="http://127.0.0.1:9", region="us-east-1", keys=keys)
    for storage in (wrong, away):
        with pytest.raises(StorageUnavailable, match="file storage") as error:
            storage.read("x", 0, 1)
        assert "hush" not in str(error.value)


def test_without_keys_it_uses_the_credentials_of_its_process(server, monkeypatch) -> None:
    place = {"endpoint": server.url, "region": "us-east-1", "keys": None}
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(S3NotUsable, match="no identity"):
        S3Storage("s3://files/own", **place)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ROOT_KEYS["accessKeyId"].decode())
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", ROOT_KEYS["secretAccessKey"].decode())
    own = S3Storage("s3://files/own", **place)
    writer = own.writer("f")
    writer.write(b"content")
    writer.close()
    assert own.read("f", 0, 100) == b"content"
    own.delete("f")


@pytest.mark.parametrize("uri", ["s3://", "s3://UPPER/x", "s3://b", "s3://bucket/../x", "s3://bucket/a b", "http://x"])
def test_what_names_no_bucket_is_refused(uri) -> None:
    with pytest.raises(ValueError, match="is not s3://BUCKET/PREFIX"):
        parse_place(uri)


async def test_a_batch_runs_on_s3_from_upload_to_output(server, s3, store) -> None:
    async with serving(store, s3, sole=False) as world, world.gateway():
        client = world.client()
        job = await client.submit(input_file(20) + b"{")
        ended = await client.ended(job.batch_id)
        assert (ended.status, ended.completed, ended.failed) == (BatchStatus.COMPLETED, 20, 1)
        assert len(await client.lines(ended.output_file_id)) == 20
        assert names(server) == sorted(f"weft/batch/{file.file_id}" for file in await client.files())
        for file in await client.files():
            await client.delete(file.file_id)
        assert names(server) == []
