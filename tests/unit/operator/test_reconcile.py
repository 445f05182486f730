"""The planner as tables: one situation, what is ordered, what the conditions say."""

from collections import Counter
from dataclasses import fields, replace
from math import inf

import pytest

from tests.unit.operator.planning import (
    BASE,
    World,
    adapter_object,
    adapter_ref,
    check_indexes,
    digest,
    failed,
    fetched_base,
    pool_object,
    pool_ref,
    runner_name,
    template,
    verified,
)
from weft.domain.adapter import Tier
from weft.domain.request import NO_DEFAULTS, SamplingDefaults
from weft.domain.routes import AdapterStatus, PoolStatus, RoleCounts, SloAttainment
from weft_operator.core import (
    EnsureRunner,
    OperationStatus,
    OperatorPolicy,
    RemoveRunner,
    Resolve,
    RunnerProcess,
    requeue_at,
)
from weft_operator.core.actions import Action
from weft_operator.core.artifacts import source_changed
from weft_operator.core.chat_templates import template_uid
from weft_operator.core.reconcile import PROGRESS_S, live_digests, progress_s, resolve_period_s
from weft_operator.core.resources import FINALIZER
from weft_operator.core.scaling import ANSWER_S


def test_a_pool_and_its_adapters_become_ready(serving: World) -> None:
    serving.check(pool_ref(), Available="True RunnersReady", Progressing="False RunnersReady")
    assert serving.condition(adapter_ref("upper"), "Ready") == ("True", "Published")
    assert serving.status(pool_ref())["adapters"] == {"total": 2, "ready": 2}
    assert serving.status(adapter_ref("upper"))["digest"] == digest("a")
    assert serving.status(adapter_ref("upper"))["modelName"] == "acme/upper"


def test_nothing_is_kept_of_objects_that_are_deleted(serving: World) -> None:
    canary = {"source": {"uri": "file:lower"}, "weight": 10, "maxErrorPercent": 5, "minRequests": 20}
    serving.settle(adapter_object("upper", canary=canary, pinned=True))
    for ref in (adapter_ref("upper"), adapter_ref("lower"), pool_ref()):
        serving.remove(ref)
    parts = serving.observed, serving.expectations
    kept = {field.name for part in parts for field in fields(part) if getattr(part, field.name)}
    assert kept <= {"retention", "adapter_reports"}, "streams drain, and the scheduler speaks of them"
    assert not serving.desired.by_uid
    check_indexes(serving.desired)


def test_an_unchanged_source_is_asked_for_again_and_writes_nothing(serving: World) -> None:
    writes, asked = serving.status_writes, len(serving.asked)
    serving.wait(2.1)
    assert (len(serving.asked), serving.status_writes) == (asked + 3, writes)


def test_a_source_named_by_digest_is_not_asked_for_again(world: World) -> None:
    world.settle(pool_object(), adapter_object("upper", source={"uri": "file:upper", "digest": digest("a")}))
    asked = sum(request.uri == "file:upper" for request in world.asked)
    world.wait(100)
    assert sum(request.uri == "file:upper" for request in world.asked) == asked == 1


def test_an_adapter_of_no_pool_has_a_condition_and_is_served_once_the_pool_is_there(world: World) -> None:
    world.settle(adapter_object("upper"))
    world.check(adapter_ref("upper"), Accepted="False PoolNotFound", Ready="False PoolNotFound")
    world.settle(pool_object())
    assert world.condition(adapter_ref("upper"), "Ready") == ("True", "Published")


def test_of_two_adapters_with_one_name_the_older_has_it(serving: World) -> None:
    serving.settle(adapter_object("lower", namespace="globex", modelName="acme/upper"))
    assert serving.condition(adapter_ref("lower", "globex"), "Accepted") == ("False", "NameConflict")
    assert serving.condition(adapter_ref("upper"), "Ready") == ("True", "Published")
    serving.remove(adapter_ref("upper"))
    assert serving.condition(adapter_ref("lower", "globex"), "Ready") == ("True", "Published")


def test_a_name_that_begins_with_a_namespace_is_that_namespaces_though_another_was_there_before(world: World) -> None:
    world.settle(pool_object(), adapter_object("lower", namespace="globex", modelName="acme/upper"))
    assert world.condition(adapter_ref("lower", "globex"), "Ready") == ("True", "Published")
    world.settle(adapter_object("upper"))
    assert world.condition(adapter_ref("lower", "globex"), "Accepted") == ("False", "NameConflict")
    assert world.condition(adapter_ref("upper"), "Ready") == ("True", "Published")


def test_a_base_name_is_reserved_even_from_an_older_adapter(world: World) -> None:
    world.settle(adapter_object("upper", modelName="base"), pool_object())
    assert world.condition(adapter_ref("upper"), "Accepted") == ("False", "NameConflict")
    assert world.condition(pool_ref(), "Available") == ("True", "RunnersReady")


def test_of_two_pools_with_one_name_the_older_serves(serving: World) -> None:
    serving.settle(pool_object("other", model={"name": "base", "uri": "file:base"}))
    assert serving.condition(pool_ref("other"), "Accepted") == ("False", "NameConflict")
    assert pool_ref("other") not in serving.observed.runners
    assert serving.condition(adapter_ref("upper"), "Ready") == ("True", "Published")


def test_a_refused_object_holds_no_name(world: World) -> None:
    world.apply(pool_object(allowedNamespaces=["globex"]))
    world.apply(adapter_object("lower", namespace="acme", modelName="wanted"))
    world.apply(adapter_object("upper", namespace="globex", modelName="wanted"))
    world.settle()
    assert world.condition(adapter_ref("lower"), "Accepted") == ("False", "NotPermitted")
    assert world.condition(adapter_ref("upper", "globex"), "Ready") == ("True", "Published")


def test_an_assertion_about_the_base_that_does_not_hold_is_a_mismatch(serving: World) -> None:
    serving.settle(adapter_object("upper", namespace="globex", baseModel="llama"))
    serving.check(adapter_ref("upper", "globex"), Validated="False BaseMismatch", Ready="False BaseMismatch")


