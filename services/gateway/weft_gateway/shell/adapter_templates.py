"""Chat templates that are not a base's own, read from the depot when the first chat needs them.

They come with an adapter, or are an artifact of their own: a text that the spec of an adapter or a pool gives. They are
kept apart from the tokenizers of pools: however many adapters there are, a base's tokenizer stays. What an artifact
has of template files is remembered by their digests, so that adapters with equal files, as a trainer writes them,
share one compiled template.
"""

import asyncio
import weakref

import httpx2

from weft.artifacts.digest import MAX_MANIFEST_BYTES, Manifest
from weft.chat_template import NAMED_FILE, TEMPLATE_FILE, TEMPLATE_FILES
from weft.domain.lru import LruDict
from weft_gateway.shell.depot_client import download
from weft_gateway.shell.tokenizer import ModelTokenizer

MAX_KNOWN = 16_384  # artifacts whose files are known
MAX_COMPILED = 256
MAX_FILE_BYTES = 4 << 20
_Files = tuple[tuple[str, str], ...]  # name and digest of each template file


class AdapterTemplates:
    """Owned by the event loop."""

    def __init__(self, depot: httpx2.AsyncClient) -> None:
        self._depot = depot
        self._files = LruDict[str, _Files](MAX_KNOWN)
        self._compiled = LruDict[tuple[str, _Files], tuple[ModelTokenizer, ModelTokenizer]](MAX_COMPILED)
        self._locks = weakref.WeakValueDictionary[object, asyncio.Lock]()

    async def tokenizer(self, adapter: str, supplied: str, base_digest: str, base: ModelTokenizer) -> ModelTokenizer:
        """The base's tokenizer with another template. `adapter`: whose files count, by its digest; "" for none.

        `supplied`: the digest of a template that counts in place of those among these files; "" for none. Raises
        Unavailable, UnknownDigest, Refused.
        """
        files = await self._files_of(adapter) if adapter else ()
        if supplied:
            rest = [(name, digest) for name, digest in files if name not in (TEMPLATE_FILE, NAMED_FILE)]
            files = (*rest, *await self._files_of(supplied))
        key = base_digest, files
        async with self._lock(key):
            compiled = self._compiled.get(key)
            if compiled is None or compiled[0] is not base:
                bodies = {name: await download(self._depot, digest, MAX_FILE_BYTES) for name, digest in files}
                compiled = base, await asyncio.to_thread(base.with_template_of, bodies)
            self._compiled[key] = compiled
        return compiled[1]

    async def _files_of(self, artifact: str) -> _Files:
        if (files := self._files.get(artifact)) is None:
            async with self._lock(artifact):
                files = self._files.get(artifact) or await self._template_files(artifact)
        self._files[artifact] = files
        return files

    async def _template_files(self, artifact: str) -> _Files:
        manifest = Manifest.from_bytes(await download(self._depot, artifact, MAX_MANIFEST_BYTES))
        return tuple((entry.name, entry.digest) for entry in manifest.files if entry.name in TEMPLATE_FILES)

    def _lock(self, key: object) -> asyncio.Lock:
        return self._locks.setdefault(key, asyncio.Lock())
