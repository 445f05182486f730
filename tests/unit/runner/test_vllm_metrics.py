"""What routers and dashboards made for vLLM read of a runner: names, labels and what the values follow."""

import json
import sys
import threading
from collections import deque
from dataclasses import replace
from math import inf
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from harness.client_fields import RECORD
from harness.runner_machine import session, start_of
from weft.domain.adapter import DesiredAdapter, DesiredChange, Tier
from weft.domain.machine import Connected, Received
from weft.domain.request import FinishReason, SessionHello, Stop
from weft.domain.routes import PoolRoute, Routes
from weft_gateway.core import Gateway, GatewayConfig
from weft_gateway.shell import GatewayMetrics
from weft_runner.core import BatchLimits, Fetch, Fetched, PoolLimits, Runner, SampledToken
from weft_runner.core.events import (
    AdapterUse,
    Fact,
    Load,
    Loaded,
    RunnerStatus,
    RunStep,
    StepDone,
    StepResults,
    StepSlot,
    SwapDone,
    SwapIn,
    SwapOut,
)
from weft_runner.shell import Output
from weft_runner.shell.adapter_series import MAX_NAMED
from weft_runner.shell.metrics import RunnerMetrics

LIMITS = PoolLimits(64, 4, 8, 2, 200, 9, frozenset([0]), BatchLimits(2, 64))
SWAPPING = replace(LIMITS, total_pages=16, batch=BatchLimits(2, 32), host_bytes=1000, page_bytes=1, swap_page_bytes=1)
STEP_S = 0.02
# `vllm/v1/metrics/buckets.py`, 0.33
VLLM_GAP_BUCKETS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
# The endpoint picker's defaults for vLLM: llm-d-router, docs of its metric protocol and the tests of its core metrics
# extractor (pkg/epp/framework/plugins/datalayer/extractor/metrics); the first five are also those of the Gateway API
# Inference Extension's model server protocol (docs/proposals/003-model-server-protocol).
PICKER = {
    "vllm:num_requests_waiting": set[str](), "vllm:num_requests_running": set[str](),
    "vllm:kv_cache_usage_perc": set[str](), "vllm:cache_config_info": {"block_size", "num_gpu_blocks"},
    "vllm:lora_requests_info": {"max_lora", "running_lora_adapters", "waiting_lora_adapters"},
    "vllm:lora_adapter_loaded": {"adapter_name", "level", "pinned"},
    "vllm:num_gpu_loaded_lora_adapters": {"model_name"}, "vllm:max_gpu_lora_adapters": set[str](),
    "vllm:lora_adapter_load_seconds": {"transition"},
}  # fmt: skip
# What vLLM's Grafana board draws: examples/online_serving/prometheus_grafana/grafana.json.
BOARD = """
e2e_request_latency_seconds inter_token_latency_seconds time_to_first_token_seconds request_queue_time_seconds
request_prefill_time_seconds request_decode_time_seconds request_prompt_tokens request_generation_tokens
prompt_tokens generation_tokens request_success num_preemptions prefix_cache_queries prefix_cache_hits
""".split()


# What vLLM had under this name once, and what its pull request 54830 may bring; docs/observability.md says so.
RENAMED = {"vllm:gpu_cache_usage_perc"}
NOT_SHIPPED = {
    "vllm:lora_adapter_loaded", "vllm:num_gpu_loaded_lora_adapters", "vllm:num_cpu_loaded_lora_adapters",
    "vllm:max_gpu_lora_adapters", "vllm:lora_adapter_load_seconds",
}  # fmt: skip


