"""What every queue policy is: waiting requests in the policy's order, and by age."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from heapq import merge
from itertools import islice
from typing import ClassVar, Generic, Protocol, TypeVar

from weft_scheduler.core.policy.queue.sorted_queue import Key, SortedQueue

FIRST: Key = (-float("inf"),)  # before every key


class QueuedRequest(Protocol):
    """What a queue policy has to know of a request. All of it is fixed while the request waits."""

    @property
    def id(self) -> str: ...

    @property
    def order(self) -> tuple[float, int]:
        """Its age: the smaller waits longer, whatever the order of a policy. The first part is its arrival, seconds."""
        ...

    @property
    def awaited_class(self) -> str:
        """The numerics class that it may have to wait for. "": none."""
        ...

    @property
    def queued_tokens(self) -> int:
        """Tokens that its pages have to hold: prompt, emitted, reservation."""
        ...

    @property
    def expected_work(self) -> float:
        """What it is expected to cost yet, in output tokens."""
        ...


R = TypeVar("R", bound=QueuedRequest)


class WaitingQueue(ABC, Generic[R]):
    """The waiting requests of one pool. A policy is the key that they are ordered by.

    Requests that wait for a numerics class have a lane of their own, and a window of their own: else, once as many of
    them wait as the window has, no request behind them would be offered.
    """

    ages: ClassVar[bool] = False  # the order itself bounds who passes whom: only passes out of that order count

    def __init__(self) -> None:
        self._lanes: dict[str, SortedQueue[R]] = {}
        self._keys: dict[str, Key] = {}

    @abstractmethod
    def key(self, request: R) -> Key:
        """Its place in the policy's order: the smaller is offered first; no two requests have the same."""

    def first(self, free_tokens: int) -> Key:
        """The order's start for a pass in which no runner has more tokens free: keys up to it cannot be placed."""
        del free_tokens
        return FIRST

    def delay_s(self, request: R) -> float:
        """What the policy adds to its arrival: a runner computes prompts in the order of the sum."""
        del request
        return 0.0

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[R]:
        """Every waiting request, in the policy's order."""
        return merge(*self._lanes.values(), key=self.key_of)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._keys

    def key_of(self, request: R) -> Key:
        """The key that it waits by. Raises KeyError where it does not wait."""
        return self._keys[request.id]

    def push(self, request: R) -> None:
        key = self._keys[request.id] = self.key(request)
        self._lanes.setdefault(request.awaited_class, SortedQueue()).add(key, request)

    def remove(self, request: R) -> None:
        """Raises KeyError where it does not wait."""
        lane = self._lanes[request.awaited_class]
        lane.remove(self._keys.pop(request.id))
        if not len(lane):
            del self._lanes[request.awaited_class]

    def oldest(self, limit: int) -> list[R]:
        """At most so many of them, by age: here the policy's order."""
        return list(islice(self, limit))

    def candidates(self, window: int, free_tokens: Callable[[], int]) -> Iterator[R]:
        """Requests to offer, in the policy's order: each is removed or stays before the next is taken.

        Of each lane the iteration ends where `window` offered requests have stayed. `free_tokens`: the most that a
        runner has free by now.
        """
        passed, stayed = dict[str, Key](), Counter[str]()
        while True:
            first, found = self.first(free_tokens()), list[tuple[Key, R, str]]()
            for name, lane in self._lanes.items():
                entry = lane.after(max(first, passed.get(name, FIRST))) if stayed[name] < window else None
                if entry is not None:
                    found.append((*entry, name))
            if not found:
                return
            key, request, name = found[0] if len(found) == 1 else min(found, key=lambda entry: entry[0])
            passed[name] = key
            yield request
            stayed[name] += request.id in self._keys


class ReorderingQueue(WaitingQueue[R]):
    """One whose order is not that of age."""

    def __init__(self) -> None:
        super().__init__()
        self._by_age: SortedQueue[R] = SortedQueue()

    def push(self, request: R) -> None:
        super().push(request)
        self._by_age.add(request.order, request)

    def remove(self, request: R) -> None:
        super().remove(request)
        self._by_age.remove(request.order)

    def oldest(self, limit: int) -> list[R]:
        return list(islice(self._by_age, limit))
