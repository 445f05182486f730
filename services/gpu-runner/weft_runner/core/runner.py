"""The runner as a machine: sessions, request pool, adapters and reports. See `weft.domain.machine`.

The shell offers a step whenever the executor can take one (`StepSlot`); the machine answers with `RunStep`, or with
nothing to run, and takes the results as `StepDone`. Every effect of an event is there when `handle` returns.
"""

from functools import partial
from math import inf

from weft.domain.machine import Closed, Connected, Kind, Peer, Received, Send, Tick
from weft.domain.request import Draining, EndReason, Freeze, Priority, SessionHello, Start, Stop
from weft.domain.runner import Registered, Resync, RunnerOrder
from weft_runner.core import events as ev
from weft_runner.core.admission import PoolLimits, ended, no_capacity
from weft_runner.core.awaited_grammars import WAIT_S, AwaitedGrammars
from weft_runner.core.batch import Batch
from weft_runner.core.drafts.drafter import Search
from weft_runner.core.reporter import Reporter
from weft_runner.core.request_pool import RequestPool, check_pool
from weft_runner.core.step_time_model import GUESS, StepModel

RETRY_S = 5.0  # between attempts at what a Ready runner holds and this one does not
_step = partial(tuple.__new__, ev.RunStep)  # at every iteration: its own constructor is a Python function


