"""Requests whose grammar is being compiled, before they are admitted: nothing is reserved for them, and no step waits.

The grammar's state comes from a thread beside the engine (`CompileGrammar`, `GrammarCompiled`), already behind the
tokens that were emitted in earlier epochs. What is not there after WAIT_S never comes: its request ends by name.
"""

from typing import NamedTuple

from weft.domain.machine import Peer
from weft.domain.request import Start
from weft.domain.timers import TimerQueue
from weft_runner.core.events import CompileGrammar, GrammarCompiled

WAIT_S = 10.0  # a gateway has compiled it in less than one; of the mask behind a token, too


class AwaitedGrammar(NamedTuple):
    """A Start that waits, its session and that session's gateway."""

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
        """Forget a Start that was stopped, or whose time is over. None: it does not wait."""
        self._timers.clear(("grammar", session, request_id))
        return self.waiting.pop((session, request_id), None)

    def closed(self, peer: Peer) -> None:
        """Forget what a session that is over has started."""
        for key in [key for key, one in self.waiting.items() if one.peer == peer]:
            self.drop(*key)

    def take(self, event: GrammarCompiled) -> AwaitedGrammar | None:
        """Return who waited for that; None: nobody any more."""
        key = event.peer.name, event.request_id
        one = self.waiting.get(key)
        return self.drop(*key) if one is not None and one.start.epoch == event.epoch else None
