"""The program of `helm test`: what it says, and how it ends. It is asked of a real server, of a few fixed answers."""

import json
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import pytest

from harness import chart
from harness.loopback import LoopbackServer, Request

PROGRAM = chart.CHART / "files" / "completion.py"
MODELS = {"data": [{"id": "acme/upper"}, {"id": "other"}]}
ANSWER = {"choices": [{"text": "HELLO"}], "usage": {"completion_tokens": 5}}


@contextmanager
def gateway(answers: dict[str, tuple[int, Any]]) -> Generator[tuple[str, list[Any]]]:
    """A server with these answers by path; its URL, and what it was asked."""
    asked: list[Any] = []

    def answer(request: Request) -> tuple[int, bytes]:
        asked.append((request.path, request.headers["Authorization"], json.loads(request.body or b"null")))
        status, value = answers[request.path]
        return status, json.dumps(value).encode()

    server = LoopbackServer(answer)
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
