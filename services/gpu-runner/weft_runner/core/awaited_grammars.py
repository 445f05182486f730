"""Requests whose grammar is being compiled, before they are admitted: nothing is reserved for them, and no step waits.

The grammar's state comes from a thread beside the engine (`CompileGrammar`, `GrammarCompiled`), already behind the
tokens that were emitted in earlier epochs. What is not there after WAIT_S never comes: its request ends by name.
"""

from typing import NamedTuple

from weft.domain.machine import Peer
from weft.domain.request import Start
from weft.domain.timers import TimerQueue
from weft_runner.core.batch_scheduler import BatchScheduler
from weft_runner.core.events import CompileGrammar, GrammarCompiled
from weft_runner.core.sequence import RUNNING, Sequence

WAIT_S = 10.0  # a gateway has compiled it in less than one; of the mask behind a token, too


class AwaitedGrammar(NamedTuple):
    """A waiting Start, with its session and the session's gateway."""

    start: Start
    peer: Peer
    gateway: str


class AwaitedGrammars:
    """At most `limit` at a time, by session and request. One owner: the runner's machine.

    Timers ("grammar", session, request) say when the time of each is over.
    """

    def __init__(self, limit: int, timers: TimerQueue[tuple[str, ...]]) -> None:
        self._limit, self._timers = limit, timers
        self.waiting: dict[tuple[str, str], AwaitedGrammar] = {}

    def wait(self, start: Start, peer: Peer, gateway: str, now: float) -> CompileGrammar | None:
        """What makes its grammar's state; None: too many wait. An earlier epoch of the request waits no more."""
        key = peer.name, start.request_id
        if key not in self.waiting and len(self.waiting) >= self._limit:
            return None
        self.waiting[key] = AwaitedGrammar(start, peer, gateway)
        self._timers.set(("grammar", *key), now + WAIT_S)
        sampling = start.sampling
        ends = () if sampling.ignore_eos else sampling.eos_token_ids
        return CompileGrammar(peer, start.request_id, start.epoch, sampling.grammar, start.emitted, ends)

    def drop(self, session: str, request_id: str) -> AwaitedGrammar | None:
        """Forget a stopped or expired Start. Return None if it does not wait."""
        self._timers.clear(("grammar", session, request_id))
        return self.waiting.pop((session, request_id), None)

    def forget_session(self, peer: Peer) -> None:
        """Forget all Starts of an ended session."""
        for key in [key for key, grammar in self.waiting.items() if grammar.peer == peer]:
            self.drop(*key)

    def take(self, event: GrammarCompiled) -> AwaitedGrammar | None:
        """Return the Start that waited for this grammar; None if its sequence has ended."""
        key = event.peer.name, event.request_id
        grammar = self.waiting.get(key)
        return self.drop(*key) if grammar is not None and grammar.start.epoch == event.epoch else None


class AwaitedMasks:
    """Sequences with a grammar, by key, and the sequences with a late mask. Owner: the request pool.

    Timers ("mask", key) say when the time of each that is late is over.
    """

    def __init__(self, scheduler: BatchScheduler, timers: TimerQueue[tuple[str, ...]]) -> None:
        self._scheduler, self._timers = scheduler, timers
        self.constrained: dict[str, Sequence] = {}
        self.late: set[str] = set()

    def admit(self, sequence: Sequence) -> None:
        """Watch its masks, if it has a grammar."""
        if sequence.mask is not None and sequence.mask.grammar is not None:
            self.constrained[sequence.key] = sequence

    def before_step(self, now: float) -> None:
        """Keep who has no mask yet, and will have none by the end of a step, out of batches until it has."""
        running = ((key, s.mask) for key, s in self.constrained.items() if s.phase in RUNNING)
        old_late, late = self.late, {key for key, mask in running if mask is not None and not mask.ready}
        if late != old_late:
            for key in late - old_late:
                self._timers.set(("mask", key), now + WAIT_S)
            for key in old_late - late:
                self._timers.clear(("mask", key))
            self.late = late
            self._scheduler.invalidate()

    def keeps_pace(self, now: float) -> bool:
        """Return whether all sequences with a mask now will also have the mask after the next token."""
        if self.constrained:
            self.before_step(now)
        return all(s.mask is None or s.mask.quick for s in self.constrained.values())

    def remove(self, key: str) -> None:
        """Watch it no more."""
        if self.constrained.pop(key, None) is not None:
            self.late.discard(key)
            self._timers.clear(("mask", key))
