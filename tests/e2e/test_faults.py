"""Processes are killed, drained and restarted while streams run; every client reads the text it would have read anyway.

The quickstart's answers are the baselines: each is asserted to be far from a tie (the smallest gap of the two best
logits, by transformers + peft), so that equality is a promise and not luck.
"""

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import pairwise

import grpc
import httpx2
import psutil
import pytest

from harness.crowd import SLOW, Crowd, Watched, assert_undisturbed, finished, load, strike, until_idle
from harness.quickstart import Case, copy_manifests, sure_cases
from harness.waiting import PATIENCE_S, eventually
from weft.domain.runner import RunnerBook
from weft_stage.reports import runners
from weft_stage.stack import Stack

pytestmark = pytest.mark.slow

MODELS = ("weft-quickstart", "acme/upper", "acme/reverse-words", "initech/cipher")
SEED = 20
KILLS = 3  # of gateways


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Two runners of at most 12 sequences: 20 streams need both."""
    manifests = copy_manifests(tmp_path_factory.mktemp("m"), replicas=2, advanced={"maxSequences": 12})
    with Stack(manifests, tmp_path_factory.mktemp("w"), environment=SLOW) as made:
        made.wait_for_models()
        yield made


@pytest.fixture(scope="module")
def lone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """One runner."""
    with Stack(copy_manifests(tmp_path_factory.mktemp("m")), tmp_path_factory.mktemp("w"), environment=SLOW) as made:
        made.wait_for_models()
        yield made


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    """Make 20 long answers, none of them near a tie."""
    return sure_cases(MODELS, 20, seed=SEED)


async def wait_for_runners(stack: Stack, struck: int | None = None, enough: Callable[[], bool] = lambda: False) -> None:
    """Wait until every runner is ready, or it is `enough`. `struck`: the process that one of them is no more.

    A test that has seen enough ends its load: the runner starts beside none, and the next test waits for it.
    """
    names = stack.names("runner")

    async def ready() -> bool:
        """A runner that was struck stays in the supervisor's list until its lease ends, or it is back."""
        found = [stack.components()[name] for name in names]
        alive = all(one["phase"] == "Ready" and one["pid"] != struck and psutil.pid_exists(one["pid"]) for one in found)
        listed = await runners(stack.address("supervisor"))
        return enough() or (alive and sum(r.figures.ready and not r.figures.draining for r in listed) == len(names))

    await eventually(ready)


async def strike_runner(stack: Stack, made: Crowd, signum: int, streams: int) -> int:
    """Send a signal to a runner with `streams` streams or more between their first token and 80 % of their tokens.

    Returns its process. On a slow machine the streams of a report may have ended before the signal comes.
    """
    pids = {stack.components()[name]["listen"]: stack.pid(name) for name in stack.names("runner")}
    struck = 0

    def blow(runner: RunnerBook, running: list[tuple[Watched, int]]) -> bool:
        nonlocal struck
        if sum(0 < tokens < 0.8 * len(watched.case.expect) for watched, tokens in running) < streams:
            return False
        os.kill(struck := pids[runner.spec.address], signum)
        return True

    await strike(grpc.insecure_channel(stack.address("supervisor")), made, blow)
    return struck


async def test_a_killed_runners_streams_continue_elsewhere(pair: Stack, cases: list[Case]) -> None:
    await wait_for_runners(pair)
    await struck_until_streams_migrate(pair, cases, "killed", width=48, streams=8)


async def test_a_runner_is_drained_while_no_other_has_room(pair: Stack, cases: list[Case]) -> None:
    await wait_for_runners(pair)
    async with load(pair.url, cases, "drained", width=48) as made:
        struck = await strike_runner(pair, made, signal.SIGTERM, 8)
        await wait_for_runners(pair, struck, lambda: not psutil.pid_exists(struck))
    assert_undisturbed(made.streams)


async def struck_until_streams_migrate(stack: Stack, cases: list[Case], name: str, width: int, streams: int) -> None:
    """Kill a runner under continuing load, again where nothing ran any more; all texts are as without."""

    def migrated() -> float:
        return stack.metric("scheduler", "weft_scheduler_migrations_total")

    before = migrated()
    async with asyncio.timeout(3 * PATIENCE_S), load(stack.url, cases, name, width) as made:
        while migrated() == before:
            struck = await strike_runner(stack, made, signal.SIGKILL, streams)
            await wait_for_runners(stack, struck, lambda: migrated() > before)
    assert_undisturbed(made.streams)


