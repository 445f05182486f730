"""The runner's metrics in one table: Weft's own names (`weft_runner_*`), vLLM's (`vllm:*`), and what is read.

vLLM's names, labels and buckets are those of vLLM 0.33 (`vllm/v1/metrics/loggers.py`, `buckets.py`), for what endpoint
pickers, autoscalers and dashboards read. A runner is one engine, "0". Times begin when the request arrived at its
gateway. What a request did on another runner (a migration, a hand-over) is that runner's; it counts as finished where
it finished.

A row with `read` is read at each scrape, on the thread that scrapes, while the engine's thread goes on. It reads
numbers and lengths, or copies a container in one call that runs no Python code: the interpreter's lock makes each of
them whole. What takes more (free pages, tokens to compute) is in the figures of the latest report, a value that
nobody changes. So two rows may be of two moments. The other rows count events, on the shell's event loop.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from typing import Any, Generic, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from weft.domain.request import Ended, FinishReason, NoCapacity, Step
from weft.domain.runner import RunnerFigures, RunnerRole
from weft_runner.core import events as ev
from weft_runner.core.admission import PoolLimits
from weft_runner.core.profile_model import Profile
from weft_runner.core.request_pool import RequestPool
from weft_runner.core.sequence import SequencePhase
from weft_runner.core.token_times import GAP_BUCKETS, GapCounts
from weft_runner.offload.figures import OffloadFigures, TierFigures
from weft_runner.shell.adapter_series import LABELS, AdapterSeries
from weft_runner.shell.engine import Output

S = TypeVar("S")
Samples = Mapping[tuple[str, ...], float]  # by values of the row's labels
Value = float | Samples | GapCounts
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
_PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)
_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 128, 256, 512, 1024)
_NONE = PoolLimits(total_pages=1, page_tokens=1, max_sequences=1, max_adapters=0, max_context_tokens=1, vocab_size=1)


@dataclass(slots=True)
class FigureSource:
    """What rows are read from. `status`: of the latest report; until the engine is `built` its pool is an empty one."""

    pool: RequestPool
    built: bool = False
    status: ev.RunnerStatus | None = None
    profile: Profile | None = None

    @property
    def figures(self) -> RunnerFigures:
        return RunnerFigures() if self.status is None else self.status.figures

    @property
    def usage(self) -> float:
        return self.figures.used_pages / self.pool.limits.total_pages

    @property
    def waiting(self) -> int:
        """Count sequences that have not begun, including sequences with KV or an earlier prompt in transfer."""
        pool, swaps = self.pool, tuple(self.pool.swap.by_key.values())
        waiting = sum(sequence.phase is SequencePhase.WAITING for sequence in tuple(pool.sequences.values()))
        return waiting + sum(swap.is_new for swap in swaps) + len(pool.hand_over.kv.incoming)

    @property
    def running(self) -> int:
        return max(0, len(self.pool.sequences) - self.waiting - self.pool.swap.num_swapped_out)


@dataclass(frozen=True, slots=True)
class Figure(Generic[S]):
    """A metric, by its own name, by vLLM's, or by both. `read`: at each scrape; None: it is fed with events.

    `labels`: beside those that all of vLLM's have, unless `engine` is among them.
    """

    own_name: str | None
    vllm: str | None
    kind: type[Gauge] | type[Counter] | type[Histogram]
    text: str
    read: Callable[[S], Value] | None = None
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


def _both_ways(out: float, back: float) -> Samples:
    return {("out",): out, ("in",): back}


_COPIED = "copied to host memory (out) and back (in)"
FIGURES: tuple[Figure[FigureSource], ...] = (
    # ---- what the engine does
    Figure("iterations", None, Gauge, "Iterations since start", lambda source: source.figures.iterations),
    Figure("forwards", None, Gauge, "Forward passes since start", lambda source: source.figures.forwards),
    Figure("busy_seconds", None, Counter, "Time in iterations that ran a batch, from scheduling to accounting"),
    Figure("batch_rows", None, Histogram, "Rows of an iteration", buckets=_ROWS),
    Figure("batch_adapters", None, Histogram, "Distinct adapters of an iteration", buckets=(0, *_ROWS)),
    Figure(
        "batch_rows_held",
        None,
        Counter,
        "Batch rows held out of iterations beside interactive ones, for the token time, summed",
        lambda source: source.pool.scheduler.held_rows,
    ),
    Figure(None, "iteration_tokens_total", Histogram, "Tokens of an iteration", buckets=_ITERATION_TOKENS),
    Figure("tokens", "generation_tokens", Counter, "Tokens emitted"),
    Figure(
        None,
        "spec_decode_num_drafts",
        Counter,
        "Rows of steps with a draft",
        lambda source: source.pool.scheduler.drafter.figures.drafts,
    ),
    Figure(
        None,
        "spec_decode_num_draft_tokens",
        Counter,
        "Drafted tokens",
        lambda source: source.pool.scheduler.drafter.figures.guesses,
    ),
    Figure(
        None,
        "spec_decode_num_accepted_tokens",
        Counter,
        "Drafted tokens that were right",
        lambda source: source.pool.scheduler.drafter.figures.accepted,
    ),
    Figure(None, "prompt_tokens", Counter, "Prompt tokens, once they are in KV"),
    Figure(None, "prompt_tokens_cached", Counter, "Of these those that were reused, not computed"),
    Figure(
        None,
        "prompt_tokens_cached_by_source",
        Counter,
        "Tokens found among earlier prompts, by the memory they were in",
        lambda source: {("device",): source.pool.reuse.device_tokens, ("host",): source.pool.reuse.host_tokens},
        labels=("source",),
    ),
    Figure(
        None,
        "inter_token_latency_seconds",
        Histogram,
        "Time between two tokens of a sequence",
        lambda source: source.pool.token_times.gaps,
    ),
    # ---- sequences
    Figure(None, "num_requests_running", Gauge, "Sequences running", lambda source: source.running),
    Figure(None, "num_requests_waiting", Gauge, "Sequences waiting on this runner", lambda source: source.waiting),
    Figure(
        None,
        "num_requests_waiting_by_reason",
        Gauge,
        "Sequences waiting on this runner: deferred, for an adapter or KV; what waits for capacity has no runner",
        lambda source: {("capacity",): 0, ("deferred",): source.waiting},
        labels=("reason",),
    ),
    Figure(
        "sequences_paused",
        None,
        Gauge,
        "Sequences paused for want of a page",
        lambda source: len(source.pool.reservations.paused),
    ),
    Figure(
        "stalled_sequence_seconds",
        None,
        Counter,
        "Time for which sequences were paused or swapped for want of pages, summed",
        lambda source: source.pool.preemption.stalled_s,
    ),
    Figure(
        "reservation_doublings",
        None,
        Gauge,
        "Reservations doubled since start",
        lambda source: source.figures.doublings,
    ),
    Figure("ended", None, Counter, "Sequences the runner gave up, by reason", labels=("reason",)),
    Figure("no_capacity", None, Counter, "Starts answered with NoCapacity, by reason", labels=("reason",)),
    Figure(
        "draining", None, Gauge, "1 while the runner gives its sequences back", lambda source: source.figures.draining
    ),
    Figure(
        "role",
        None,
        Gauge,
        "1: the role that it has now",
        lambda source: (
            {} if source.status is None else {(role.value,): role is source.figures.role for role in RunnerRole}
        ),
        labels=("role",),
    ),
    Figure(
        None,
        "num_preemptions",
        Counter,
        "Sequences that lost their place for want of memory",
        lambda source: source.pool.preemption.preemptions,
    ),
    Figure(
        None,
        "request_success",
        Counter,
        "Requests that finished here, by reason: stop, length, abort (the client left), error",
        labels=("finished_reason",),
    ),
    Figure(None, "time_to_first_token_seconds", Histogram, "Arrival to first token", buckets=_SECONDS_TO_FIRST),
    Figure(
        None,
        "request_time_per_output_token_seconds",
        Histogram,
        "A request's mean time of a token after the first",
        buckets=GAP_BUCKETS,
    ),
    Figure(None, "e2e_request_latency_seconds", Histogram, "Arrival to end", buckets=_SECONDS),
    Figure(
        None,
        "request_queue_time_seconds",
        Histogram,
        "Arrival to first iteration, an adapter's load included",
        buckets=_SECONDS,
    ),
    Figure(None, "request_inference_time_seconds", Histogram, "First iteration to end", buckets=_SECONDS),
    Figure(None, "request_prefill_time_seconds", Histogram, "First iteration to first token", buckets=_SECONDS),
    Figure(None, "request_decode_time_seconds", Histogram, "First token to end", buckets=_SECONDS),
    Figure(None, "request_prompt_tokens", Histogram, "Prompt tokens of a request", buckets=_TOKENS),
    Figure(None, "request_generation_tokens", Histogram, "Tokens of an answer", buckets=_TOKENS),
    Figure(None, "request_params_max_tokens", Histogram, "max_tokens of a request", buckets=_TOKENS),
    Figure(
        None,
        "request_num_preemptions",
        Histogram,
        "How often a request lost its place on this runner",
        buckets=_PREEMPTIONS,
    ),
    # ---- KV
    Figure("kv_pages_free", None, Gauge, "KV pages that a newcomer can have", lambda source: source.figures.free_pages),
    Figure("kv_pages_used", None, Gauge, "KV pages that hold tokens", lambda source: source.figures.used_pages),
    Figure(
        "kv_pages_adapters",
        None,
        Gauge,
        "KV pages of adapters in use, pinned or being loaded",
        lambda source: source.figures.adapter_pages,
    ),
    Figure(
        "kv_pages_grown", None, Gauge, "Pages granted in place since start", lambda source: source.figures.grown_pages
    ),
    Figure(None, "kv_cache_usage_perc", Gauge, "KV use, 0..1", lambda source: source.usage),
    Figure(None, "gpu_cache_usage_perc", Gauge, "KV use, 0..1: its older name", lambda source: source.usage),
    Figure(
        None,
        "cache_config_info",
        Gauge,
        "1: tokens of a page of KV, and how many pages there are",
        lambda source: (
            {(str(source.pool.limits.page_tokens), str(source.pool.limits.total_pages), ENGINE): 1}
            if source.built
            else {}
        ),
        labels=("block_size", "num_gpu_blocks", "engine"),
    ),
    Figure(
        "swapped_sequences",
        None,
        Gauge,
        "Sequences whose KV is in host memory, or on the way there or back",
        lambda source: source.pool.swap.num_swapped_out,
    ),
    Figure(
        "swapped_pages", None, Gauge, "KV pages of sequences in host memory", lambda source: source.pool.swap.host_pages
    ),
    Figure(
        "swapped_bytes",
        None,
        Counter,
        f"Bytes of KV of preempted sequences {_COPIED}",
        lambda source: _both_ways(source.pool.swap.out_bytes, source.pool.swap.in_bytes),
        labels=("direction",),
    ),
    Figure(
        "swap_copy_seconds",
        None,
        Counter,
        "Time that copies of KV to host memory and back took",
        lambda source: source.pool.swap.copy_s,
    ),
    Figure(
        "handed_over",
        None,
        Counter,
        "Sequences that another runner has taken over with their KV",
        lambda source: source.pool.hand_over.handed_over,
    ),
    Figure(
        "received",
        None,
        Counter,
        "Sequences that came with their KV from another runner",
        lambda source: source.pool.hand_over.received,
    ),
    Figure(
        "kv_lost",
        None,
        Counter,
        "Sequences whose KV did not get from one runner to the other",
        lambda source: source.pool.hand_over.lost,
    ),
    Figure(
        "kv_bytes",
        None,
        Counter,
        "Bytes of KV sent to other runners (out) and received (in), by carrier",
        labels=("direction", "carrier"),
    ),
    Figure(
        "kv_seconds",
        None,
        Counter,
        "Time in which these bytes were written to carriers, or read",
        labels=("direction", "carrier"),
    ),
    Figure(
        "kv_transfers",
        None,
        Counter,
        "Sequences whose KV was sent or received, by result; layers: sent as they were computed, or after that",
        labels=("direction", "result", "layers"),
    ),
    Figure(
        "kv_transfer_seconds",
        None,
        Counter,
        "Time of these from the first page or acceptance to the end",
        labels=("direction",),
    ),
    # ---- earlier prompts
    Figure(
        "prefix_reused_tokens",
        None,
        Counter,
        "Tokens found in pages of earlier requests, not computed again",
        lambda source: source.figures.prefix_reused_tokens,
    ),
    Figure(
        "prefix_reused_host_tokens",
        None,
        Counter,
        "Of the tokens reused those from host memory",
        lambda source: source.pool.reuse.host_tokens,
    ),
    Figure(
        "prefix_host_pages",
        None,
        Gauge,
        "KV pages of earlier prompts in host memory",
        lambda source: len(source.pool.host_prefixes),
    ),
    Figure(
        "prefix_swapped_bytes",
        None,
        Counter,
        f"Bytes of KV of earlier requests {_COPIED}",
        lambda source: _both_ways(source.pool.host_prefixes.out_bytes, source.pool.swap.prefix_in_bytes),
        labels=("direction",),
    ),
    Figure(
        None,
        "prefix_cache_queries",
        Counter,
        "Tokens looked up among earlier prompts",
        lambda source: source.pool.reuse.queried,
    ),
    Figure(
        None,
        "prefix_cache_hits",
        Counter,
        "Of these those that were found",
        lambda source: source.figures.prefix_reused_tokens,
    ),
    # ---- adapters
    Figure(
        "adapters_resident",
        None,
        Gauge,
        "Adapters on the device",
        lambda source: sum(adapter.resident for adapter in tuple(source.pool.adapters.slots.by_slot.values())),
    ),
    Figure("adapters_known", None, Gauge, "Adapters known", lambda source: len(source.pool.adapters.adapters)),
    Figure(
        None,
        "max_gpu_lora_adapters",
        Gauge,
        "Adapters that the device can hold at a time",
        lambda source: source.pool.limits.max_adapters,
    ),
    Figure(
        None,
        "lora_adapter_load_seconds",
        Histogram,
        "Adapters brought nearer: load to disk or host, activate to the device",
        labels=("transition",),
        buckets=_LOAD_SECONDS,
    ),
    Figure("corrupt_artifacts", None, Counter, "Files of the disk cache that were damaged, and fetched again"),
    # ---- what the runner measured of itself
    Figure(
        "best_batch_sequences",
        None,
        Gauge,
        "Sequences that it runs best, as it measured at start; 0: not",
        lambda source: source.profile.best_batch if source.profile else 0,
    ),
    Figure(
        "profiled_step_seconds",
        None,
        Gauge,
        "Iteration by rows, as measured at start",
        lambda source: {(str(time.rows),): time.ms / 1e3 for time in source.profile.decode} if source.profile else {},
        labels=("rows",),
    ),
    Figure(
        "kv_layer_by_layer_tokens",
        None,
        Gauge,
        "Prompt tokens from which on KV is sent as it is computed; +Inf: never",
        lambda source: source.profile.layer_by_layer_tokens if source.profile else 0,
    ),
    Figure(
        "profiled_kv_bytes_per_second",
        None,
        Gauge,
        "KV to another runner, as measured at start; 0: not",
        lambda source: source.profile.kv_bytes_per_s if source.profile else 0,
    ),
    Figure(
        "profiled_prefill_tokens_per_second",
        None,
        Gauge,
        "Prompt tokens, as measured at start",
        lambda source: source.profile.prefill_tokens_per_s if source.profile else 0,
    ),
)


def _places(figures: OffloadFigures) -> Samples:
    n_bytes = figures.resident_bytes, figures.host_bytes, figures.streamed_bytes, figures.ring_bytes
    return {(place,): value for place, value in zip(("memory", "host", "disk", "ring"), n_bytes, strict=True)}


def _token_seconds(figures: OffloadFigures) -> Samples:
    if (accuracy := figures.accuracy) is None:
        return {}
    return {
        ("predicted",): accuracy.token_predicted_s,
        ("measured",): accuracy.token_measured_s,
        ("alone",): accuracy.alone_s,
    }


def _page_figures(
    name: str, content: str, pages: Callable[[OffloadFigures], TierFigures]
) -> tuple[Figure[OffloadFigures], ...]:
    return (
        Figure(
            f"offload_{name}_read_bytes",
            None,
            Counter,
            f"Bytes of {content} read from disk, or copied from the host to a GPU",
            lambda source: pages(source).read_bytes,
        ),
        Figure(
            f"offload_{name}_written_bytes",
            None,
            Counter,
            f"Bytes of {content} written to disk, or copied from a GPU to its host",
            lambda source: pages(source).written_bytes,
        ),
        Figure(
            f"offload_{name}_wait_seconds",
            None,
            Counter,
            f"Time for which steps waited for {content}",
            lambda source: pages(source).waited_s,
        ),
    )


OFFLOAD_FIGURES: tuple[Figure[OffloadFigures], ...] = (  # of each stage of a pipeline, where weights come from disk
    Figure(
        "offload_weight_bytes",
        None,
        Gauge,
        "Bytes of weights by place: memory (a GPU's if any), host, disk (read in each pass), ring",
        _places,
        labels=("place",),
    ),
    Figure(
        "offload_planned_pass_seconds",
        None,
        Gauge,
        "Pass without prompts, by the plan; 0: none",
        lambda source: source.planned_pass_s,
    ),
    Figure(
        "offload_token_seconds",
        None,
        Gauge,
        "A token of each running sequence, lately, predicted and measured; alone: of one request, predicted",
        _token_seconds,
        labels=("of",),
    ),
    Figure(
        "offload_read_bytes", None, Counter, "Bytes of weights read from disk", lambda source: source.stream.read_bytes
    ),
    Figure(
        "offload_copied_bytes",
        None,
        Counter,
        "Bytes of weights copied to a GPU",
        lambda source: source.stream.copied_bytes,
    ),
    Figure(
        "offload_reading_seconds",
        None,
        Counter,
        "Time in which at least one read was under way",
        lambda source: source.stream.reading_s,
    ),
    Figure(
        "offload_wait_seconds",
        None,
        Counter,
        "Time for which steps waited for weights",
        lambda source: source.stream.waited_s,
    ),
    *_page_figures("kv", "KV", lambda source: source.kv),
    *_page_figures("activations", "activations", lambda source: source.activations),
    Figure("offload_step_seconds", None, Counter, "Time of steps", lambda source: source.step_s),
    Figure(
        "offload_predicted_seconds",
        None,
        Counter,
        "Time that steps should have taken by the cost model",
        lambda source: source.accuracy.predicted_s if source.accuracy else 0,
    ),
    Figure(
        "offload_measured_seconds",
        None,
        Counter,
        "Time of steps that were predicted",
        lambda source: source.accuracy.measured_s if source.accuracy else 0,
    ),
)


def _family(row: Figure[Any], name: str, labels: tuple[str, ...], read: Mapping[tuple[str, ...], Value]) -> Metric:
    """Make the family of a row that is read. `read`: by values of the labels before the row's own."""
    if row.kind is Histogram:
        family = HistogramMetricFamily(name, row.text, labels=labels)
    else:
        family = (GaugeMetricFamily if row.kind is Gauge else CounterMetricFamily)(name, row.text, labels=labels)
    for values, value in read.items():
        if isinstance(family, HistogramMetricFamily):
            assert isinstance(value, GapCounts), row
            bounds = (*GAP_BUCKETS, inf)
            counts = zip(map(floatToGoString, bounds), map(float, accumulate(value.counts)), strict=True)
            family.add_metric(values, list(counts), value.sum_s)
        else:
            assert not isinstance(value, GapCounts), row
            for more, number in (value if isinstance(value, Mapping) else {(): value}).items():
                family.add_metric((*values, *more), number)
    return family


