"""Adapters in device slots, and the threads that bring them there while the batch runs on.

Punica (section 5.2): loading is asynchronous, the request joins at the next step. Each download has a thread, since a
slow one must not hold up the next adapter; one thread, the builder, owns the host copies, reads and converts. The
engine's thread puts a loaded adapter into its slot between two iterations, so a step never sees a change.
"""

import logging
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from weft.domain.request import EndReason
from weft_runner.core.events import (
    Action,
    DropHost,
    Fetch,
    Fetched,
    FetchFailed,
    Load,
    Loaded,
    LoadFailed,
    Retain,
    Unload,
)
from weft_runner.core.host_cache import PREFETCHES
from weft_runner.errors import AdapterInvalid, ArtifactUnknown, ArtifactUnusable, RunnerError
from weft_runner.model.adapter_store import (
    AdapterFiles,
    AdapterStore,
    DeviceAdapter,
    HostAdapter,
    HostTensors,
    Source,
    map_tensors,
)
from weft_runner.model.operator_threads import set_operator_threads

log = logging.getLogger(__name__)
NICE = 10  # of threads that load: a step's thread gets nine tenths of a core that both want
# A download that a sequence waits for has a thread of its own, up to this number: a slow one, and the pauses between
# its tries, delay no other adapter. Threads are made when they are needed.
DOWNLOADS = 256
READS = 16  # files compared with their digests at a time: more would only take turns on the cores
VERIFIED_S = 10.0  # a load this soon after the fetch does not compare the file with its digest again


@dataclass(frozen=True, slots=True, eq=False)
class InSlot:
    """An adapter is ready to be put into its slot; then it is `loaded`."""

    loaded: Loaded
    slot: int
    adapter: DeviceAdapter


Report = Callable[[InSlot | LoadFailed | Fetched | FetchFailed], None]