class Scraped:
    """A runner's machine with two adapters' worth of slots, and what a scrape shows of it."""

    def __init__(self, limits: PoolLimits = LIMITS) -> None:
        self.runner, self.now, self.counter = Runner(limits), 0.0, 0
        self.registry = CollectorRegistry()
        self.metrics = RunnerMetrics(self.registry, "base")
        self.metrics.built(self.runner.pool)
        self.handle(Connected(session(), SessionHello("g", "i")))

    def handle(self, event: Any) -> list[Any]:
        effects = self.runner.handle(event, self.now)
        status = [effect for effect in effects if isinstance(effect, RunnerStatus)]
        facts = [effect for effect in effects if isinstance(effect, Fact)]
        self.metrics.observe(Output(facts=facts, status=status[-1] if status else None))
        return effects

    def start(self, key: str, prompt: int = 5, max_tokens: int = 20, **fields: Any) -> None:
        self.counter += 1
        start = start_of(key, self.counter, (1,) * prompt, max_tokens, **fields)
        if start.adapter:
            self.metrics.adapters.name(start.adapter, start.model_name)
        for effect in self.handle(Received(session(), start)):
            if isinstance(effect, Fetch):
                self.now += 1.0
                self.loading = self.handle(Fetched(effect.digest, 1, None, 1.0))

    def load(self) -> None:
        self.now += 0.5
        for effect in self.loading:
            if isinstance(effect, Load):
                self.handle(Loaded(effect.digest, 4, 1, None, 0.5))

    def steps(self, n: int, token: int = 2) -> None:
        for _ in range(n):
            (step,) = (e for e in self.handle(StepSlot()) if isinstance(e, RunStep))
            self.now += STEP_S
            sampled = {row.key: SampledToken(token) for row in step.batch.rows if row.samples}
            self.handle(StepDone(step, StepResults(sampled, {}), 1000 * STEP_S))

    def value(self, name: str, **labels: str) -> float | None:
        about = {"model_name": "base", "engine": "0", **labels}
        return self.registry.get_sample_value(f"vllm:{name}", about)

    def labels(self, name: str) -> list[dict[str, str]]:
        families = text_string_to_metric_families(generate_latest(self.registry).decode())
        return [sample.labels for family in families for sample in family.samples if sample.name == name]


def served() -> Scraped:
    """A request of the base that ran to its end, and one of an adapter."""
    scraped = Scraped()
    scraped.start("one", max_tokens=3)
    scraped.steps(3)
    scraped.start("two", adapter="sha256:a", model_name="acme/upper")
    scraped.load()
    scraped.steps(2)
    return scraped


def test_an_endpoint_picker_finds_its_default_names_and_labels():
    scraped = served()
    families = {f.name: f for f in text_string_to_metric_families(generate_latest(scraped.registry).decode())}
    for name, labels in PICKER.items():
        assert families[name].samples, name
        assert labels <= families[name].samples[0].labels.keys(), name
    assert {f"vllm:{name}" for name in BOARD} <= families.keys()


def test_names_types_and_labels_are_those_of_the_newest_vllm() -> None:
    """Compare with the record of its wheel. A gateway is no engine: it has `model_name` alone of the common labels."""
    gateway, registry = Gateway(GatewayConfig(), "gateway", lambda _: b""), CollectorRegistry()
    gateway.routes.take(Routes(1, True, pools=(PoolRoute("team/base", "sha256:t", "tiny", 512, 1),)))
    GatewayMetrics(gateway, registry)
    metrics: dict[str, str] = json.loads(RECORD.read_text())["metrics"]
    scraped, missing, checked = served(), set[str](), 0
    for exported, common in ((scraped.registry, {"engine"}), (registry, set[str]())):
        for family in exported.collect():
            if not family.name.startswith("vllm:"):
                continue
            if family.name not in metrics:
                missing.add(family.name)
            elif (about := metrics[family.name].split()) and family.samples:
                assert family.type == about[0], family.name
                labels = {*about[1:]} - ({"engine"} - common)
                assert {*family.samples[0].labels} - {"le"} == labels, family.name
                checked += 1
    assert missing == RENAMED | NOT_SHIPPED
    assert checked > 25


def test_adapters_are_listed_under_the_names_that_requests_gave_them():
    scraped = served()
    (info,) = scraped.labels("vllm:lora_requests_info")
    assert info == {"max_lora": "2", "running_lora_adapters": "acme/upper", "waiting_lora_adapters": ""}
    (loaded,) = scraped.labels("vllm:lora_adapter_loaded")
    assert (loaded["adapter_name"], loaded["level"], loaded["pinned"], loaded["rank"]) == (
        "acme/upper", "gpu", "false", "4",
    )  # fmt: skip
    assert scraped.value("num_gpu_loaded_lora_adapters") == 1
    scraped.start("three", adapter="sha256:b", model_name="acme/lower")
    (info,) = scraped.labels("vllm:lora_requests_info")
    assert (info["running_lora_adapters"], info["waiting_lora_adapters"]) == ("acme/upper", "acme/lower")
    assert scraped.value("lora_adapter_load_seconds_sum", transition="activate") == 0.5
    assert scraped.value("lora_adapter_load_seconds_sum", transition="load") == 2.0


