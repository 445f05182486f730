"""The program of `helm test`: what it says, and how it ends. It is asked of a real server, of a few fixed answers."""

import json
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest

from harness import chart
from harness.loopback import LoopbackServer

PROGRAM = chart.CHART / "files" / "completion.py"
MODELS = {"data": [{"id": "acme/upper"}, {"id": "other"}]}
ANSWER = {"choices": [{"text": "HELLO"}], "usage": {"completion_tokens": 5}}


@contextmanager
def gateway(answers: dict[str, tuple[int, Any]]) -> Generator[tuple[str, list[Any]]]:
    """A server with these answers by path; its URL, and what it was asked."""
    asked: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(None)

        def do_POST(self) -> None:
            self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def _answer(self, body: Any) -> None:
            asked.append((self.path, self.headers.get("Authorization"), body))
            status, value = answers[self.path]
            content = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (the standard library's name)
            pass

    server = LoopbackServer(Handler)
    try:
        yield server.url, asked
    finally:
        server.close()


def run(url: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-I", PROGRAM]
    env = {"URL": url, "PROMPT": "hello", **environment}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


def test_it_asks_the_first_model_that_is_listed_with_the_key() -> None:
    with gateway({"/v1/models": (200, MODELS), "/v1/completions": (200, ANSWER)}) as (url, asked):
        done = run(url, API_KEY="secret")
    assert (done.returncode, done.stdout) == (0, "acme/upper: 'HELLO' (5 tokens)\n"), done.stderr
    assert asked[0] == ("/v1/models", "Bearer secret", None)
    assert asked[1] == (
        "/v1/completions",
        "Bearer secret",
        {"model": "acme/upper", "prompt": "hello", "max_tokens": 16},
    )


def test_it_asks_the_model_that_it_is_told_without_a_key() -> None:
    with gateway({"/v1/completions": (200, ANSWER)}) as (url, asked):
        assert run(url, MODEL="other").returncode == 0
    assert [(path, key, body["model"]) for path, key, body in asked] == [("/v1/completions", None, "other")]


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ({"/v1/models": (200, {"data": []})}, "lists nothing"),
        ({"/v1/models": (401, {"error": "no key"})}, "401"),
        (
            {"/v1/models": (200, MODELS), "/v1/completions": (503, {"error": "no_runner_available"})},
            "no_runner_available",
        ),
        (
            {"/v1/models": (200, MODELS), "/v1/completions": (200, {**ANSWER, "usage": {"completion_tokens": 0}})},
            "without a token",
        ),
    ],
)
def test_it_fails_with_what_the_gateway_said(answers: dict[str, tuple[int, Any]], said: str) -> None:
    with gateway(answers) as (url, _):
        done = run(url)
    assert done.returncode == 1
    assert said in done.stderr


def test_it_fails_where_nobody_answers() -> None:
    with gateway({}) as (url, _):
        pass
    assert run(url).returncode == 1


@pytest.mark.slow
def test_the_pod_runs_this_program(rendered: dict[str, list[chart.Json]]) -> None:
    (container,) = dict(chart.pod_templates(rendered["default"]))["weft-test"]["spec"]["containers"]
    assert container["args"][0].strip() == PROGRAM.read_text().strip()
    assert {item["name"] for item in container["env"]} == {"URL", "MODEL", "PROMPT"}
