"""The machine of batches: turns, windows, retries, endings; and any interleaving with crashes ends the same."""

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.domain.batch import BatchStatus, CancelLines, LineEnds, LineReleased, LineResult, LinesHello
from weft.domain.machine import TICK, Closed, Connected, Kind, Peer, Received, Send
from weft_batch.core import (
    Added,
    Batches,
    BatchGone,
    CancelAsked,
    Finalize,
    Give,
    LineCounters,
    LineFailed,
    LinesStored,
    NamespaceFigures,
    StoreResult,
    Validate,
    Validated,
)
from weft_batch.core import batches as core

DAY = 86_400.0


def peer(name: str = "g1") -> Peer:
    return Peer(Kind.GATEWAY, name)


def added(batch_id: str = "b1", namespace: str = "a", order: int = 0, ending: BatchStatus | None = None) -> Added:
    return Added(batch_id, namespace, (order, batch_id), DAY, ending)


def result(batch_id: str, line: int, status: int = 200) -> LineResult:
    return LineResult(batch_id, line, status, "r", b"{}")


def ends(*these: LineResult | LineReleased) -> LineEnds:
    results = [end for end in these if isinstance(end, LineResult)]
    return LineEnds(results, [end for end in these if isinstance(end, LineReleased)])


@dataclass
class World:
    """The machine, checked after each event."""

    machine: Batches = field(default_factory=lambda: Batches(lines_in_flight=100))
    now: float = 0.0

    def do(self, *events) -> list:
        effects = []
        for event in events:
            effects += self.machine.handle(event, self.now)
            self.machine.check()
        return effects

    @classmethod
    def with_gateway(cls, name: str = "g1", max_lines: int = 100) -> "World":
        world = cls()
        world.gateway(name, max_lines)
        return world

    def gateway(self, name: str = "g1", max_lines: int = 100) -> list:
        return self.do(Connected(peer(name), LinesHello(name, max_lines)))

    def batch(self, batch_id: str = "b1", namespace: str = "a", *, order: int = 0, total: int = 3, finished=()) -> list:
        assert self.do(added(batch_id, namespace, order)) == [Validate(batch_id)]
        return self.do(Validated(batch_id, total, finished))

    def answer(self, batch_id: str, line: int, status: int = 200, name: str = "g1") -> list:
        return self.do(Received(peer(name), ends(result(batch_id, line, status))))


def given_lines(effects: list) -> list[tuple[str, int]]:
    return [(effect.batch_id, effect.line) for effect in effects if isinstance(effect, Give)]


def test_a_batch_runs_its_lines_in_order_and_ends_once_the_store_has_them() -> None:
    world = World.with_gateway(max_lines=2)
    assert given_lines(world.batch(total=3)) == [("b1", 1), ("b1", 2)]
    assert [world.machine.is_at(peer(name), "b1", line) for name, line in (("g1", 1), ("g1", 3), ("g2", 1))] == [
        True, False, False,
    ]  # fmt: skip
    assert world.answer("b1", 2) == [StoreResult(result("b1", 2)), Give(peer(), "b1", 3)]
    assert world.answer("b1", 2) == [], "a second answer is none"
    world.answer("b1", 1)
    world.answer("b1", 3)
    assert world.do(LinesStored([("b1", 1), ("b1", 2)])) == []
    assert world.do(LinesStored([("b1", 3)])) == [Finalize("b1", BatchStatus.COMPLETED)]
    world.do(BatchGone("b1"))
    assert (world.machine.namespaces(), world.machine.next_deadline()) == ({}, None)


def test_after_a_restart_only_unfinished_lines_run() -> None:
    world = World.with_gateway()
    assert given_lines(world.batch(total=5, finished=[1, 4])) == [("b1", 2), ("b1", 3), ("b1", 5)]
    assert World().batch(total=2, finished=[1, 2]) == [Finalize("b1", BatchStatus.COMPLETED)]


