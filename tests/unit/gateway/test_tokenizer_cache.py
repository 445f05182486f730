"""The tokenizers' cache on disk: what pools need stays, what they needed goes."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from harness.waiting import soon
from weft.artifacts.blobs import BlobStore
from weft.artifacts.digest import Digest, FileEntry, Manifest, build_manifest, digest_of, hex_of
from weft.wire.v1 import scheduler_pb2 as pb
from weft_gateway.core.routes import RouteTable, table_of
from weft_gateway.shell.tokenizer_cache import TokenizerCache

NOBODY = "http://127.0.0.1:1"


def put_model(store: BlobStore, *contents: bytes) -> Manifest:
    names = ("tokenizer.json", "tokenizer_config.json")
    files = [FileEntry(n, hex_of(store.put(data)), len(data)) for n, data in zip(names, contents, strict=False)]
    manifest = build_manifest("model", files)
    store.put(manifest.to_bytes())
    return manifest


def table(*bases: Digest | str) -> RouteTable:
    return table_of(pb.Routes(pools=[pb.PoolRoute(pool=f"n/{i}", base_digest=base) for i, base in enumerate(bases)]))


def blobs(folder: Path) -> set[str]:
    return {path.name for path in (folder / "sha256").iterdir()}


def names(*manifests: Manifest) -> set[str]:
    return {hex_of(m.digest) for m in manifests} | {entry.sha256 for m in manifests for entry in m.files}


@pytest.fixture
async def tidied(tmp_path: Path) -> AsyncIterator[Callable[..., object]]:
    """A table to a gateway's tokenizers; returns when the disk is as it says."""
    tokenizers = TokenizerCache(NOBODY, tmp_path)

    async def want(*bases: Digest | str) -> None:
        tokenizers.want(table(*bases))
        assert tokenizers._tidying is not None
        await soon(tokenizers._tidying)

    yield want
    await tokenizers.close()


async def test_files_of_pools_that_are_gone_leave_the_disk_and_shared_ones_stay(tmp_path: Path, tidied) -> None:
    store = BlobStore(tmp_path)
    first, second = put_model(store, b"shared", b"one"), put_model(store, b"shared", b"two")
    await tidied(first.digest, second.digest)
    assert blobs(tmp_path) == names(first, second)
    await tidied(second.digest)
    assert blobs(tmp_path) == names(second)
    await tidied()
    assert blobs(tmp_path) == set()


async def test_what_an_earlier_life_left_goes_with_the_first_table(tmp_path: Path, tidied) -> None:
    store = BlobStore(tmp_path)
    kept, left = put_model(store, b"kept"), put_model(store, b"left")
    store.part(left.digest).write_bytes(b"half")
    await tidied(kept.digest)
    assert blobs(tmp_path) == names(kept)
    assert not store.part(left.digest).exists()


async def test_tables_that_come_meanwhile_are_followed_to_the_last(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    models = [put_model(store, b"%d" % i) for i in range(3)]
    tokenizers = TokenizerCache(NOBODY, tmp_path)
    for model in models:  # no await in between: the first removal has not begun
        tokenizers.want(table(model.digest))
    assert tokenizers._tidying is not None
    await soon(tokenizers._tidying)
    assert blobs(tmp_path) == names(models[-1])
    await tokenizers.close()


async def test_a_digest_that_is_none_costs_the_tidying_and_nothing_else(tmp_path: Path, tidied, caplog) -> None:
    manifest = put_model(BlobStore(tmp_path), b"x")
    await tidied(manifest.digest, "no digest")
    assert "tokenizer cache not tidied" in caplog.text
    assert blobs(tmp_path) == names(manifest)
    await tidied(manifest.digest)
    assert digest_of(b"x") == manifest.files[0].digest
