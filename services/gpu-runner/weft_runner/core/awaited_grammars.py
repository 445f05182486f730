"""Requests whose grammar is being compiled, before they are admitted: nothing is reserved for them, and no step waits.

The grammar's state comes from a thread beside the engine (`CompileGrammar`, `GrammarCompiled`), already behind the
tokens that were emitted in earlier epochs. What is not there after WAIT_S never comes: its request ends by name.
"""

from math import inf
from typing import NamedTuple

from weft.domain.machine import Peer
from weft.domain.request import Start
from weft_runner.core.events import CompileGrammar, GrammarCompiled

WAIT_S = 10.0  # a gateway has compiled it in less than one; of the mask behind a token, too


class AwaitedGrammar(NamedTuple):
    """A Start that waits, its session and that session's gateway."""

    start: Start
    peer: Peer
    gateway: str
    deadline: float


class AwaitedGrammars:
    """At most `limit` at a time, by session and request. One owner: the runner's machine."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.waiting: dict[tuple[Peer, str], AwaitedGrammar] = {}

    def wait(self, start: Start, peer: Peer, gateway: str, now: float) -> CompileGrammar | None:
        """What makes its grammar's state; None: too many wait. An earlier epoch of the request waits no more."""
        key = peer, start.request_id
        if key not in self.waiting and len(self.waiting) >= self._limit:
            return None
        self.waiting[key] = AwaitedGrammar(start, peer, gateway, now + WAIT_S)
        sampling = start.sampling
        ends = () if sampling.ignore_eos else sampling.eos_token_ids
        return CompileGrammar(peer, start.request_id, start.epoch, sampling.grammar, start.emitted, ends)

    def drop(self, peer: Peer, request_id: str) -> None:
        """It was stopped."""
        self.waiting.pop((peer, request_id), None)

    def closed(self, peer: Peer) -> None:
        """That session is over."""
        self.waiting = {key: one for key, one in self.waiting.items() if one.peer != peer}

    def take(self, event: GrammarCompiled) -> AwaitedGrammar | None:
        """Who waited for that; None: nobody any more."""
        key = event.peer, event.request_id
        one = self.waiting.get(key)
        return self.waiting.pop(key) if one is not None and one.start.epoch == event.epoch else None

    def next_deadline(self) -> float:
        """inf: nobody waits. Asked at every event."""
        return min([one.deadline for one in self.waiting.values()]) if self.waiting else inf

    def take_expired(self, now: float) -> list[AwaitedGrammar]:
        """Those that have waited too long."""
        over = [one for one in self.waiting.values() if one.deadline <= now]
        for one in over:
            del self.waiting[one.peer, one.start.request_id]
        return over