def test_namespaces_take_turns_each_with_its_oldest_batch() -> None:
    world = World(Batches(lines_in_flight=6))
    world.batch("b1", "a", order=2, total=9)
    world.batch("b2", "a", order=1, total=2)
    world.batch("b3", "b", order=3, total=9)
    assert given_lines(world.gateway()) == [("b2", 1), ("b3", 1), ("b2", 2), ("b3", 2), ("b1", 1), ("b3", 3)]


def test_lines_go_to_the_gateway_with_the_most_room_within_every_bound() -> None:
    world = World(Batches(lines_in_flight=5))
    world.gateway("g1", 1)
    world.gateway("g2", 3)
    world.gateway("g3", 0)
    effects = world.batch(total=9, finished=[9])
    assert Counter(effect.peer.name for effect in effects if isinstance(effect, Give)) == {"g1": 1, "g2": 3}
    assert len(given_lines(world.gateway("g4", 9))) == 1, "five in all"
    assert given_lines(world.answer("b1", 1, name="g2")) == [], "what the store does not have yet counts"
    assert world.machine.namespaces() == {"a": NamespaceFigures(batches=1, waiting=3, running=4, storing=1)}
    assert len(given_lines(world.do(LinesStored([("b1", 1)])))) == 1


def test_a_gateway_may_change_its_room() -> None:
    world = World.with_gateway(max_lines=1)
    world.batch(total=3)
    assert len(given_lines(world.do(Received(peer(), LinesHello("g1", 3))))) == 2
    world.do(Received(peer(), LinesHello("g1", 0)))
    world.answer("b1", 1)
    assert world.do(LinesStored([("b1", 1)])) == []


def test_lines_of_a_lost_gateway_run_elsewhere_at_once() -> None:
    world = World.with_gateway("g1", 2)
    world.batch(total=2)
    world.gateway("g2", 2)
    assert given_lines(world.do(Closed(peer("g1"), "gone"))) == [("b1", 1), ("b1", 2)]
    assert world.answer("b1", 1, name="g2") == [StoreResult(result("b1", 1))]


def test_a_line_given_back_again_and_again_waits_longer_each_time() -> None:
    world = World.with_gateway()
    world.batch(total=1)
    pauses = []
    for _ in range(9):
        before = world.now
        effects = world.do(Received(peer(), ends(LineReleased("b1", 1, "drains"))))
        while not given_lines(effects):
            world.now = world.machine.next_deadline()
            effects = world.do(TICK)
        pauses.append(world.now - before)
    assert pauses == [0, 1, 2, 4, 8, 16, 32, 60, 60]
    assert world.machine.counters == LineCounters(sent=10, retried=0, released=9, lost=0)


@pytest.mark.parametrize(("status", "pauses_s"), [(429, (2, 4)), (500, (2, 4)), (503, (2, 4)), (404, ())])
def test_a_line_that_may_succeed_later_is_tried_three_times_and_a_refused_one_once(
    status: int, pauses_s: tuple[int, ...]
) -> None:
    world = World.with_gateway()
    world.batch(total=1)
    for pause_s in pauses_s:
        assert world.answer("b1", 1, status) == []
        assert world.machine.next_deadline() == world.now + pause_s
        world.now += pause_s
        assert given_lines(world.do(TICK)) == [("b1", 1)]
    assert world.answer("b1", 1, status) == [StoreResult(result("b1", 1, status))]
    world.do(LinesStored([("b1", 1)]))
    tries = len(pauses_s)
    assert world.machine.counters == LineCounters(sent=tries + 1, retried=tries, released=0, lost=0)


def test_a_line_that_ends_every_gateway_fails() -> None:
    world = World()
    world.batch(total=1)
    stored = []
    while not stored:
        if (deadline := world.machine.next_deadline()) is not None and deadline < DAY:
            world.now = deadline
        effects = world.do(TICK) + world.gateway()
        assert given_lines(effects) == [("b1", 1)]
        stored = [effect for effect in world.do(Closed(peer(), "killed")) if isinstance(effect, StoreResult)]
    assert stored == [StoreResult(LineFailed("b1", 1, "gateway_lost", "10 gateways were lost while they ran the line"))]
    assert world.machine.counters == LineCounters(sent=10, retried=0, released=0, lost=10)


