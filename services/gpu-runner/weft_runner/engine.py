"""The heartbeat: choose (pure, host integers) -> run (the model) -> account. One thread, one iteration at a time.

Commands come in through `post` from any thread; each iteration sends one `Iteration` out. An engine with nothing to run
sleeps on its queue. `beat` is the whole of it and fits on a screen.

The queue takes whatever is posted, for a report that got lost would leave sequences waiting for ever. Who posts is
bounded: sessions by `server.MAX_BACKLOG`, the adapter pool by the loads under way, the supervisor's orders by the
lease, which ends when no iteration does.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from weft.domain.adapter import DesiredChange
from weft_runner.core.choice import Choice
from weft_runner.core.events import Event, PoolState
from weft_runner.core.iteration import Batch, Row
from weft_runner.core.request_pool import RequestPool, check_pool
from weft_runner.core.sequence import Epoch, Request
from weft_runner.errors import ExecutorLost
from weft_runner.flights import NOTHING, Flights, InFlight, Pipeline, draws_of
from weft_runner.memory.adapter_pool import AdapterPool
from weft_runner.memory.load_results import Fetched, FetchFailed, FoundOnDisk, FromAdapters, Loaded, LoadFailed
from weft_runner.model.executor import AsyncExecutor, Executor, Pipelined
from weft_runner.steps import Prepared, Steps

log = logging.getLogger(__name__)
CHECKED_PAGES = 1 << 16  # an idle beat checks every book; sorting more pages than this would delay the next command


@dataclass(frozen=True, slots=True)
class Stop:
    """Cancel an epoch, which that session has started."""

    request_id: str
    epoch: Epoch
    owner: int


@dataclass(frozen=True, slots=True)
class OwnerLost:
    """A session is over."""

    owner: int


@dataclass(frozen=True, slots=True)
class Drain:
    """Give every sequence back (or serve again)."""

    on: bool


@dataclass(frozen=True, slots=True)
class TellState:
    """The next iteration carries the whole state; with `retry`, what should be here and failed is tried again."""

    retry: bool = False


@dataclass(frozen=True, slots=True)
class Shutdown:
    """End the thread."""


@dataclass(frozen=True, slots=True)
class Broken:
    """The executor is lost, and the engine with it."""

    error: ExecutorLost


Command = Request | Stop | OwnerLost | DesiredChange | Drain | TellState | Shutdown | Broken | FromAdapters


@dataclass(frozen=True, slots=True)
class Iteration:
    """What one heartbeat tells. `state` is there when somebody asked, or at once for overruns, ends and finishes."""

    number: int
    events: tuple[Event, ...]
    state: PoolState | None
    batch_rows: int = 0
    batch_tokens: int = 0
    batch_adapters: int = 0
    busy_s: float = 0.0  # from the choice to the account


class Engine:
    """Owns the request pool, the executor and the adapter slots. `on_iteration` is called from the engine's thread.

    An executor of several stages has several batches in flight: a beat then launches one, or accounts for the oldest.
    """

    def __init__(
        self,
        pool: RequestPool,
        executor: Executor,
        make_adapters: Callable[[Callable[[Command], None]], AdapterPool],
        on_iteration: Callable[[Iteration], None],
    ) -> None:
        self.pool, self.executor, self._on_iteration = pool, executor, on_iteration
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self.adapters = make_adapters(self.post)  # loads report back to this engine's queue
        self._steps = Steps(pool, self.adapters.ranks)
        self._flights = Flights(pool, self._steps, executor) if isinstance(executor, AsyncExecutor) else None
        self._next: InFlight | None = None  # launched already, behind the step that ran last
        self._pipeline = Pipeline(pool, self._steps, executor) if isinstance(executor, Pipelined) else None
        self._launching_s = 0.0  # in beats that launched, since one landed
        self._tell_state = self._stopping = False
        self.busy_since: float | None = None  # monotonic, while the model runs: a forward that never ends shows

    def post(self, command: Command) -> None:
        """Queue a command for the next iteration. Any thread."""
        self._commands.put(command)

    @property
    def backlog(self) -> int:
        """Commands that wait for an iteration. Any thread."""
        return self._commands.qsize()

    def run(self) -> None:
        """Beat until Shutdown."""
        while not self._stopping:
            self.beat()

    def beat(self) -> None:
        """One iteration."""
        self._take_commands(wait=not (self.pool.runnable or self._next or self._pipeline))
        began = time.monotonic()
        if self._pipeline is not None:
            self._move_on(self._pipeline, began)
            return
        flight, self._next = self._next, None
        batch = flight.batch if flight else self.pool.choose()
        self._order_adapters()
        if batch.rows:
            self.busy_since = began
            choices, failures = self._run(batch, flight)
            self.busy_since = None
            batch = flight.still_there(self.pool) if flight else batch
            self.pool.account(batch, choices, failures)
            self.pool.chooser.timed(batch, (time.monotonic() - began) * 1e3)
            self._order_adapters()
        else:
            self._check()
        self._publish(batch, time.monotonic() - began)

    def _order_adapters(self) -> None:
        """What the books decided about adapters. Steps that may still touch the pages that these get come first."""
        self.executor.allocate_adapter_pages(self.pool.take_lent_pages())
        self.adapters.execute(self.pool.adapters.take_actions())

    def _check(self) -> None:
        if self.pool.pages.total_pages <= CHECKED_PAGES:
            check_pool(self.pool)

    # ---- choose: what came in

    def _take_commands(self, *, wait: bool) -> None:
        try:
            while True:
                self._handle(self._commands.get(block=wait))
                wait = False
        except queue.Empty:
            return

    def _handle(self, command: Command) -> None:
        pool = self.pool
        match command:
            case Request():
                pool.start(command)
            case Stop(request_id, epoch, owner):
                pool.stop(request_id, epoch, owner)
            case OwnerLost(owner):
                pool.owner_lost(owner)
            case DesiredChange():
                pool.apply(command)
            case Drain(on):
                pool.drain(on=on)
                self._tell_state = True
            case TellState(retry):
                self._tell_state = True
                if retry:
                    pool.retry()
            case Shutdown():
                self._stopping = True
            case Broken(error):
                raise error
            case Loaded():
                self._put(command)
            case LoadFailed(digest, reason, detail, permanent):
                pool.load_failed(digest, reason, detail, permanent=permanent)
            case Fetched(digest, n_bytes, host_bytes):
                pool.fetched(digest, n_bytes=n_bytes, host_bytes=host_bytes)
            case FetchFailed(digest, reason, detail, permanent):
                pool.fetch_failed(digest, reason, detail, permanent=permanent)
            case FoundOnDisk(digests):
                pool.adapters.on_found_on_disk(digests)

    def _put(self, loaded: Loaded) -> None:
        self.adapters.put(loaded)
        self.pool.loaded(
            loaded.digest,
            rank=loaded.adapter.rank,
            n_bytes=loaded.adapter.n_bytes,
            host_bytes=loaded.host_bytes,
            load_cost=loaded.seconds,
        )

    # ---- run

    def _run(self, batch: Batch, flight: InFlight | None) -> tuple[dict[str, Choice], dict[str, str]]:
        """One forward for the whole batch, if none is in flight. If it fails, each row runs alone.

        Only those that fail again end. Raises ExecutorLost: then no row can run.
        """
        self.executor.clear_pages(self.pool.take_granted_pages())
        try:
            if self._flights is not None:
                return self._fly(self._flights, flight or self._flights.launch(batch))
            return self._forward(batch.rows, keep=batch is self.pool.chooser.standing)
        except ExecutorLost:
            raise
        except Exception:
            log.exception("the forward of a batch failed; its rows run alone")
        choices: dict[str, Choice] = {}
        failures: dict[str, str] = {}
        self._next = None
        for row in (flight.still_there(self.pool) if flight else batch).rows:
            try:
                chosen, failed = self._forward((row,))
            except ExecutorLost:
                raise
            except Exception as error:  # noqa: BLE001 (it ends this sequence, with its name, and is told to its gateway)
                chosen, failed = {}, {row.key: f"{type(error).__name__}: {error}"}
            choices.update(chosen)
            failures.update(failed)
        return choices, failures

    def _forward(self, rows: tuple[Row, ...], *, keep: bool = False) -> tuple[dict[str, Choice], dict[str, str]]:
        prepared = self._steps.prepare(rows, keep=keep)
        logits = self.executor.run(prepared.step)
        self.pool.forwards += 1
        return _by_key(prepared, self.executor.sample(logits, draws_of(prepared)))

    def _fly(self, flights: Flights, flight: InFlight) -> tuple[dict[str, Choice], dict[str, str]]:
        """Launch the next step behind this one, unless somebody has come meanwhile; then wait for this one."""
        if self._commands.empty():
            self._next = flights.follow(flight)
        return _by_key(flight.prepared, flight.landing.result())

    # ---- several batches in flight

    def _move_on(self, pipeline: Pipeline, began: float) -> None:
        """The rest of a beat: launch a batch while a stage has no work, else wait for the oldest one."""
        batch, landed = pipeline.choose(), NOTHING
        self._order_adapters()
        self.busy_since = began
        if batch.rows:
            self.executor.clear_pages(self.pool.take_granted_pages())
            pipeline.launch(batch)
            self._launching_s += time.monotonic() - began
        elif pipeline:
            landed = self._land(pipeline)
        else:
            self._check()
        self.busy_since = None
        self._publish(landed, time.monotonic() - began)

    def _land(self, pipeline: Pipeline) -> Batch:
        """The rows that are still there, accounted for."""
        landed = pipeline.land()
        flight = landed.flight
        batch = flight.still_there(self.pool)
        self.pool.account(batch, *_by_key(flight.prepared, landed.found))
        if landed.found:  # else it was not waited for
            self.pool.chooser.timed(flight.batch, landed.ms, landed.keys)
        self._order_adapters()
        return batch

    # ---- account: what goes out

    def _publish(self, batch: Batch, busy_s: float) -> None:
        events = tuple(self.pool.take_events())
        wanted = self.pool.take_urgent() or self._tell_state
        self._tell_state = False
        if batch.rows:
            busy_s, self._launching_s = busy_s + self._launching_s, 0.0
        if events or wanted or batch.rows:
            state = self.pool.state() if wanted else None
            sizes = len(batch.rows), batch.n_tokens, batch.n_adapters
            self._on_iteration(Iteration(self.pool.iterations, events, state, *sizes, busy_s))


def _by_key(prepared: Prepared, found: list[Choice | None]) -> tuple[dict[str, Choice], dict[str, str]]:
    """What rows chose, and why those that have no choice failed."""
    chosen = dict(zip((s.key for s in prepared.sampled), found, strict=True))
    choices = {key: choice for key, choice in chosen.items() if choice is not None}
    return choices, {key: "the model's output is not finite" for key in chosen if key not in choices}


class EngineThread:
    """The engine's own thread; `on_failure` hears of a bug that ended it."""

    def __init__(self, engine: Engine, threads: int, on_failure: Callable[[BaseException], None]) -> None:
        self._engine, self._threads, self._on_failure = engine, threads, on_failure
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Ask it to end; True when it did in time."""
        self._engine.post(Shutdown())
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        torch.set_num_threads(self._threads)
        try:
            self._engine.run()
        except BaseException as error:
            log.exception("the engine failed")
            self._on_failure(error)
        finally:
            self._engine.adapters.close()