class OffloadSeries(Collector):
    """Rows of weights, KV and activations on a disk, by stage of a pipeline (alone: 0). `stages`: any thread's."""

    def __init__(self, stages: Callable[[], Sequence[OffloadFigures]]) -> None:
        self._stages = stages

    def collect(self) -> Iterator[Metric]:
        stages = self._stages()
        for row in OFFLOAD_FIGURES:
            if row.read is not None:
                read = {(str(stage),): row.read(figures) for stage, figures in enumerate(stages)}
                yield _family(row, f"weft_runner_{row.own_name}", ("stage", *row.labels), read)


class RunnerMetrics(Collector):
    """Fed from the shell's event loop with the engine's output, and read at scrapes."""

    def __init__(self, registry: CollectorRegistry, model: str) -> None:
        """`model`: the name that the base is served under, as vLLM labels its own."""
        self._registry, self._of_vllm = registry, (model, ENGINE)
        self._source = FigureSource(RequestPool(_NONE))
        self._fed = {row.own_name or row.vllm or "": self._made(row) for row in FIGURES if row.read is None}
        self.adapters = AdapterSeries(self._of_vllm)
        registry.register(self.adapters)
        registry.register(self)

    def built(self, pool: RequestPool, profile: Profile | None = None) -> None:
        """Take the engine's pool, and what the runner has measured of itself: before the first output."""
        self._source = FigureSource(pool, True, None, profile)
        self.adapters.slots = pool.limits.max_adapters

    def show_offload(self, stages: Callable[[], Sequence[OffloadFigures]]) -> None:
        """Show what `stages` returns of each stage: weights come from disk."""
        self._registry.register(OffloadSeries(stages))

    def collect(self) -> Iterator[Metric]:
        for row in FIGURES:
            if row.read is not None:
                value = row.read(self._source)
                for name, labels, values in self._names(row):
                    yield _family(row, name, labels, {values: value})

    def observe(self, output: Output) -> None:
        if output.done is not None:
            batch, checked = output.done.step.batch, output.done.results.checked
            self.count("busy_seconds", output.busy_s)
            self.count("batch_rows", len(batch.rows))
            self.count("batch_adapters", batch.n_adapters)
            accepted = sum(len(sampled) - 1 for sampled in checked.values())
            rows = len(batch.rows) - batch.n_prefills
            self.count("iteration_tokens_total", batch.prompt_tokens + rows + accepted)
        for fact in output.facts:
            self._observe(fact)
        for _, message in output.sends:
            if isinstance(message, Step):
                self.count("tokens", sum(len(sequence.tokens) for sequence in message.sequences))
            elif isinstance(message, NoCapacity):
                self.count("no_capacity", 1, message.reason)
            elif isinstance(message, Ended):
                self.count("ended", 1, message.reason.value)
        if output.status is not None:
            self._source.status = output.status

    def _names(self, row: Figure[FigureSource]) -> Iterator[tuple[str, tuple[str, ...], tuple[str, ...]]]:
        """Give each name of a row with its labels, and values of those that all rows of vLLM's have."""
        if row.own_name is not None:
            yield f"weft_runner_{row.own_name}", row.labels, ()
        if row.vllm is not None:
            common = "engine" not in row.labels
            yield f"vllm:{row.vllm}", (*LABELS, *row.labels) if common else row.labels, self._of_vllm if common else ()

    def _made(self, row: Figure[FigureSource]) -> list[tuple[Counter | Histogram, tuple[str, ...]]]:
        """Make what counts events, with values of the labels that all of its series have."""
        made = list[tuple[Counter | Histogram, tuple[str, ...]]]()
        for name, labels, values in self._names(row):
            if row.kind is Histogram:
                metric = Histogram(name, row.text, labels, buckets=row.buckets, registry=self._registry)
            else:
                metric = Counter(name, row.text, labels, registry=self._registry)
            made.append((metric, values) if row.labels or not labels else (metric.labels(*values), ()))
        return made

    def count(self, name: str, value: float = 1, *labels: str) -> None:
        """Add to a row that counts events, with the values of its labels. Any thread."""
        for metric, values in self._fed[name]:
            child = metric.labels(*values, *labels) if labels else metric
            if isinstance(child, Counter):
                child.inc(value)
            else:
                child.observe(value)

    def _observe(self, fact: ev.Fact) -> None:
        match fact:
            case ev.PromptComputed(prompt_tokens, ttft_s, cached_tokens):
                self.count("prompt_tokens", prompt_tokens)
                self.count("prompt_tokens_cached", cached_tokens)
                self.count("time_to_first_token_seconds", ttft_s)
            case ev.SequenceEnded():
                self._ended(fact)
            case ev.AdapterBrought(to_device, seconds):
                self.count("lora_adapter_load_seconds", seconds, "activate" if to_device else "load")
            case ev.AdaptersChanged(adapters):
                self.adapters.take(adapters)

    def _ended(self, ended: ev.SequenceEnded) -> None:
        if ended.finish is None:
            return
        start, times = ended.start, ended.times
        self.count("request_success", 1, FINISHED[ended.finish])
        self.count("e2e_request_latency_seconds", ended.ended_at - ended.arrived)
        self.count("request_prompt_tokens", len(start.prompt))
        self.count("request_generation_tokens", ended.answer_tokens)
        self.count("request_params_max_tokens", start.max_tokens)
        self.count("request_num_preemptions", ended.preemptions)
        scheduled, first = times.scheduled_at, times.first_token_at
        if scheduled is not None:
            self.count("request_inference_time_seconds", ended.ended_at - scheduled)
        is_whole = start.kv_from is None and not start.emitted  # else an earlier runner had the first token
        if is_whole and scheduled is not None:
            self.count("request_queue_time_seconds", scheduled - ended.arrived)
        if is_whole and scheduled is not None and first is not None:
            self.count("request_prefill_time_seconds", first - scheduled)
        if first is not None:
            self.count("request_decode_time_seconds", ended.ended_at - first)
        if is_whole and first is not None and ended.answer_tokens > 1:
            mean_s = (ended.ended_at - first) / (ended.answer_tokens - 1)
            self.count("request_time_per_output_token_seconds", mean_s)
