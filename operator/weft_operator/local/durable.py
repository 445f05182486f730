"""`objects.json`: the object store on disk, whole or not at all.

A write goes to a temporary file, is fsynced, renamed over the old one, and the folder is fsynced. Writes of many
callers are one write (group commit). Versions in the file run ahead of those in memory, so after a crash no version is
given out twice although the last ones were never written.
"""

import asyncio
import json
import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from weft.files import write_atomically
from weft.telemetry.logs import kv
from weft_operator.errors import StoreDamaged
from weft_operator.local.objects import Event, ObjectStore
from weft_operator.resources import Object

log = logging.getLogger(__name__)

FORMAT = 1
AHEAD = 1_000_000
RETRY_S = 1.0


def open_store(
    path: Path, clock: Callable[[], float], as_served: Callable[[Object], Object] = lambda obj: obj
) -> ObjectStore:
    """The store as the file says; an empty one without a file. Raises StoreDamaged: nothing is ever thrown away.

    `as_served`: what is served of an object that is in the file; a ValueError of its says that the object is damaged.
    """
    try:
        content = json.loads(path.read_bytes())
        if content["format"] != FORMAT:
            raise StoreDamaged(f"{path} has format {content['format']}, this weft reads format {FORMAT}: update weft")
        return ObjectStore(clock, map(as_served, content["objects"]), content["version"])
    except FileNotFoundError:
        return ObjectStore(clock)
    except (ValueError, KeyError, TypeError) as error:
        raise StoreDamaged(f"{path} is damaged ({error}): repair it, or move it away and apply again") from error


class Durable:
    """Writes a store to its file as it changes. `run()` until cancelled; `flush()` once more at the end."""

    def __init__(self, store: ObjectStore, path: Path) -> None:
        self._store, self._path = store, path
        self._written = store.version
        self._changed = asyncio.Event()
        self._writing = threading.Lock()  # a file has one writer: `flush` may come while `run` writes in its thread
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []
        store.listen(self._on_event)

    async def committed(self) -> None:
        """Wait until everything that has happened so far is on disk. Raises OSError when it cannot be written."""
        if self._written < self._store.version:
            done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append((self._store.version, done))
            await done

    async def run(self) -> None:
        """Write whenever something has changed."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            version, content = self._snapshot()
            try:
                await asyncio.to_thread(self._write, version, content)
            except OSError as error:
                log.error("objects are not on disk", extra=kv(path=self._path, error=str(error)))
                self._settle(version, error)
                self._changed.set()
                await asyncio.sleep(RETRY_S)
            else:
                self._settle(version, None)

    def flush(self) -> None:
        """Write now what is not yet written. Raises OSError."""
        self._write(*self._snapshot())

    def _write(self, version: int, content: bytes) -> None:
        """Any thread. An older snapshot never replaces a newer one."""
        with self._writing:
            if version > self._written:
                write_atomically(self._path, content)
                self._written = version

    def _snapshot(self) -> tuple[int, bytes]:
        return self._store.version, serialise(self._store.objects(), self._store.version)

    def _settle(self, version: int, error: OSError | None) -> None:
        ready = [done for wanted, done in self._waiting if wanted <= version]
        self._waiting = [(wanted, done) for wanted, done in self._waiting if wanted > version]
        for done in ready:
            if done.done():  # its caller has gone away
                continue
            if error is None:
                done.set_result(None)
            else:
                done.set_exception(error)

    def _on_event(self, event: Event) -> None:  # noqa: ARG002 (the store's listener)
        self._changed.set()


def serialise(objects: Sequence[Object], version: int) -> bytes:
    return json.dumps({"format": FORMAT, "version": version + AHEAD, "objects": objects}, indent=1).encode() + b"\n"
