"""The runner's metrics under vLLM's names: what endpoint pickers, autoscalers and dashboards made for vLLM read.

Names, labels and buckets are those of vLLM 0.32 (`vllm/v1/metrics/loggers.py`, `buckets.py`). Names of adapters on the
device and their labels are those of the metric protocol of llm-d's router, which vLLM adds in its pull request 54830.
A runner is one engine, "0". Times begin when the request arrived at its gateway. What a request did on another runner
(a migration, a hand-over) is that runner's; it counts as finished where it finished.

Adapters are labelled with the model names that requests name them by, as a Start or the list of adapters to hold says;
one that neither names has its digest. At most `MOST_NAMED` adapters are listed; a scrape costs no more than these.
"""

import time
from collections.abc import Iterable, Iterator
from itertools import accumulate, islice

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics_core import GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from weft.domain.adapter import MAX_METRIC_NAMES, DesiredAdapter, Tier
from weft.domain.lru import LruDict
from weft.domain.request import FinishReason
from weft_runner.core.batch import Batch
from weft_runner.core.events import (
    AdapterBrought,
    AdaptersChanged,
    AdapterUse,
    Fact,
    PromptComputed,
    RunnerStatus,
    SequenceEnded,
)
from weft_runner.core.token_times import GAP_BUCKETS, GapCounts

MOST_NAMED = 512  # adapters with a series of their own
LABELS = ("model_name", "engine")
ENGINE = "0"
FINISHED = {  # vLLM's `finished_reason`
    FinishReason.EOS: "stop",
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CANCELLED: "abort",
    FinishReason.FAILED: "error",
}
_SECONDS = (  # vLLM's begin with 0.3: a small model's request has ended by then
    0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0,
    60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
_SECONDS_TO_FIRST = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0, 2560.0,
)  # fmt: skip
_LOAD_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_ITERATION_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_TOKENS = tuple(digit * 10**zeros for zeros in range(6) for digit in (1, 2, 5))


class Total:
    """A counter that is fed with totals since start."""

    def __init__(self, counter: Counter) -> None:
        self._counter, self._before = counter, 0.0

    def set(self, total: float) -> None:
        self._counter.inc(total - self._before)
        self._before = total


