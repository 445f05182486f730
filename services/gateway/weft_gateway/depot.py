"""The few files of a base model that a gateway needs, from the depot by digest; weights stay where they are.

Everything is verified against its SHA-256 and kept in a blob folder, so a gateway restarts without the depot.
"""

from collections.abc import Mapping
from http import HTTPStatus

import httpx2

from weft.artifacts.blobs import BlobStore
from weft.artifacts.digest import MAX_MANIFEST_BYTES, Manifest, digest_of
from weft.artifacts.errors import Reason, Refused, Unavailable, UnknownDigest

FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
MAX_FILE_BYTES = 128 << 20


async def fetch_text_files(depot: httpx2.AsyncClient, digest: str, blobs: BlobStore) -> Mapping[str, bytes]:
    """Name -> content of the tokenizer's files that this model has.

    Raises Refused (no such model, no tokenizer.json, damaged content), Unavailable (the depot does not answer).
    """
    manifest = Manifest.from_bytes(await _blob(depot, digest, blobs, MAX_MANIFEST_BYTES))
    manifest.file("tokenizer.json")
    entries = [entry for entry in manifest.files if entry.name in FILES]
    return {entry.name: await _blob(depot, entry.digest, blobs, MAX_FILE_BYTES) for entry in entries}


async def _blob(depot: httpx2.AsyncClient, digest: str, blobs: BlobStore, max_bytes: int) -> bytes:
    if blobs.has(digest):
        return blobs.read(digest, max_bytes=max_bytes)
    data = await _download(depot, digest, max_bytes)
    if digest_of(data) != digest:
        raise Refused(Reason.DIGEST_MISMATCH, f"the depot's content of {digest} has another SHA-256")
    blobs.put(data)
    return data


async def _download(depot: httpx2.AsyncClient, digest: str, max_bytes: int) -> bytes:
    try:
        async with depot.stream("GET", f"/v1/blobs/{digest}") as response:
            if response.status_code == HTTPStatus.NOT_FOUND:
                raise UnknownDigest(digest, "the depot")
            response.raise_for_status()
            data = bytearray()
            async for chunk in response.aiter_bytes():
                data += chunk
                if len(data) > max_bytes:
                    raise Refused(Reason.TOO_LARGE, f"{digest} is larger than {max_bytes} bytes")
            return bytes(data)
    except httpx2.HTTPError as error:
        raise Unavailable(f"{digest} from the depot at {depot.base_url}: {error!r}") from error
