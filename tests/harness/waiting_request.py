"""A request as queue policies see it, without the rest of the scheduler."""

from abc import ABC, abstractmethod
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

from weft_scheduler.core import QueueEntry, RunnerShape


@dataclass(eq=False)
class WaitingRequest:
    """Requests arrive by name, one `every_s`. `left`: tokens still to compute, once it runs."""

    name: int
    size: int
    tenant: str = ""
    left: int = 0
    awaited_class: str = ""
    every_s: float = 1.0

    @property
    def id(self) -> str:
        return str(self.name)

    @property
    def order(self) -> tuple[float, int]:
        return self.name * self.every_s, self.name

    @property
    def waiting(self) -> QueueEntry:
        return QueueEntry(self.awaited_class, self.size, self.size, float(self.size))


class Runners(ABC):
    """Runners of a test, on which requests are placed."""

    @abstractmethod
    def place(self, request: WaitingRequest, closed: AbstractSet[RunnerShape]) -> RunnerShape | None:
        """Take a request out of the queue, onto a runner. Returns its shape; None: none has room for the request."""

    @abstractmethod
    def shapes_for(self, request: WaitingRequest) -> AbstractSet[RunnerShape]:
        """Return the shapes of the runners that could ever take a request."""

    def answer(self, queue_pass: Any) -> None:
        """Answer the offers of a pass as a scheduling cycle does."""
        for offer in queue_pass.offers():
            shape = None
            if not offer.tried:
                shape = self.place(offer.request, queue_pass.closed)
                queue_pass.tried(offer.request, placed=shape is not None)
            if shape is not None:
                passed = queue_pass.passed_by(offer.request)
                queue_pass.count(other for other in passed if shape in self.shapes_for(other))
            elif offer.drains:
                queue_pass.close(self.shapes_for(offer.request))
