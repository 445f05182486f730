"""The few files of a base model that a gateway needs, from the depot by digest; weights stay where they are.

Everything is kept in a blob folder, so a gateway restarts without the depot, and verified against its SHA-256 whenever
it is read: a damaged file is thrown away and downloaded again.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus

import httpx2

from weft.artifacts.blobs import BlobStore
from weft.artifacts.digest import MAX_MANIFEST_BYTES, Manifest, digest_of
from weft.artifacts.errors import Damaged, Reason, Refused, Unavailable, UnknownDigest
from weft.artifacts.fetch import MISMATCH_HEADER
from weft.telemetry.logs import kv

log = logging.getLogger(__name__)
FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
MAX_FILE_BYTES = 128 << 20


async def fetch_tokenizer_files(
    depot: httpx2.AsyncClient, digest: str, blobs: BlobStore, on_corrupt: Callable[[], None]
) -> Mapping[str, bytes]:
    """Name -> content of the tokenizer's files that this model has. `on_corrupt` is called for each damaged file here.

    Raises Refused (no such model, no tokenizer.json), Unavailable (the depot does not answer, or with other content).
    """
    cache = _Cache(depot, blobs, on_corrupt)
    with blobs.lease() as lease:
        lease.name(digest)
        manifest = Manifest.from_bytes(await cache.blob("manifest", digest, MAX_MANIFEST_BYTES))
        manifest.file("tokenizer.json")
        entries = [entry for entry in manifest.files if entry.name in FILES]
        lease.name(*(entry.digest for entry in entries))
        return {entry.name: await cache.blob(entry.name, entry.digest, MAX_FILE_BYTES) for entry in entries}


@dataclass(frozen=True, slots=True)
class _Cache:
    depot: httpx2.AsyncClient
    blobs: BlobStore
    on_corrupt: Callable[[], None]

    async def blob(self, name: str, digest: str, max_bytes: int) -> bytes:
        """From here, else from the depot; verified either way."""
        try:
            return await asyncio.to_thread(self.blobs.read, digest, max_bytes=max_bytes)
        except UnknownDigest:
            pass
        except Damaged as error:
            self.blobs.discard(digest)
            log.error("damaged file thrown away", extra=kv(file=name, digest=digest, difference=error.difference))
            self.on_corrupt()
        data = await _download(self.depot, digest, max_bytes)
        if digest_of(data) != digest:
            with contextlib.suppress(httpx2.HTTPError):  # the depot verifies its copy; the next try finds a whole one
                await self.depot.head(f"/v1/blobs/{digest}", headers={MISMATCH_HEADER: "1"})
            raise Unavailable(f"the depot's content of {digest} has another SHA-256", Reason.DIGEST_MISMATCH)
        self.blobs.put(data)
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
