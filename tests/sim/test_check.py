"""Scenarios: the same seed is the same run everywhere, the laws hold, and a failure says how to see it again."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from harness.explore import FAILED_SCENARIO
from weft_scheduler.core import Scheduler
from weft_sim import check
from weft_sim.check import check_seed
from weft_sim.clock import Rank
from weft_sim.laws import ClientRequest
from weft_sim.scenario import scenario
from weft_sim.stack import World

DRAWN = (6, 9, 10, 11, 12, 13, 18, 22)  # cheap ones that together have every kind of fault, and one that has none
HASH = "from weft_sim.check import check_seed; print([check_seed(seed).trace_hash for seed in (2, 5)])"


@pytest.mark.slow
def test_a_seed_is_one_run_twice_in_one_process_and_in_two_under_other_hash_seeds() -> None:
    here = [[check_seed(seed).trace_hash for seed in (2, 5)] for _ in range(2)]
    assert here[0] == here[1]
    assert here[0][0] != here[0][1]
    for hash_seed in ("0", "4242"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        found = subprocess.run(
            [sys.executable, "-c", HASH], env=environment, capture_output=True, text=True, check=True
        )
        assert found.stdout.strip() == str(here[0])


@pytest.mark.parametrize("seed", DRAWN)
def test_the_laws_hold(seed: int) -> None:
    assert not check_seed(seed).fault, f"python -m weft_sim check --seeds 1 --first {seed}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed",
    [
        29,  # the scheduler ends a gateway's stream, for outcomes that do not fit, while requests of it wait
        43,  # and that gateway dies before it is back
        161,  # KV that was offered twice is refused once the token runner has taken over
        466,  # the scheduler's clock jumps between two requests
    ],
)
def test_the_laws_hold_in_what_was_found_before(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft_sim.shells.MeasuredSearch", lambda *_: None)  # it was found without drafts
    assert not check_seed(seed).fault


def test_scenarios_differ_and_every_kind_of_fault_occurs() -> None:
    plans = [scenario(seed) for seed in range(60)]
    assert len({repr(plan.deployment) for plan in plans}) == 60
    kinds = {
        "crash", "power", "break", "pause", "clock", "slow", "delay", "partition", "duplicate", "load", "disk",
        "delete", "lie", "reorder", "terminate",
    }  # fmt: skip
    for seeds in (range(60), DRAWN):
        assert {fault.kind.value for seed in seeds for fault in plans[seed].faults} == kinds
    assert any(not plan.faults for plan in plans)


def test_a_failing_seed_prints_how_to_see_it_again_and_writes_its_timeline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("weft_gateway.core.answer_text.AnswerText.append", lambda *_: "")
    trace = tmp_path / "out.json"
    arguments = ["check", "--seeds", "1", "--first", "3", "--trace", str(trace)]
    monkeypatch.setattr(sys, "argv", ["weft_sim", *arguments])
    from weft_sim.__main__ import main

    assert main() == 1
    printed = capsys.readouterr().out
    assert "seed 3: LawBroken" in printed
    assert "python -m weft_sim check --seeds 1 --first 3 --trace seed-3.json" in printed
    assert [seed for seed, _ in FAILED_SCENARIO.findall(printed)] == ["3"], "`make explore` reads it"
    events = json.loads(trace.read_text())["traceEvents"]
    assert {"M", "X", "b"} <= {event["ph"] for event in events}
    assert all(event["dur"] >= 0 for event in events if event["ph"] == "X")


def test_a_restart_of_the_scheduler_in_full_flight_migrates_nothing_and_keeps_the_queue_in_order() -> None:
    deployment = scenario(0).deployment
    runner = replace(deployment.runners[0], spec=replace(deployment.runners[0].spec, max_sequences=2))
    world = World(replace(deployment, runners=(runner,)), seed=0)
    clock = world.clock
    world.start()
    clock.run(end_s=clock.now + 1.0)
    for number in range(20):
        request = ClientRequest(
            f"r{number}", f"r{number}", "gateway-0", "acme", "base", (number + 1, 2, 3), 40, 1 << 40
        )
        clock.at(clock.now + number / 100, Rank.ARRIVAL, world.submit, request.id, [request])
    clock.run(end_s=clock.now + 0.5)
    before = _places(world)
    assert before[0]
    assert before[1]
    world.scheduler.crash()
    clock.run(end_s=clock.now + 0.01)
    world.scheduler.start()
    clock.run(end_s=clock.now + 0.4)
    after = _places(world)
    assert {r: after[0][r] for r in before[0] if r in after[0]} == {r: e for r, e in before[0].items() if r in after[0]}
    assert [r for r in before[1] if r in after[1]] == after[1]
    clock.run(end_s=clock.now + 30.0)
    assert not world.laws.unfinished()
    assert all(request.finish == "length" for request in world.clients.values())


def _places(world: World) -> tuple[dict[str, object], list[str]]:
    """The epoch of each request that runs, and those that wait, in order."""
    machine = world.scheduler.machine
    assert isinstance(machine, Scheduler)
    requests = machine.state.requests.values()
    queue = [request.id for pool in machine.state.pools.values() for request in pool.waiting.queue]
    return {request.id: (request.epoch, request.runner) for request in requests if request.placed}, queue


@pytest.mark.slow
def test_two_processes_share_the_seeds(capsys: pytest.CaptureFixture[str]) -> None:
    verdicts = list(check.check_seeds(range(2), jobs=2))
    assert sorted(verdict.seed for verdict in verdicts) == [0, 1]
    assert not any(verdict.fault for verdict in verdicts)
