"""Adapters by name, for endpoint pickers made for vLLM: which are on the device and in host memory, and have requests.

Names and labels are those of the metric protocol of llm-d's router, which vLLM adds in its pull request 54830. Adapters
are labelled with the model names that requests name them by, as a Start or the list of adapters to hold says; one that
neither names has its digest. At most MAX_NAMED adapters are listed; a scrape costs no more than these.
"""

import time
from collections.abc import Iterable, Iterator
from itertools import islice

from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from weft.domain.adapter import MAX_METRIC_NAMES, DesiredChange, Tier
from weft.domain.lru import LruDict
from weft_runner.core.events import AdapterUse

MAX_NAMED = 512  # adapters with a series of their own
LABELS = ("model_name", "engine")


class AdapterSeries(Collector):
    """Adapters by name.

    Fed with changes from the event loop; scrapes come from another thread and copy what they list.
    """

    def __init__(self, labels: tuple[str, str]) -> None:
        self._labels, self.slots = labels, 0
        self._names: LruDict[str, tuple[str, ...]] = LruDict(2 * MAX_NAMED)  # by digest
        self._device, self._host = dict[str, AdapterUse](), dict[str, AdapterUse]()  # the latest change last
        self._running, self._waiting = dict[str, None](), dict[str, None]()
        self._changed_at = time.time()

    def name(self, digest: str, model_name: str) -> None:
        """Note a name that requests give this adapter."""
        names = self._names.touch(digest, tuple)
        if model_name and model_name not in names:
            self._names[digest] = (*names, model_name)[-MAX_METRIC_NAMES:]

    def hold(self, change: DesiredChange) -> None:
        """Note the names of adapters that are brought before a request names them.

        Those of removed adapters are dropped: a later adapter of that content has its own.
        """
        for digest in change.removed:
            if digest in self._names:
                self._names[digest] = ()
        for adapter in change.adapters:
            if adapter.pinned or adapter.tier is Tier.HOST:
                for name in adapter.model_names:
                    self.name(adapter.digest, name)

    def take(self, adapters: Iterable[AdapterUse]) -> None:
        for adapter in adapters:
            on_device, in_host = adapter.tier is Tier.DEVICE, adapter.tier is Tier.HOST
            for there, counts in ((on_device, self._device), (in_host, self._host)):
                counts.pop(adapter.digest, None)
                if there:
                    counts[adapter.digest] = adapter
            for n_sequences, having in ((adapter.running, self._running), (adapter.waiting, self._waiting)):
                having.pop(adapter.digest, None)
                if n_sequences:
                    having[adapter.digest] = None
        self._changed_at = time.time()

    def collect(self) -> Iterator[Metric]:
        yield from self._requests()
        for level, adapters in (("gpu", self._device), ("cpu", self._host)):
            text = f"Adapters {'on the device' if level == 'gpu' else 'in host memory alone'}"
            family = GaugeMetricFamily(f"vllm:num_{level}_loaded_lora_adapters", text, labels=LABELS)
            family.add_metric(self._labels, len(adapters))
            yield family
        yield self._loaded()

    def _requests(self) -> Iterator[Metric]:
        """Give one series: an endpoint picker reads the latest; an adapter that waits and runs is in both lists."""
        labels = ("max_lora", "running_lora_adapters", "waiting_lora_adapters")
        family = GaugeMetricFamily("vllm:lora_requests_info", "When requests of adapters last changed", labels=labels)
        lists = [",".join(self._names_of(having)) for having in (self._running, self._waiting)]
        family.add_metric((str(self.slots), *lists), self._changed_at)
        yield family

    def _loaded(self) -> Metric:
        text = f"1: the adapter is there; the last {MAX_NAMED} that were used"
        labels = (*LABELS, "adapter_name", "level", "pinned", "rank")
        family = GaugeMetricFamily("vllm:lora_adapter_loaded", text, labels=labels)
        left = MAX_NAMED
        for level, adapters in (("gpu", self._device), ("cpu", self._host)):
            listed = _latest(adapters, left)
            left -= len(listed)
            for digest in listed:
                if (adapter := adapters.get(digest)) is None:
                    continue
                for name in self._names.get(digest, (digest,)):
                    about = (name, level, str(adapter.pinned).lower(), str(adapter.rank))
                    family.add_metric((*self._labels, *about), 1)
        return family

    def _names_of(self, digests: dict[str, None]) -> list[str]:
        return [name for digest in _latest(digests, MAX_NAMED) for name in self._names.get(digest, (digest,))]


def _latest(digests: dict[str, AdapterUse] | dict[str, None], limit: int) -> list[str]:
    """List the most recently changed digests, copied at once because another thread changes them."""
    return list(islice(reversed(tuple(digests)), limit))
