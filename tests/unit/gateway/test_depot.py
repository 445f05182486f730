"""A tokenizer's files: from the cache where it is whole, else from the depot."""

import json
from collections.abc import Mapping
from pathlib import Path

import httpx2
import pytest

from harness.blobs import check_blobs
from weft.artifacts.blobs import BlobStore
from weft.artifacts.digest import FileEntry, build_manifest, digest_of, hex_of
from weft.artifacts.errors import Reason, Unavailable
from weft_gateway.shell import fetch_tokenizer_files

TOKENIZER = json.dumps({"model": {"vocab": {"a": 0}}}).encode()
MANIFEST = build_manifest("model", [FileEntry("tokenizer.json", hex_of(digest_of(TOKENIZER)), len(TOKENIZER))])


def depot(blobs: Mapping[str, bytes], asked: list[httpx2.Request] | None = None) -> httpx2.AsyncClient:
    def answer(request: httpx2.Request) -> httpx2.Response:
        if asked is not None:
            asked.append(request)
        content = blobs.get(request.url.path.rpartition("/")[2])
        return httpx2.Response(404) if content is None else httpx2.Response(200, content=content)

    return httpx2.AsyncClient(base_url="http://depot", transport=httpx2.MockTransport(answer))


WHOLE: dict[str, bytes] = {MANIFEST.digest: MANIFEST.to_bytes(), digest_of(TOKENIZER): TOKENIZER}


@pytest.mark.parametrize("digest", WHOLE)
async def test_a_depot_that_sends_other_content_is_asked_to_verify_it(tmp_path: Path, digest: str) -> None:
    blobs, damaged = BlobStore(tmp_path), list[int]()
    asked = list[httpx2.Request]()
    other = depot(WHOLE | {digest: WHOLE[digest] + b" "}, asked)
    with pytest.raises(Unavailable) as caught:
        await fetch_tokenizer_files(other, MANIFEST.digest, blobs, lambda: damaged.append(1))
    assert caught.value.reason == Reason.DIGEST_MISMATCH
    assert not blobs.has(digest)
    assert (asked[-1].url.path, "weft-mismatch" in asked[-1].headers) == (f"/v1/blobs/{digest}", True)
    found = await fetch_tokenizer_files(depot(WHOLE), MANIFEST.digest, blobs, lambda: damaged.append(1))
    assert found == {"tokenizer.json": TOKENIZER}
    assert damaged == [], "nothing here was"
    check_blobs(blobs)


async def test_a_whole_file_here_needs_no_depot_and_a_damaged_one_is_not_used_where_it_is_away(tmp_path: Path) -> None:
    blobs, damaged = BlobStore(tmp_path), list[int]()
    found = await fetch_tokenizer_files(depot(WHOLE), MANIFEST.digest, blobs, lambda: None)
    assert await fetch_tokenizer_files(_away(), MANIFEST.digest, blobs, lambda: damaged.append(1)) == found
    assert not damaged
    blobs.path(digest_of(TOKENIZER)).write_bytes(TOKENIZER.replace(b"a", b"b"))
    with pytest.raises(Unavailable):
        await fetch_tokenizer_files(_away(), MANIFEST.digest, blobs, lambda: damaged.append(1))
    assert damaged == [1]


def _away() -> httpx2.AsyncClient:
    def refuse(request: httpx2.Request) -> httpx2.Response:
        raise httpx2.ConnectError("refused", request=request)

    return httpx2.AsyncClient(base_url="http://depot", transport=httpx2.MockTransport(refuse))