def test_an_adapter_without_requests_stays_listed_as_loaded_and_only_so():
    scraped = served()
    scraped.handle(Received(session(), Stop("two", scraped.runner.pool.sequences["two"].start.epoch)))
    (info,) = scraped.labels("vllm:lora_requests_info")
    assert info["running_lora_adapters"] == info["waiting_lora_adapters"] == ""
    assert [labels["adapter_name"] for labels in scraped.labels("vllm:lora_adapter_loaded")] == ["acme/upper"]


def test_a_content_that_comes_back_has_no_name_of_an_adapter_that_was_removed() -> None:
    scraped = served()
    adapters = scraped.metrics.adapters
    adapters.hold(DesiredChange(2, full=False, removed=("sha256:a", "sha256:of no request")))
    assert not scraped.labels("vllm:lora_adapter_loaded"), "it leaves after its last sequence"
    adapters.name("sha256:a", "acme/later")
    assert [labels["adapter_name"] for labels in scraped.labels("vllm:lora_adapter_loaded")] == ["acme/later"]


def test_a_pinned_adapter_has_its_names_before_any_request() -> None:
    scraped = Scraped()
    pinned = DesiredAdapter("sha256:a", 8, 1, pinned=True, model_names=("acme/a", "rival/a"))
    scraped.metrics.adapters.hold(DesiredChange(1, full=True, adapters=(pinned,)))
    scraped.metrics.adapters.take([AdapterUse("sha256:a", Tier.DEVICE, 8, True, 0, 0)])
    listed = scraped.labels("vllm:lora_adapter_loaded")
    assert [(labels["adapter_name"], labels["pinned"]) for labels in listed] == [
        ("acme/a", "true"),
        ("rival/a", "true"),
    ]


def test_a_scrape_lists_no_more_adapters_than_its_bound():
    scraped = Scraped()
    many = [AdapterUse(f"sha256:{i}", Tier.DEVICE, 8, False, 1, 0) for i in range(MAX_NAMED + 50)]
    scraped.metrics.adapters.take(many)
    assert len(scraped.labels("vllm:lora_adapter_loaded")) == MAX_NAMED
    (info,) = scraped.labels("vllm:lora_requests_info")
    assert len(info["running_lora_adapters"].split(",")) == MAX_NAMED
    assert scraped.value("num_gpu_loaded_lora_adapters") == MAX_NAMED + 50


def test_times_and_tokens_of_a_request_are_its_own():
    scraped = Scraped()
    scraped.start("r", prompt=5, max_tokens=4, waited_s=3.0)
    scraped.now += 0.25
    scraped.steps(4)
    assert scraped.value("request_success_total", finished_reason="length") == 1
    assert scraped.value("prompt_tokens_total") == scraped.value("request_prompt_tokens_sum") == 5
    assert scraped.value("request_generation_tokens_sum") == 4
    expected = {
        "request_queue_time_seconds": 3.25,
        "time_to_first_token_seconds": 3.25 + STEP_S,
        "request_prefill_time_seconds": STEP_S,
        "request_decode_time_seconds": 3 * STEP_S,
        "e2e_request_latency_seconds": 3.25 + 4 * STEP_S,
        "request_time_per_output_token_seconds": STEP_S,
    }
    measured = {name: round(scraped.value(f"{name}_sum") or 0, 6) for name in expected}
    assert measured == {name: round(value, 6) for name, value in expected.items()}


def test_tokens_that_are_reused_are_cached_ones_and_adapters_that_are_waited_for_defer():
    scraped = Scraped()
    for key in ("first", "second"):
        scraped.start(key, prompt=9, max_tokens=2, cache_salt="tenant")
        scraped.steps(2)
    assert scraped.value("prompt_tokens_total") == 18
    assert scraped.value("prompt_tokens_cached_total") == 8, "two pages"
    cached = {
        source: scraped.value("prompt_tokens_cached_by_source_total", source=source) for source in ("device", "host")
    }
    assert cached == {"device": 8, "host": 0}
    scraped.start("third", adapter="sha256:a", model_name="acme/upper")
    waiting = {
        reason: scraped.value("num_requests_waiting_by_reason", reason=reason) for reason in ("capacity", "deferred")
    }
    assert waiting == {"capacity": 0, "deferred": 1}
    assert scraped.value("num_requests_waiting") == 1


