"""Logs and probes: what a person and a collector read."""

import json
import logging
import urllib.error
import urllib.request

import pytest
from prometheus_client import CollectorRegistry, Counter

from weft.telemetry.logs import JsonFormatter, TextFormatter, kv
from weft.telemetry.probes import Probes, split_address


def record(**fields: object) -> logging.LogRecord:
    made = logging.LogRecord("weft.test", logging.INFO, "f", 1, "sequence %s", ("admitted",), None)
    made.__dict__.update(kv(**fields))
    return made


def test_json_lines_carry_the_event_and_its_key_values() -> None:
    line = json.loads(JsonFormatter("runner").format(record(request_id="r1", pages=3)))
    assert {k: line[k] for k in ("event", "component", "level", "request_id", "pages")} == {
        "event": "sequence admitted",
        "component": "runner",
        "level": "info",
        "request_id": "r1",
        "pages": 3,
    }


def test_text_lines_quote_what_has_spaces() -> None:
    line = TextFormatter("runner").format(record(reason="no room", adapter="acme/upper"))
    assert line.endswith('sequence admitted  reason="no room" adapter=acme/upper')


def get(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_probes_tell_health_readiness_and_metrics() -> None:
    registry = CollectorRegistry()
    Counter("weft_things", "things", registry=registry).inc()
    reason: list[str | None] = ["no runner has reported"]
    probes = Probes("127.0.0.1:0", lambda: reason[0], registry=registry)
    probes.start()
    try:
        assert get(probes.port, "/healthz") == (200, "ok\n")
        assert get(probes.port, "/readyz") == (503, "no runner has reported\n")
        reason[0] = None
        assert get(probes.port, "/readyz")[0] == 200
        assert "weft_things_total 1.0" in get(probes.port, "/metrics")[1]
        assert get(probes.port, "/other")[0] == 404
    finally:
        probes.close()


def test_a_loop_that_stands_still_is_unhealthy() -> None:
    probes = Probes("127.0.0.1:0", lambda: None, stall_s=0.0)
    try:
        assert probes.answer("/healthz")[0] == 503
    finally:
        probes._server.server_close()


@pytest.mark.parametrize("bad", ["8080", "host", "host:", ":80", "a:b"])
def test_an_address_without_host_or_port_is_refused(bad: str) -> None:
    with pytest.raises(ValueError, match="HOST:PORT"):
        split_address(bad)