def test_who_names_the_base_is_not_asked_what_it_was_trained_on(serving: World) -> None:
    serving.settle(adapter_object("upper", namespace="globex", baseModel="base"))
    named = next(request for request in serving.asked if request.namespace == "globex")
    unnamed = next(request for request in serving.asked if request.namespace == "acme")
    assert named.body()["base"] == {"digest": BASE}
    assert unnamed.body()["base"] == {"digest": BASE, "name": "base"}


def test_an_adapter_waits_for_its_base(world: World) -> None:
    world.contents["file:base"] = failed("SourceNotFound")
    world.settle(pool_object(), adapter_object("upper"))
    assert world.condition(adapter_ref("upper"), "Ready") == ("False", "BaseNotReady")
    assert world.status(adapter_ref("upper"))["unavailableRunners"] == 0
    world.check(pool_ref(), Fetched="False SourceNotFound", Available="False BaseNotReady")


@pytest.mark.parametrize(
    ("answer", "validated", "fetched"),
    [
        (failed("ShapeMismatch"), ("False", "ShapeMismatch"), ("False", "ShapeMismatch")),
        (failed("NotFinite", validated=True), ("True", "Validated"), ("False", "NotFinite")),
        (OperationStatus("Validated", None, {"rank": 4}), ("True", "Validated"), ("Unknown", "Resolving")),
        (OperationStatus("Pending"), ("Unknown", "Resolving"), ("Unknown", "Resolving")),
    ],
)
def test_conditions_report_how_far_a_content_has_come(
    serving: World, answer: OperationStatus, validated: tuple[str, str], fetched: tuple[str, str]
) -> None:
    serving.contents["file:new"] = answer
    serving.settle(adapter_object("new"))
    serving.wait(PROGRESS_S)
    assert serving.condition(adapter_ref("new"), "Validated") == validated
    assert serving.condition(adapter_ref("new"), "Fetched") == fetched
    assert serving.condition(adapter_ref("new"), "Ready") == ("False", fetched[1])
    assert serving.condition(adapter_ref("upper"), "Ready") == ("True", "Published")


def test_an_edited_source_takes_the_place_of_the_old_one_which_is_kept_while_it_drains(serving: World) -> None:
    serving.wait(400)  # the first list waits until what drained before the start has drained
    serving.contents["file:upper"] = verified("d")
    serving.wait(2.1)
    assert [entry.digest for entry in serving.routed.values()].count(digest("d")) == 1
    assert serving.condition(adapter_ref("upper"), "Ready") == ("True", "Published")
    assert serving.kept is not None
    assert {digest("a"), digest("d")} <= serving.kept
    serving.wait(61)
    assert digest("a") not in serving.kept
    assert digest("d") in serving.kept
    assert serving.expectations.retention.kept_until == {}


def versions(world: World) -> list[tuple[str, str | None]]:
    """(digest, name) of each content, as the status lists them."""
    return [(v["digest"], v.get("name")) for v in world.status(adapter_ref("upper"))["versions"]]


def published(world: World) -> tuple[str, list[str]]:
    """The content that the scheduler routes, and the earlier ones; each with the token that ends its answers."""
    entry = next(entry for entry in world.routed.values() if entry.model_name == "acme/upper")
    assert all(digest(chr(one.eos_token_ids[0])) == one.digest for one in (entry, *entry.versions))
    return entry.digest, [version.digest for version in entry.versions]


def test_earlier_contents_are_served_and_kept_up_to_the_history_limit(serving: World) -> None:
    serving.wait(400)  # the first list waits until what drained before the start has drained
    for letter in "cde":
        serving.contents[f"file:{letter}"] = verified(letter)
        source = {"uri": f"file:{letter}"}
        serving.settle(adapter_object("upper", source=source, version=f"step-{letter}", revisionHistoryLimit=2))
    assert versions(serving) == [(digest("e"), "step-e"), (digest("d"), "step-d"), (digest("c"), "step-c")]
    assert published(serving) == (digest("e"), [digest("d"), digest("c")])
    serving.wait(61)
    assert serving.kept is not None
    assert {digest("c"), digest("d"), digest("e")} <= serving.kept
    assert digest("a") not in serving.kept
    serving.settle(adapter_object("upper", source={"uri": "file:c"}, version="step-c", revisionHistoryLimit=1))
    assert versions(serving) == [(digest("c"), "step-c"), (digest("e"), "step-e")]
    assert published(serving) == (digest("c"), [digest("e")])
    writes = serving.status_writes
    serving.wait(61)
    assert digest("d") not in serving.kept
    assert serving.status_writes == writes


def test_a_version_is_the_name_of_the_content_that_is_found_once_it_is_published(serving: World) -> None:
    serving.contents["file:new"] = failed("RankTooLarge")
    bad = adapter_object("upper", source={"uri": "file:new"}, version="v2", revisionHistoryLimit=5)
    serving.settle(bad)
    assert versions(serving) == [(digest("a"), None)]
    serving.contents["file:new"] = verified("d")
    serving.wait(11)
    assert versions(serving) == [(digest("d"), "v2"), (digest("a"), None)]
    serving.contents["file:new"] = verified("e")  # the newest content of a name has it
    serving.wait(11)
    assert versions(serving) == [(digest("e"), "v2"), (digest("d"), None), (digest("a"), None)]


def test_versions_that_another_operator_wrote_in_another_form_are_left_out(serving: World) -> None:
    (current,) = serving.status(adapter_ref("upper"))["versions"]
    known = {"digest": current["digest"], "publishTime": "2026-01-01T00:00:00Z"}
    foreign = [known, {"digest": digest("d"), "publishedAt": "2026-01-01T00:00:00Z"}, {"name": "v1"}]
    stored = serving.store.get(adapter_ref("upper"))
    meta, status = stored["metadata"], {**stored["status"], "versions": foreign}
    serving.store.set_status(adapter_ref("upper"), meta["uid"], meta["resourceVersion"], status)
    again = serving.restarted()
    again.settle()
    (stays,) = again.status(adapter_ref("upper"))["versions"]
    assert (stays["digest"], stays["publishTime"]) == (digest("a"), known["publishTime"])
    assert published(again) == (digest("a"), [])
    assert again.condition(adapter_ref("upper"), "Ready") == ("True", "Published")


