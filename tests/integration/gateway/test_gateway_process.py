"""The process itself: flags, ports, signals; and what it shows of itself."""

import asyncio
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import openai
import orjson
import pytest

from harness.processes import tied
from harness.waiting import eventually
from weft.wire.v1 import common_pb2
from weft_gateway.main import main

from .conftest import ANSWER, PATIENCE_S, World, opened, serving, soon, until

TEXT: dict[str, Any] = {"model": "tiny", "prompt": "hello", "max_tokens": 40}


class Process:
    """`python -m weft_gateway` and its log."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process, self.log = process, ""

    async def logged(self, text: str) -> str:
        """The first line from here on that holds `text`."""
        assert self.process.stderr
        async with asyncio.timeout(PATIENCE_S):
            while line := (await self.process.stderr.readline()).decode():
                self.log += line
                if text in line:
                    return line
        raise AssertionError(f"{text!r} was never logged:\n{self.log}")


@asynccontextmanager
async def started(world: World, tmp_path: Path, *flags: str) -> AsyncIterator[tuple[Process, str]]:
    """The process, serving; and its URL."""
    arguments = ["--http", "127.0.0.1:0", "--scheduler", world.scheduler_address]
    arguments += ["--predictor", world.predictor_address]
    arguments += ["--depot", world.depot.url, "--data-dir", str(tmp_path / "data"), "--no-auth", *flags]
    command = tied(sys.executable, "-m", "weft_gateway", *arguments)
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    try:
        running = Process(process)
        line = await running.logged("gateway_id")
        found = re.search(r"127\.0\.0\.1:\d+", line)
        assert found, line
        yield running, f"http://{found[0]}"
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def answers_and_closes_connections(parts: World, http: httpx2.AsyncClient) -> None:
    """For clients that do not know yet: on a connection from before, and on a new one."""
    async with httpx2.AsyncClient(base_url=http.base_url, timeout=PATIENCE_S) as late:
        for client in (http, late):
            await answer_with_connection_close(parts, client)
        leaving = await late.get("/readyz")
        assert (leaving.status_code, leaving.text, leaving.headers["connection"]) == (503, "draining\n", "close")
        assert (await late.get("/healthz")).status_code == 200, "it is not to be killed meanwhile"


async def answer_with_connection_close(parts: World, client: httpx2.AsyncClient) -> Any:
    """The client's end of the connection that the answer came on."""
    posted = asyncio.create_task(opened(client, TEXT))
    start = await parts.runner.next("start")
    parts.runner.step(start, 0, parts.tokens(ANSWER), common_pb2.FINISH_REASON_EOS)
    answer = await soon(posted)
    assert (answer.status_code, answer.headers["connection"]) == (200, "close")
    used = client_address(answer)
    await answer.aread()
    return used


def client_address(response: httpx2.Response) -> Any:
    return response.extensions["network_stream"].get_extra_info("client_addr")


async def ready(http: httpx2.AsyncClient) -> None:
    async def is_ready() -> bool:
        return (await http.get("/readyz")).status_code == 200

    await eventually(is_ready)


async def test_after_sigterm_what_still_arrives_is_answered_until_connections_are_closed_and_the_exit_code_is_0(
    parts: World, tmp_path: Path
) -> None:
    parts.runner.autopilot = False
    async with (
        started(parts, tmp_path, "--drain-seconds", "600") as (running, url),
        httpx2.AsyncClient(base_url=url, timeout=PATIENCE_S) as http,
    ):
        await ready(http)
        posted = asyncio.create_task(opened(http, TEXT | {"stream": True}))
        start = await parts.runner.next("start")
        tokens = parts.tokens(ANSWER)
        parts.runner.step(start, 0, tokens[:2])
        response = await soon(posted)
        used = client_address(response)
        running.process.send_signal(signal.SIGTERM)
        await running.logged("closing connections")
        await answers_and_closes_connections(parts, http)
        parts.runner.step(start, 2, tokens[2:], common_pb2.FINISH_REASON_EOS)
        body = (await soon(response.aread())).decode()
        assert body.endswith("data: [DONE]\n\n")
        assert await answer_with_connection_close(parts, http) == used, "its head could not ask the client to leave"
        assert await soon(running.process.wait()) == 0
        with pytest.raises(httpx2.ConnectError):
            await http.get("/readyz")
    await until(lambda: len(parts.scheduler.outcomes) == 4)
    assert {one.finish for one in parts.scheduler.outcomes.values()} == {common_pb2.FINISH_REASON_EOS}


