"""Logs and probes: what a person and a collector read."""

import contextlib
import json
import logging
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter

from harness.waiting import PATIENCE_S, wait_until
from weft.telemetry.logs import JsonFormatter, TextFormatter, configure, kv
from weft.telemetry.probes import MAX_CONNECTIONS, Probes


def record(**fields: object) -> logging.LogRecord:
    made = logging.LogRecord("weft.test", logging.INFO, "f", 1, "sequence %s", ("admitted",), None)
    made.__dict__.update(kv(**fields))
    return made


def test_json_lines_carry_the_event_and_its_key_values() -> None:
    line = json.loads(JsonFormatter("runner").format(record(request_id="r1", pages=3)))
    assert {k: line[k] for k in ("event", "component", "level", "request_id", "pages")} == {
        "event": "sequence admitted", "component": "runner", "level": "info", "request_id": "r1", "pages": 3,
    }  # fmt: skip


def test_text_lines_quote_what_has_spaces() -> None:
    line = TextFormatter("runner").format(record(reason="no room", adapter="acme/upper"))
    assert line.endswith('sequence admitted  reason="no room" adapter=acme/upper')


HOSTILE = ["a\nb", "a\rb", "\x1b[2Jb", "a\x9b2Jb", "a\x7fb", "a\u202eb", "\ud800"]


@pytest.mark.parametrize("text", HOSTILE)
def test_nothing_that_steers_a_terminal_reaches_a_text_line(text: str) -> None:
    made = record(uri=text)
    made.args = (text,)
    made.exc_info = (ValueError, ValueError(text), None)
    line = TextFormatter("depot").format(made)
    assert all(part.isprintable() for part in line.split("\n"))
    assert f"uri={json.dumps(text)}" in line
    assert "\n" not in line.partition("  uri=")[0], "the event stays in its line"


def test_clients_and_servers_log_their_requests_at_debug_only(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    handlers, before = root.handlers[:], root.level
    try:
        for level, shown in (("INFO", False), ("DEBUG", True), ("ERROR", False)):
            configure("depot", level=level)
            for name in ("httpx2", "uvicorn.access"):
                assert logging.getLogger(name).isEnabledFor(logging.INFO) == shown
        assert not logging.getLogger("httpx2").isEnabledFor(logging.WARNING), "the process's own level counts too"
    finally:
        root.handlers, root.level = handlers, before


def get(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=PATIENCE_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@contextlib.contextmanager
def probing(not_ready: Callable[[], str | None] = lambda: None, **options: Any) -> Iterator[Probes]:
    probes = Probes("127.0.0.1:0", not_ready, **options)
    probes.start()
    try:
        yield probes
    finally:
        probes.close()


def test_probes_tell_health_readiness_and_metrics() -> None:
    registry = CollectorRegistry()
    Counter("weft_things", "things", registry=registry).inc()
    reason: list[str | None] = ["no runner has reported"]
    with probing(lambda: reason[0], registry=registry) as probes:
        assert get(probes.port, "/healthz") == (200, "ok\n")
        assert get(probes.port, "/readyz") == (503, "no runner has reported\n")
        reason[0] = None
        assert get(probes.port, "/readyz") == (200, "ok\n")
        probes.shortages.note("the disk is full")
        assert get(probes.port, "/readyz") == (200, "ok, but the disk is full\n")
        with socket.create_connection(("127.0.0.1", probes.port), PATIENCE_S) as client:
            client.sendall(b"HEAD /readyz HTTP/1.0\r\n\r\n")
            head = client.makefile("rb").read()
        assert (head[:12], head[-4:]) == (b"HTTP/1.0 200", b"\r\n\r\n")
        metrics = get(probes.port, "/metrics")[1]
        assert "weft_things_total 1.0" in metrics
        assert "_created" not in metrics
        assert get(probes.port, "/other")[0] == 404


def test_on_loopback_a_foreign_pages_name_is_refused_and_metrics_get_the_callers_key() -> None:
    def status(headers: dict[str, str]) -> tuple[int, str]:
        request = urllib.request.Request(f"http://127.0.0.1:{probes.port}/metrics", headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    with probing(metrics=lambda key: f"for {key}".encode()) as probes:
        assert status({"Host": "evil.example"}) == (403, "expected an address or localhost as Host\n")
        assert status({"Host": "localhost:1"}) == (200, "for None")
        assert status({"Authorization": "Bearer key"}) == (200, "for Bearer key")
        probes._loopback = False  # as where the kubelet and a Service lead to it
        assert status({"Host": "weft-scheduler.weft-system.svc"}) == (200, "for None")


def test_probes_listen_where_pods_have_ipv6_addresses_only() -> None:
    probes = Probes("[::1]:0", lambda: None)
    probes.start()
    with contextlib.closing(probes), urllib.request.urlopen(f"http://[::1]:{probes.port}/healthz") as answer:
        assert answer.status == 200


def test_idle_connections_keep_no_probe_out_and_only_some_stay_open() -> None:
    of_others = _probe_threads()
    with probing() as probes, contextlib.ExitStack() as open_ones:
        idle = [_connect(probes.port, open_ones) for _ in range(3 * MAX_CONNECTIONS)]
        assert get(probes.port, "/healthz") == (200, "ok\n")
        for eldest in idle[: 2 * MAX_CONNECTIONS]:
            assert eldest.recv(1) == b"", "closed to make room"
        wait_until(lambda: _probe_threads() <= of_others + MAX_CONNECTIONS, "the threads of closed connections end")


def test_a_connection_that_says_nothing_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.telemetry.probes.IDLE_S", 0.05)
    with probing() as probes, contextlib.ExitStack() as open_ones:
        silent, half = (_connect(probes.port, open_ones) for _ in range(2))
        half.sendall(b"GET /heal")
        assert (silent.recv(1), half.recv(1)) == (b"", b"")


def _connect(port: int, open_ones: contextlib.ExitStack) -> socket.socket:
    return open_ones.enter_context(socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S))


def _probe_threads() -> int:
    return sum("process_request_thread" in thread.name for thread in threading.enumerate())


def test_a_loop_that_stands_still_is_unhealthy() -> None:
    probes = Probes("127.0.0.1:0", lambda: None, stall_s=0.0)
    try:
        assert probes.answer("/healthz")[0] == 503
    finally:
        probes._server.server_close()