def test_a_content_of_another_base_is_no_version(serving: World) -> None:
    serving.apply(adapter_object("upper", source={"uri": "file:new"}, revisionHistoryLimit=5))
    serving.contents["file:new"] = verified("d")
    serving.settle()
    assert published(serving) == (digest("d"), [digest("a")])
    serving.contents["file:base"] = replace(fetched_base(), digest=digest("9"))
    serving.wait(11)
    assert published(serving) == (digest("d"), [])


def test_ready_does_not_flap_while_a_new_content_takes_over(serving: World) -> None:
    serving.contents["file:upper"] = verified("d")
    serving.now += 2.1
    for _ in range(6):
        serving.step()
        assert serving.condition(adapter_ref("upper"), "Ready") == ("True", "Published")
    assert serving.status(adapter_ref("upper"))["digest"] == digest("d")


def test_ready_is_about_the_new_generation_once_the_new_content_is_served(serving: World) -> None:
    serving.contents["file:new"] = OperationStatus("Pending")
    serving.settle(adapter_object("upper", source={"uri": "file:new"}))
    serving.wait(60)  # it is shown that the source is being read
    upper = adapter_ref("upper")
    assert serving.condition(upper, "Fetched") == ("Unknown", "Resolving")
    assert (ready_generation(serving), serving.status(upper)["observedGeneration"]) == (1, 1)
    serving.contents["file:new"] = verified("d")
    serving.scheduler_speaks = False
    serving.wait(60)
    assert (ready_generation(serving), serving.status(upper)["digest"]) == (1, digest("a")), "no gateway has it yet"
    serving.scheduler_speaks = True
    serving.wait(1)
    assert serving.condition(upper, "Ready") == ("True", "Published")
    assert (ready_generation(serving), serving.status(upper)["digest"]) == (2, digest("d"))
    assert serving.status(upper)["observedGeneration"] == 2


def test_a_spec_that_changes_nothing_but_itself_is_observed_with_one_write(serving: World) -> None:
    writes = serving.status_writes
    serving.settle(adapter_object("upper", tier="Disk"))
    assert (ready_generation(serving), serving.status_writes - writes) == (2, 1)


def ready_generation(world: World) -> int:
    conditions = world.status(adapter_ref("upper"))["conditions"]
    return next(c["observedGeneration"] for c in conditions if c["type"] == "Ready")


def test_a_source_that_became_bad_leaves_the_old_content_serving(serving: World) -> None:
    serving.contents["file:upper"] = failed("NotFinite", "NaN in layer 3", validated=True)
    serving.wait(2.1)
    serving.check(adapter_ref("upper"), Fetched="False NotFinite", Ready="True UpdateFailed")
    assert serving.status(adapter_ref("upper"))["digest"] == digest("a")
    serving.contents["file:upper"] = verified("d")
    serving.wait(30)
    assert serving.condition(adapter_ref("upper"), "Fetched") == ("True", "Fetched")
    assert serving.status(adapter_ref("upper"))["digest"] == digest("d")


def many(world: World, count: int) -> World:
    world.apply(pool_object())
    for number in range(count - 1):
        world.contents[f"file:a{number}"] = verified("a")
        world.apply(adapter_object(f"a{number}"))
    world.settle()
    return world


@pytest.mark.parametrize(
    ("count", "period_s", "steps_s"),
    [(1, 2.0, 3.0), (100, 2.0, 3.0), (101, 2.02, 3.0), (200, 4.0, 4.0), (1_000, 20.0, 10.0)],
)
def test_many_objects_are_asked_and_written_rarely(world: World, count: int, period_s: float, steps_s: float) -> None:
    desired = many(world, count).desired
    assert (resolve_period_s(desired), progress_s(desired)) == pytest.approx((period_s, steps_s))


def test_a_failing_source_is_never_asked_for_more_often_than_a_good_one(world: World) -> None:
    world.policy = OperatorPolicy(resolves_per_s=0.1)
    for number in range(3):
        world.contents[f"file:a{number}"] = failed("NotFinite")
    many(world, 4)
    world.contents["file:a0"] = failed("NotFinite")
    world.wait(45.0)
    asked = sum(request.uri == "file:a0" for request in world.asked)
    for _ in range(16):
        world.wait(5.0)
    assert sum(request.uri == "file:a0" for request in world.asked) == asked + 2  # every 40 s


def test_a_new_base_that_an_adapter_does_not_fit_stops_it(serving: World) -> None:
    serving.wait(400)  # the first list waits until what drained before the start has drained
    serving.contents["file:base"] = OperationStatus("Fetched", digest("f"), {})
    serving.contents["file:upper"] = failed("ShapeMismatch")
    serving.wait(3)
    assert serving.condition(adapter_ref("upper"), "Ready") == ("False", "ShapeMismatch")
    assert serving.condition(adapter_ref("lower"), "Ready") == ("True", "Published")
    assert serving.routed_pools[pool_ref()].base_digest == digest("f")
    assert serving.kept is not None
    assert {BASE, digest("f")} <= serving.kept
    serving.wait(61)
    assert BASE not in serving.kept


@pytest.mark.parametrize("with_pool", [False, True])
def test_a_deleted_adapter_leaves_at_once_and_its_content_later(serving: World, with_pool: bool) -> None:
    serving.wait(400)
    uid = serving.store.get(adapter_ref("upper"))["metadata"]["uid"]
    for ref in [adapter_ref("upper"), pool_ref()][: 1 + with_pool]:
        serving.store.delete(ref)
    serving.step()
    assert uid not in serving.routed
    serving.settle()
    assert serving.kept is not None
    assert digest("a") in serving.kept
    serving.wait(61)
    assert digest("a") not in serving.kept
    assert digest("c") in serving.kept


def test_an_object_made_again_under_its_name_is_another_one(serving: World) -> None:
    serving.store.delete(adapter_ref("upper"))
    serving.settle(adapter_object("upper"))
    uid = serving.store.get(adapter_ref("upper"))["metadata"]["uid"]
    assert {entry.uid for entry in serving.routed.values() if entry.model_name == "acme/upper"} == {uid}
    assert serving.condition(adapter_ref("upper"), "Ready") == ("True", "Published")


def test_a_finalizer_goes_when_the_registry_has_let_go(serving: World) -> None:
    wish = adapter_object("upper")
    wish["metadata"]["finalizers"] = [FINALIZER]
    serving.settle(wish)
    serving.remove(adapter_ref("upper"))
    assert serving.store.find(adapter_ref("upper")) is None
    assert [entry.model_name for entry in serving.routed.values()] == ["acme/lower"]


