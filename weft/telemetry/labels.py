"""Labels of metrics that name what people name: bounded, and given back when the name goes."""

from collections.abc import Container
from typing import Generic, TypeVar

from prometheus_client import Counter, Gauge, Histogram

OTHER = "other"
M = TypeVar("M", Counter, Gauge, Histogram)


class BoundedLabels:
    """A label for each of the first `max_labels` live names, and one label for all further names."""

    def __init__(self, max_labels: int, live: Container[str] | None = None) -> None:
        """`live`: the names that are there now; None: each name stays."""
        self._max_labels, self._live = max_labels, live
        self.names = set[str]()  # that have a label each

    def label_of(self, name: str) -> str:
        if name not in self.names:
            if len(self.names) >= self._max_labels or (self._live is not None and name not in self._live):
                return OTHER
            self.names.add(name)
        return name

    def give_back(self) -> list[str]:
        """Free the labels of the names that are not live any more, and return these names."""
        assert self._live is not None, "each name stays"
        ended = [name for name in self.names if name not in self._live]
        self.names.difference_update(ended)
        return ended


class LabelledSeries(Generic[M]):
    """The series of a metric, each looked up once by its labels: that takes 5 us. All are made here."""

    def __init__(self, metric: M) -> None:
        self._metric = metric
        self._made: dict[tuple[str, ...], M] = {}

    def child_of(self, *labels: str) -> M:
        if (series := self._made.get(labels)) is None:
            series = self._made[labels] = self._metric.labels(*labels)
        return series

    def remove(self, label: str, at: int = 0) -> None:
        """Remove the series with this label at number `at`. A counter that returns begins at 0."""
        for labels in [labels for labels in self._made if labels[at] == label]:
            del self._made[labels]
            self._metric.remove(*labels)
