"""Progress of steps through their layers, for threads beside the steps."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


class LayerProgress(Protocol):
    """Counts completed layers of all steps, one after the other. Who sees n + k, n before a step, may read k layers."""

    @property
    def count(self) -> int: ...

    def wait_for(self, count: int, timeout_s: float) -> bool:
        """Wait until `count` layers are complete. Returns whether they were within `timeout_s`. Any thread."""
        ...


class CalledLayerCounter:
    """Counts by being called, see `Executor.run`: for executors without a counter of their own."""

    def __init__(self) -> None:
        self._changed, self.count = threading.Condition(), 0

    def layer_done(self, layer: int) -> None:
        del layer
        self.raise_by(1)

    def raise_by(self, layers: int) -> None:
        with self._changed:
            self.count += layers
            self._changed.notify_all()

    def wait_for(self, count: int, timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self.count >= count, timeout_s)


@dataclass(slots=True)
class LayerReports:
    """What threads beside the steps have to know. `counter`: None if nobody asks, or the executor raises its own.

    `options`: of `Executor.run`; `again`: called before a step's rows run once more, each alone, and write the same
    pages.
    """

    counter: CalledLayerCounter | None = None
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    again: Callable[[], None] = lambda: None

    def raise_counter(self, counter: CalledLayerCounter) -> None:
        """Raise that counter from now on."""
        self.counter, self.options = counter, {"layer_done": counter.layer_done}
