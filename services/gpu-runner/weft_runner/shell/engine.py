"""The engine's thread: take events -> handle -> perform -> a turn of the step loop. It fits on a screen.

`post` takes events from any thread. An engine with nothing to run sleeps until the next event or the machine's
deadline. The queue takes whatever is posted, for a result that got lost would leave sequences waiting for ever. Its
writers are bounded: sessions by `server.MAX_BACKLOG`, the adapter pool by the loads under way, the supervisor's orders
by the lease, which ends when no step does.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from weft.domain.machine import TICK, Close, Kind, Peer, Send
from weft.domain.runner import Heartbeat
from weft_runner.core import events as ev
from weft_runner.core.runner import Runner
from weft_runner.engine.loop import StepLoop
from weft_runner.errors import ExecutorLost
from weft_runner.model.executor import Executor
from weft_runner.model.grammar import GrammarPool, Grammars
from weft_runner.model.layer_progress import CalledLayerCounter, LayerProgress, LayerReports
from weft_runner.model.operator_threads import set_operator_threads
from weft_runner.offload.stages import state_of_all
from weft_runner.shell.adapter_pool import AdapterPool, InSlot
from weft_runner.shell.kv_swapper import KvSwapper
from weft_runner.shell.step_gaps import COPIES_SHARE, StepGaps

log = logging.getLogger(__name__)
CHECKED_PAGES = 1 << 16  # an idle engine checks the machine; sorting more pages than this would delay the next event
CHECK_S = 1.0  # between two checks: one of thousands of adapters takes milliseconds. Heartbeats alone need none


@dataclass(frozen=True, slots=True)
class Shutdown:
    """End the thread."""


# ExecutorLost: the engine is lost with it. None: there is work for the gaps between steps.
Posted = ev.Event | InSlot | Shutdown | ExecutorLost | None


@dataclass(slots=True)
class Output:
    """What leaves the engine: messages in order, facts for metrics, the latest status, the step that was completed."""

    sends: list[Send] = field(default_factory=list[Send])
    facts: list[ev.Fact] = field(default_factory=list[ev.Fact])
    status: ev.RunnerStatus | None = None
    done: ev.StepDone | None = None
    busy_s: float = 0.0  # since the step before was complete, without waiting for events


class KvStreams(Protocol):
    """Streams of KV to other runners and from them; all of it returns without waiting for one."""

    def execute(self, action: ev.KvAction, steps_ahead: int) -> None:
        """Act on an order. `steps_ahead`: layers of steps in flight, which are not counted yet."""
        ...

    def send(self, peer: Peer, message: object) -> None: ...

    def step_failed(self) -> None:
        """Note that pages of the present step are written again."""
        ...

    def close(self) -> None: ...


class Engine:
    """Owns the machine, the executor and the adapter slots. `on_output` is called from the engine's thread."""

    def __init__(
        self, runner: Runner, executor: Executor, make_adapters: Callable[[Callable[[Posted], None]], AdapterPool],
        on_output: Callable[[Output], None], clock: Callable[[], float] = time.monotonic,
        grammars: Grammars | None = None,
    ) -> None:  # fmt: skip
        """`grammars`: of its model; None: requests with one are refused."""
        self.runner, self.executor, self._on_output, self._clock = runner, executor, on_output, clock
        can = executor.can
        self._stages = can.stages
        self._events: queue.SimpleQueue[Posted] = queue.SimpleQueue()
        self.adapters = make_adapters(self.post)  # results of loads come back to this engine's queue
        self._called = CalledLayerCounter()
        self.layers: LayerProgress = can.layer_counter or self._called
        self._kv: KvStreams | None = None
        self._reports = LayerReports()
        self.steps = StepLoop(runner, executor, self.adapters.ranks, self, self._reports, clock)
        if (stages := can.stages) is not None:
            runner.reporter.watch_offload(lambda: state_of_all(stages()))
        wake = partial(self.post, None)
        self.gaps, self.copies = StepGaps(wake), StepGaps(wake, share=COPIES_SHARE)
        self._output = Output()
        self._busy_s, self._check_at, self._unchecked = 0.0, 0.0, False
        self._swaps: KvSwapper | None = None
        grammars = grammars or Grammars(None, executor.spec.vocab_size, frozenset())
        grammars.wake = wake
        self._grammars = GrammarPool(grammars, self.post)
        self._stopping = False
        self.busy_since: float | None = None  # monotonic, while the model runs: a forward that never ends shows

    def exchange_kv(self, streams: KvStreams) -> None:
        """Exchange KV with other runners. Before the first turn."""
        self._kv = streams
        self._reports.again = streams.step_failed
        if self.layers is self._called:
            self._reports.raise_counter(self._called)

    def post(self, event: Posted) -> None:
        """Queue an event. Any thread."""
        self._events.put(event)

    @property
    def layers_done(self) -> int:
        """The layers of all steps, as far as the executor counts them. Any thread."""
        return self.layers.count if self._stages is None else sum(stage.layers_done for stage in self._stages())

    @property
    def backlog(self) -> int:
        """The number of events that wait. Any thread."""
        return self._events.qsize()

    def run(self) -> None:
        """Run turns until Shutdown."""
        while not self._stopping:
            self.run_once()

    def run_once(self) -> None:
        """Handle the posted events, then run a step or a part of a step."""
        self._take_events()
        if self._output.sends:
            self._flush()
        began = self.busy_since = self._clock()
        done = self.steps.advance()
        self.busy_since = None
        if done is not None:
            self._output.done, self._output.busy_s = done, self._busy_s + self._clock() - began
            self._busy_s, self._unchecked = 0.0, True
        elif self.steps.in_flight:
            self._busy_s += self._clock() - began
        elif self._unchecked and began >= self._check_at and self.runner.pool.pages.total_pages <= CHECKED_PAGES:
            self._check_at, self._unchecked = began + CHECK_S, False
            self.runner.check()
        self._flush()

    def _take_events(self) -> None:
        """Take all events that were posted. With nothing to run, wait for one, or for the machine's deadline.

        While steps run, their own events find what is due.
        """
        events = self._events
        if not (self.runner.pool.runnable or self.steps.in_flight):
            while events.empty() and (self.copies.advance() or self.gaps.advance()):
                pass
            deadline = self.runner.next_deadline()
            try:
                wait_s = None if deadline is None else max(deadline - self._clock(), 0.0)
                self._take(events.get(timeout=wait_s))
            except queue.Empty:
                self._take(TICK)
        while not events.empty():
            self._take(events.get())

    def _take(self, event: Posted) -> None:
        match event:
            case Shutdown():
                self._stopping = True
                return
            case None:
                return
            case ExecutorLost():
                raise event
            case InSlot():
                self.adapters.put(event)
                event = event.loaded
            case _:
                pass
        effects = self.runner.handle(event, self._clock())
        self._unchecked = self._unchecked or event is not TICK or not all(map(_is_heartbeat, effects))
        self.perform(effects)

    # ---- what is done around the steps, see `engine.loop.Surroundings`

    def has_work(self) -> bool:
        """Say whether events may change the next batch, or memory work waits for the end of this step."""
        return not self._events.empty() or self.copies.waiting or self.gaps.waiting

    def between_steps(self, step_s: float | None) -> None:
        """Run slices of memory work, as many as steps of this length allow; one slice while nothing runs."""
        if step_s is not None:
            self.copies.between_steps(step_s)
            self.gaps.between_steps(step_s)
        elif not self.copies.advance():
            self.gaps.advance()

    def perform(self, effects: Sequence[ev.Effect]) -> None:
        """Perform effects in their order."""
        for effect in effects:
            match effect:
                case Send(peer, message):
                    if peer.kind is Kind.RUNNER and self._kv is not None:
                        self._kv.send(peer, message)
                    else:
                        self._output.sends.append(effect)
                case ev.RunnerStatus():
                    self._output.status = effect
                case ev.PromptComputed() | ev.SequenceEnded() | ev.AdapterBrought() | ev.AdaptersChanged():
                    self._output.facts.append(effect)
                case ev.AdapterPages(pages):
                    self.executor.allocate_adapter_pages(pages)
                case ev.SwapOut() | ev.SwapIn() | ev.DropSwap():
                    self._swapper().execute(effect)
                case ev.OpenKvStream() | ev.SendKv() | ev.ReceiveKv() | ev.DropKv() | Close():
                    assert self._kv is not None, "this runner exchanges no KV"
                    self._kv.execute(effect, self.executor.spec.layers if self.steps.in_flight else 0)
                case ev.CompileGrammar():
                    self._grammars.execute(effect)
                case ev.RunStep():
                    raise AssertionError("the loop runs it")
                case action:
                    self.adapters.execute(action)

    def _swapper(self) -> KvSwapper:
        """The copier of KV, made for the first copy."""
        if self._swaps is None:
            memory = self.executor.kv_memory
            assert memory is not None, "an executor that swaps nothing"
            self._swaps = KvSwapper(memory, self.post, self.copies)
        return self._swaps

    def close(self) -> None:
        """Take no further loads, copies and streams of KV; wait for those in flight."""
        if self._kv is not None:
            self._kv.close()
        if self._swaps is not None:
            self._swaps.close()
        self._grammars.close()
        self.copies.close()
        self.gaps.close()
        self.adapters.close()

    def _flush(self) -> None:
        output = self._output
        if output.sends or output.facts or output.status is not None or output.done is not None:
            self._output = Output()
            self._on_output(output)


def _is_heartbeat(effect: ev.Effect) -> bool:
    return isinstance(effect, Send) and isinstance(effect.message, Heartbeat)


class EngineThread:
    """The thread of the engine. `on_failure` is called with the bug that ended it."""

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
        set_operator_threads(self._threads)
        try:
            self._engine.run()
        except BaseException as error:
            log.exception("the engine failed")
            self._on_failure(error)
        finally:
            self._engine.close()