def test_a_foreign_finalizer_keeps_the_object_and_says_so(serving: World) -> None:
    wish = adapter_object("upper")
    wish["metadata"]["finalizers"] = ["example.com/audit"]
    serving.settle(wish)
    serving.remove(adapter_ref("upper"))
    assert serving.condition(adapter_ref("upper"), "Ready") == ("False", "Deleting")


def test_a_deleted_pool_takes_its_runners_and_routes_along(serving: World) -> None:
    serving.remove(pool_ref())
    assert (serving.routed, serving.routed_pools, serving.observed.runners) == ({}, {}, {})
    assert serving.condition(adapter_ref("upper"), "Ready") == ("False", "PoolNotFound")
    serving.ready_runners = serving.scheduler_speaks = False
    serving.settle(pool_object())
    assert serving.condition(pool_ref(), "Available") == ("False", "NoReadyRunner"), "the report of the one before"


@pytest.mark.parametrize(("replicas", "expected"), [(None, 1), (0, 0), (3, 3)])
def test_a_pool_has_as_many_runners_as_it_wants(world: World, replicas: int | None, expected: int) -> None:
    world.settle(pool_object(replicas=replicas), adapter_object("upper"))
    assert len(world.observed.runners.get(pool_ref(), {})) == expected
    available = ("True", "RunnersReady") if expected else ("False", "ScaledToZero")
    assert world.condition(pool_ref(), "Available") == available
    assert world.condition(adapter_ref("upper"), "Ready") == ("True", "Published")


def stopped(actions: list[Action]) -> list[int]:
    return [action.index for action in actions if isinstance(action, RemoveRunner)]


def test_fewer_replicas_stop_those_that_the_scheduler_names(world: World) -> None:
    world.settle(pool_object(replicas=4))
    world.scheduler_speaks = False
    world.apply(pool_object(replicas=2))
    world.step()
    assert world.plan() == []  # told, not answered
    world.observed.pool_reports[str(pool_ref())] = PoolStatus(
        4, 2, (runner_name(1), runner_name(0)), world.generation(pool_ref())
    )
    assert stopped(world.step()) == [1, 0]
    assert list(world.observed.runners[pool_ref()]) == [2, 3]
    world.scheduler_speaks = True
    world.settle()
    assert list(world.observed.runners[pool_ref()]) == [2, 3]
    world.settle(pool_object(replicas=3))
    assert sorted(world.observed.runners[pool_ref()]) == [0, 2, 3]


def test_a_scheduler_that_is_away_delays_fewer_replicas_by_a_few_seconds(world: World) -> None:
    pinned = {"name": "base", "uri": "file:base", "digest": BASE}  # so that nothing else wakes it
    world.settle(pool_object(replicas=3, model=pinned))
    world.scheduler_speaks = False
    world.settle(pool_object(replicas=1, model=pinned))
    assert len(world.observed.runners[pool_ref()]) == 3
    when = world.due(pool_ref())
    assert when <= world.now + ANSWER_S
    world.now = when
    assert stopped(world.step()) == [2, 1]


def test_a_runner_that_does_not_serve_goes_before_those_that_do(world: World) -> None:
    world.settle(pool_object(replicas=3))
    runners = world.observed.runners[pool_ref()]
    runners[0] = replace(runners[0], state="Starting")
    world.apply(pool_object(replicas=2))
    world.step()
    assert stopped(world.plan()) == [0]


def test_a_runner_on_its_way_out_is_neither_counted_nor_stopped_again(world: World) -> None:
    world.settle(pool_object(replicas=2))
    runners = world.observed.runners[pool_ref()]
    runners[0] = replace(runners[0], state="Leaving")
    starts = [action.index for action in world.plan() if isinstance(action, EnsureRunner)]
    assert starts == [2]  # its folder and its ports are still its own
    world.settle()
    assert world.status(pool_ref())["replicas"] == 2
    world.apply(pool_object(replicas=1))
    world.step()
    assert stopped(world.plan()) == [2]


def autoscaled(low: int, high: int) -> dict[str, object]:
    return pool_object(autoscaling={"minReplicas": low, "maxReplicas": high, "idleSeconds": 60})


def test_an_autoscaled_pool_goes_to_what_the_scheduler_wants_and_to_zero_and_back(world: World) -> None:
    world.settle(autoscaled(0, 3), adapter_object("upper"))
    assert pool_ref() not in world.observed.runners
    assert world.condition(pool_ref(), "Available") == ("False", "ScaledToZero")
    assert world.condition(adapter_ref("upper"), "Ready") == ("True", "Published")
    entry = world.routed_pools[pool_ref()]
    assert (entry.min_runners, entry.max_runners, entry.idle_s) == (0, 3, 60.0)
    assert entry.max_context_tokens == 2048  # the model's own: known though nothing runs
    for wanted, expected, reason in ((3, 3, "Demand"), (9, 3, "Demand"), (1, 1, "Idle"), (0, 0, "Idle")):
        world.demand[pool_ref()] = wanted
        world.answers()
        world.settle()
        assert len(world.observed.runners.get(pool_ref(), {})) == expected
        status = world.status(pool_ref())
        assert (status["desiredReplicas"], status["replicas"]) == (expected, expected)
        assert status["lastScale"]["reason"] == reason
    assert (status["lastScale"]["from"], status["lastScale"]["to"]) == (1, 0)


def test_the_status_has_what_the_scheduler_reports_and_keeps_it_while_nobody_says(world: World) -> None:
    split = {"mode": "Split"}
    world.scheduler_speaks, slo = False, {"tokenTimeMs": 50, "admission": "Queue"}
    world.settle(pool_object(memory={"fraction": 0.5}, advanced={"kvPages": None}, slo=slo, phases=split))
    flags = dict(world.observed.runners[pool_ref()][0].launch.flags)
    assert (flags["kv-pages"], flags["kv-memory-fraction"]) == (0, 0.5)
    assert not {"kvCache", "slo", "phases"} & world.status(pool_ref()).keys()
    for number in (7, None, 0, 9):
        world.observed.pool_reports.pop(str(pool_ref()), None)
        if number is not None:
            known = (SloAttainment(number, 100, 98), RoleCounts(number, 1, 0, "why")) if number else (None, None)
            world.observed.pool_reports[str(pool_ref())] = PoolStatus(1, 1, (), 1, *known, kv_pages=number)
        world.settle()
        status, shown = world.status(pool_ref()), number or 7
        assert status["kvCache"] == {"pages": shown}
        assert status["slo"] == {"attainedPercent": shown, "ttftPercent": 100, "tokenTimePercent": 98}
        assert status["phases"] == {"prompt": shown, "token": 1, "mixed": 0, "message": "why"}


