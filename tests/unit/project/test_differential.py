"""Replays of one recording (`make differential`) are equal where the code is, and say where it is not."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from harness.differential import drive, record
from harness.differential.comparison import Names, Report, compare
from harness.differential.values import Json, built, plain
from harness.scheduler_driver import Driver
from tests.unit.operator import cluster, planning
from tests.unit.operator.planning import adapter_object, fetched_base, pool_object, verified
from weft.domain.ids import Epoch, RunnerId
from weft.domain.request import Submit
from weft.wire.codec.scheduling import GATEWAY_TO_SCHEDULER as CONTRACT
from weft_scheduler.core import Scheduler

TREAP = "weft_scheduler.core.policy.placement.capacity_treap.CapacityTreap.best"
SUBMIT = Submit("r", "acme/p", "acme", "acme/m", "", prompt_tokens=3, max_tokens=7)


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch) -> list[Json]:
    """A scheduler that places, a world that comes to rest, a message."""
    recorder = record.Recorder()
    with monkeypatch.context() as patched:
        kept: dict[Any, tuple[str, ...]] = {
            Scheduler: ("__init__", "handle"),
            planning.World: ("__init__", "restarted"),
        }
        kept |= {cluster.ClusterWorld: ("__init__",)}
        for of in (*kept, *record.STEPS):
            for name in (*kept.get(of, ()), *record.STEPS.get(of, ())):
                patched.setattr(of, name, getattr(of, name))
        record.record_machine(recorder, Scheduler)
        record.record_worlds(recorder)
        driver = Driver().start("a")
        for uuid in ("u1", "u2"):
            driver.runner(uuid)
        for name in ("q1", "q2", "q3"):
            driver.submit(name, "a")
        world = cluster.cluster_world(planning.ObjectStore(lambda: 0.0), {"file:base": fetched_base()}, 1_000.0)
        world.contents["file:upper"] = verified("a")
        world.settle(pool_object(replicas=2), adapter_object("upper"))
        world.restarted().wait(6.0)
    recorder.record("call", call="scheduling.GATEWAY_TO_SCHEDULER", args=plain([CONTRACT.encode(SUBMIT)]))
    return json.loads(json.dumps(recorder.taken()))


def answers(records: list[Json]) -> list[Json]:
    return [line for one in records for line in drive.replay(one)]


def place_last(patch: pytest.MonkeyPatch) -> None:
    """Runners are preferred in the opposite order."""

    def worst(treap: Any, free_tokens: int, *_: Any, **__: Any) -> Any:
        return min((key for key, _ in treap.descending(free_tokens)), default=None)

    patch.setattr(TREAP, worst)


def wait_longer(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("weft_operator.core.pod_template.AFTER_DRAIN_S", 31)


def swap_fields(patch: pytest.MonkeyPatch) -> None:
    decode = CONTRACT.decode

    def swapped(envelope: Any) -> Any:
        read: Any = decode(envelope)
        return replace(read, prompt_tokens=read.max_tokens, max_tokens=read.prompt_tokens)

    patch.setattr(CONTRACT, "decode", swapped)


@pytest.mark.parametrize(
    ("plant", "where"),
    [
        (place_last, {"machine: Assign: RunnerId.uuid"}),
        (wait_longer, {"world: ApplyChild: Child.manifest.spec.template.spec.terminationGracePeriodSeconds"}),
        (swap_fields, {"call: scheduling.GATEWAY_TO_SCHEDULER: Submit.prompt_tokens"}),
    ],
)
def test_a_break_is_reported_where_it_is(
    plant: Callable[[pytest.MonkeyPatch], None], where: set[str], records: list[Json], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = answers(records)
    assert not compare(before, answers(records), Names({})).differences
    assert {line[1] for line in before} >= {"Assign", "ApplyChild", "SetStatus", "scheduling.GATEWAY_TO_SCHEDULER"}
    assert not [line for line in before if line[1] == "raises"]
    plant(monkeypatch)
    assert compare(before, answers(records), Names({})).unexplained.keys() >= where


NAMES = Names({
    "names": {"Old": "New", "Kind.A": "Kind.B"},
    "fields": {"New.max_moves": "limits:Limits.moves"},
    "removed": {"New.gone": "nobody read it"},
    "added": {"New.fresh": "for a reason"},
    "explained": {"machine: New: New.shown": "rounded"},
})  # fmt: skip


def compared(old: Json, new: Json, at: float = 1.0) -> Report:
    return compare([["machine a", "Old", 1.0, old]], [["machine a", "New", at, new]], NAMES)


def test_what_the_table_says_is_no_difference() -> None:
    old = {"=": "Old", "max_moves": 8, "gone": 1, "kind": {"=enum": "Kind.A"}, "shown": 0.12}
    new: Json = {
        "=": "New",
        "limits": {"=": "Limits", "moves": 8},
        "kind": {"=enum": "Kind.B"},
        "shown": 0.1,
        "fresh": 2,
    }
    report = compared(old, new)
    assert [one.reason for one in report.differences.values()] == ["rounded"]
    assert "explained (rounded)" in report.text()
    new["limits"]["moves"] = 9
    assert compared(old, new).unexplained.keys() == {"machine: New: Limits.moves"}
    assert compared(old, new, at=2.0).unexplained.keys() == {"machine: New: when, or how many"}


@pytest.mark.parametrize(
    "value",
    [
        replace(SUBMIT, epoch=Epoch(1, 2), runner=RunnerId("u", "i")),
        frozenset({"b", "a"}), {RunnerId("u", "i"): float("inf")}, {"a": [1, {"b": None}]}, b"\0" * 5_000, b"",
        CONTRACT.encode(SUBMIT),
    ],
)  # fmt: skip
def test_a_value_comes_back_as_it_was(value: Any) -> None:
    assert built(json.loads(json.dumps(plain(value)))) == value
