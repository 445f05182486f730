"""The tokenizers' cache on disk: what pools need stays, what they needed goes."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx2
import pytest
import tokenizers as tokenizers_library

from harness.waiting import soon
from weft.artifacts.blobs import BlobStore
from weft.artifacts.digest import Digest, FileEntry, Manifest, build_manifest, digest_of, hex_of
from weft_gateway.core.events import TokenizerChanged, TokenizerState
from weft_gateway.shell import TokenizerCache

NOBODY = httpx2.AsyncClient(base_url="http://127.0.0.1:1")


def put_model(store: BlobStore, *contents: bytes) -> Manifest:
    names = ("tokenizer.json", "tokenizer_config.json")
    files = [FileEntry(n, hex_of(store.put(data)), len(data)) for n, data in zip(names, contents, strict=False)]
    manifest = build_manifest("model", files)
    store.put(manifest.to_bytes())
    return manifest


def blobs(folder: Path) -> set[str]:
    return {path.name for path in (folder / "sha256").iterdir()}


def names(*manifests: Manifest) -> set[str]:
    return {hex_of(m.digest) for m in manifests} | {entry.sha256 for m in manifests for entry in m.files}


@pytest.fixture
def tokenizer_json() -> bytes:
    return tokenizers_library.Tokenizer(tokenizers_library.models.BPE()).to_str().encode()


@pytest.fixture
async def synced(tmp_path: Path) -> AsyncIterator[Callable[..., object]]:
    """Base models to a gateway's tokenizers; returns when the disk holds theirs."""
    tokenizers = TokenizerCache(NOBODY, tmp_path)

    async def sync(*bases: Digest | str) -> None:
        tokenizers.sync(set(bases))
        assert tokenizers._cleaning is not None
        await soon(tokenizers._cleaning)

    yield sync
    await tokenizers.close()


async def test_files_of_pools_that_are_gone_leave_the_disk_and_shared_ones_stay(tmp_path: Path, synced) -> None:
    store = BlobStore(tmp_path)
    first, second = put_model(store, b"shared", b"one"), put_model(store, b"shared", b"two")
    await synced(first.digest, second.digest)
    assert blobs(tmp_path) == names(first, second)
    await synced(second.digest)
    assert blobs(tmp_path) == names(second)
    await synced()
    assert blobs(tmp_path) == set()


async def test_what_an_earlier_life_left_goes_with_the_first_table(tmp_path: Path, synced) -> None:
    store = BlobStore(tmp_path)
    kept, left = put_model(store, b"kept"), put_model(store, b"left")
    store.part(left.digest).write_bytes(b"half")
    await synced(kept.digest)
    assert blobs(tmp_path) == names(kept)
    assert not store.part(left.digest).exists()


async def test_changes_that_come_meanwhile_are_followed_to_the_last(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    models = [put_model(store, b"%d" % i) for i in range(3)]
    tokenizers = TokenizerCache(NOBODY, tmp_path)
    for model in models:  # no await in between: the first removal has not begun
        tokenizers.sync({model.digest})
    assert tokenizers._cleaning is not None
    await soon(tokenizers._cleaning)
    assert blobs(tmp_path) == names(models[-1])
    await tokenizers.close()


async def test_a_digest_that_is_none_costs_the_cleaning_and_nothing_else(tmp_path: Path, synced, caplog) -> None:
    manifest = put_model(BlobStore(tmp_path), b"x")
    await synced(manifest.digest, "no digest")
    assert "tokenizer cache not cleaned" in caplog.text
    assert blobs(tmp_path) == names(manifest)
    await synced(manifest.digest)
    assert digest_of(b"x") == manifest.files[0].digest


async def test_each_state_of_a_tokenizer_is_reported(tmp_path: Path, tokenizer_json: bytes) -> None:
    good, bad = put_model(BlobStore(tmp_path), tokenizer_json), put_model(BlobStore(tmp_path), b"{}")
    changes: asyncio.Queue[TokenizerChanged] = asyncio.Queue()
    tokenizers = TokenizerCache(NOBODY, tmp_path, on_change=changes.put_nowait)
    tokenizers.sync({good.digest, bad.digest})
    tokenizers.sync({good.digest, bad.digest})
    seen = [await soon(changes.get()) for _ in range(4)]
    tokenizers.sync(set())
    seen += [changes.get_nowait() for _ in range(2)]
    assert changes.empty()
    states = {
        digest: [change.state for change in seen if change.digest == digest] for digest in (good.digest, bad.digest)
    }
    assert states[good.digest] == [TokenizerState.LOADING, TokenizerState.READY, TokenizerState.REMOVED]
    assert states[bad.digest] == [TokenizerState.LOADING, TokenizerState.FAILED, TokenizerState.REMOVED]
    assert tokenizers.get(good.digest) is None
    await tokenizers.close()