class VllmMetrics:
    """Fed from the shell's event loop. `model`: the name that the base is served under."""

    def __init__(self, registry: CollectorRegistry, model: str) -> None:
        labels = model, ENGINE

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"vllm:{name}", text, LABELS, registry=registry).labels(*labels)

        def counter(name: str, text: str) -> Counter:
            return Counter(f"vllm:{name}", text, LABELS, registry=registry).labels(*labels)

        def histogram(name: str, text: str, buckets: Iterable[float] = _SECONDS) -> Histogram:
            return Histogram(f"vllm:{name}", text, LABELS, buckets=tuple(buckets), registry=registry).labels(*labels)

        self._labels, self._registry, self._pages = labels, registry, 1
        self._running = gauge("num_requests_running", "Sequences running")
        self._waiting = gauge("num_requests_waiting", "Sequences waiting on this runner")
        usage = "KV use, 0..1"
        self._usage = gauge("kv_cache_usage_perc", usage), gauge("gpu_cache_usage_perc", f"{usage}: its older name")
        self._slots = gauge("max_gpu_lora_adapters", "Adapters that the device can hold at a time")
        self._preemptions = Total(counter("num_preemptions", "Sequences that lost their place for want of memory"))
        self._queried = Total(counter("prefix_cache_queries", "Tokens looked up among earlier prompts"))
        self._hits = Total(counter("prefix_cache_hits", "Of these those that were found"))
        self._prompt = counter("prompt_tokens", "Prompt tokens, once they are in KV")
        self._generated = counter("generation_tokens", "Tokens emitted")
        success = "Requests that finished here, by reason: stop, length, abort (the client left), error"
        self._success = Counter("vllm:request_success", success, (*LABELS, "finished_reason"), registry=registry)
        self._ttft = histogram("time_to_first_token_seconds", "Arrival to first token", _SECONDS_TO_FIRST)
        mean = "A request's mean time of a token after the first"
        self._per_token = histogram("request_time_per_output_token_seconds", mean, GAP_BUCKETS)
        self._e2e = histogram("e2e_request_latency_seconds", "Arrival to end")
        self._queue = histogram("request_queue_time_seconds", "Arrival to first iteration, an adapter's load included")
        self._inference = histogram("request_inference_time_seconds", "First iteration to end")
        self._prefill = histogram("request_prefill_time_seconds", "First iteration to first token")
        self._decode = histogram("request_decode_time_seconds", "First token to end")
        self._prompt_tokens = histogram("request_prompt_tokens", "Prompt tokens of a request", _TOKENS)
        self._answer_tokens = histogram("request_generation_tokens", "Tokens of an answer", _TOKENS)
        self._max_tokens = histogram("request_params_max_tokens", "max_tokens of a request", _TOKENS)
        self._iteration = histogram("iteration_tokens_total", "Tokens of an iteration", _ITERATION_TOKENS)
        self._loads = Histogram(
            "vllm:lora_adapter_load_seconds", "Adapters brought nearer: load to disk or host, activate to the device",
            (*LABELS, "transition"), buckets=_LOAD_SECONDS, registry=registry,
        )  # fmt: skip
        self._gaps: GapCounts | None = None
        self.adapters = AdapterSeries(labels)
        registry.register(self.adapters)
        registry.register(_Gaps(self))

    def built(self, *, total_pages: int, page_tokens: int, slots: int) -> None:
        """What the engine has: before the first output."""
        self._pages, self.adapters.slots = total_pages, slots
        self._slots.set(slots)
        sizes = "1: tokens of a page of KV, and how many pages there are"
        config = Gauge(
            "vllm:cache_config_info", sizes, ("block_size", "num_gpu_blocks", "engine"), registry=self._registry
        )
        config.labels(str(page_tokens), str(total_pages), ENGINE).set(1)

    def ran(self, batch: Batch) -> None:
        """An iteration."""
        self._iteration.observe(batch.prompt_tokens + len(batch.rows) - batch.n_prefills)

    def emitted(self, n_tokens: int) -> None:
        self._generated.inc(n_tokens)

    def observe(self, fact: Fact) -> None:
        match fact:
            case PromptComputed(prompt_tokens, ttft_s):
                self._prompt.inc(prompt_tokens)
                self._ttft.observe(ttft_s)
            case SequenceEnded():
                self._ended(fact)
            case AdapterBrought(to_device, seconds):
                self._loads.labels(*self._labels, "activate" if to_device else "load").observe(seconds)
            case AdaptersChanged(adapters):
                self.adapters.take(adapters)

    def show(self, status: RunnerStatus) -> None:
        self._running.set(status.running)
        self._waiting.set(status.waiting)
        for gauge in self._usage:
            gauge.set(status.figures.used_pages / self._pages)
        self._preemptions.set(status.preemptions)
        self._queried.set(status.prefix_queried_tokens)
        self._hits.set(status.figures.prefix_reused_tokens)
        self._gaps = status.token_gaps

    def gaps(self) -> Metric:
        """The histogram of times between tokens, counted by iteration (`core/token_times.py`)."""
        counts = self._gaps or GapCounts((0,) * (len(GAP_BUCKETS) + 1), 0.0)
        text = "Time between two tokens of a sequence"
        family = HistogramMetricFamily("vllm:inter_token_latency_seconds", text, labels=LABELS)
        bounds = (*GAP_BUCKETS, float("inf"))
        buckets = [
            (floatToGoString(bound), float(n)) for bound, n in zip(bounds, accumulate(counts.counts), strict=True)
        ]
        family.add_metric(self._labels, buckets, counts.sum_s)
        return family

    def _ended(self, ended: SequenceEnded) -> None:
        if ended.finish is None:
            return
        start = ended.start
        self._success.labels(*self._labels, FINISHED[ended.finish]).inc()
        self._e2e.observe(ended.ended_at - ended.arrived)
        self._prompt_tokens.observe(len(start.prompt))
        self._answer_tokens.observe(ended.answer_tokens)
        self._max_tokens.observe(start.max_tokens)
        scheduled, first = ended.scheduled_at, ended.first_token_at
        if scheduled is not None:
            self._inference.observe(ended.ended_at - scheduled)
        whole = start.kv_from is None and not start.emitted  # else an earlier runner had the first token
        if whole and scheduled is not None:
            self._queue.observe(scheduled - ended.arrived)
        if whole and scheduled is not None and first is not None:
            self._prefill.observe(first - scheduled)
        if first is not None:
            self._decode.observe(ended.ended_at - first)
        if whole and first is not None and ended.answer_tokens > 1:
            self._per_token.observe((ended.ended_at - first) / (ended.answer_tokens - 1))


