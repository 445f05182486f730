"""Metrics of the runner under its own names, and what leaves the engine as they show it (`vllm_metrics.py`: vLLM's)."""

from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from weft.domain.request import Ended, NoCapacity, Step
from weft.domain.runner import RunnerRole
from weft_runner.core.events import RunnerStatus
from weft_runner.core.profile_model import Profile
from weft_runner.offload.figures import OffloadFigures
from weft_runner.shell.engine import Output
from weft_runner.shell.kv_figures import KvTransfer
from weft_runner.shell.vllm_metrics import Total, VllmMetrics

_FIGURES = {  # gauges by field
    "iterations": ("iterations", "Iterations since start"),
    "forwards": ("forwards", "Forward passes since start"),
    "free_pages": ("kv_pages_free", "KV pages that a newcomer can have"),
    "used_pages": ("kv_pages_used", "KV pages that hold tokens"),
    "adapter_pages": ("kv_pages_adapters", "KV pages of adapters in use, pinned or being loaded"),
    "grown_pages": ("kv_pages_grown", "Pages granted in place since start"),
    "doublings": ("reservation_doublings", "Reservations doubled since start"),
    "draining": ("draining", "1 while the runner gives its sequences back"),
}
_STATUS = {
    "paused": ("sequences_paused", "Sequences paused for want of a page"),
    "swapped": ("swapped_sequences", "Sequences whose KV is in host memory, or on the way there or back"),
    "swapped_pages": ("swapped_pages", "KV pages of sequences in host memory"),
    "prefix_host_pages": ("prefix_host_pages", "KV pages of earlier prompts in host memory"),
    "adapters_resident": ("adapters_resident", "Adapters on the device"),
    "adapters_known": ("adapters_known", "Adapters known"),
}
_TOTALS = {  # counters by field
    "swap_copy_s": ("swap_copy_seconds", "Time that copies of KV to host memory and back took"),
    "stalled_s": (
        "stalled_sequence_seconds", "Time for which sequences were paused or swapped for want of pages, summed"
    ),
    "prefix_host_tokens": ("prefix_reused_host_tokens", "Of the tokens reused those from host memory"),
    "handed_over": ("handed_over", "Sequences that another runner has taken over with their KV"),
    "received": ("received", "Sequences that came with their KV from another runner"),
    "kv_lost": ("kv_lost", "Sequences whose KV did not get from one runner to the other"),
    "held_rows": (
        "batch_rows_held", "Batch rows held out of iterations beside interactive ones, for the token time, summed"
    ),
}  # fmt: skip
_OFFLOAD_TOTALS: dict[str, tuple[str, Callable[[OffloadFigures], float]]] = {
    "read_bytes": ("Bytes of weights read from disk", lambda of: of.stream.read_bytes),
    "copied_bytes": ("Bytes of weights copied to a GPU", lambda of: of.stream.copied_bytes),
    "reading_seconds": ("Time in which at least one read was under way", lambda of: of.stream.reading_s),
    "wait_seconds": ("Time for which steps waited for weights", lambda of: of.stream.waited_s),
    "kv_read_bytes": ("Bytes of KV read from disk, or copied from the host to a GPU", lambda of: of.kv.read_bytes),
    "kv_written_bytes": (
        "Bytes of KV written to disk, or copied from a GPU to its host", lambda of: of.kv.written_bytes
    ),
    "kv_wait_seconds": ("Time for which steps waited for KV", lambda of: of.kv.waited_s),
    "activations_read_bytes": (
        "Bytes of activations read from disk, or copied from the host to a GPU", lambda of: of.activations.read_bytes
    ),
    "activations_written_bytes": (
        "Bytes of activations written to disk, or copied from a GPU to its host",
        lambda of: of.activations.written_bytes,
    ),
    "activations_wait_seconds": ("Time for which steps waited for activations", lambda of: of.activations.waited_s),
    "step_seconds": ("Time of steps", lambda of: of.step_s),
    "predicted_seconds": (
        "Time that steps should have taken by the cost model", lambda of: of.accuracy.predicted_s if of.accuracy else 0
    ),
    "measured_seconds": (
        "Time of steps that were predicted", lambda of: of.accuracy.measured_s if of.accuracy else 0
    ),
}  # fmt: skip
_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 128, 256, 512, 1024)


