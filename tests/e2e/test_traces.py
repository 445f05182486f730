"""One trace of a request through every process, as an OpenTelemetry collector receives it over OTLP."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent import futures
from dataclasses import dataclass, field
from typing import Any

import grpc
import openai
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from harness.waiting import PATIENCE_S, wait_until
from weft_stage.stack import Stack, quickstart

pytestmark = pytest.mark.slow

TRACE, CLIENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@dataclass
class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """What a collector has received: each span with the service that sent it."""

    spans: list[tuple[str, Span]] = field(default_factory=list[tuple[str, Span]])

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802 (the contract's names)
        for resource in request.resource_spans:
            about = {a.key: a.value.string_value for a in resource.resource.attributes}
            self.spans += [(about["service.name"], span) for scope in resource.scope_spans for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def of(self, trace_id: str) -> dict[str, tuple[str, Span]]:
        """Return the spans of a trace by name."""
        return {span.name: (service, span) for service, span in self.spans if span.trace_id.hex() == trace_id}


@pytest.fixture(scope="module")
def collector() -> Iterator[tuple[Collector, str]]:
    made = Collector()
    server = grpc.server(futures.ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(made, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield made, f"http://127.0.0.1:{port}"
    server.stop(0).wait()


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory, collector: tuple[Collector, str]) -> Iterator[Stack]:
    """A stack that samples what its clients do, and every batch."""
    environment = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": collector[1],
        "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
        "OTEL_TRACES_SAMPLER_ARG": "1",
        "OTEL_BSP_SCHEDULE_DELAY": "50",
    }
    with Stack(quickstart(), tmp_path_factory.mktemp("w"), environment=environment) as made:
        made.wait_for_models()
        yield made


def complete(stack: Stack, flags: str, **more: Any) -> dict[str, Any]:
    body = {"model": "acme/upper", "prompt": "hello there", "max_tokens": 8, "temperature": 0, **more}
    headers = {"Content-Type": "application/json", "traceparent": f"00-{TRACE}-{CLIENT}-{flags}"}
    request = urllib.request.Request(f"{stack.url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as found:
        return json.load(found)


def test_a_sampled_request_is_one_trace_from_client_to_decode(traced: Stack, collector: tuple[Collector, str]) -> None:
    spans, root = collector[0], "text_completion acme/upper"
    usage = complete(traced, "01")["usage"]  # its adapter is not on the device yet
    assert usage == complete(traced, "00")["usage"], "not sampled: it leaves nothing"
    names = {root, "predict", "queue", "sequence", "adapter_load", "prefill", "decode"}
    wait_until(lambda: names <= spans.of(TRACE).keys(), "every span has arrived")
    found = spans.of(TRACE)
    services = {name: service.removeprefix("weft-") for name, (service, _) in found.items()}
    ids = {name: span.span_id.hex() for name, (_, span) in found.items()}
    parents = {name: span.parent_span_id.hex() for name, (_, span) in found.items()}
    assert {name: services[name] for name in names} == {
        root: "gateway", "predict": "predictor", "queue": "scheduler", "sequence": "runner",
        "adapter_load": "runner", "prefill": "runner", "decode": "runner",
    }  # fmt: skip
    assert {name: parents[name] for name in names} == {
        root: CLIENT, "predict": ids[root], "queue": ids[root], "sequence": ids[root],
        "adapter_load": ids["sequence"], "prefill": ids["sequence"], "decode": ids["sequence"],
    }  # fmt: skip
    assert len([span for _, span in spans.spans if span.name == root]) == 1
    attributes = {a.key: a.value for a in found[root][1].attributes}
    assert attributes["gen_ai.request.model"].string_value == "acme/upper"
    assert attributes["gen_ai.usage.input_tokens"].int_value == usage["prompt_tokens"]
    assert attributes["gen_ai.usage.output_tokens"].int_value == usage["completion_tokens"]
    assert attributes["http.response.status_code"].int_value == 200
    assert not [span for _, span in spans.spans if "hello there" in str(span)], "prompts are in no span"


def test_a_refused_request_has_a_span_with_its_error(traced: Stack, collector: tuple[Collector, str]) -> None:
    with pytest.raises(urllib.error.HTTPError):
        complete(traced, "01", model="nobodys")
    wait_until(lambda: "text_completion nobodys" in collector[0].of(TRACE), "the span of the refusal")
    _, span = collector[0].of(TRACE)["text_completion nobodys"]
    attributes = {a.key: a.value for a in span.attributes}
    assert attributes["error.type"].string_value == "model_not_found"
    assert attributes["http.response.status_code"].int_value == 404


def test_the_lines_of_a_batch_are_in_its_trace(traced: Stack, collector: tuple[Collector, str]) -> None:
    lines = 3
    body = {"model": "acme/upper", "prompt": "hello there", "max_tokens": 8}
    text = "".join(
        json.dumps({"custom_id": str(n), "method": "POST", "url": "/v1/completions", "body": body}) + "\n"
        for n in range(lines)
    )
    with openai.OpenAI(base_url=f"{traced.url}/v1", api_key="none") as client:
        file = client.files.create(file=("in.jsonl", text.encode()), purpose="batch")
        made = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        wait_until(lambda: client.batches.retrieve(made.id).status == "completed", "the batch has ended")

    def batch() -> list[Span]:
        """Return the spans of this batch."""
        return [span for service, span in list(collector[0].spans) if service == "weft-batch" and made.id in str(span)]

    wait_until(batch, "the batch's span has arrived")
    (root,) = batch()

    def under(parents: set[bytes], name: str) -> list[Span]:
        return [s for _, s in list(collector[0].spans) if s.parent_span_id in parents and s.name == name]

    def answered() -> list[Span]:
        return under({root.span_id}, "text_completion acme/upper")

    wait_until(lambda: len(answered()) == lines, "every line's span has arrived")
    assert {span.trace_id for span in answered()} == {root.trace_id}
    ids = {span.span_id for span in answered()}
    wait_until(lambda: len(under(ids, "sequence")) == lines, "every line's sequence has arrived")
    attributes = {a.key: a.value for a in root.attributes}
    assert attributes["weft.batch.status"].string_value == "completed"
    assert attributes["weft.batch.lines"].int_value == lines
