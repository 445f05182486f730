"""Drafts in the simulator: right as often as measured, paid for, and nothing that a client reads."""

from array import array
from random import Random

import pytest

from weft.domain.ids import Epoch
from weft.domain.machine import Kind, Peer
from weft.domain.request import Start
from weft_runner.core import SUREST, DraftQuery, Sequence
from weft_sim.drafts import SEARCHES, TASKS, MeasuredSearch
from weft_sim.executor_model import key_of
from weft_sim.faults import What
from weft_sim.scenario import Run
from weft_sim.shells import RunnerShell
from weft_sim.simulate import PoolDescription, simulate
from weft_sim.stack import World
from weft_sim.traces import TraceArrival


def shells(world: World) -> list[RunnerShell]:
    return [runner.shell for runner in world.runners.values() if isinstance(runner.shell, RunnerShell)]


@pytest.mark.parametrize(("seed", "fault"), [(15, What.CRASH), (53, What.TERMINATE)])
def test_answers_are_those_without_drafts_whatever_is_killed_moved_and_swapped(
    seed: int, fault: What, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run() -> tuple[World, dict[str, str]]:
        one = Run(seed)
        one.run()
        assert any(struck.kind is fault and struck.target.startswith("runner") for struck in one.plan.faults)
        assert sum(shell.swaps for shell in shells(one.world))
        begun = [request_id for request_id, _, kv in one.world.laws.starts if not kv]
        assert len(begun) > len(set(begun))  # some have moved
        clients = one.world.clients.values()
        return one.world, {client.id: client.text for client in clients if client.finish in ("eos", "length", "stop")}

    drafting, answers = run()
    monkeypatch.setattr("weft_sim.shells.MeasuredSearch", lambda *_: None)
    plain, others = run()
    assert sum(shell.accepted for shell in shells(drafting)) > 50
    assert not any(shell.accepted for shell in shells(plain))
    both = answers.keys() & others.keys()
    assert len(both) > 10
    assert {request: answers[request] for request in both} == {request: others[request] for request in both}


def test_steps_are_fewer_and_take_their_guesses_time() -> None:
    pool = PoolDescription(drafts=True, step_ms_1=10.0, step_ms_best=25.0, best_batch=16, adapters=0, cpu=False)
    worlds: list[World] = []
    (one,) = simulate(pool, [TraceArrival(0.0, 50, 201)], attach=worlds.append).figures.served
    (shell,) = shells(worlds[0])
    guesses = shell.machine.pool.scheduler.drafter.figures.guesses
    assert one.tokens == 201
    assert shell.steps == 201 - shell.accepted
    assert 0 < shell.accepted < guesses
    assert shell.model_s == pytest.approx(0.009 + 50 / 2000 + (shell.steps - 1) * 0.010 + guesses * 0.001)


@pytest.mark.parametrize("adapter", ["", "sha256:1"])
def test_drafts_are_right_as_often_as_measured(adapter: str) -> None:
    start = Start("r", Epoch(1, 1), (1, 2, 3), (), 100, 0, adapter)
    one = Sequence(start, Peer(Kind.GATEWAY, "g"), "g", admitted=1, now=0.0, max_context_tokens=100)
    search = MeasuredSearch(lambda: [one], lambda _, count: [7] * count, Random(0))
    tail = array("i", one.tokens)
    for text, counts in zip((tail, array("i")), SEARCHES[TASKS[key_of(adapter) % len(TASKS)]], strict=True):
        drafts = search([DraftQuery(text, tail, array("d", [1.0] * (1 + SUREST)), 32)] * 20_000)
        found = sum(1 for draft in drafts if draft.tokens) / len(drafts)
        right = sum(draft.tokens.count(7) for draft in drafts) / len(drafts)
        assert found == pytest.approx(1 - counts[0] / sum(counts), abs=0.01)
        mean = sum(n_right * count for n_right, count in enumerate(counts[1:])) / sum(counts)
        assert right == pytest.approx(mean, rel=0.05)
        assert all(len(draft.tokens) in (0, 32) for draft in drafts)
