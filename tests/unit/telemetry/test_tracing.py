"""Spans: whose trace they belong to, when they began, and what turns them on."""

import ssl
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from harness.certificates import Authority
from harness.spans import in_memory
from weft.telemetry.tracing import ENDPOINTS, PROTOCOLS, TracingNotPossible, tracer

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, NOT_SAMPLED = f"00-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-00"


def test_a_trace_goes_on_from_its_client_to_what_lies_under_the_request() -> None:
    made, exporter = in_memory()
    request = made.begin({"traceparent": SAMPLED}, 5_000)
    inner = made.record("sequence", request.traceparent, 97.0, 99.0, {"weft.adapter": None, "n": 3})
    made.record("prefill", inner, 97.5, 98.0)
    request.end("chat tiny", {"gen_ai.request.model": "tiny"})
    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert {f"{span.context.trace_id:032x}" for span in spans.values()} == {TRACE}
    parents = {name: span.parent.span_id for name, span in spans.items() if span.parent}
    assert parents == {
        "chat tiny": int(PARENT, 16),
        "sequence": spans["chat tiny"].context.span_id,
        "prefill": spans["sequence"].context.span_id,
    }
    sequence = spans["sequence"]
    assert sequence.end_time is not None
    assert sequence.start_time is not None
    assert (sequence.end_time - sequence.start_time) / 1e9 == pytest.approx(2.0)
    assert dict(sequence.attributes or {}) == {"n": 3}
    assert spans["chat tiny"].start_time == 5_000_000_000
    assert request.trace_id == TRACE


@pytest.mark.parametrize("headers", [{}, {"traceparent": NOT_SAMPLED}, {"traceparent": "nonsense"}])
def test_what_is_not_sampled_has_no_span(headers: dict[str, str]) -> None:
    made, exporter = in_memory()
    assert made.begin(headers, 0) is None
    assert not exporter.get_finished_spans()


def test_a_trace_begins_at_the_gateway_where_the_client_has_none() -> None:
    made, exporter = in_memory(ratio=1.0)
    request = made.begin({}, 0)
    request.end("chat tiny", {}, "queue_full")
    (span,) = exporter.get_finished_spans()
    assert span.parent is None
    assert dict(span.attributes or {}) == {"error.type": "queue_full"}
    assert not span.status.is_ok


def test_without_a_collector_there_is_no_tracer(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ENDPOINTS:
        monkeypatch.delenv(name, raising=False)
    assert tracer("gateway") is None


def test_a_protocol_that_is_not_spoken_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENDPOINTS[0], "http://127.0.0.1:4317")
    monkeypatch.setenv(PROTOCOLS[1], "http/json")
    with pytest.raises(TracingNotPossible, match="http/json"):
        tracer("gateway")


def test_spans_reach_a_collector_whose_owner_trusts_its_certificate_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The http/protobuf exporter trusts as `weft.trust` says: no root need be named, nor follow an issuer RFC 5280."""
    certificate, key = Authority(bare=True).issue("localhost")
    (tmp_path / "tls.crt").write_bytes(certificate)
    (tmp_path / "tls.key").write_bytes(key)
    bodies: list[bytes] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "tls.crt", tmp_path / "tls.key")
    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        monkeypatch.setenv(ENDPOINTS[0], f"https://localhost:{server.server_port}")
        for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):  # go before the exporter's own
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_CERTIFICATE", str(tmp_path / "tls.crt"))
        monkeypatch.setenv(PROTOCOLS[1], "http/protobuf")
        made = tracer("gateway")
        request = made.begin({"traceparent": SAMPLED}, 0)
        request.end("chat tiny", {})
        made.close()
        server.shutdown()
        serving.join()
    assert any(b"chat tiny" in body for body in bodies)