async def test_a_runner_that_gets_sigterm_hands_its_streams_over_with_their_kv(pair: Stack, cases: list[Case]) -> None:
    """Half of what both runners hold, so that one of them can take it over."""

    def moved() -> float:
        return pair.metric("scheduler", "weft_scheduler_kv_migrations_total", reason="drain")

    await wait_for_runners(pair)
    before = moved()
    async with asyncio.timeout(3 * PATIENCE_S), load(pair.url, cases, "sigterm", width=12) as made:
        while moved() == before:
            struck = await strike_runner(pair, made, signal.SIGTERM, 2)
            await wait_for_runners(pair, struck, lambda: moved() > before)
    assert_undisturbed(made.streams)


@pytest.mark.parametrize("component", ["scheduler", "supervisor", "predictor", "depot"])
async def test_a_control_plane_process_is_killed_and_comes_back(pair: Stack, cases: list[Case], component: str) -> None:
    await wait_for_runners(pair)
    async with load(pair.url, cases, component, width=28) as made:  # more than fit at once: some wait
        await made.until(lambda: sum(bool(w.text) for w in made.streams) >= 8)
        killed = pair.pid(component)
        os.kill(killed, signal.SIGKILL)

        async def back() -> bool:
            now = pair.components()[component]
            return now["phase"] == "Ready" and now["pid"] != killed

        await eventually(back)
    assert_undisturbed(made.streams)


async def test_outcomes_reach_the_store_though_the_supervisor_was_away(pair: Stack, cases: list[Case]) -> None:
    await wait_for_runners(pair)
    os.kill(pair.pid("supervisor"), signal.SIGKILL)
    streams = await finished(pair.url, cases[:4], "away")
    assert_undisturbed(streams)

    async def acknowledged() -> bool:
        return pair.metric("gateway", "weft_gateway_outcomes_unacked") == 0

    await eventually(acknowledged)


async def test_the_only_runner_dies_and_held_streams_continue_when_it_is_back(lone: Stack, cases: list[Case]) -> None:
    await struck_until_streams_migrate(lone, cases, "only", width=8, streams=4)


async def cut_by_a_kill(stack: Stack, case: Case) -> None:
    """A stream whose gateway is killed once its first token is here; over when another gateway runs."""
    asked = {"model": case.model, "prompt": case.prompt, "temperature": 0, "max_tokens": 200, "stream": True}
    killed = stack.pid("gateway")
    async with (
        httpx2.AsyncClient(base_url=stack.url, timeout=PATIENCE_S) as http,
        http.stream("POST", "/v1/completions", json=asked) as response,
    ):
        lines = response.aiter_lines()
        assert response.status_code == 200, await response.aread()
        await anext(lines)
        os.kill(killed, signal.SIGKILL)
        with suppress(httpx2.HTTPError):
            async for _ in lines:
                pass

    async def another_runs() -> bool:
        return stack.components()["gateway"]["pid"] not in (None, killed)

    await eventually(another_runs)


async def first_answer(url: str, case: Case) -> httpx2.Response:
    """Return the answer to the first request that any process takes."""
    asked = {"model": case.model, "prompt": case.prompt, "temperature": 0, "max_tokens": 200}
    async with httpx2.AsyncClient(base_url=url, timeout=PATIENCE_S) as http, asyncio.timeout(PATIENCE_S):
        while True:
            with suppress(httpx2.ConnectError):
                return await http.post("/v1/completions", json=asked)
            await asyncio.sleep(0.01)


async def test_a_killed_gateways_streams_are_given_up_and_the_next_one_answers_its_first_request(
    lone: Stack, cases: list[Case]
) -> None:
    lone.wait_for_models()
    given_up = 0
    for case, other in pairwise(cases[: KILLS + 1]):
        before = lone.metric("runner", "weft_runner_tokens_total")
        await cut_by_a_kill(lone, case)
        answer = await first_answer(lone.url, other)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["text"] == other.expect
        await until_idle(lone, 1)
        whole = len(case.expect) + len(other.expect)
        given_up += lone.metric("runner", "weft_runner_tokens_total") - before < whole
    assert given_up, "every stream ran to its end for nobody"
