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
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from weft.domain.request import EndReason
from weft_runner.core import events as ev
from weft_runner.core.host_cache import PREFETCHES
from weft_runner.errors import AdapterInvalid, ArtifactUnknown, ArtifactUnusable, CacheFull, RunnerError
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

    loaded: ev.Loaded
    slot: int
    adapter: DeviceAdapter


Report = Callable[[InSlot | ev.LoadFailed | ev.Fetched | ev.FetchFailed], None]


class AdapterPool:
    """The loader's threads, and what they brought: host copies, and device adapters on their way to a slot."""

    def __init__(self, store: AdapterStore, max_rank: int, source: Source, report: Report) -> None:
        self._store, self._max_rank, self._source, self._report = store, max_rank, source, report
        self.ranks: dict[int, int] = {}  # slot -> the largest width of its stacked sites
        self._host: dict[str, HostAdapter] = {}
        self._closed = False
        self._loading: Counter[str] = Counter()  # being brought here: they stay on disk, whatever an older Retain names
        self._lock = threading.Lock()  # of `_loading`: downloads end in threads of their own
        self._to_retain: frozenset[str] | None = None
        self._downloads = ThreadPoolExecutor(DOWNLOADS, thread_name_prefix="adapter-download")
        self._prefetches = ThreadPoolExecutor(PREFETCHES, thread_name_prefix="adapter-prefetch")
        self._reads = ThreadPoolExecutor(READS, thread_name_prefix="adapter-read", initializer=_lower_priority)
        self._fetched: dict[str, tuple[AdapterFiles, float, float]] = {}  # for a sequence; when, and seconds
        # One thread of torch's too: its workers spin after each operator, on cores that the running step needs.
        self._builder = ThreadPoolExecutor(1, thread_name_prefix="adapter-builder", initializer=_begin_building)

    def execute(self, action: ev.Action) -> None:
        """Execute an action, between two iterations of the engine's thread."""
        match action:
            case ev.Load():
                self._builder.submit(self._load, action)
            case ev.Unload(slot):
                self._store.clear(slot)
                self.ranks.pop(slot, None)
            case ev.Fetch():
                self._builder.submit(self._fetch, action)
            case ev.DropHost(digest):
                self._builder.submit(self._host.pop, digest, None)
            case ev.Retain(digests):
                with self._lock:
                    self._to_retain = digests
                self._builder.submit(self._retain)

    def put(self, built: InSlot) -> None:
        """Put a built adapter into its slot."""
        self._store.put(built.slot, built.adapter)
        self.ranks[built.slot] = built.adapter.site_rank

    def close(self) -> None:
        """Begin no further loads, and wait for those in flight."""
        self._closed = True
        for threads in (self._downloads, self._prefetches, self._reads, self._builder):
            threads.shutdown(wait=True, cancel_futures=True)

    # ---- the builder's thread, but for `_read`

    def _load(self, load: ev.Load) -> None:
        self._want(load.digest)
        files, fetched_at, fetch_s = self._fetched.pop(load.digest, (None, 0.0, 0.0))
        if load.digest in self._host:
            self._build(load)
        elif files is not None and time.monotonic() - fetched_at < VERIFIED_S:
            self._build(load, files, fetch_s)
        elif not self._closed:
            self._reads.submit(self._read, load)

    def _fetch(self, fetch: ev.Fetch) -> None:
        self._want(fetch.digest)
        if not self._closed:
            (self._downloads if fetch.urgent else self._prefetches).submit(self._read, fetch)

    def _read(self, action: ev.Load | ev.Fetch) -> None:
        """Have an adapter on disk and compared with its digest, in a thread that may wait; the builder goes on."""
        started = time.perf_counter()
        go_on = partial(self._build, action) if isinstance(action, ev.Load) else partial(self._end_fetch, action)
        try:
            files = self._source.adapter(action.digest)
        except Exception as error:  # noqa: BLE001 (our own mistake must not leave sequences waiting for ever)
            self._fail(action, error)
        else:
            self._builder.submit(go_on, files, time.perf_counter() - started)

    def _build(self, load: ev.Load, files: AdapterFiles | None = None, fetch_s: float = 0.0) -> None:
        """Build from the host copy, made now if there is to be one; else from views of the file."""
        began_s, digest = time.perf_counter() - fetch_s, load.digest
        try:
            if files is not None and not load.to_host:
                adapter = HostTensors(self._store, map_tensors(files.tensors), files.scales).build(load.pages)
            else:
                adapter = self._copy(digest, files).build(load.pages)
            if adapter.rank > self._max_rank:
                raise AdapterInvalid(f"rank {adapter.rank} is above this runner's --max-rank {self._max_rank}")
        except Exception as error:  # noqa: BLE001 (as above)
            self._fail(load, error)
            return
        host_bytes = self._host[digest].n_bytes if digest in self._host else None
        loaded = ev.Loaded(digest, adapter.rank, adapter.n_bytes, host_bytes, time.perf_counter() - began_s)
        self._done_with(digest)
        self._report(InSlot(loaded, load.slot, adapter))

    def _end_fetch(self, fetch: ev.Fetch, files: AdapterFiles, seconds: float) -> None:
        host_bytes = n_bytes = None
        try:
            if fetch.to_host:
                copy = self._copy(fetch.digest, files)
                copy.complete()
                host_bytes = copy.n_bytes
            if fetch.measure:
                n_bytes = self._store.device_bytes(map_tensors(files.tensors), files.scales)
        except Exception as error:  # noqa: BLE001 (as above)
            self._fail(fetch, error)
            return
        if fetch.urgent:
            self._fetched[fetch.digest] = files, time.monotonic(), seconds
        self._done_with(fetch.digest)
        self._report(ev.Fetched(fetch.digest, n_bytes, host_bytes, seconds))

    def _copy(self, digest: str, files: AdapterFiles | None) -> HostAdapter:
        """Return the copy in host memory, made of these files unless it is there."""
        if files is not None and digest not in self._host:
            self._host[digest] = self._store.copy(map_tensors(files.tensors), files.scales)
        return self._host[digest]

    def _fail(self, action: ev.Load | ev.Fetch, error: Exception) -> None:
        if not isinstance(error, RunnerError):
            log.error("bringing an adapter here failed unexpectedly", exc_info=error)
        self._done_with(action.digest)
        failed = ev.LoadFailed if isinstance(action, ev.Load) else ev.FetchFailed
        self._report(failed(action.digest, *failure_of(error)))

    def _want(self, digest: str) -> None:
        with self._lock:
            self._loading[digest] += 1

    def _done_with(self, digest: str) -> None:
        """Count off whoever brought it here, and needs its files no more."""
        with self._lock:
            self._loading[digest] -= 1
            if not self._loading[digest]:
                del self._loading[digest]

    def _retain(self) -> None:
        """Keep the digests of the latest list, skipping earlier lists: each retention reads all named manifests."""
        with self._lock:
            digests, self._to_retain = self._to_retain, None
        if digests is None:
            return
        self._fetched = {digest: fetched for digest, fetched in self._fetched.items() if digest in digests}
        try:
            with self._lock:
                retained = digests | self._loading.keys()
            self._source.retain(retained)
        except (RunnerError, OSError):
            log.exception("tidying the adapter cache failed; the next change of desired adapters tries again")


def _begin_building() -> None:
    set_operator_threads(1)
    _lower_priority()


def _lower_priority() -> None:
    """Lower only the calling thread's priority, if the system can (Linux gives each thread a priority)."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)


def failure_of(error: Exception) -> tuple[EndReason, str, bool]:
    """Return the reason for the waiting requests, and say if it is permanent: an artifact that is wrong stays wrong.

    One that the depot lacks may come; other requests may be tried again.
    """
    match error:
        case ArtifactUnknown():
            return EndReason.UNKNOWN_ADAPTER, str(error), False
        case ArtifactUnusable():
            return EndReason.LOAD_FAILED, str(error), isinstance(error, AdapterInvalid)
        case CacheFull():
            return EndReason.RUNNER_FULL, str(error), False
        case RunnerError():
            return EndReason.INTERNAL, str(error), False
        case _:
            return EndReason.INTERNAL, f"{type(error).__name__}: {error}", False
