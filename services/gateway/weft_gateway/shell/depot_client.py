"""The depot as a gateway uses it: the few files of a base model that it needs, and adapters that clients upload.

Everything is kept in a blob folder, so a gateway restarts without the depot, and verified against its SHA-256 whenever
it is read: a damaged file is thrown away and downloaded again.
"""

import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncIterator, Callable, Mapping
from http import HTTPStatus
from typing import Any

import httpx2

from weft.artifacts.blobs import BlobStore
from weft.artifacts.digest import MAX_MANIFEST_BYTES, Manifest, digest_of
from weft.artifacts.errors import Damaged, Reason, Refused, Unavailable, UnknownDigest
from weft.artifacts.fetch import MISMATCH_HEADER
from weft.chat_template import TEMPLATE_FILES
from weft.telemetry.logs import kv

log = logging.getLogger(__name__)
FILES = ("tokenizer.json", *TEMPLATE_FILES)
MAX_FILE_BYTES = 128 << 20


async def fetch_tokenizer_files(
    depot: httpx2.AsyncClient, digest: str, blobs: BlobStore, on_corrupt: Callable[[], None]
) -> Mapping[str, bytes]:
    """Name -> content of the tokenizer's files that this model has. `on_corrupt` is called for each damaged file here.

    Raises Refused (no such model, no tokenizer.json), Unavailable (the depot does not answer, or with other content).
    """

    async def blob(name: str, digest: str, max_bytes: int) -> bytes:
        """Read a file from here, else from the depot; verified either way."""
        try:
            return await asyncio.to_thread(blobs.read, digest, max_bytes=max_bytes)
        except UnknownDigest:
            pass
        except Damaged as error:
            blobs.discard(digest)
            log.error("damaged file thrown away", extra=kv(file=name, digest=digest, difference=error.difference))
            on_corrupt()
        data = await download(depot, digest, max_bytes)
        blobs.put(data)
        return data

    with blobs.lease() as lease:
        lease.name(digest)
        manifest = Manifest.from_bytes(await blob("manifest", digest, MAX_MANIFEST_BYTES))
        manifest.file("tokenizer.json")
        entries = [entry for entry in manifest.files if entry.name in FILES]
        lease.name(*(entry.digest for entry in entries))
        return {entry.name: await blob(entry.name, entry.digest, MAX_FILE_BYTES) for entry in entries}


async def download(depot: httpx2.AsyncClient, digest: str, max_bytes: int) -> bytes:
    """A blob of the depot, verified. Raises Unavailable, UnknownDigest, Refused(TooLarge)."""
    data = await _download(depot, digest, max_bytes)
    if digest_of(data) != digest:
        with contextlib.suppress(httpx2.HTTPError):  # the depot verifies its copy; the next try finds a whole one
            await depot.head(f"/v1/blobs/{digest}", headers={MISMATCH_HEADER: "1"})
        raise Unavailable(f"the depot's content of {digest} has another SHA-256", Reason.DIGEST_MISMATCH)
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


class DepotRefused(Exception):
    """The depot does not take an upload: `status` of HTTP, `code` for programs, and the depot's own message."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, re.sub("(?<=[a-z])(?=[A-Z])", "_", reason).lower()


async def upload_adapter(
    depot: httpx2.AsyncClient, namespace: str, content_type: str, body: AsyncIterator[bytes]
) -> Mapping[str, Any]:
    """Stream a form with an adapter's files to the depot. Returns its digest, uri and sizeBytes.

    Raises DepotRefused, httpx2.HTTPError, and what `body` raises.
    """
    headers = {"content-type": content_type}
    timeout = httpx2.Timeout(10.0, read=None)  # the whole upload is bounded by the caller
    response = await depot.put(
        "/v1/uploads", params={"namespace": namespace}, content=body, headers=headers, timeout=timeout
    )
    if response.status_code in (HTTPStatus.INTERNAL_SERVER_ERROR, HTTPStatus.BAD_GATEWAY, HTTPStatus.FORBIDDEN):
        response.raise_for_status()
    value: Mapping[str, Any] = response.json()
    if response.status_code != HTTPStatus.CREATED:
        raise DepotRefused(response.status_code, str(value.get("reason", "")), str(value.get("message", "")))
    return value