class _Gaps(Collector):
    def __init__(self, metrics: VllmMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        yield self._metrics.gaps()


class AdapterSeries(Collector):
    """Which adapters are on the device and in host memory, and which have requests, by name.

    Fed with changes from the event loop; scrapes come from another thread and copy what they list.
    """

    def __init__(self, labels: tuple[str, str]) -> None:
        self._labels, self.slots = labels, 0
        self._names: LruDict[str, tuple[str, ...]] = LruDict(2 * MOST_NAMED)  # by digest
        self._device, self._host = dict[str, AdapterUse](), dict[str, AdapterUse]()  # the latest change last
        self._running, self._waiting = dict[str, None](), dict[str, None]()
        self._changed_at = time.time()

    def name(self, digest: str, model_name: str) -> None:
        """Requests name this adapter so."""
        names = self._names.touch(digest, tuple)
        if model_name and model_name not in names:
            self._names[digest] = (*names, model_name)[-MAX_METRIC_NAMES:]

    def hold(self, adapters: Iterable[DesiredAdapter]) -> None:
        """These are to be on the device or in host memory before a request names them."""
        for adapter in adapters:
            if adapter.pinned or adapter.tier is Tier.HOST:
                for name in adapter.model_names:
                    self.name(adapter.digest, name)

    def take(self, adapters: Iterable[AdapterUse]) -> None:
        for adapter in adapters:
            on_device, in_host = adapter.tier is Tier.DEVICE, adapter.tier is Tier.HOST
            for there, of in ((on_device, self._device), (in_host, self._host)):
                of.pop(adapter.digest, None)
                if there:
                    of[adapter.digest] = adapter
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
        """One series: an endpoint picker reads the latest, and an adapter that waits and runs is in both lists."""
        labels = ("max_lora", "running_lora_adapters", "waiting_lora_adapters")
        family = GaugeMetricFamily("vllm:lora_requests_info", "When requests of adapters last changed", labels=labels)
        lists = [",".join(self._names_of(having)) for having in (self._running, self._waiting)]
        family.add_metric((str(self.slots), *lists), self._changed_at)
        yield family

    def _loaded(self) -> Metric:
        text = f"1: the adapter is there; the last {MOST_NAMED} that were used"
        labels = (*LABELS, "adapter_name", "level", "pinned", "rank")
        family = GaugeMetricFamily("vllm:lora_adapter_loaded", text, labels=labels)
        left = MOST_NAMED
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
        return [name for digest in _latest(digests, MOST_NAMED) for name in self._names.get(digest, (digest,))]


def _latest(digests: dict[str, AdapterUse] | dict[str, None], most: int) -> list[str]:
    """Those that changed last; copied at once, for another thread changes them."""
    return list(islice(reversed(tuple(digests)), most))