def test_a_scheduler_that_knows_no_runner_yet_takes_none_away(world: World) -> None:
    world.apply(autoscaled(0, 3))
    world.demand[pool_ref()] = 3
    world.settle()
    world.scheduler_speaks = False
    world.observed.pool_reports[str(pool_ref())] = PoolStatus(0, 0, (), world.generation(pool_ref()))
    world.wait(600)
    assert len(world.observed.runners[pool_ref()]) == 3
    runners = world.observed.runners[pool_ref()]
    runners[1] = replace(runners[1], state="Starting")  # nobody asked for it any more before it was ready
    world.settle()
    assert sorted(world.observed.runners[pool_ref()]) == [0, 2]


def test_an_operator_that_starts_keeps_the_runners_there_are_until_the_scheduler_speaks(world: World) -> None:
    world.apply(autoscaled(0, 3))
    world.demand[pool_ref()] = 2
    world.settle()
    after = world.restarted()
    after.scheduler_speaks = False
    after.wait(600)
    assert len(after.observed.runners[pool_ref()]) == 2
    assert after.status_writes == 0


def test_a_pool_elsewhere_has_the_condition_that_nobody_serves_it_and_reserves_no_name(world: World) -> None:
    world.serve_only("default")
    world.settle(pool_object(namespace="attic"), adapter_object("lower", pool="attic/base"))
    assert world.condition(pool_ref("base", "attic"), "Accepted") == ("False", "NamespaceNotServed")
    assert world.condition(adapter_ref("lower"), "Ready") == ("False", "BaseNotReady")
    world.settle(pool_object())
    assert world.condition(pool_ref(), "Available") == ("True", "RunnersReady")


def test_of_more_pinned_adapters_than_fit_the_older_are_accepted(world: World) -> None:
    world.apply(pool_object(advanced={"maxAdapters": 3}))
    names = ("a", "b", "c", "d")
    world.contents |= {f"file:{name}": verified(name) for name in names}
    for name in names:
        world.apply(adapter_object(name, pinned=name != "b"))
    world.settle()
    accepted = {name: world.condition(adapter_ref(name), "Accepted")[1] for name in names}
    assert accepted == {"a": "Accepted", "b": "Accepted", "c": "Accepted", "d": "NoSlots"}
    gone = world.desired.adapters[adapter_ref("a")]
    assert adapter_ref("d") in world.desired.drop(adapter_ref("a"))  # it is planned again
    world.desired.put(gone)
    world.remove(adapter_ref("a"))
    assert world.condition(adapter_ref("d"), "Ready") == ("True", "Published")


def test_what_the_manifest_says_of_the_source_is_what_the_depot_is_asked(world: World) -> None:
    model = {"name": "base", "uri": "hf:acme/base", "revision": "v1", "credentialsRef": {"name": "hub"}}
    world.contents["hf:acme/base"] = fetched_base()
    world.apply(pool_object(model=model))
    world.contents["s3://acme/upper"] = verified("a")
    source = {"uri": "s3://acme/upper", "endpoint": "https://minio.acme:9000", "credentialsRef": {"name": "s3"}}
    world.settle(adapter_object("upper", source=source, tier="Host", maxRank=8))
    base, adapter = (request.body() for request in world.asked)
    assert (base["revision"], base["credentialsRef"]) == ("v1", {"name": "hub"})
    assert (adapter["endpoint"], adapter["credentialsRef"]) == ("https://minio.acme:9000", {"name": "s3"})
    assert (base.get("endpoint"), adapter["namespace"], adapter["maxRank"]) == (None, "acme", 8)
    assert next(iter(world.routed.values())).tier is Tier.HOST


def test_steps_on_the_way_are_written_only_where_they_last(world: World) -> None:
    world.settle(pool_object())
    writes = world.status_writes
    world.contents["file:quick"], world.contents["file:slow"] = verified("a"), OperationStatus("Pending")
    world.settle(adapter_object("quick"), adapter_object("slow"))
    assert "conditions" not in (world.store.get(adapter_ref("slow")).get("status") or {})
    assert world.condition(adapter_ref("quick"), "Ready") == ("True", "Published")
    assert world.status_writes == writes + 3, "the adapter's, and its pool's counts"
    world.now = world.due(adapter_ref("slow"))
    world.answers()
    world.settle()
    assert world.condition(adapter_ref("slow"), "Ready") == ("False", "Resolving")


def test_what_is_due_is_done_at_the_moment_that_was_named_and_that_moment_is_named_once(world: World) -> None:
    world.settle(pool_object())
    when, asked = requeue_at(pool_ref(), world.state, world.now), len(world.asked)
    assert when is not None
    assert requeue_at(pool_ref(), world.state, when) != when, "who sleeps until then would not sleep at all"
    world.now = when
    world.step()
    assert len(world.asked) == asked + 1


def test_a_pool_that_waits_for_nothing_names_no_moment(world: World) -> None:
    world.settle(pool_object(model={"name": "base", "uri": "file:base", "digest": BASE}))
    world.wait(60.0)  # for the scheduler's answer, which has come
    assert requeue_at(pool_ref(), world.state, world.now) is None


def test_a_pool_that_states_no_objective_and_no_scaling_is_published_with_none(world: World) -> None:
    world.settle(pool_object())
    entry = world.routed_pools[pool_ref()]
    assert (entry.slo_ttft_s, entry.slo_token_time_s, entry.slo_reject) == (0.0, 0.0, False)
    assert entry.idle_s == 0.0