@pytest.mark.slow
@pytest.mark.parametrize(("drain_seconds", "connections"), [("600", 0), ("0.6", 1)])
async def test_an_idle_gateway_leaves_when_no_connection_is_open_or_none_has_sent_anything_for_long(
    parts: World, tmp_path: Path, drain_seconds: str, connections: int
) -> None:
    async with started(parts, tmp_path, "--drain-seconds", drain_seconds) as (running, url):
        async with httpx2.AsyncClient(base_url=url, timeout=PATIENCE_S) as http:
            await ready(http)
            if connections:
                running.process.send_signal(signal.SIGTERM)
                assert await soon(running.process.wait()) == 0
        if not connections:
            running.process.send_signal(signal.SIGTERM)
            assert await soon(running.process.wait()) == 0


@pytest.mark.slow
@pytest.mark.parametrize(("drain_seconds", "signum"), [("0.2", signal.SIGTERM), ("600", signal.SIGINT)])
async def test_answers_that_do_not_finish_in_the_drain_time_or_after_ctrl_c_end_by_name(
    parts: World, tmp_path: Path, drain_seconds: str, signum: signal.Signals
) -> None:
    parts.runner.autopilot = False
    async with started(parts, tmp_path, "--drain-seconds", drain_seconds) as (running, url):
        async with httpx2.AsyncClient(base_url=url, timeout=PATIENCE_S) as http:
            await ready(http)
            posted = asyncio.create_task(opened(http, TEXT | {"stream": True}))
            start = await parts.runner.next("start")
            parts.runner.step(start, 0, parts.tokens("a"))
            response = await soon(posted)
            running.process.send_signal(signum)
            body = (await soon(response.aread())).decode()
        last = orjson.loads(body.strip().split("\n\n")[-1].removeprefix("data: "))
        assert last["error"]["code"] == "shutting_down"
        assert (await parts.runner.next("stop")).request_id == start.request_id
        assert await soon(running.process.wait()) == 0
    await until(lambda: parts.scheduler.outcomes)
    assert parts.outcome().error == "shutting_down"


async def test_a_request_id_is_the_same_from_client_to_runner_and_log(parts: World, tmp_path: Path) -> None:
    async with started(parts, tmp_path, "--log-format", "json") as (running, url):
        async with httpx2.AsyncClient(base_url=url, timeout=PATIENCE_S) as http:
            await ready(http)
            response = await http.post("/v1/completions", json=TEXT, headers={"x-request-id": "trace-1"})
        assert response.headers["x-request-id"] == "trace-1"
        start = await parts.runner.next("start")
        assert start.client_request_id == "trace-1"
        assert start.request_id.startswith("trace-1-")
        line = orjson.loads(await running.logged('"finished"'))
        assert (line["request_id"], line["component"]) == (start.request_id, "gateway")
        assert line["duration_ms"] >= line["ttft_ms"] > 0
        assert (line["model"], line["status"], line["reason"]) == ("tiny", 200, "EOS")
        usage, names = response.json()["usage"], ("prompt_tokens", "completion_tokens")
        assert [line[name] for name in names] == [usage[name] for name in names]
        assert "hello" not in str(line)