class KvMetrics:
    """Fed from the threads of the streams of KV, see `kv_figures.KvFigures`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"weft_runner_kv_{name}", text, labels, registry=registry)

        carried = ("direction", "carrier")
        self._bytes = counter(
            "bytes", "Bytes of KV sent to other runners (out) and received (in), by carrier", *carried
        )
        self._seconds = counter("seconds", "Time in which these bytes were written to carriers, or read", *carried)
        self._transfers = counter(
            "transfers",
            "Sequences whose KV was sent or received, by result; layers: sent as they were computed, or after that",
            *("direction", "result", "layers"),
        )
        self._open = counter(
            "transfer_seconds", "Time of these from the first page or acceptance to the end", "direction"
        )

    def sent(self, carrier: str, n_bytes: int, seconds: float) -> None:
        self._count("out", carrier, n_bytes, seconds)

    def received(self, carrier: str, n_bytes: int, seconds: float) -> None:
        self._count("in", carrier, n_bytes, seconds)

    def ended(self, direction: str, result: str, transfer: KvTransfer, now: float) -> None:
        self._transfers.labels(direction, result, "as_computed" if transfer.layer_wise else "after").inc()
        self._open.labels(direction).inc(now - transfer.began)

    def _count(self, direction: str, carrier: str, n_bytes: int, seconds: float) -> None:
        self._bytes.labels(direction, carrier).inc(n_bytes)
        self._seconds.labels(direction, carrier).inc(seconds)


class OffloadMetrics:
    """Of weights, KV and activations on a disk, by stage of a pipeline (alone: 0); only where some may be there."""

    def __init__(self, registry: CollectorRegistry, stages: Callable[[], Sequence[OffloadFigures]]) -> None:
        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"weft_runner_offload_{name}", text, ("stage", *labels), registry=registry)

        self._stages = stages
        self._weights = gauge(
            "weight_bytes", "Bytes of weights by place: memory (a GPU's if any), host, disk (read in each pass), ring",
            "place",
        )  # fmt: skip
        self._planned = gauge("planned_pass_seconds", "Pass without prompts, by the plan; 0: none")
        self._token = gauge(
            "token_seconds",
            "A token of each running sequence, lately, predicted and measured; alone: of one request, predicted",
            "of",
        )
        counters = {
            name: Counter(f"weft_runner_offload_{name}", text, ("stage",), registry=registry)
            for name, (text, _) in _OFFLOAD_TOTALS.items()
        }
        self._totals = [
            {name: Total(counter.labels(str(stage))) for name, counter in counters.items()}
            for stage in range(len(stages()))
        ]
        self.observe()

    def observe(self) -> None:
        for stage, (figures, totals) in enumerate(zip(self._stages(), self._totals, strict=True)):
            of_stage = str(stage)
            places = figures.resident_bytes, figures.host_bytes, figures.streamed_bytes, figures.ring_bytes
            for place, n_bytes in zip(("memory", "host", "disk", "ring"), places, strict=True):
                self._weights.labels(of_stage, place).set(n_bytes)
            self._planned.labels(of_stage).set(figures.planned_pass_s)
            for name, (_, of) in _OFFLOAD_TOTALS.items():
                totals[name].set(of(figures))
            if (accuracy := figures.accuracy) is not None:
                self._token.labels(of_stage, "predicted").set(accuracy.token_predicted_s)
                self._token.labels(of_stage, "measured").set(accuracy.token_measured_s)
                self._token.labels(of_stage, "alone").set(accuracy.alone_s)


class RunnerMetrics:
    """Fed from the shell's event loop with the engine's output."""

    def __init__(self, registry: CollectorRegistry, model: str) -> None:
        """`model`: the name that the base is served under, as vLLM labels its own."""

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"weft_runner_{name}", text, registry=registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"weft_runner_{name}", text, labels, registry=registry)

        self._tokens = counter("tokens", "Tokens emitted")
        self._busy = counter("busy_seconds", "Time in iterations that ran a batch, from scheduling to accounting")
        self._ended = counter("ended", "Sequences the runner gave up, by reason", "reason")
        self._no_capacity = counter("no_capacity", "Starts answered with NoCapacity, by reason", "reason")
        self._rows = Histogram("weft_runner_batch_rows", "Rows of an iteration", buckets=_ROWS, registry=registry)
        self._adapters = Histogram(
            "weft_runner_batch_adapters", "Distinct adapters of an iteration", buckets=(0, *_ROWS), registry=registry
        )
        self._figures = {name: gauge(*of) for name, of in _FIGURES.items()}
        self._status = {name: gauge(*of) for name, of in _STATUS.items()}
        copied = "copied to host memory (out) and back (in)"
        swapped = counter("swapped_bytes", f"Bytes of KV of preempted sequences {copied}", "direction")
        prefixes = counter("prefix_swapped_bytes", f"Bytes of KV of earlier requests {copied}", "direction")
        self._totals = {
            **{name: Total(counter(*of)) for name, of in _TOTALS.items()},
            **{f"swap_{way}_bytes": Total(swapped.labels(way)) for way in ("out", "in")},
            **{f"prefix_{way}_bytes": Total(prefixes.labels(way)) for way in ("out", "in")},
        }
        self._reused = Total(
            counter("prefix_reused_tokens", "Tokens found in pages of earlier requests, not computed again")
        )
        self._corrupt = counter("corrupt_artifacts", "Files of the disk cache that were damaged, and fetched again")
        self.kv = KvMetrics(registry)
        self._best_batch = gauge("best_batch_sequences", "Sequences that it runs best, as it measured at start; 0: not")
        self._step = Gauge(
            "weft_runner_profiled_step_seconds", "Iteration by rows, as measured at start", ("rows",), registry=registry
        )
        self._layer_by_layer = gauge(
            "kv_layer_by_layer_tokens", "Prompt tokens from which on KV is sent as it is computed; +Inf: never"
        )
        self._kv_rate = gauge("profiled_kv_bytes_per_second", "KV to another runner, as measured at start; 0: not")
        self._prefill = gauge("profiled_prefill_tokens_per_second", "Prompt tokens, as measured at start")
        self._role = Gauge("weft_runner_role", "1: the role that it has now", ("role",), registry=registry)
        self.vllm = VllmMetrics(registry, model)
        self._registry, self._offload = registry, None

    def corrupt_artifact(self) -> None:
        """A cached file was not what its digest says. From any thread."""
        self._corrupt.inc()

    def profiled(self, profile: Profile) -> None:
        """What the runner measured of itself."""
        self._best_batch.set(profile.best_batch)
        self._layer_by_layer.set(profile.layer_by_layer_tokens)
        self._kv_rate.set(profile.kv_bytes_per_s)
        self._prefill.set(profile.prefill_tokens_per_s)
        for time in profile.decode:
            self._step.labels(str(time.rows)).set(time.ms / 1e3)

    def offloaded(self, stages: Callable[[], Sequence[OffloadFigures]]) -> None:
        """Weights come from disk: of each stage what `stages` returns."""
        self._offload = OffloadMetrics(self._registry, stages)

    def observe(self, output: Output) -> None:
        if output.done is not None:
            if self._offload is not None:
                self._offload.observe()
            batch = output.done.step.batch
            self._busy.inc(output.busy_s)
            self._rows.observe(len(batch.rows))
            self._adapters.observe(batch.n_adapters)
            self.vllm.ran(batch)
        for fact in output.facts:
            self.vllm.observe(fact)
        for _, message in output.sends:
            if isinstance(message, Step):
                n_tokens = sum(len(sequence.tokens) for sequence in message.sequences)
                self._tokens.inc(n_tokens)
                self.vllm.emitted(n_tokens)
            elif isinstance(message, NoCapacity):
                self._no_capacity.labels(message.reason).inc()
            elif isinstance(message, Ended):
                self._ended.labels(message.reason.value).inc()
        if output.status is not None:
            self._show(output.status)

    def _show(self, status: RunnerStatus) -> None:
        figures = status.figures
        for name, gauge in self._figures.items():
            gauge.set(getattr(figures, name))
        for name, gauge in self._status.items():
            gauge.set(getattr(status, name))
        self._reused.set(figures.prefix_reused_tokens)
        for name, total in self._totals.items():
            total.set(getattr(status, name))
        for role in RunnerRole:
            self._role.labels(role.value).set(role is figures.role)
        self.vllm.show(status)
