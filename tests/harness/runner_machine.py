"""What tests of the runner's machine and its parts share: requests, sessions, messages and the state as one value."""

from collections.abc import Iterable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from weft.domain.ids import Epoch
from weft.domain.machine import Kind, Peer, Send
from weft.domain.request import Allotment, Draining, Start, Step
from weft.domain.runner import Overrun
from weft_runner.core.request_pool import RequestPool
from weft_runner.core.sequence import SequencePhase


class RecordedGrammar:
    """A grammar's state that only remembers its tokens, and whose mask is there when the test says so."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.fault, self.ready, self.quick, self.late, self.forced = "", True, True, False, ()

    def add(self, *tokens: int) -> None:
        self.tokens += tokens

    def fill(self, states: Any, address: int, row_bytes: int, computing: Any) -> None:
        raise AssertionError("nothing runs")


def session(number: int = 1) -> Peer:
    return Peer(Kind.GATEWAY, str(number))


def start_of(key: str, counter: int, prompt: Iterable[int], max_tokens: int, **fields: Any) -> Start:
    defaults: dict[str, Any] = {"emitted": (), "reservation_tokens": max_tokens}
    settled = Allotment(**{name: fields.pop(name) for name in Allotment._fields if name in fields})
    start = Start(key, Epoch(1, counter), tuple(prompt), max_tokens=max_tokens, **{**defaults, **fields})
    return replace(start, allotment=settled)


def take(pool: RequestPool, *kinds: Any) -> list[Any]:
    """Take the pool's effects of these kinds; the others stay."""
    taken = [effect for effect in pool.effects if isinstance(effect, kinds)]
    pool.effects[:] = [effect for effect in pool.effects if not isinstance(effect, kinds)]
    return taken


def flat(sends: Iterable[Send]) -> list[Any]:
    """Messages to gateways about their requests; of a step, what it produced for each sequence."""
    messages: list[Any] = []
    for peer, message in sends:
        if peer.kind is Kind.GATEWAY and not isinstance(message, Draining):
            messages.extend(message.sequences if isinstance(message, Step) else (message,))
    return messages


def state_of(pool: RequestPool) -> Any:
    """The pool's whole state: the figures of a report, and its sequences, adapters and overruns."""
    not_ready = pool.adapters.not_ready_reason()
    sequences = [
        SimpleNamespace(
            request_id=key,
            reserved_pages=pool.pages.reserved_by(key),
            used_pages=pool.pages.used_by(key) if key in pool.pages.holders() else 0,
            waiting=sequence.phase is SequencePhase.WAITING,
        )
        for key, sequence in pool.sequences.items()
    ]
    return SimpleNamespace(
        **pool.figures(ready=not not_ready)._asdict(),
        not_ready=not_ready,
        total_pages=pool.pages.total_pages,
        sequences=sequences,
        adapters=[adapter.report() for adapter in pool.adapters.adapters.values() if adapter.reported],
        adapters_known=len(pool.adapters.adapters),
        overruns=[
            Overrun(key, pool.sequences[key].start.epoch, wanted, pool.sequences[key].reservation_tokens)
            for key, wanted in pool.preemption.overruns().items()
        ],
    )
