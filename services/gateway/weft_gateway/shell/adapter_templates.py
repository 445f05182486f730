"""The chat templates of adapters that come with their own, read from the depot when the first chat needs them.

They are kept apart from the tokenizers of pools: however many adapters there are, a base's tokenizer stays. What an
adapter has of template files is remembered by their digests, so that adapters with equal files, as a trainer writes
them, share one compiled template.
"""

import asyncio
import weakref

import httpx2

from weft.artifacts.digest import MAX_MANIFEST_BYTES, Manifest
from weft.chat_template import TEMPLATE_FILES
from weft.domain.lru import LruDict
from weft_gateway.shell.depot_client import download
from weft_gateway.shell.tokenizer import ModelTokenizer

MAX_KNOWN_ADAPTERS = 16_384  # adapters whose files are known
MAX_COMPILED = 256
MAX_FILE_BYTES = 4 << 20
_Files = tuple[tuple[str, str], ...]  # name and digest of each template file


class AdapterTemplates:
    """Owned by the event loop."""

    def __init__(self, depot: httpx2.AsyncClient) -> None:
        self._depot = depot
        self._files = LruDict[str, _Files](MAX_KNOWN_ADAPTERS)
        self._compiled = LruDict[tuple[str, _Files], tuple[ModelTokenizer, ModelTokenizer]](MAX_COMPILED)
        self._locks = weakref.WeakValueDictionary[object, asyncio.Lock]()

    async def tokenizer(self, adapter: str, base_digest: str, base: ModelTokenizer) -> ModelTokenizer:
        """The base's tokenizer with the template of an adapter that has one.

        Raises Unavailable, UnknownDigest, Refused.
        """
        if (files := self._files.get(adapter)) is None:
            async with self._lock(adapter):
                files = self._files.get(adapter) or await self._template_files(adapter)
        self._files[adapter] = files
        key = base_digest, files
        async with self._lock(key):
            known = self._compiled.get(key)
            if known is None or known[0] is not base:
                found = {name: await download(self._depot, digest, MAX_FILE_BYTES) for name, digest in files}
                known = base, await asyncio.to_thread(base.with_template_of, found)
            self._compiled[key] = known
        return known[1]

    async def _template_files(self, adapter: str) -> _Files:
        manifest = Manifest.from_bytes(await download(self._depot, adapter, MAX_MANIFEST_BYTES))
        return tuple((entry.name, entry.digest) for entry in manifest.files if entry.name in TEMPLATE_FILES)

    def _lock(self, key: object) -> asyncio.Lock:
        return self._locks.setdefault(key, asyncio.Lock())
