"""Metrics of the runner, and the names that vLLM's dashboards and the Gateway API Inference Extension read."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from weft.domain.adapter import Tier
from weft_runner.core.events import Ended, NoRoom, PoolState, Tokens
from weft_runner.core.measured import Profile
from weft_runner.engine import Iteration

_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 128, 256, 512, 1024)


class Metrics:
    """Fed from the shell's event loop: each iteration, and the whole state whenever one is told."""

    def __init__(self, registry: CollectorRegistry, model: str) -> None:
        """`model`: the name that the base is served under, as vLLM labels its own."""

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"weft_runner_{name}", text, registry=registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"weft_runner_{name}", text, labels, registry=registry)

        self._tokens = counter("tokens", "Tokens emitted")
        self._busy = counter("busy_seconds", "Time in iterations that ran a batch, from the choice to the account")
        self._ended = counter("ended", "Sequences the runner gave up, by reason", "reason")
        self._no_room = counter("no_room", "Starts answered with NoRoom, by reason", "reason")
        self._rows = Histogram("weft_runner_batch_rows", "Rows of an iteration", buckets=_ROWS, registry=registry)
        self._adapters = Histogram(
            "weft_runner_batch_adapters", "Distinct adapters of an iteration", buckets=(0, *_ROWS), registry=registry
        )
        self._iterations = gauge("iterations", "Iterations since start")
        self._forwards = gauge("forwards", "Forward passes since start")
        self._free = gauge("kv_pages_free", "KV pages that a newcomer can have")
        self._used = gauge("kv_pages_used", "KV pages that hold tokens")
        self._lent = gauge("kv_pages_adapters", "KV pages whose memory adapters in use, pinned or on their way have")
        self._reused = counter("prefix_reused_tokens", "Tokens found in pages of earlier requests, not computed again")
        self._reused_before = 0
        self._grown = gauge("kv_pages_grown", "Pages granted in place since start")
        self._doublings = gauge("reservation_doublings", "Reservations doubled since start")
        self._paused = gauge("sequences_paused", "Sequences paused for want of a page")
        self._resident = gauge("adapters_resident", "Adapters on the device")
        self._known = gauge("adapters_known", "Adapters known")
        self._corrupt = counter("corrupt_artifacts", "Files of the disk cache that were damaged, and fetched again")
        self._draining = gauge("draining", "1 while the runner gives its sequences back")
        self._best_batch = gauge("best_batch_sequences", "Sequences that it runs best, as it measured at start; 0: not")
        self._step = Gauge(
            "weft_runner_profiled_step_seconds", "Iteration by rows, as measured at start", ("rows",), registry=registry
        )
        self._prefill = gauge("profiled_prefill_tokens_per_second", "Prompt tokens, as measured at start")
        labels = ("model_name",)
        self._vllm_running = Gauge("vllm:num_requests_running", "Sequences running", labels, registry=registry)
        self._vllm_waiting = Gauge("vllm:num_requests_waiting", "Sequences waiting", labels, registry=registry)
        self._vllm_kv = Gauge("vllm:kv_cache_usage_perc", "KV use, 0..1", labels, registry=registry)
        self._model = model

    def corrupt_artifact(self) -> None:
        """A cached file was not what its digest says. From any thread."""
        self._corrupt.inc()

    def profiled(self, profile: Profile) -> None:
        """What the runner measured of itself."""
        self._best_batch.set(profile.best_batch)
        self._prefill.set(profile.prefill_tokens_per_s)
        for time in profile.decode:
            self._step.labels(str(time.rows)).set(time.ms / 1e3)

    def observe(self, iteration: Iteration) -> None:
        """Count what an iteration did."""
        if iteration.batch_rows:
            self._busy.inc(iteration.busy_s)
            self._rows.observe(iteration.batch_rows)
            self._adapters.observe(iteration.batch_adapters)
        self._tokens.inc(sum(len(event.tokens) for event in iteration.events if isinstance(event, Tokens)))
        for event in iteration.events:
            if isinstance(event, NoRoom):
                self._no_room.labels(event.reason).inc()
            elif isinstance(event, Ended):
                self._ended.labels(event.reason.value).inc()
        if iteration.state is not None:
            self._show(iteration.state)

    def _show(self, state: PoolState) -> None:
        waiting = sum(s.waiting for s in state.sequences)
        self._iterations.set(state.iterations)
        self._forwards.set(state.forwards)
        self._free.set(state.free_pages)
        self._used.set(state.used_pages)
        self._lent.set(state.adapter_pages)
        self._reused.inc(state.prefix_reused_tokens - self._reused_before)
        self._reused_before = state.prefix_reused_tokens
        self._grown.set(state.grown_pages)
        self._doublings.set(state.doublings)
        self._paused.set(len(state.overruns))
        self._resident.set(sum(a.tier is Tier.DEVICE for a in state.adapters))
        self._known.set(state.adapters_known)
        self._draining.set(state.draining)
        self._vllm_running.labels(self._model).set(len(state.sequences) - waiting)
        self._vllm_waiting.labels(self._model).set(waiting)
        self._vllm_kv.labels(self._model).set(state.used_pages / state.total_pages)