def test_a_pool_has_the_defaults_of_its_model_unless_it_ignores_them(world: World) -> None:
    """The status shows them all the same."""
    for choice, defaults in (({}, SamplingDefaults(0.7, top_k=20)), ({"generationDefaults": "Ignore"}, NO_DEFAULTS)):
        world.settle(pool_object(model=BASE_MODEL | choice))
        assert world.routed_pools[pool_ref()].sampling_defaults == defaults
        status = world.status(pool_ref())
        assert (status["generationDefaults"], status["eosTokenIds"]) == ({"temperature": 0.7, "topK": 20}, [1, 2])


def test_what_of_a_content_is_not_used_is_said_where_it_was_checked(serving: World) -> None:
    for uri, ref, kind in (("file:base", pool_ref(), "Fetched"), ("file:upper", adapter_ref("upper"), "Validated")):
        found = serving.contents[uri]
        serving.contents[uri] = replace(found, verdict={**(found.verdict or {}), "warnings": ["top_p is 5", "more"]})
        serving.wait(2.1)
        said = next(c for c in serving.status(ref)["conditions"] if c["type"] == kind)
        assert (said["status"], said["message"].partition("; ")[2]) == ("True", "top_p is 5; more")


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({"from": "Base"}, ("True", "TemplateOfBase")),
        ({"from": "Adapter"}, ("True", "TemplateOfAdapter")),
        ({"from": "Adapter", "fault": "line 1"}, ("False", "TemplateFault")),
        ({"from": "None"}, ("False", "NoTemplate")),
        (None, None),
    ],
)
def test_chat_template_conditions(serving: World, found: dict[str, str] | None, said: tuple[str, str] | None) -> None:
    for uri, ref in (("file:base", pool_ref()), ("file:upper", adapter_ref("upper"))):
        answer = serving.contents[uri]
        serving.contents[uri] = replace(answer, verdict={**(answer.verdict or {}), "chatTemplate": found})
        serving.wait(2.1)
        restarted = serving.restarted()
        restarted.settle()
        for world in (serving, restarted):
            conditions = {c["type"]: (c["status"], c["reason"]) for c in world.status(ref)["conditions"]}
            assert (conditions.get("ChatTemplate"), conditions["Ready"][0]) == (said, "True")


@pytest.mark.parametrize(
    ("chosen", "has", "own", "said"),
    [
        ("Auto", "Adapter", True, ("True", "TemplateOfAdapter")),
        ("Auto", "Base", False, ("True", "TemplateOfBase")),
        ("Base", "Adapter", False, ("True", "TemplateOfBase")),
        ("Adapter", "Adapter", True, ("True", "TemplateOfAdapter")),
        ("Adapter", "Base", True, ("False", "NoTemplate")),
    ],
)
def test_whose_chat_template_counts(serving: World, chosen: str, has: str, own: bool, said: tuple[str, str]) -> None:
    for letter in "cd":
        answer = verified(letter)
        answer = replace(answer, verdict={**(answer.verdict or {}), "chatTemplate": {"from": has}})
        serving.contents[f"file:{letter}"] = answer
        spec = {"source": {"uri": f"file:{letter}"}, "chatTemplate": {"from": chosen}, "revisionHistoryLimit": 1}
        serving.settle(adapter_object("upper", **spec))
        serving.wait(2.1)
    entry = next(entry for entry in serving.routed.values() if entry.model_name == "acme/upper")
    assert [one.own_chat_template for one in (entry, *entry.versions)] == [own, own], "of earlier contents, too"
    assert serving.condition(adapter_ref("upper"), "ChatTemplate") == said


BASE_MODEL = {"name": "base", "uri": "file:base"}
GIVEN: dict[str, dict[str, object]] = {
    "Inline": {"from": "Inline", "inline": "text"},
    "ConfigMap": {"from": "ConfigMap", "configMapRef": {"name": "chat"}},
}


@pytest.mark.parametrize("origin", GIVEN)
@pytest.mark.parametrize("kind", ["ServingPool", "LoRAAdapter"])
def test_a_chat_template_of_a_spec_is_published_by_its_digest(serving: World, kind: str, origin: str) -> None:
    ref = pool_ref() if kind == "ServingPool" else adapter_ref("upper")
    uri, given = {"Inline": "text", "ConfigMap": "configmap:chat"}[origin], GIVEN[origin]
    runners = serving.observed.runners[pool_ref()]

    def made(**choice: object) -> dict[str, object]:
        return pool_object(model=BASE_MODEL | choice) if kind == "ServingPool" else adapter_object("upper", **choice)

    def published(world: World) -> tuple[str, str]:
        adapters = {one.model_name: one for one in world.routed.values()}
        entry = world.routed_pools[ref] if kind == "ServingPool" else adapters["acme/upper"]
        return entry.chat_template, entry.chat_template_fault

    def said(world: World) -> tuple[str, str]:
        return world.condition(ref, "ChatTemplate")

    serving.settle(made(chatTemplate=given))
    assert (published(serving), said(serving)) == (("", "nothing there (SourceNotFound)"), ("False", "SourceNotFound"))
    assert serving.asked[-1].namespace == ref.namespace
    serving.contents[uri] = template("d", origin)
    serving.wait(60.0)
    assert (published(serving), said(serving)) == ((digest("d"), ""), ("True", "TemplateOfSpec"))
    serving.contents[uri] = template("e", origin, fault="line 1")
    uid = template_uid(serving.store.get(ref)["metadata"]["uid"])
    if origin == "Inline":  # as the depot says of a text that it has lost
        serving.observed.resolutions[uid] = source_changed(serving.observed.resolutions[uid])
    serving.wait(60.0)
    assert (published(serving), said(serving)) == ((digest("e"), ""), ("False", "TemplateFault"))
    assert list(serving.expectations.retention.kept_until) == [digest("d")], "gateways may still need it"
    serving.contents[uri] = failed("ConfigMapMissing")
    restarted = serving.restarted()
    restarted.settle()
    for world in (serving, restarted):
        world.wait(60.0)
        assert published(world) == (digest("e"), ""), "what was read before stays"
        expected = ("False", "ConfigMapMissing" if origin == "ConfigMap" else "TemplateFault")
        assert said(world) == expected
        assert world.condition(ref, "Ready")[0] == "True"
        assert digest("e") in live_digests(world.state)
    assert serving.observed.runners[pool_ref()] == runners, "no runner is replaced"
    serving.settle(made())
    assert published(serving) == ("", "")
    assert "suppliedChatTemplate" not in serving.status(ref)