class AdapterPool:
    """The loader's threads, and what they brought: host copies, and device adapters on their way to a slot."""

    def __init__(self, store: AdapterStore, max_rank: int, source: Source, report: Report) -> None:
        self._store, self._max_rank, self._source, self._report = store, max_rank, source, report
        self.ranks: dict[int, int] = {}  # slot -> the largest width of its stacked sites
        self._host: dict[str, HostAdapter] = {}
        self._closed = False
        self._wanted: Counter[str] = Counter()  # being brought here: they stay on disk, whatever an older Retain names
        self._lock = threading.Lock()  # of `_wanted`: downloads end in threads of their own
        self._to_retain: frozenset[str] | None = None
        self._downloads = ThreadPoolExecutor(DOWNLOADS, thread_name_prefix="adapter-download")
        self._prefetches = ThreadPoolExecutor(PREFETCHES, thread_name_prefix="adapter-prefetch")
        self._reads = ThreadPoolExecutor(READS, thread_name_prefix="adapter-read", initializer=_lower_priority)
        self._fetched: dict[str, tuple[AdapterFiles, float, float]] = {}  # for a sequence; when, and seconds
        # One thread of torch's too: its workers spin after each operator, on cores that the running step needs.
        self._builder = ThreadPoolExecutor(1, thread_name_prefix="adapter-builder", initializer=_begin_building)

    def execute(self, actions: Iterable[Action]) -> None:
        """Orders of the residency book, in their order. Called between two iterations by the engine's thread."""
        for action in actions:
            match action:
                case Load():
                    self._builder.submit(self._load, action)
                case Unload(slot):
                    self._clear(slot)
                case Fetch():
                    self._builder.submit(self._begin_fetch, action)
                case DropHost(digest):
                    self._builder.submit(self._drop_host, digest)
                case Retain(digests):
                    with self._lock:
                        self._to_retain = digests
                    self._builder.submit(self._retain)

    def put(self, built: InSlot) -> None:
        """A built adapter takes its slot."""
        self._store.put(built.slot, built.adapter)
        self.ranks[built.slot] = built.adapter.site_rank

    def close(self) -> None:
        """No further loads; those in flight are waited for."""
        self._closed = True
        self._downloads.shutdown(wait=True, cancel_futures=True)
        self._prefetches.shutdown(wait=True, cancel_futures=True)
        self._reads.shutdown(wait=True, cancel_futures=True)
        self._builder.shutdown(wait=True, cancel_futures=True)

    def _clear(self, slot: int) -> None:
        self._store.clear(slot)
        self.ranks.pop(slot, None)

    # ---- the builder's thread, but for `_read_for` and `_fetch`

    def _load(self, load: Load) -> None:
        self._want(load.digest)
        files, fetched_at, fetch_s = self._fetched.pop(load.digest, (None, 0.0, 0.0))
        if load.digest in self._host:
            self._build(load)
        elif files is not None and time.monotonic() - fetched_at < VERIFIED_S:
            self._build(load, files, fetch_s)
        elif not self._closed:
            self._reads.submit(self._read_for, load)

    def _read_for(self, load: Load) -> None:
        started = time.perf_counter()
        try:
            files = self._source.adapter(load.digest)
        except Exception as error:  # noqa: BLE001 (our own mistake must not leave sequences waiting for ever)
            self._fail(load, error)
        else:
            self._builder.submit(self._build, load, files, time.perf_counter() - started)

    def _build(self, load: Load, files: AdapterFiles | None = None, fetch_s: float = 0.0) -> None:
        since = time.perf_counter() - fetch_s
        try:
            result = self._built(load, self._source_of(load, files).build(load.pages), since)
        except Exception as error:  # noqa: BLE001 (as above)
            self._fail(load, error)
        else:
            self._done_with(load.digest)
            self._report(result)

    def _source_of(self, load: Load, files: AdapterFiles | None) -> HostAdapter:
        """Its host copy, made now if it is to have one; else views of its file."""
        if files is not None and not load.to_host:
            return HostTensors(self._store, map_tensors(files.tensors), files.scales)
        if files is not None:
            self._read(load.digest, files)
        return self._host[load.digest]

    def _built(self, load: Load, adapter: DeviceAdapter, since: float) -> InSlot:
        if adapter.rank > self._max_rank:
            raise AdapterInvalid(f"rank {adapter.rank} is above this runner's --max-rank {self._max_rank}")
        seconds = time.perf_counter() - since
        loaded = Loaded(load.digest, adapter.rank, adapter.n_bytes, self._host_bytes(load.digest), seconds)
        return InSlot(loaded, load.slot, adapter)

    def _host_bytes(self, digest: str) -> int | None:
        return self._host[digest].n_bytes if digest in self._host else None

    def _fail(self, load: Load, error: Exception) -> None:
        self._complain(load.digest, error)
        self._report(LoadFailed(load.digest, *_failure(error)))

    def _begin_fetch(self, fetch: Fetch) -> None:
        self._want(fetch.digest)
        if not self._closed:
            (self._downloads if fetch.urgent else self._prefetches).submit(self._fetch, fetch)

    def _fetch(self, fetch: Fetch) -> None:
        started = time.perf_counter()
        try:
            files = self._source.adapter(fetch.digest)
        except Exception as error:  # noqa: BLE001 (our own mistake must not leave the runner waiting for ever)
            self._fetch_failed(fetch, error)
        else:
            self._builder.submit(self._end_fetch, fetch, files, time.perf_counter() - started)

    def _end_fetch(self, fetch: Fetch, files: AdapterFiles, seconds: float) -> None:
        try:
            if fetch.to_host:
                self._read(fetch.digest, files)
                self._host[fetch.digest].complete()
            n_bytes = self._needed(files) if fetch.measure else None
        except Exception as error:  # noqa: BLE001 (as above)
            self._fetch_failed(fetch, error)
        else:
            if fetch.urgent:
                self._fetched[fetch.digest] = files, time.monotonic(), seconds
            self._done_with(fetch.digest)
            host_bytes = self._host_bytes(fetch.digest) if fetch.to_host else None
            self._report(Fetched(fetch.digest, n_bytes, host_bytes, seconds))

    def _needed(self, files: AdapterFiles) -> int:
        return self._store.needs(map_tensors(files.tensors), files.scales)

    def _fetch_failed(self, fetch: Fetch, error: Exception) -> None:
        self._complain(fetch.digest, error)
        self._report(FetchFailed(fetch.digest, *_failure(error)))

    def _read(self, digest: str, files: AdapterFiles) -> None:
        """Into host memory, unless it is there."""
        if digest not in self._host:
            self._host[digest] = self._store.copy(map_tensors(files.tensors), files.scales)

    def _complain(self, digest: str, error: Exception) -> None:
        if not isinstance(error, RunnerError):
            log.error("bringing an adapter here failed unexpectedly", exc_info=error)
        self._done_with(digest)

    def _want(self, digest: str) -> None:
        with self._lock:
            self._wanted[digest] += 1

    def _done_with(self, digest: str) -> None:
        """Whoever brought it here needs its files no more."""
        with self._lock:
            self._wanted[digest] -= 1
            if not self._wanted[digest]:
                del self._wanted[digest]

    def _drop_host(self, digest: str) -> None:
        self._host.pop(digest, None)

    def _retain(self) -> None:
        """The latest list alone: each reads the manifests of all that it names."""
        with self._lock:
            digests, self._to_retain = self._to_retain, None
        if digests is None:
            return
        self._fetched = {digest: fetched for digest, fetched in self._fetched.items() if digest in digests}
        try:
            with self._lock:
                kept = digests | self._wanted.keys()
            self._source.retain(kept)
        except (RunnerError, OSError):
            log.exception("tidying the adapter cache failed; the next change of desired adapters tries again")


def _begin_building() -> None:
    set_operator_threads(1)
    _lower_priority()


def _lower_priority() -> None:
    """Of the calling thread alone, where the system can (Linux gives each thread its own)."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)


def _failure(error: Exception) -> tuple[EndReason, str, bool]:
    """The reason for the waiting requests, and whether it is permanent: an artifact that is wrong stays wrong.

    One that the depot lacks may come; other requests may be tried again.
    """
    match error:
        case ArtifactUnknown():
            return EndReason.UNKNOWN_ADAPTER, str(error), False
        case ArtifactUnusable():
            return EndReason.LOAD_FAILED, str(error), isinstance(error, AdapterInvalid)
        case RunnerError():
            return EndReason.INTERNAL, str(error), False
        case _:
            return EndReason.INTERNAL, f"{type(error).__name__}: {error}", False