def test_a_cancelled_batch_ends_once_the_store_has_what_was_on_its_way() -> None:
    world = World.with_gateway()
    world.batch(total=3)
    world.answer("b1", 1)
    assert world.do(CancelAsked("b1")) == [Send(peer(), CancelLines("b1", [2, 3]))]
    assert world.answer("b1", 2) == [], "too late"
    assert world.do(LinesStored([("b1", 1)])) == [Finalize("b1", BatchStatus.CANCELLED)]
    assert world.do(CancelAsked("b1"), CancelAsked("never")) == []


def test_a_window_that_ends_is_an_end_unless_everything_is_finished() -> None:
    world = World.with_gateway()
    world.batch("b1", total=2)
    world.batch("b2", total=1, finished=[1])
    world.do(BatchGone("b2"))
    world.batch("b3", total=1)
    world.answer("b3", 1)
    world.now = DAY
    effects = world.do(TICK)
    assert Finalize("b1", BatchStatus.EXPIRED) in effects
    assert Finalize("b3", BatchStatus.COMPLETED) in world.do(LinesStored([("b3", 1)]))


@pytest.mark.parametrize("ending", [BatchStatus.CANCELLED, BatchStatus.EXPIRED, BatchStatus.COMPLETED])
def test_a_batch_that_was_ending_only_ends(ending: BatchStatus) -> None:
    assert World().do(added(ending=ending)) == [Finalize("b1", ending)]


def test_a_batch_cancelled_while_its_input_is_read_ends_after_it() -> None:
    world = World.with_gateway()
    for events, effects in (
        ([added()], [Validate("b1")]),
        ([CancelAsked("b1")], []),
        ([Validated("b1", 3, ())], [Finalize("b1", BatchStatus.CANCELLED)]),
    ):
        assert world.do(*events) == effects
        assert world.machine.namespaces() == {"a": NamespaceFigures(batches=1, waiting=0, running=0, storing=0)}


def test_much_that_waits_holds_back_new_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "MAX_WAITING", 2)
    monkeypatch.setattr(core, "MAX_STORING_BYTES", 4)
    world = World.with_gateway(max_lines=2)
    world.batch(total=9)
    assert given_lines(world.answer("b1", 1, 500)) == [("b1", 3)]
    assert given_lines(world.answer("b1", 2, 500) + world.answer("b1", 3, 500)) == []
    world.now = world.machine.next_deadline()
    assert given_lines(world.do(TICK)) == [("b1", 1), ("b1", 2)]
    world.answer("b1", 1)
    assert given_lines(world.answer("b1", 2)) == [], "answers on their way to the store are bounded in bytes"


@pytest.mark.parametrize(
    "broken",
    [
        lambda machine: machine._ready.clear(),
        lambda machine: setattr(machine, "_storing_bytes", 1),
        lambda machine: setattr(machine._books["b1"], "cursor", 3),
    ],
    ids=["turns", "sums", "lines"],
)
def test_what_must_hold_is_looked_at(broken) -> None:
    world = World.with_gateway(max_lines=1)
    world.batch(total=9)
    broken(world.machine)
    with pytest.raises(AssertionError):
        world.machine.check()


