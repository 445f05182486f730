"""Persistence of the object store in `objects.json`, whole or not at all.

A write goes to a temporary file and is fsynced. Then the file replaces the old file, and the folder is fsynced. A
change with a waiting caller is written at once; the changes of many callers are written together (group commit). A
change without a waiting caller, such as a status, may wait up to `GATHER_S` for more changes. An object is encoded when
it has changed, not at each write. Versions in the file run ahead of versions in memory. So after a crash no version is
used twice, even if the last versions were never written.
"""

import asyncio
import json
import logging
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from weft.files import write_atomically
from weft.telemetry.logs import kv
from weft_operator.core.resources import Object, Ref
from weft_operator.errors import FileRootGone, StoreDamaged
from weft_operator.local.objects import ObjectStore, WatchEvent, ref_of

log = logging.getLogger(__name__)

FORMAT = 1
AHEAD = 1_000_000
RETRY_S = 1.0
GATHER_S = 1.0


def open_store(
    path: Path, clock: Callable[[], float], with_defaults: Callable[[Object], Object] = lambda obj: obj
) -> ObjectStore:
    """Read the store from its file; without a file, return an empty store. Nothing is ever thrown away.

    `with_defaults` makes the served form of a stored object. It raises ValueError for a damaged object. Raises
    StoreDamaged.
    """
    try:
        content = json.loads(path.read_bytes())
        if content["format"] != FORMAT:
            raise StoreDamaged(f"{path} has format {content['format']}, this weft reads format {FORMAT}: update weft")
        return ObjectStore(clock, map(with_defaults, content["objects"]), content["version"])
    except FileNotFoundError:
        return ObjectStore(clock)
    except (ValueError, KeyError, TypeError) as error:
        raise StoreDamaged(f"{path} is damaged ({error}): repair it, or move it away and apply again") from error


class Durable:
    """Writes a store to its file as it changes. `run()` until cancelled; `flush()` once more at the end."""

    def __init__(self, store: ObjectStore, path: Path) -> None:
        self._store, self._path = store, path
        self._written = store.version
        self._lines = {ref_of(obj): encode(obj) for obj in store.objects()}  # of the file, by object
        self._unwritten = dict[Ref, Object]()  # changed since its line was encoded
        self._changed, self._requested = asyncio.Event(), asyncio.Event()
        # a file has a single writer: `flush` may come while `run` writes in its thread
        self._writing = threading.Lock()
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []
        store.listen(self._on_event)

    async def committed(self) -> None:
        """Wait until all present changes are on disk. Raises OSError if they cannot be written."""
        if self._written < self._store.version:
            done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append((self._store.version, done))
            self._requested.set()
            await done

    async def run(self) -> None:
        """Write whenever something has changed."""
        while True:
            await self._changed.wait()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._requested.wait(), GATHER_S)
            self._changed.clear()
            self._requested.clear()
            version, lines = self._snapshot()
            try:
                await asyncio.to_thread(self._write, version, lines)
            except OSError as error:
                log.error("objects are not on disk", extra=kv(path=self._path, error=str(error)))
                self._settle(version, error)
                self._changed.set()
                await asyncio.sleep(RETRY_S)
            else:
                self._settle(version, None)

    def flush(self) -> None:
        """Write all unwritten changes now. Raises OSError."""
        self._write(*self._snapshot())

    def _write(self, version: int, lines: list[bytes]) -> None:
        """Write the file, in any thread. An older snapshot never replaces a newer snapshot."""
        with self._writing:
            if version > self._written:
                write_atomically(self._path, snapshot(lines, version))
                self._written = version

    def _snapshot(self) -> tuple[int, list[bytes]]:
        for ref, obj in self._unwritten.items():
            self._lines[ref] = encode(obj)
        self._unwritten.clear()
        return self._store.version, list(self._lines.values())

    def _settle(self, version: int, error: OSError | None) -> None:
        ready = [done for awaited, done in self._waiting if awaited <= version]
        self._waiting = [(awaited, done) for awaited, done in self._waiting if awaited > version]
        for done in ready:
            if done.done():  # its caller has gone away
                continue
            if error is None:
                done.set_result(None)
            else:
                done.set_exception(error)

    def _on_event(self, event: WatchEvent) -> None:
        ref = ref_of(event.object)
        if event.type == "DELETED":
            self._unwritten.pop(ref, None)
            self._lines.pop(ref, None)
        else:
            self._unwritten[ref] = event.object
        self._changed.set()


def encode(obj: Object) -> bytes:
    """Encode an object as its line of the file."""
    return json.dumps(obj).encode()


def snapshot(lines: list[bytes], version: int) -> bytes:
    """Join the whole file, an object a line."""
    head = json.dumps({"format": FORMAT, "version": version + AHEAD})[:-1].encode()
    return b"".join((head, b', "objects": [\n', b",\n".join(lines), b"\n]}\n"))


FILE = "file-root"


def settle_file_root(data_dir: Path, file_root: Path | None) -> Path | None:
    """Choose the named folder and keep it for the next start, or else the kept folder. Raises FileRootGone."""
    path = data_dir / FILE
    if file_root is not None:
        write_atomically(path, os.fsencode(file_root.absolute()))
        return file_root
    try:
        root = Path(os.fsdecode(path.read_bytes()))
    except FileNotFoundError:
        return None
    if not root.is_dir():
        raise FileRootGone(
            f"{root}, the root of `file:` URIs ({path} names it), is not a folder any more: "
            "name its new place with --file-root"
        )
    return root
