"""The book of operations: one per resolve, Pending -> Validated -> Fetched, or Failed from either.

Bounded: at most `max_unfinished` wait or run (more are refused). At most `max_finished` are remembered, each for
`keep_s`, and the oldest are forgotten first. Equal requests share an operation while it runs. `now` is in seconds.
"""

from dataclasses import replace

from weft.artifacts.depot_api import OperationStatus, State

_NEXT: dict[State, tuple[State, ...]] = {"Pending": ("Validated", "Failed"), "Validated": ("Fetched", "Failed")}


class Operations:
    """The owner of every operation's state. Not safe between threads: a single loop changes it.

    A finished operation is remembered for `keep_s`, long enough for its caller to poll it many times.
    """

    def __init__(self, *, max_unfinished: int = 10_000, max_finished: int = 20_000, keep_s: float = 600.0) -> None:
        self._max_unfinished, self._max_finished, self._keep_s = max_unfinished, max_finished, keep_s
        self._unfinished: dict[str, OperationStatus] = {}
        self._finished: dict[str, tuple[OperationStatus, float]] = {}  # with the time of its end, in order of time
        self._by_key: dict[str, str] = {}  # only unfinished operations: a request's key may be long
        self._keys: dict[str, str] = {}

    def find(self, operation_id: str) -> OperationStatus | None:
        return self._unfinished.get(operation_id) or self._finished.get(operation_id, (None, 0.0))[0]

    def running(self, key: str) -> str | None:
        """Return the unfinished operation of an equal request, or None."""
        return self._by_key.get(key)

    def start(self, operation_id: str, key: str) -> bool:
        """Begin an operation. Return False if too many are unfinished."""
        assert self.find(operation_id) is None, "ids are drawn once"
        assert key not in self._by_key, "an equal request is running: share it"
        if len(self._unfinished) >= self._max_unfinished:
            return False
        self._unfinished[operation_id] = OperationStatus()
        self._by_key[key], self._keys[operation_id] = operation_id, key
        return True

    def change(self, operation_id: str, status: OperationStatus, now: float) -> OperationStatus:
        """Set an operation's next state. Keep its verdict. Return the stored status."""
        previous = self._unfinished[operation_id]
        assert status.state in _NEXT[previous.state], f"{previous.state} -> {status.state}"
        status = replace(status, verdict=previous.verdict if status.verdict is None else status.verdict)
        if status.finished:
            del self._unfinished[operation_id], self._by_key[self._keys.pop(operation_id)]
            self._finished[operation_id] = status, now
        else:
            self._unfinished[operation_id] = status
        return status

    def forget(self, now: float) -> list[str]:
        """Drop finished operations that are too old or too many. Return their ids."""
        forgotten: list[str] = []
        for operation_id, (_, finished_at) in self._finished.items():  # the oldest first
            if len(self._finished) - len(forgotten) <= self._max_finished and now - finished_at < self._keep_s:
                break
            forgotten.append(operation_id)
        for operation_id in forgotten:
            del self._finished[operation_id]
        return forgotten

    def counts(self) -> dict[State, int]:
        """Count operations by state."""
        counts: dict[State, int] = {"Pending": 0, "Validated": 0, "Fetched": 0, "Failed": 0}
        for operation in (*self._unfinished.values(), *(operation for operation, _ in self._finished.values())):
            counts[operation.state] += 1
        return counts

    def check_operations(self) -> None:
        """Check that an operation is in one place, the bounds hold, and a finished operation has a result."""
        assert not self._unfinished.keys() & self._finished.keys(), "an operation is finished or not"
        assert len(self._unfinished) <= self._max_unfinished, "too many unfinished"
        assert {self._keys[name]: name for name in self._unfinished} == self._by_key, "one running operation a request"
        assert not any(o.finished for o in self._unfinished.values()), "a finished operation among the unfinished"
        for operation, _ in self._finished.values():
            assert operation.digest if operation.state == "Fetched" else operation.reason, "finished without a result"