def test_a_chat_template_in_a_config_map_is_read_again_two_or_three_times_a_minute(serving: World) -> None:
    serving.contents["configmap:chat"] = template("d", "ConfigMap")
    serving.settle(adapter_object("upper", chatTemplate=GIVEN["ConfigMap"]))
    before = len(serving.asked)
    for _ in range(60):
        serving.wait(1.0)
    assert 2 <= sum(request.uri == "configmap:chat" for request in serving.asked[before:]) <= 4


def test_an_object_is_first_published_when_its_chat_template_is_known(world: World) -> None:
    world.contents["text"] = OperationStatus("Pending")
    world.apply(pool_object(model=BASE_MODEL | {"chatTemplate": GIVEN["Inline"]}))
    for _ in range(5):
        world.step()
    assert world.routed_pools == {}
    world.contents["text"] = template("d", "Inline")
    world.wait(1.0)
    assert world.routed_pools[pool_ref()].chat_template == digest("d")


def test_a_remote_source_that_can_change_is_asked_for_as_often_as_the_platform_says(world: World) -> None:
    sources = {
        "branch": {"uri": "hf:acme/branch"},
        "commit": {"uri": "hf:acme/commit", "revision": "a" * 40},
        "digest": {"uri": "oci://host/digest@sha256:" + "a" * 64},
    }
    for name, source in sources.items():
        world.contents[source["uri"]] = verified("a")
        world.apply(adapter_object(name, source=source))
    world.apply(pool_object())
    for poll_s, branch in ((inf, 1), (60.0, 3)):
        world.policy = replace(world.policy, poll_s=poll_s)
        world.settle()
        for _ in range(50):
            world.wait(2.1)
        asked = Counter(request.uri for request in world.asked)
        assert [asked[source["uri"]] for source in sources.values()] == [branch, 1, 1]
    assert asked["file:base"] > 80


def test_a_new_leader_asks_the_hub_for_nothing_that_is_known(world: World) -> None:
    contents = {"hf:acme/good": replace(verified("a"), watch=digest("a")), "hf:acme/bad": failed("SourceNotFound")}
    world.contents |= contents
    world.apply(pool_object(model={"name": "base", "uri": "hf:acme/base"}))
    world.contents["hf:acme/base"] = fetched_base()
    for uri in contents:
        world.apply(adapter_object(uri.rpartition("/")[2], source={"uri": uri}))
    world.settle()
    after = world.restarted()
    after.settle()
    assert [request.uri for request in after.asked] == ["hf:acme/bad"]
    uid = after.store.get(adapter_ref("good"))["metadata"]["uid"]
    assert after.observed.resolutions[uid].answer.watch == digest("a"), "the depot is asked whether it holds it"
    after.observed.resolutions[uid] = source_changed(after.observed.resolutions[uid])
    after.settle()
    assert [request.uri for request in after.asked] == ["hf:acme/bad", "hf:acme/good"]


def pages(runner: RunnerProcess) -> object:
    return dict(runner.launch.flags)["kv-pages"]


@pytest.mark.parametrize(
    ("rollout", "at_a_time"), [({}, 1), ({"maxUnavailable": 0, "maxSurge": 2}, 1), ({"maxUnavailable": 2}, 2)]
)
def test_a_changed_pool_replaces_runners_a_few_at_a_time(world: World, rollout: dict[str, int], at_a_time: int) -> None:
    world.settle(pool_object(replicas=4, rollout=rollout))
    world.ready_runners = False
    world.settle(pool_object(replicas=4, rollout=rollout, advanced={"kvPages": 2048}))
    states = [(pages(r), r.state) for r in world.observed.runners[pool_ref()].values()]
    assert states == [(2048, "Starting")] * at_a_time + [(1024, "Ready")] * (4 - at_a_time)
    runners = world.observed.runners[pool_ref()]
    runners[0] = replace(runners[0], state="Ready")
    world.settle()
    assert sum(pages(r) == 2048 for r in world.observed.runners[pool_ref()].values()) == at_a_time + 1


def test_runners_that_cannot_start_are_replaced_at_once(world: World) -> None:
    world.settle(pool_object(replicas=2))
    runners = world.observed.runners[pool_ref()]
    runners.update({i: replace(runner, state="CrashLoop", message="no memory") for i, runner in runners.items()})
    world.observed.pool_reports[str(pool_ref())] = PoolStatus(0)
    world.apply(pool_object(replicas=2, advanced={"kvPages": 16}))
    assert [action.index for action in world.plan() if isinstance(action, EnsureRunner)] == [0, 1]


def test_a_crash_loop_is_reported_with_its_last_words(world: World) -> None:
    world.settle(pool_object())
    runners = world.observed.runners[pool_ref()]
    runners[0] = RunnerProcess(runners[0].launch, "CrashLoop", "exit code 1: out of memory")
    world.settle()
    world.check(pool_ref(), Available="False NoReadyRunner", Progressing="False CrashLoop")
    assert "exit code 1: out of memory" in [c["message"] for c in world.status(pool_ref())["conditions"]]


def test_an_adapter_that_no_runner_can_load_is_not_ready(serving: World) -> None:
    uid = serving.store.get(adapter_ref("upper"))["metadata"]["uid"]
    for everywhere, expected in ((True, ("False", "LoadFailed")), (False, ("True", "Published"))):
        report = AdapterStatus(digest("a"), True, 1, ("r1: out of slots",), load_failed=everywhere)
        serving.observed.adapter_reports[uid] = report
        for action in serving.plan():
            serving.do(action)
        assert serving.condition(adapter_ref("upper"), "Ready") == expected


def test_a_renamed_adapter_is_served_under_its_new_name_without_being_fetched_again(serving: World) -> None:
    asked = len(serving.asked)
    serving.settle(adapter_object("upper", modelName="shout"))
    assert {entry.model_name for entry in serving.routed.values()} == {"shout", "acme/lower"}
    assert len(serving.asked) == asked
    assert not any(isinstance(action, Resolve) for action in serving.plan())