async def test_a_port_in_use_is_a_named_error_and_exit_2(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, log = await ended("--http", f"127.0.0.1:{taken.getsockname()[1]}", "--data-dir", str(tmp_path))
    assert code == 2
    assert "AddressInUse" in log


@pytest.mark.slow
async def test_a_data_directory_has_one_owner(parts: World, tmp_path: Path) -> None:
    async with started(parts, tmp_path):
        code, log = await ended("--http", "127.0.0.1:0", "--data-dir", str(tmp_path / "data"))
    assert code == 2
    assert "DataDirInUse" in log


def test_wrong_values_of_flags_and_environment_stop_the_start_and_are_all_listed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WEFT_GATEWAY__HTTP", "nonsense")
    monkeypatch.setenv("WEFT_GATEWAY__PREDICT_MS", "-1")
    with pytest.raises(SystemExit) as ended:
        main(["--hold-seconds", "-1", "--depot", "ftp://x", "--predict-ms", "5"])
    assert ended.value.code == 2
    errors = capsys.readouterr().err
    assert all(flag in errors for flag in ("--http", "--hold-seconds", "--depot"))
    assert "--predict-ms" not in errors


async def ended(*flags: str) -> tuple[int | None, str]:
    command = tied(sys.executable, "-m", "weft_gateway", *flags)
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    try:
        _, log = await soon(process.communicate())
    finally:
        if process.returncode is None:
            process.kill()
    return process.returncode, log.decode()


# ---------------------------------------------------------------- what it shows


@pytest.mark.parametrize("given", ["with space", "x" * 129, "ünfit", "<script>"])
async def test_an_unfit_request_id_is_replaced(world: World, given: str) -> None:
    async with world.http() as http:
        response = await http.get("/healthz", headers={"x-request-id": given.encode()})
    assert response.headers["x-request-id"].startswith("req-")


async def test_status_shows_pools_models_and_requests_now(world: World) -> None:
    world.runner.autopilot = False
    async with world.http() as http:
        posted = asyncio.create_task(http.post("/v1/completions", json=TEXT | {"model": "acme/upper"}))
        start = await world.runner.next("start")
        status = (await http.get("/status")).json()
        assert (status["in_flight"], status["held"], status["ready"], status["scheduler"]) == (1, 0, "ok", True)
        pool = {"name": "team/base", "base": "tiny", "ready_runners": 1, "in_flight": 1, "held": 0, "held_lines": 0}
        assert status["pools"] == [pool]
        assert {m["id"]: m["in_flight"] for m in status["models"]} == {"tiny": 0, "acme/upper": 1, "rival/secret": 0}
        world.runner.answer_whole(start)
        assert (await soon(posted)).status_code == 200
        world.scheduler.autopilot = False
        waiting = asyncio.create_task(http.post("/v1/completions", json=TEXT | {"n": 2}))
        await until(lambda: len(world.gateway.machine.requests) == 2)
        status = (await http.get("/status")).json()
        assert (status["held"], status["pools"][0]["held"], status["pools"][0]["in_flight"]) == (2, 2, 2)
        waiting.cancel()
        await world.settled()


async def test_metrics_count_answers_tokens_and_refusals(world: World) -> None:
    async with world.http() as http:
        await http.post("/v1/completions", json=TEXT)
        await http.post("/v1/completions", json=TEXT | {"model": "acme/upper", "max_tokens": 2})
        await world.settled()
        text = (await http.get("/metrics")).text
    tokens = len(world.tokens(ANSWER))
    assert 'weft_gateway_requests_total{model="tiny",status="200"} 1.0' in text
    assert f'weft_gateway_tokens_total{{model="tiny"}} {tokens}.0' in text
    assert 'weft_gateway_tokens_total{model="acme/upper"} 2.0' in text
    assert 'weft_gateway_ttft_seconds_count{model="acme/upper",pool="team/base"} 1.0' in text
    assert 'vllm:num_requests_waiting{model_name="tiny"} 0.0' in text
    assert 'weft_gateway_time_per_output_token_seconds_count{pool="team/base"} 2.0' in text
    assert "weft_gateway_in_flight 0.0" in text


async def test_models_beyond_the_bound_share_a_label(
    parts: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft_gateway.shell.metrics.MAX_MODELS", 1)
    async with serving(parts, parts.settings(tmp_path)) as world, world.http() as http:
        for model in ("tiny", "acme/upper", "rival/secret"):
            await http.post("/v1/completions", json=TEXT | {"model": model})
        text = (await http.get("/metrics")).text
    assert 'weft_gateway_requests_total{model="other",status="200"} 2.0' in text
    assert "acme/upper" not in text


async def test_series_end_with_their_model_and_pool_though_requests_run_on(
    parts: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft_gateway.shell.metrics.MAX_MODELS", 1)
    answered = {f"weft_gateway_{name}": labels for name, labels in (
        ("requests_total", ',status="200"'), ("tokens_total", ""), ("prompt_tokens_total", ""),
        ("ttft_seconds_count", ',pool="team/base"'),
    )}  # fmt: skip
    async with serving(parts, parts.settings(tmp_path)) as world, world.http() as http:

        async def ask(model: str, **fields: object) -> str:
            answer = await http.post("/v1/completions", json=TEXT | {"model": model, **fields})
            assert answer.status_code == 200, answer.text
            await world.settled()
            return (await http.get("/metrics")).text

        async def change(version: int, *models: str) -> str:
            routes = world.routes(version)
            for kept in [route for route in routes.routes if route.model_name not in models]:
                routes.routes.remove(kept)
            if not models:
                del routes.pools[:]
            world.scheduler.send_routes(routes)
            await until(lambda: world.gateway.machine.routes.version == version)
            return (await http.get("/metrics")).text

        def shown(text: str, model: str) -> set[str]:
            return {name for name, more in answered.items() if f'{name}{{model="{model}"{more}}}' in text}

        assert shown(await ask("acme/upper"), "acme/upper") == answered.keys()
        assert not shown(await ask("rival/secret"), "rival/secret")
        world.runner.autopilot = False
        running = asyncio.create_task(http.post("/v1/completions", json=TEXT | {"model": "acme/upper"}))
        await world.runner.next("start")
        await world.runner.next("start")
        start = await world.runner.next("start")
        assert "acme/upper" not in await change(2, "tiny", "rival/secret")
        world.runner.answer_whole(start)
        assert (await soon(running)).status_code == 200
        world.runner.autopilot = True
        text = await ask("rival/secret")
        assert "acme/upper" not in text
        assert shown(text, "rival/secret") == answered.keys(), "the label that was given back"
        assert 'weft_gateway_requests_total{model="other",status="200"} 2.0' in text
        await change(3, "tiny", "acme/upper")
        again = await ask("acme/upper")
        assert 'weft_gateway_requests_total{model="acme/upper",status="200"} 1.0' in again, "it begins at 0"
        assert 'pool="team/base"' in again
        world.gateway.manager.count_answer("tiny", None, 429, "queue_full")
        rejected = 'vllm:admission_rejections_total{model_name="tiny",reason="max_num_queued_reqs"}'
        assert f"{rejected} 1.0" in (await http.get("/metrics")).text
        assert 'pool="team/base"' not in await change(4)
        assert f"{rejected} 0.0" in await change(5, "tiny"), "a pool of the same name counts from zero"


async def test_the_openapi_document_describes_both_requests(world: World) -> None:
    async with world.http() as http:
        document = (await http.get("/openapi.json")).json()
    body = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert {"messages", "model", "stop", "max_completion_tokens"} <= set(body["properties"])
    assert "$ref" not in orjson.dumps(body).decode()
    for path, operations in document["paths"].items():
        for operation in operations.values():
            defined = {one["name"] for one in operation.get("parameters", ()) if one["in"] == "path"}
            assert defined == set(re.findall(r"{(\w+)}", path)), path
            assert {"200", "default"} <= set(operation["responses"])


# ---------------------------------------------------------------- predictions


async def test_predictions_gather_while_one_is_under_way(world: World) -> None:
    world.predictor.go.clear()
    client = world.client()
    asked = [asyncio.create_task(client.completions.create(model="tiny", prompt="hello")) for _ in range(5)]
    await until(lambda: world.gateway.machine.admission.arriving == 5)
    await until(lambda: len(world.predictor.batches) == 1)
    client_of_predictor = world.gateway.manager._predictor
    await until(lambda: sum(map(len, world.predictor.batches)) + len(client_of_predictor._waiting) == 5)
    world.predictor.go.set()
    await soon(asyncio.gather(*asked))
    first, *later = map(len, world.predictor.batches)
    assert first + sum(later) == 5
    assert len(world.predictor.batches) < 5, "calls carry what gathered"


@pytest.mark.parametrize("trouble", ["fails", "silent", "away"])
async def test_a_predictor_in_trouble_costs_no_request(parts: World, tmp_path: Path, trouble: str) -> None:
    parts.predictor.fails = trouble == "fails"
    if trouble == "silent":
        parts.predictor.go.clear()
    changes: dict[str, Any] = {"predict_ms": 50} | ({"predictor": "127.0.0.1:1"} if trouble == "away" else {})
    async with serving(parts, parts.settings(tmp_path, **changes)) as world, world.http() as http:
        answer = await world.client().completions.create(model="tiny", prompt="hello")
        assert answer.choices[0].text == ANSWER
        submit = await world.scheduler.next("submit")
        assert (submit.p50_tokens, submit.p90_tokens) == (0, 0)
        assert "weft_gateway_predict_failures_total 1.0" in (await http.get("/metrics")).text


async def test_the_official_client_retries_a_429_by_itself(parts: World, tmp_path: Path) -> None:
    parts.runner.autopilot = False
    async with serving(parts, parts.settings(tmp_path, max_in_flight=1)) as world:
        first = asyncio.create_task(world.client().completions.create(model="tiny", prompt="hello"))
        start = await world.runner.next("start")
        with pytest.raises(openai.RateLimitError):
            await world.client().completions.create(model="tiny", prompt="hello")
        patient = asyncio.create_task(world.client(max_retries=10).completions.create(model="tiny", prompt="hello"))
        refused = {"model": "-", "status": "429"}
        registry = world.gateway.registry
        await until(lambda: (registry.get_sample_value("weft_gateway_requests_total", refused) or 0) >= 2)
        world.runner.autopilot = True
        world.runner.answer_whole(start)
        assert (await soon(first)).choices[0].text == ANSWER
        assert (await soon(patient)).choices[0].text == ANSWER