class Runner:
    """The runner's machine, owned by the engine's thread or the simulator."""

    def __init__(
        self, limits: PoolLimits, model: StepModel = GUESS, search: Search | None = None, *, checks_drafts: bool = False
    ) -> None:
        """`search`: of drafts, and `checks_drafts`: see `RequestPool`."""
        self.pool = RequestPool(limits, model, search, checks_drafts=checks_drafts)
        self._effects = self.pool.effects  # of the present event
        self.reporter = Reporter(self.pool)
        self._timers = self.pool.timers
        self.grammars = AwaitedGrammars(limits.max_sequences, self._timers)
        self._gateways: dict[Peer, str] = {}  # sessions, and the gateway that each one's hello names
        self._ordered_drain = False
        self._step: ev.RunStep | None = None  # the latest

    # ---- Machine

    def handle(self, event: ev.Event, now: float) -> list[ev.Effect]:
        pool = self.pool
        pool.account_stall_time(now)
        match event:
            case ev.StepSlot():
                self._schedule(event)
            case ev.StepDone():
                self._account(event)
            case Received(peer, message):
                self._receive(peer, message, now)
            case Tick():
                pass
            case Connected(peer, hello):
                self._connect(peer, hello)
            case Closed(peer, reason) if peer.kind is Kind.RUNNER:
                pool.hand_over.on_stream_closed(peer, reason)
            case Closed(peer):
                self._close(peer)
            case ev.Drain(on, migrate_s):
                self._drain(on, migrate_s)
            case ev.Loaded() | ev.Fetched() | ev.LoadFailed() | ev.FetchFailed() | ev.FoundOnDisk():
                pool.on_adapter_event(event)
                self._retry_later(now)
            case ev.SwapDone() | ev.SwapFailed():
                pool.on_swap_event(event)
            case ev.GrammarCompiled():
                self._compiled(event, now)
        if event.__class__ is not ev.StepSlot:  # else what is due follows with the step's results, or with the deadline
            if (due := self._timers.next()) is not None and due <= now:
                while (timer := self._timers.take_due(now)) is not None:
                    self._expire(timer, now)
            self._effects.extend(self.reporter.effects(now, changed=event.__class__ is not Tick))
        effects = self._effects.copy()
        self._effects.clear()
        return effects

    def next_deadline(self) -> float | None:
        reported, timed = self.reporter.deadline(), self._timers.next()
        deadline = reported if timed is None else min(reported, timed)
        return None if deadline == inf else deadline

    def _expire(self, timer: tuple[str, ...], now: float) -> None:
        """End expired or too long waits: KV, grammars, masks, a drain, failed adapters."""
        pool = self.pool
        match timer:
            case ("report",):
                self.reporter.report_now()
            case ("drain",):
                pool.drain.end(now)
            case ("grammar", session, request_id):
                if (awaited := self.grammars.drop(session, request_id)) is not None:
                    detail = f"the grammar was not compiled within {WAIT_S:g} s"
                    self._effects.append(Send(awaited.peer, ended(awaited.start, EndReason.GRAMMAR, detail)))
            case ("mask", key):
                pool.masks.before_step(now)  # it may be there by now
                if key in pool.masks.late:
                    detail = f"the mask behind a token was not there within {WAIT_S:g} s"
                    pool.end(pool.sequences[key], EndReason.GRAMMAR, detail)
            case ("offer", request_id):
                pool.hand_over.kv.expire_offer(request_id)
            case ("transfer", key):
                pool.hand_over.expire(key)
            case ("parked",):
                pool.preemption.parking.expire(now)
                pool.settle()
            case ("retry",):
                if pool.adapters.not_ready_reason():
                    pool.adapters.retry()
                self._retry_later(now)
            case _:
                raise AssertionError(timer)

    def _retry_later(self, now: float) -> None:
        if self.pool.adapters.not_ready_reason():
            self._timers.set_earlier(("retry",), now + RETRY_S)

    def check(self) -> None:
        check_pool(self.pool)
        for sequence in self.pool.sequences.values():
            assert sequence.owner in self._gateways, sequence.key

    # ---- steps

    def repeat(self, step: ev.RunStep) -> ev.RunStep:
        """The same batch once more, on the tokens that the step in flight samples."""
        return step._replace(
            clear_pages=[], keys=step.keys + len(step.batch.rows), departures=self.pool.scheduler.departures
        )

    def may_repeat(self, step: ev.RunStep) -> bool:
        """Return whether the batch can run again unchanged, after the step in flight."""
        return self.pool.masks.keeps_pace(self.pool.now) and self.pool.scheduler.lasts(step.batch, 2)

    def _schedule(self, slot: ev.StepSlot) -> None:
        pool = self.pool
        batch = pool.schedule(slot.depth, slot.free) if slot.previous is None else pool.schedule_behind(slot.previous)
        if not batch.rows:
            return
        last, clear_pages = self._step, pool.reservations.take_granted()
        number = batch.number or batch.extends
        stays = (reusable := pool.scheduler.reusable_batch) is not None and reusable.number == number
        stands = stays and not batch.guesses
        if stays and last is not None and number in (last.batch.number, last.batch.extends):
            sequences, awaited = last.sequences, last.awaited
        else:
            sequences = tuple(pool.sequences[row.key] for row in batch.rows)
            pool.token_times.note_scheduled(sequences, pool.now)
            awaited = any(sequence.start.priority is Priority.INTERACTIVE for sequence in sequences)
        if pool.hand_over.kv.outgoing:
            pool.hand_over.before_step(batch)
        self._step = _step(
            (batch, sequences, clear_pages, pool.scheduler.keys, pool.scheduler.departures, awaited, stands)
        )
        self._effects.append(self._step)

    def _account(self, done: ev.StepDone) -> None:
        step, results, _ = done
        batch, pool, late = step.batch, self.pool, list[str]()
        if step.departures != pool.scheduler.departures or results.late:
            rows = zip(batch.rows, step.sequences, strict=True)
            here = tuple(row for row, sequence in rows if pool.runs(sequence, step.departures))  # who has left does not
            late = [row.key for row in here if row.key in results.late]  # nor do these: they feed again what they fed
            here = tuple(row for row in here if row.key not in late)
            n_prefills = sum(row in here for row in batch.rows[: batch.n_prefills])
            batch = batch if len(here) == len(batch.rows) else Batch(here, n_prefills)
        pool.account(batch, results, late)
        if pool.hand_over.freezing:
            pool.hand_over.freeze_again(pool.now)
        if done.ms > 0.0:
            pool.scheduler.learn(step.batch, done.ms, step.keys, awaited=step.awaited)

    # ---- peers

    def _receive(self, peer: Peer, message: object, now: float) -> None:
        match message:
            case Start():
                if (gateway := self._gateways.get(peer)) is not None:
                    self._start(message, peer, gateway, now)
            case Stop(request_id, epoch, finish, preempted):
                self.grammars.drop(peer.name, request_id)
                self.pool.stop(request_id, epoch, peer, finish, preempted=preempted)
            case Freeze():
                self.grammars.drop(peer.name, message.request_id)
                self.pool.hand_over.freeze(message, peer, now)
            case Registered():
                self.reporter.register(message)
            case RunnerOrder(desired, drain, role):
                if desired is not None:
                    self.pool.apply(desired)
                if role is not None and role is not self.pool.role:
                    self.pool.set_role(role)
                if drain != self._ordered_drain:
                    self._ordered_drain = drain
                    self._drain(drain)
            case Resync():
                self.reporter.resync()
            case _ if peer.kind is Kind.RUNNER:
                self.pool.hand_over.on_message(peer, message, now)
            case _:
                pass  # of a newer version

    def _start(self, start: Start, peer: Peer, gateway: str, now: float) -> None:
        """Admit it, or have its grammar compiled before."""
        if not start.sampling.grammar:
            self.pool.start(start, peer, gateway, now)
        elif (compile_ := self.grammars.wait(start, peer, gateway, now)) is not None:
            self._effects.append(compile_)
        else:
            answer = no_capacity(start, self.pool.adapters.free_pages(), "sequences")
            self._effects.append(Send(peer, answer))

    def _compiled(self, event: ev.GrammarCompiled, now: float) -> None:
        if (awaited := self.grammars.take(event)) is None:
            return
        if event.fault:
            answer = ended(awaited.start, EndReason.GRAMMAR, event.fault)
            self._effects.append(Send(awaited.peer, answer))
        else:
            self.pool.start(awaited.start, awaited.peer, awaited.gateway, now, event.state)

    def _connect(self, peer: Peer, hello: object) -> None:
        if peer.kind is Kind.SUPERVISOR:
            self.reporter.connect(peer)
            return
        if peer.kind is Kind.RUNNER:
            self.pool.hand_over.kv.connected(peer, hello)
            return
        self._close(peer)
        self._gateways[peer] = hello.gateway if isinstance(hello, SessionHello) else peer.name
        if self.pool.drain.on:
            self._effects.append(Send(peer, Draining()))

    def _close(self, peer: Peer) -> None:
        if peer.kind is Kind.SUPERVISOR:
            self.reporter.connect(None)
        else:
            self._gateways.pop(peer, None)
            self.grammars.forget_session(peer)
            self.pool.cancel_session(peer)

    def _drain(self, on: bool, migrate_s: float = 0.0) -> None:
        """Draining follows each Ended(DRAINED) of what ends at once. Without a supervisor nobody orders moves."""
        if self.reporter.supervisor is None:
            migrate_s = 0.0
        self.pool.drain.order(self.pool.now, on=on, migrate_s=migrate_s)
        if on:
            self._effects.extend(Send(peer, Draining()) for peer in self._gateways)