@given(seed=st.integers(0, 2**32), lines=st.lists(st.integers(1, 12), min_size=1, max_size=4))
def test_any_interleaving_with_crashes_runs_each_line_to_one_stored_result(seed: int, lines: list[int]) -> None:
    """What the store has is kept over crashes, nothing else; every batch ends as it should. Answers cross what cancels
    their lines.
    """
    rng = random.Random(seed)
    store: dict[str, dict[int, LineResult | LineFailed]] = {f"b{i}": {} for i in range(len(lines))}
    totals = {f"b{i}": total for i, total in enumerate(lines)}
    cancelled, ended = set[str](), dict[str, BatchStatus]()

    def start() -> tuple[World, dict[str, list], list]:
        world = World(Batches(lines_in_flight=rng.randint(1, 8)), now=world_now[0])
        for i, batch_id in enumerate(totals):
            if batch_id not in ended:
                ending = BatchStatus.CANCELLED if batch_id in cancelled else None
                todo.append(("effects", world.do(added(batch_id, f"n{i % 2}", i, ending))))
        return world, {}, []

    world_now = [0.0]
    todo: list = []
    world, running, storing = start()
    names, crossing = iter(range(10**6)), list[tuple[str, str, int]]()
    for step in range(4_000):
        while todo:
            for effect in todo.pop()[1]:
                match effect:
                    case Validate():
                        finished = list(store[effect.batch_id])
                        todo.append(("e", world.do(Validated(effect.batch_id, totals[effect.batch_id], finished))))
                    case Give():
                        assert effect.line not in store[effect.batch_id], "a finished line runs again"
                        running[effect.peer.name].append((effect.batch_id, effect.line))
                    case Send():
                        for line in effect.message.lines:
                            running[effect.peer.name].remove((effect.message.batch_id, line))
                            crossing.append((effect.peer.name, effect.message.batch_id, line))
                    case StoreResult():
                        storing.append(effect.result)
                    case Finalize():
                        assert effect.batch_id not in ended
                        ended[effect.batch_id] = effect.ending
                        todo.append(("e", world.do(BatchGone(effect.batch_id))))
        if len(ended) == len(totals):
            break
        choice, calm = rng.random(), step > 2_000
        crossing = [(name, *line) for name, *line in crossing if name in running]
        flying = [*((name, *line) for name, own in running.items() for line in own), *crossing]
        if choice < 0.02 and not calm:  # kill -9
            todo.clear()
            world_now[0] = world.now
            world, running, storing = start()
        elif choice < 0.1 and running and not calm:
            running.pop(name := rng.choice(list(running)))
            todo.append(("e", world.do(Closed(peer(name), "lost"))))
        elif choice < 0.2 or not running:
            name = f"g{next(names)}"
            running[name] = []
            todo.append(("e", world.gateway(name, rng.randint(1, 4))))
        elif choice < 0.22 and not calm:
            batch_id = rng.choice(list(totals))
            if batch_id not in ended:
                cancelled.add(batch_id)
                todo.append(("e", world.do(CancelAsked(batch_id))))
        elif choice < 0.5 and storing:
            stored = [storing.pop(rng.randrange(len(storing))) for _ in range(rng.randint(1, len(storing)))]
            for one in stored:
                assert one.line not in store[one.batch_id]
                store[one.batch_id][one.line] = one
            todo.append(("e", world.do(LinesStored([(one.batch_id, one.line) for one in stored]))))
        elif choice < 0.9 and flying:
            name, batch_id, line = one = rng.choice(flying)
            if one in crossing:
                crossing.remove(one)
            else:
                running[name].remove((batch_id, line))
            status = 200 if calm else rng.choice([200, 200, 404, 429, 503])
            message = LineReleased(batch_id, line, "x") if rng.random() < 0.2 else result(batch_id, line, status)
            todo.append(("e", world.do(Received(peer(name), ends(message)))))
        elif (deadline := world.machine.next_deadline()) is not None:
            world.now = max(world.now, min(deadline, world.now + 70))
            todo.append(("e", world.do(TICK)))
    assert ended.keys() == totals.keys()
    for batch_id, ending in ended.items():
        assert ending is BatchStatus.CANCELLED or set(store[batch_id]) == set(range(1, totals[batch_id] + 1))
        assert ending is (BatchStatus.CANCELLED if batch_id in cancelled else BatchStatus.COMPLETED) or (
            batch_id in cancelled and len(store[batch_id]) == totals[batch_id]
        )
