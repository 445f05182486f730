"""The book of operations: one per resolve, Pending -> Validated -> Fetched, or Failed from either.

Bounded: at most `max_unfinished` wait or run (more are refused), at most `max_finished` are remembered, each for
`keep_s`; the oldest are forgotten first. Equal requests share one operation while it runs. `now` is in seconds.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

State = Literal["Pending", "Validated", "Fetched", "Failed"]
FINISHED: tuple[State, ...] = ("Fetched", "Failed")
_NEXT: dict[State, tuple[State, ...]] = {"Pending": ("Validated", "Failed"), "Validated": ("Fetched", "Failed")}


@dataclass(frozen=True, slots=True)
class Operation:
    """One resolve. A Failed one keeps its verdict if it had one."""

    id: str
    key: str  # of its request, which may be long; empty once it has finished: many are remembered
    state: State
    changed_at: float
    verdict: dict[str, Any] | None = None
    digest: str | None = None
    watch: str | None = None  # by which its source's state may be asked for
    reason: str | None = None
    message: str | None = None
    retry_after_s: int = 0  # of a Failed one: how long the source's server asks to wait

    @property
    def finished(self) -> bool:
        return self.state in FINISHED


class Operations:
    """Owns every operation's state. Not safe between threads: one loop changes it."""

    def __init__(self, *, max_unfinished: int = 10_000, max_finished: int = 20_000, keep_s: float = 600.0) -> None:
        self._max_unfinished, self._max_finished, self._keep_s = max_unfinished, max_finished, keep_s
        self._unfinished: dict[str, Operation] = {}
        self._finished: dict[str, Operation] = {}  # in the order they finished
        self._by_key: dict[str, str] = {}

    def find(self, operation_id: str) -> Operation | None:
        return self._unfinished.get(operation_id) or self._finished.get(operation_id)

    def running(self, key: str) -> Operation | None:
        """The unfinished operation of an equal request."""
        operation_id = self._by_key.get(key)
        return self._unfinished[operation_id] if operation_id else None

    def start(self, operation_id: str, key: str, now: float) -> Operation | None:
        """A new operation; None when too many are unfinished."""
        assert self.find(operation_id) is None, "ids are drawn once"
        assert key not in self._by_key, "an equal request is running: share it"
        if len(self._unfinished) >= self._max_unfinished:
            return None
        operation = Operation(operation_id, key, "Pending", now)
        self._unfinished[operation_id] = operation
        self._by_key[key] = operation_id
        return operation

    def validated(self, operation_id: str, verdict: dict[str, Any], now: float) -> Operation:
        return self._change(operation_id, "Validated", now, verdict=verdict)

    def fetched(self, operation_id: str, digest: str, now: float, watch: str | None = None) -> Operation:
        return self._change(operation_id, "Fetched", now, digest=digest, watch=watch)

    def failed(self, operation_id: str, reason: str, message: str, now: float, retry_after_s: int = 0) -> Operation:
        fields = {"reason": reason, "message": message, "retry_after_s": retry_after_s}
        return self._change(operation_id, "Failed", now, **fields)

    def forget(self, now: float) -> list[str]:
        """Drop finished operations that are too old or too many; returns their ids."""
        gone: list[str] = []
        for operation in self._finished.values():  # the oldest first: one that is kept ends the search
            if len(self._finished) - len(gone) <= self._max_finished and now - operation.changed_at < self._keep_s:
                break
            gone.append(operation.id)
        for operation_id in gone:
            del self._finished[operation_id]
        return gone

    def counts(self) -> dict[State, int]:
        """Operations by state."""
        counts: dict[State, int] = {"Pending": 0, "Validated": 0, "Fetched": 0, "Failed": 0}
        for operation in (*self._unfinished.values(), *self._finished.values()):
            counts[operation.state] += 1
        return counts

    def check_operations(self) -> None:
        """One place an operation, the bounds hold, a finished one has a result."""
        assert not self._unfinished.keys() & self._finished.keys(), "an operation is finished or not"
        assert len(self._unfinished) <= self._max_unfinished, "too many unfinished"
        assert {o.key: o.id for o in self._unfinished.values()} == self._by_key, "one running operation a request"
        assert not any(o.finished for o in self._unfinished.values()), "a finished operation among the unfinished"
        for operation in self._finished.values():
            assert operation.digest if operation.state == "Fetched" else operation.reason, "finished without a result"

    def _change(self, operation_id: str, state: State, now: float, **fields: Any) -> Operation:
        before = self._unfinished[operation_id]
        assert state in _NEXT[before.state], f"{before.state} -> {state}"
        key = "" if state in FINISHED else before.key
        operation = replace(before, key=key, state=state, changed_at=now, **fields)
        if operation.finished:
            del self._unfinished[operation_id], self._by_key[before.key]
            self._finished[operation_id] = operation
        else:
            self._unfinished[operation_id] = operation
        return operation
