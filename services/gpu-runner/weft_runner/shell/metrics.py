"""Metrics of the runner, and the names that vLLM's dashboards and the Gateway API Inference Extension read."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from weft.domain.request import Ended, NoCapacity, Step
from weft.domain.runner import RunnerRole
from weft_runner.core.events import RunnerStatus
from weft_runner.core.profile_model import Profile
from weft_runner.shell.engine import Output
from weft_runner.shell.kv_figures import KvTransfer

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


class RunnerMetrics:
    """Fed from the shell's event loop with the engine's output."""

    def __init__(self, registry: CollectorRegistry, model: str, total_pages: int) -> None:
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
        self._reused = counter("prefix_reused_tokens", "Tokens found in pages of earlier requests, not computed again")
        self._reused_before = 0
        copied = "copied to host memory (out) and back (in)"
        self._copied = {
            "swap": counter("swapped_bytes", f"Bytes of KV of preempted sequences {copied}", "direction"),
            "prefix": counter("prefix_swapped_bytes", f"Bytes of KV of earlier requests {copied}", "direction"),
        }
        self._copied_before: dict[str, int] = {}
        self._sums = {
            "swap_copy_s": counter("swap_copy_seconds", "Time that copies of KV to host memory and back took"),
            "stalled_s": counter(
                "stalled_sequence_seconds", "Time for which sequences were paused or swapped for want of pages, summed"
            ),
            "prefix_host_tokens": counter("prefix_reused_host_tokens", "Of the tokens reused those from host memory"),
            "handed_over": counter("handed_over", "Sequences that another runner has gone on with, from their KV"),
            "received": counter("received", "Sequences that came with their KV from another runner"),
            "kv_lost": counter("kv_lost", "Sequences whose KV did not get from one runner to the other"),
            "role_changes": counter(
                "role_changes", "Changes of role after which a token of the new phase was computed"
            ),
            "role_change_iterations": counter("role_change_iterations", "From these orders to that token, summed"),
        }
        self._sums_before = dict.fromkeys(self._sums, 0.0)
        outcomes = "fetched; used by a request; dropped unused; failed"
        self._prefetched = (
            counter(
                "prefetched_adapters", f"Adapters that a forecast brought to disk, by outcome: {outcomes}", "outcome"
            ),
            counter("prefetched_bytes", "Bytes on the device of those adapters", "outcome"),
        )
        self._prefetched_before: dict[str, tuple[int, int]] = {}
        self._corrupt = counter("corrupt_artifacts", "Files of the disk cache that were damaged, and fetched again")
        self.kv = KvMetrics(registry)
        self._best_batch = gauge("best_batch_sequences", "Sequences that it runs best, as it measured at start; 0: not")
        self._step = Gauge(
            "weft_runner_profiled_step_seconds", "Iteration by rows, as measured at start", ("rows",), registry=registry
        )
        self._layer_by_layer = gauge(
            "kv_layer_by_layer_tokens", "Prompt tokens from which on KV is sent as it is computed; +Inf: never"
        )
        self._prefill = gauge("profiled_prefill_tokens_per_second", "Prompt tokens, as measured at start")
        self._role = Gauge("weft_runner_role", "1: the role that it has now", ("role",), registry=registry)
        labels = ("model_name",)
        self._vllm_running = Gauge("vllm:num_requests_running", "Sequences running", labels, registry=registry)
        self._vllm_waiting = Gauge("vllm:num_requests_waiting", "Sequences waiting", labels, registry=registry)
        self._vllm_kv = Gauge("vllm:kv_cache_usage_perc", "KV use, 0..1", labels, registry=registry)
        self._model, self._total_pages = model, total_pages

    def corrupt_artifact(self) -> None:
        """A cached file was not what its digest says. From any thread."""
        self._corrupt.inc()

    def profiled(self, profile: Profile) -> None:
        """What the runner measured of itself."""
        self._best_batch.set(profile.best_batch)
        self._layer_by_layer.set(profile.layer_by_layer_tokens)
        self._prefill.set(profile.prefill_tokens_per_s)
        for time in profile.decode:
            self._step.labels(str(time.rows)).set(time.ms / 1e3)

    def observe(self, output: Output) -> None:
        if output.done is not None:
            batch = output.done.step.batch
            self._busy.inc(output.busy_s)
            self._rows.observe(len(batch.rows))
            self._adapters.observe(batch.n_adapters)
        for _, message in output.sends:
            if isinstance(message, Step):
                self._tokens.inc(sum(len(sequence.tokens) for sequence in message.sequences))
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
        self._reused.inc(figures.prefix_reused_tokens - self._reused_before)
        self._reused_before = figures.prefix_reused_tokens
        for kind, copied in self._copied.items():
            for direction in ("out", "in"):
                n_bytes: int = getattr(status, field := f"{kind}_{direction}_bytes")
                copied.labels(direction).inc(n_bytes - self._copied_before.get(field, 0))
                self._copied_before[field] = n_bytes
        for name, metric in self._sums.items():
            total = getattr(status, name)
            metric.inc(total - self._sums_before[name])
            self._sums_before[name] = total
        for outcome, *counts in status.prefetched:
            before = self._prefetched_before.get(outcome, (0, 0))
            for metric, count, known in zip(self._prefetched, counts, before, strict=True):
                metric.labels(outcome).inc(count - known)
            self._prefetched_before[outcome] = counts[0], counts[1]
        for role in RunnerRole:
            self._role.labels(role.value).set(role is figures.role)
        self._vllm_running.labels(self._model).set(status.running)
        self._vllm_waiting.labels(self._model).set(status.waiting)
        self._vllm_kv.labels(self._model).set(figures.used_pages / self._total_pages)