def test_a_transition_time_moves_only_with_the_status(serving: World) -> None:
    def times() -> dict[str, str]:
        return {c["type"]: c["lastTransitionTime"] for c in serving.status(adapter_ref("upper"))["conditions"]}

    before = times()
    serving.contents["file:upper"] = failed("NotFinite", validated=True)
    serving.wait(60)
    after = times()
    assert after["Fetched"] > before["Fetched"]
    assert {name: after[name] for name in ("Accepted", "Validated", "Ready")} == {
        name: before[name] for name in ("Accepted", "Validated", "Ready")
    }


@pytest.mark.parametrize("answer", [verified("a"), failed("NotFinite", validated=True)])
def test_a_restart_of_the_operator_writes_nothing_and_serves_the_same(serving: World, answer: OperationStatus) -> None:
    serving.contents["file:upper"] = answer
    serving.wait(2.1)
    after = serving.restarted()
    after.settle()
    assert after.status_writes == 0
    assert (after.routed, after.routed_pools) == (serving.routed, serving.routed_pools)


def test_after_a_restart_nothing_is_dropped_before_everything_has_drained(serving: World) -> None:
    serving.wait(400)
    serving.remove(adapter_ref("upper"))
    after = serving.restarted()
    after.wait(299)
    assert after.kept is None
    after.wait(2)
    assert after.kept == {BASE, digest("c")}


def test_a_pool_is_ready_once_every_wanted_runner_serves(world: World) -> None:
    world.ready_runners = False
    world.settle(pool_object(replicas=2))
    assert world.condition(pool_ref(), "Ready") == ("False", "Converging")
    runners = world.observed.runners[pool_ref()]
    runners[0] = replace(runners[0], state="Ready")
    world.answers()
    world.settle()
    world.check(pool_ref(), Available="True RunnersReady", Ready="False Converging")
    runners[1] = replace(runners[1], state="Ready")
    world.answers()
    world.settle()
    assert world.condition(pool_ref(), "Ready") == ("True", "RunnersReady")
    world.settle(pool_object(replicas=0))
    assert world.condition(pool_ref(), "Ready") == ("True", "ScaledToZero")


def test_runners_of_a_paused_pool_stay_as_they_are_and_adapters_are_served(serving: World) -> None:
    runners = dict(serving.observed.runners[pool_ref()])
    changed = {"replicas": 3, "advanced": {"kvPages": 2048}}
    serving.apply(pool_object(**changed, paused=True))
    serving.contents["file:new"] = verified("d")
    serving.apply(adapter_object("new"))
    serving.wait(60)
    assert serving.observed.runners[pool_ref()] == runners
    serving.check(pool_ref(), Progressing="Unknown Paused", Ready="False Paused")
    assert serving.condition(adapter_ref("new"), "Ready") == ("True", "Published")
    serving.apply(pool_object(**changed, paused=False))
    serving.wait(60)
    assert len(serving.observed.runners[pool_ref()]) == 3
    assert serving.condition(pool_ref(), "Ready") == ("True", "RunnersReady")


def moving(world: World, **spec: object) -> None:
    """A Ready adapter of one pool names another one, whose runners do not serve yet."""
    world.contents["file:other"] = OperationStatus("Fetched", digest("e"), fetched_base().verdict)
    world.settle(pool_object(), adapter_object("upper"))
    world.ready_runners = False
    world.settle(pool_object("other", **spec))
    world.settle(adapter_object("upper", pool="default/other"))


def pool_of_route(world: World) -> str:
    (entry,) = world.routed.values()
    return entry.pool


def test_an_adapter_that_moves_is_served_by_the_old_pool_until_the_new_one_takes_requests(world: World) -> None:
    moving(world)
    assert pool_of_route(world) == "default/base"
    world.check(adapter_ref("upper"), Fetched="True Fetched", Ready="True Published")
    assert world.status(adapter_ref("upper"))["pool"] == "default/base"
    runners = world.observed.runners[pool_ref("other")]
    runners[0] = replace(runners[0], state="Ready")
    world.answers()
    world.settle()
    assert pool_of_route(world) == "default/other"
    assert world.condition(adapter_ref("upper"), "Ready") == ("True", "Published")
    assert world.status(adapter_ref("upper"))["pool"] == "default/other"


@pytest.mark.parametrize(("least", "serves"), [(0, "default/other"), (1, "default/base")])
def test_a_moved_adapter_is_served_at_once_by_a_pool_that_requests_wake(world: World, least: int, serves: str) -> None:
    moving(world, autoscaling={"minReplicas": least, "maxReplicas": 3, "idleSeconds": 60})
    assert pool_of_route(world) == serves


def test_an_adapter_that_moves_to_a_pool_that_refuses_its_content_stays_where_it_serves(world: World) -> None:
    world.ready_runners = True
    world.contents["file:other"] = OperationStatus("Fetched", digest("e"), fetched_base().verdict)
    world.settle(pool_object(), adapter_object("upper"), pool_object("other"))
    world.contents["file:upper"] = failed("ShapeMismatch")
    world.settle(adapter_object("upper", pool="default/other"))
    assert pool_of_route(world) == "default/base"
    world.check(adapter_ref("upper"), Fetched="False ShapeMismatch", Ready="True UpdateFailed")
    world.contents["file:upper"] = verified("d")
    world.wait(3)
    assert pool_of_route(world) == "default/other"


@pytest.mark.parametrize(
    ("edit", "condition", "reason"),
    [
        ({"pool": "default/nowhere"}, "Accepted", "PoolNotFound"),
        ({"pool": "default/other", "baseModel": "wrong"}, "Fetched", "BaseMismatch"),
    ],
)
def test_a_moved_adapter_that_is_refused_stays(world: World, edit: dict[str, str], condition: str, reason: str) -> None:
    moving(world)
    world.apply(adapter_object("upper", **edit))
    for current in (world, world.restarted()):
        current.settle()
        assert pool_of_route(current) == "default/base"
        assert current.condition(adapter_ref("upper"), condition) == ("False", reason)
        assert current.condition(adapter_ref("upper"), "Ready") == ("True", "UpdateFailed")
    world.settle(adapter_object("zz-thief", modelName="acme/upper"))
    assert world.condition(adapter_ref("zz-thief"), "Accepted") == ("False", "NameConflict")
    world.remove(pool_ref())
    assert world.condition(adapter_ref("upper"), "Ready")[0] == "False"