def test_times_between_tokens_count_every_token_but_a_requests_first_whatever_runs_beside_it():
    scraped = Scraped()
    scraped.start("a")
    scraped.steps(5)
    scraped.start("b", prompt=9)
    scraped.steps(4)
    assert scraped.value("inter_token_latency_seconds_count") == 8 + 3
    assert round(scraped.value("inter_token_latency_seconds_sum") or 0, 6) == round(11 * STEP_S, 6)
    assert scraped.value("inter_token_latency_seconds_bucket", le="0.01") == 0, "a step takes more"
    bounds = [float(labels["le"]) for labels in scraped.labels("vllm:inter_token_latency_seconds_bucket")]
    assert bounds == [0.001, 0.0025, 0.005, *VLLM_GAP_BUCKETS, inf], "quantiles over both engines need the same bounds"


def test_the_reason_of_an_end_is_the_gateways_where_the_runner_cannot_know_it():
    scraped = Scraped()
    reasons = {FinishReason.STOP: "stop", FinishReason.CANCELLED: "abort", FinishReason.FAILED: "error"}
    for finish, reason in reasons.items():
        scraped.start(reason)
        scraped.steps(1)
        epoch = scraped.runner.pool.sequences[reason].start.epoch
        scraped.handle(Received(session(), Stop(reason, epoch, finish)))
        assert scraped.value("request_success_total", finished_reason=reason) == 1, finish


def test_a_request_that_goes_on_elsewhere_has_not_finished_and_may_have_been_preempted():
    scraped = Scraped()
    scraped.start("r", emitted=(1, 2))
    scraped.steps(1)
    scraped.handle(Received(session(), Stop("r", scraped.runner.pool.sequences["r"].start.epoch, preempted=True)))
    assert scraped.value("e2e_request_latency_seconds_count") == 0
    assert scraped.value("time_to_first_token_seconds_count") == 0, "another runner has computed it"
    assert scraped.value("num_preemptions_total") == 1


def serve(scraped: Scraped, over: threading.Event) -> None:
    """Keep up to forty sequences here, and do what the machine asks for."""
    events, number = deque[Any](), 0
    while not over.is_set():
        if not events and len(scraped.runner.pool.sequences) < 40:
            number += 1
            adapter = ("", "sha256:a", "sha256:b")[number % 3]
            start = start_of(f"r{number}", number, (1,) * 8, 30, adapter=adapter, reservation_tokens=4)
            events.extend((Received(session(), start), StepSlot()))
        effects = scraped.handle(events.popleft() if events else StepSlot())
        if not (effects or events) and (stuck := next(iter(scraped.runner.pool.sequences.values()), None)):
            events.append(Received(session(), Stop(stuck.key, stuck.start.epoch, FinishReason.CANCELLED)))
        for effect in effects:
            match effect:
                case Fetch(digest):
                    events.append(Fetched(digest, 1, None, 0.0))
                case Load(digest):
                    events.append(Loaded(digest, 4, 1, None, 0.0))
                case SwapOut(copy, pages) | SwapIn(copy, _, pages):
                    events.append(SwapDone(copy, len(pages), 1e-9))
                case RunStep():
                    scraped.now += STEP_S
                    tokens = {row.key: SampledToken(2) for row in effect.batch.rows if row.samples}
                    events.append(StepDone(effect, StepResults(tokens, {}), 1000 * STEP_S))
                case _:
                    pass


def test_a_scrape_beside_a_busy_engine_never_fails() -> None:
    """Sequences come, leave for host memory and end on one thread, and another one scrapes."""
    scraped, over, interval = Scraped(SWAPPING), threading.Event(), sys.getswitchinterval()
    thread = threading.Thread(target=serve, args=(scraped, over))
    sys.setswitchinterval(1e-6)
    thread.start()
    try:
        for _ in range(700):
            list(scraped.metrics.collect())
        generate_latest(scraped.registry)
    finally:
        over.set()
        thread.join()
        sys.setswitchinterval(interval)
    assert (scraped.value("request_success_total", finished_reason="length") or 0) > 10
    assert scraped.runner.pool.swap.out_bytes > 10
    finished = scraped.value("request_num_preemptions_count") or 0
    assert 0 < (scraped.value("request_num_preemptions_sum") or 0) <= (scraped.value("num_preemptions_total") or 0)
    assert finished == sum(scraped.value("request_success_total", finished_reason=r) or 0 for r in ("length", "abort"))
