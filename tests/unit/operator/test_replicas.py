"""Pools in a cluster: what they own, how they grow and shrink, and that nothing is written twice."""

from dataclasses import replace
from typing import Any

import pytest

from tests.unit.operator.cluster import ClusterWorld
from tests.unit.operator.planning import BASE, adapter_object, adapter_ref, digest, failed, pool_object, pool_ref
from weft.domain.routes import GroupPhase, PhaseCounts, PhaseGroups, PoolStatus, RoleCounts
from weft_operator.core import PublishAdapter, PublishPool, SetStatus
from weft_operator.core.actions import ApplyChild, DeleteChild, SetPodDeletionCost
from weft_operator.core.artifacts import Retention
from weft_operator.core.reconcile import UNLOAD_GRACE_S
from weft_operator.core.resources import FINALIZER
from weft_operator.core.scale_in import SEEN_S
from weft_operator.core.scaling import ANSWER_S
from weft_operator.core.state import APPLY_RETRY_S, Expectations, ForeignObject, ObjectKey, ObservedState, Pod
from weft_operator.errors import LocalNotFound

PHASES = ("Prompt", "Token")
UNIFIED = {"mode": "Unified"}
DEPLOYMENT = ObjectKey("Deployment", "default", "base-runners")


def scaled(low: int, high: int, **more: Any) -> dict[str, Any]:
    return pool_object(autoscaling={"minReplicas": low, "maxReplicas": high, "idleSeconds": 60}, **more)


def groups(*named: tuple[str, int, int | None]) -> list[dict[str, Any]]:
    return [{"name": n, "minRunners": low} | ({} if high is None else {"maxRunners": high}) for n, low, high in named]


def started(cluster: ClusterWorld, *objects: dict[str, Any]) -> ClusterWorld:
    for obj in objects:
        cluster.apply(obj)
    cluster.at_rest()
    return cluster


def test_a_pool_owns_its_children_and_becomes_ready(cluster: ClusterWorld) -> None:
    started(cluster, pool_object(replicas=2), adapter_object("upper"))
    kinds = sorted(key.kind for key in cluster.cluster.objects)
    assert kinds == ["Deployment", "PodDisruptionBudget", "ServiceAccount"]
    uid = cluster.store.get(pool_ref())["metadata"]["uid"]
    assert {obj["metadata"]["ownerReferences"][0]["uid"] for obj in cluster.cluster.objects.values()} == {uid}
    status = cluster.status(pool_ref())
    assert (status["desiredReplicas"], status["replicas"], status["readyReplicas"]) == (2, 2, 2)
    assert status["selector"] == "serving.weft.dev/pool=base,app.kubernetes.io/component=runner"
    assert cluster.condition(pool_ref(), "Progressing") == ("False", "RunnersReady")
    assert cluster.condition(adapter_ref("upper"), "Ready") == ("True", "Published")


def test_a_new_adapter_changes_no_child(cluster: ClusterWorld) -> None:
    started(cluster, pool_object())
    requests = cluster.cluster.requests
    started(cluster, adapter_object("upper", tier="Host", pinned=True))
    assert cluster.cluster.requests == requests


def test_what_somebody_changes_or_deletes_is_put_back(cluster: ClusterWorld) -> None:
    started(cluster, pool_object(replicas=2))

    def by_hand(obj: dict[str, Any]) -> None:
        obj["spec"]["replicas"] = 7

    cluster.cluster.edit(DEPLOYMENT, by_hand)
    budget = next(key for key in cluster.cluster.objects if key.kind == "PodDisruptionBudget")
    del cluster.cluster.objects[budget]
    cluster.at_rest()
    assert cluster.sizes(pool_ref()) == {"runners": 2}
    assert budget in cluster.cluster.objects


def test_what_the_server_makes_of_a_manifest_is_not_applied_again_and_again(cluster: ClusterWorld) -> None:
    started(cluster, pool_object())

    def webhook(obj: dict[str, Any]) -> None:
        obj["spec"]["template"]["spec"]["containers"][0]["command"] = ["wrapped"]

    applied = cluster.cluster.apply

    def rewritten(child: Any) -> None:
        applied(child)
        webhook(cluster.cluster.objects[child.key]) if child.kind == "Deployment" else None

    cluster.cluster.apply = rewritten  # type: ignore[method-assign]
    cluster.settle(pool_object(advanced={"kvPages": 2048}))
    assert not any(isinstance(action, ApplyChild) for action in cluster.plan())


def test_what_a_pool_of_the_same_name_left_behind_goes_first(cluster: ClusterWorld) -> None:
    started(cluster, pool_object())
    old = cluster.store.get(pool_ref())["metadata"]["uid"]
    follow, delete = cluster.cluster.follow, cluster.cluster.delete
    cluster.cluster.follow = cluster.cluster.delete = lambda *_: None  # type: ignore[method-assign]  # not seen yet
    cluster.store.delete(pool_ref())
    cluster.apply(pool_object())
    cluster.step()
    orders = [type(action) for action in cluster.plan()]
    assert (orders.count(DeleteChild), orders.count(ApplyChild)) == (3, 0)
    cluster.cluster.follow, cluster.cluster.delete = follow, delete  # type: ignore[method-assign]
    cluster.at_rest()
    owners = {obj["metadata"]["ownerReferences"][0]["uid"] for obj in cluster.cluster.objects.values()}
    assert owners == {cluster.store.get(pool_ref())["metadata"]["uid"]} != {old}
    assert cluster.condition(pool_ref(), "Available") == ("True", "RunnersReady")


def test_victims_are_marked_before_the_replicas_are_lowered(cluster: ClusterWorld) -> None:
    started(cluster, pool_object(replicas=4))
    names = cluster.ready_names(pool_ref())
    cluster.scheduler_speaks = False
    cluster.apply(pool_object(replicas=2))
    cluster.step()
    assert cluster.plan() == []  # told, not answered
    cluster.observed.pool_reports[str(pool_ref())] = PoolStatus(
        4, 2, (names[2], names[0]), cluster.generation(pool_ref())
    )
    marks = cluster.plan()
    assert {a.name: a.cost for a in marks if isinstance(a, SetPodDeletionCost)} == {names[2]: -2, names[0]: -1}
    assert not any(isinstance(action, ApplyChild) for action in marks)
    cluster.step()
    assert [type(action) for action in cluster.plan()] == [ApplyChild]
    cluster.step()
    assert cluster.ready_names(pool_ref()) == [names[1], names[3]]


def test_a_mark_that_nobody_reports_is_ordered_once_and_waited_for_a_few_seconds(cluster: ClusterWorld) -> None:
    pinned = {"name": "base", "uri": "file:base", "digest": BASE}  # so that nothing else wakes it
    started(cluster, pool_object(replicas=2, model=pinned))
    cluster.cluster.mark = lambda *_: None  # type: ignore[method-assign]
    cluster.scheduler_speaks = False
    cluster.settle(pool_object(replicas=1, model=pinned))
    assert cluster.due(pool_ref()) == cluster.now + ANSWER_S
    cluster.scheduler_speaks = True
    cluster.wait(1.0)
    assert cluster.due(pool_ref()) == cluster.now - 1.0 + ANSWER_S
    seen = cluster.now + SEEN_S
    cluster.now = seen - 0.5
    cluster.settle()
    assert cluster.sizes(pool_ref()) == {"runners": 2}
    assert cluster.due(pool_ref()) == seen
    cluster.now = seen
    cluster.settle()
    assert cluster.sizes(pool_ref()) == {"runners": 1}


def test_a_mark_of_long_ago_does_not_choose_whom_to_stop_now(cluster: ClusterWorld) -> None:
    started(cluster, pool_object(replicas=3))
    names = cluster.ready_names(pool_ref())
    cluster.cluster.mark(names[0], cluster.cluster.pods[names[0]].uid, -5)
    cluster.step()
    assert cluster.plan() == []  # nothing is going to shrink
    started(cluster, pool_object(replicas=2))
    assert cluster.ready_names(pool_ref()) == names[:2]
    assert cluster.cluster.pods[names[0]].cost == 0


def test_a_pool_whose_scheduler_is_away_still_shrinks_for_people_but_not_by_itself(cluster: ClusterWorld) -> None:
    started(cluster, pool_object(replicas=3))
    cluster.scheduler_speaks = False
    started(cluster, pool_object(replicas=1))
    assert cluster.sizes(pool_ref()) == {"runners": 1}
    started(cluster, scaled(0, 2))
    assert cluster.sizes(pool_ref()) == {"runners": 1}


def test_an_autoscaled_pool_goes_to_zero_and_back_in_one_step(cluster: ClusterWorld) -> None:
    started(cluster, scaled(0, 8))
    assert cluster.sizes(pool_ref()) == {"runners": 0}
    assert cluster.condition(pool_ref(), "Available") == ("False", "ScaledToZero")
    seen = [0]
    for wanted in (5, 2, 0):
        cluster.demand[pool_ref()] = wanted
        cluster.answers()
        for _ in range(8):
            cluster.step()
            seen.append(cluster.sizes(pool_ref())["runners"])
    assert [size for size, before in zip(seen[1:], seen, strict=False) if size != before] == [5, 2, 0]


def test_the_autoscaler_takes_only_ready_pods_that_the_scheduler_has_named(cluster: ClusterWorld) -> None:
    cluster.demand[pool_ref()] = 4
    started(cluster, scaled(1, 4))
    names = cluster.ready_names(pool_ref())
    cluster.scheduler_speaks = False
    cluster.observed.pool_reports[str(pool_ref())] = PoolStatus(4, 1, (names[1],), cluster.generation(pool_ref()))
    cluster.at_rest()
    assert cluster.ready_names(pool_ref()) == [names[0], *names[2:]]


def test_a_scheduler_that_just_started_takes_no_starting_pod_away_and_may_ask_for_more(cluster: ClusterWorld) -> None:
    cluster.demand[pool_ref()] = 3
    started(cluster, scaled(0, 5))
    cluster.scheduler_speaks, cluster.cluster.pods_become_ready = False, False
    for name, pod in list(cluster.cluster.pods.items())[:2]:
        cluster.cluster.pods[name] = replace(pod, ready=False)
    cluster.observed.pool_reports[str(pool_ref())] = PoolStatus(0, wanted_runners=1)
    cluster.at_rest()
    assert cluster.sizes(pool_ref()) == {"runners": 3}
    assert cluster.status(pool_ref())["desiredReplicas"] == 3
    cluster.observed.pool_reports[str(pool_ref())] = PoolStatus(0, wanted_runners=4)
    cluster.at_rest()
    assert cluster.sizes(pool_ref()) == {"runners": 4}


def test_groups_fill_up_in_order_and_empty_in_reverse(cluster: ClusterWorld) -> None:
    kinds = groups(("fast", 1, 2), ("cheap", 0, 2), ("rest", 0, None))
    expected = {1: (1, 0, 0), 3: (2, 1, 0), 6: (2, 2, 2), 2: (2, 0, 0), 0: (0, 0, 0)}
    for replicas, sizes in expected.items():
        started(cluster, pool_object(replicas=replicas, runnerGroups=kinds))
        assert tuple(cluster.sizes(pool_ref()).values()) == sizes


def test_an_autoscaled_pool_shrinks_though_the_scheduler_names_victims_of_another_group(cluster: ClusterWorld) -> None:
    cluster.demand[pool_ref()] = 4
    started(cluster, scaled(0, 5, runnerGroups=groups(("fast", 0, 2), ("cheap", 0, 2), ("rest", 0, None))))
    assert cluster.sizes(pool_ref()) == {"fast": 2, "cheap": 2, "rest": 0}
    cluster.demand[pool_ref()] = 3  # the model names the last by name: one that is fast
    cluster.at_rest()
    assert cluster.sizes(pool_ref()) == {"fast": 2, "cheap": 1, "rest": 0}
    cluster.demand[pool_ref()] = 1
    cluster.at_rest()
    assert cluster.sizes(pool_ref()) == {"fast": 1, "cheap": 0, "rest": 0}


def test_groups_of_a_phase_are_as_large_as_the_scheduler_wants_and_give_before_they_take(cluster: ClusterWorld) -> None:
    ref = pool_ref()
    kinds = [one | {"phase": phase} for one, phase in zip(groups(("p", 0, None), ("t", 0, None)), PHASES, strict=True)]
    cluster.scheduler_speaks = False
    started(cluster, scaled(2, 4, runnerGroups=kinds, phases={**UNIFIED, "mode": "Split"}))
    assert cluster.expectations.pools[ref].groups == (PhaseGroups(GroupPhase.PROMPT), PhaseGroups(GroupPhase.TOKEN))
    assert cluster.sizes(ref) == {"p": 1, "t": 1}, "before the scheduler has answered each has one"

    def wanted(prompt: int, token: int, *victims: str) -> dict[str, int]:
        report = PoolStatus(
            4,
            prompt + token,
            victims,
            cluster.generation(ref),
            roles=RoleCounts(prompt, token, 0),
            wanted=PhaseCounts(prompt, token),
        )
        cluster.observed.pool_reports[str(ref)] = report
        cluster.at_rest()
        return cluster.sizes(ref)

    assert wanted(3, 1) == {"p": 3, "t": 1}
    assert cluster.status(ref)["phases"]["wanted"] == {"prompt": 3, "token": 1, "any": 0}
    assert wanted(1, 3) == {"p": 3, "t": 1}, "none goes that was not named, and there is no room for more"
    victim = next(name for name, pod in sorted(cluster.observed.pods[ref].items()) if pod.group == "p")
    assert wanted(1, 3, victim) == {"p": 2, "t": 2}
    assert victim not in cluster.observed.pods[ref]
    del cluster.observed.pool_reports[str(ref)]
    cluster.at_rest()
    assert cluster.sizes(ref) == {"p": 2, "t": 2}, "while the scheduler is away nothing moves"


def test_a_number_that_people_wrote_is_spread_by_phase_and_moves_only_by_victims(cluster: ClusterWorld) -> None:
    ref, kinds = pool_ref(), [{"name": phase.lower(), "phase": phase} for phase in PHASES]
    split = {**UNIFIED, "mode": "Split"}
    cluster.scheduler_speaks = False
    started(cluster, pool_object(replicas=5, runnerGroups=[kind | {"minRunners": 0} for kind in kinds], phases=split))
    assert cluster.sizes(ref) == {"prompt": 3, "token": 2}, "before the scheduler has answered"

    def wanted(prompt: int, token: int, *victims: str) -> dict[str, int]:
        counts = PhaseCounts(prompt, token)
        cluster.observed.pool_reports[str(ref)] = PoolStatus(5, 5, victims, cluster.generation(ref), wanted=counts)
        cluster.at_rest()
        return cluster.sizes(ref)

    assert wanted(1, 4) == {"prompt": 3, "token": 2}, "none goes that was not named"
    victim = next(name for name, pod in sorted(cluster.observed.pods[ref].items()) if pod.group == "prompt")
    assert wanted(1, 4, victim) == {"prompt": 2, "token": 3}
    del cluster.observed.pool_reports[str(ref)]
    started(cluster, pool_object(replicas=2, runnerGroups=[kind | {"minRunners": 0} for kind in kinds], phases=split))
    cluster.wait(2 * ANSWER_S)
    assert cluster.sizes(ref) == {"prompt": 1, "token": 1}, "a number holds, also without the scheduler"


def test_a_group_that_is_no_longer_named_gives_its_runners_over_one_by_one(cluster: ClusterWorld) -> None:
    scalings: list[dict[str, Any]] = [{"replicas": 3}, {"autoscaling": scaled(1, 5)["spec"]["autoscaling"]}]
    for scaling in scalings:
        cluster.demand[pool_ref()] = 3
        started(cluster, pool_object(**scaling, runnerGroups=groups(("old", 0, None))))
        cluster.apply(pool_object(**scaling, runnerGroups=groups(("new", 0, None))))
        least, most = 3, 0
        for _ in range(20):
            cluster.step()
            least = min(least, len(cluster.ready_names(pool_ref())))
            most = max(most, cluster.status(pool_ref())["desiredReplicas"])
        assert (least, most) == (2, 3)
        assert cluster.sizes(pool_ref()) == {"new": 3}


def test_a_group_that_is_no_longer_named_goes_at_once_where_it_serves_nobody(cluster: ClusterWorld) -> None:
    cluster.cluster.pods_become_ready = False
    started(cluster, pool_object(replicas=3, runnerGroups=groups(("old", 0, None))))
    started(cluster, pool_object(replicas=3, runnerGroups=groups(("new", 0, None))))
    assert cluster.sizes(pool_ref()) == {"new": 3}


def test_new_runners_that_do_not_come_up_leave_the_old_ones_serving(cluster: ClusterWorld) -> None:
    started(cluster, pool_object(replicas=3, runnerGroups=groups(("old", 0, None))))
    cluster.cluster.pods_become_ready = False
    started(cluster, pool_object(replicas=3, runnerGroups=groups(("new", 0, None))))
    assert cluster.sizes(pool_ref()) == {"old": 2, "new": 3}
    assert len(cluster.ready_names(pool_ref())) == 2


def test_a_pool_wants_no_more_than_its_groups_can_hold(cluster: ClusterWorld) -> None:
    started(cluster, pool_object(replicas=9, runnerGroups=groups(("fast", 0, 2), ("cheap", 0, 3))))
    assert cluster.status(pool_ref())["desiredReplicas"] == 5
    assert cluster.routed_pools[pool_ref()].max_runners == 5


def test_a_pool_that_cannot_be_served_keeps_nothing(cluster: ClusterWorld) -> None:
    started(cluster, pool_object())
    cluster.store.delete(pool_ref())
    cluster.at_rest()
    assert (cluster.cluster.objects, cluster.cluster.pods) == ({}, {})
    cluster.contents["file:bad"] = failed("UnsupportedModel")
    started(cluster, pool_object("bad", model={"name": "bad", "uri": "file:bad"}))
    assert cluster.cluster.objects == {}


def test_a_pool_that_was_changed_while_no_operator_looked_is_served_without_a_break(cluster: ClusterWorld) -> None:
    started(cluster, pool_object(replicas=2), adapter_object("upper"), adapter_object("lower"))
    pods = set(cluster.ready_names(pool_ref()))
    cluster.apply(pool_object(replicas=3))
    cluster.apply(adapter_object("upper", source={"uri": "file:edited"}))
    cluster.apply(adapter_object("lower", poolRef={"namespace": "default", "name": "another"}))
    after = cluster.restarted()
    first = after.plan()
    assert not [action for action in first if isinstance(action, DeleteChild)]
    published = {
        action.entry.model_name: (action.entry.digest, action.entry.pool)
        for action in first
        if isinstance(action, PublishAdapter)
    }
    assert published == {"acme/upper": (digest("a"), "default/base"), "acme/lower": (digest("c"), "default/base")}, (
        "what served goes on; never in a pool that it was not checked for"
    )
    assert pool_ref() in {action.ref for action in first if isinstance(action, PublishPool)}
    after.at_rest()
    assert pods < set(after.ready_names(pool_ref()))
    assert len(after.ready_names(pool_ref())) == 3


def test_runners_stay_until_it_is_known_that_there_is_no_base(cluster: ClusterWorld) -> None:
    started(cluster, pool_object())
    after = cluster.restarted()
    after.observed.resolutions.clear()  # a status that somebody has emptied tells nothing
    assert not [action for action in after.plan() if isinstance(action, DeleteChild)]
    after.contents["file:base"] = failed("SourceNotFound")
    after.settle()
    assert after.sizes(pool_ref()) == {}


def test_a_deleted_pool_does_not_wait_for_the_garbage_collector(cluster: ClusterWorld) -> None:
    started(cluster, pool_object())
    cluster.store.delete(pool_ref())
    assert {a.kind for a in cluster.plan() if isinstance(a, DeleteChild)} == {
        *("Deployment", "PodDisruptionBudget", "ServiceAccount")
    }


def test_pods_that_do_not_come_up_are_reported_with_their_reason(cluster: ClusterWorld) -> None:
    cluster.cluster.pods_become_ready = False
    started(cluster, pool_object(replicas=2))
    assert cluster.condition(pool_ref(), "Available") == ("False", "NoReadyRunner")
    pods = cluster.observed.pods[pool_ref()]
    first, last = sorted(pods)
    for state, message in (("Unschedulable", "0/1 nodes have nvidia.com/gpu"), ("CrashLoop", "exit code 1: no memory")):
        pods[first] = replace(pods[first], state=state, message=message)
        pods[last] = replace(pods[last], state=state, message="another one, which does not take turns with it")
        for action in cluster.plan():
            cluster.do(action)
            cluster.observed.pods[pool_ref()] = pods
        assert cluster.condition(pool_ref(), "Progressing") == ("False", state)
        messages = [c["message"] for c in cluster.status(pool_ref())["conditions"]]
        assert messages.count(message) == 3, "Available, Progressing, Ready"
        assert (cluster.announced[-1].type, cluster.announced[-1].reason) == ("Warning", state)


def test_what_the_api_server_refuses_is_reported_and_tried_again_now_and_then(cluster: ClusterWorld) -> None:
    cluster.cluster.refuses["Deployment"] = "exceeded quota: count/deployments.apps=1"
    cluster.settle(pool_object())
    assert cluster.condition(pool_ref(), "Progressing") == ("False", "ChildRefused")
    conditions = cluster.status(pool_ref())["conditions"]
    assert {"exceeded quota: count/deployments.apps=1"} == {c["message"] for c in conditions if c["status"] == "False"}
    assert {key.kind for key in cluster.cluster.objects} >= {"ServiceAccount", "PodDisruptionBudget"}
    requests, writes = cluster.cluster.requests, cluster.status_writes
    cluster.wait(APPLY_RETRY_S - 1)
    assert cluster.cluster.requests == requests
    assert cluster.due(pool_ref())
    cluster.wait(1.1)
    assert (cluster.cluster.requests, cluster.status_writes) == (requests + 1, writes)
    del cluster.cluster.refuses["Deployment"]
    cluster.wait(APPLY_RETRY_S)
    cluster.at_rest()
    assert cluster.condition(pool_ref(), "Progressing") == ("False", "RunnersReady")


def test_another_manifest_does_not_wait_for_the_one_that_was_refused(cluster: ClusterWorld) -> None:
    cluster.cluster.refuses["Deployment"] = "no"
    started(cluster, pool_object(advanced={"kvPages": 1}))
    cluster.cluster.refuses.clear()
    cluster.settle(pool_object())
    assert cluster.condition(pool_ref(), "Progressing") == ("False", "RunnersReady")


def test_a_refusal_of_what_is_no_longer_desired_is_not_reported_for_ever(cluster: ClusterWorld) -> None:
    started(cluster, pool_object())
    cluster.cluster.refuses["Deployment"] = "no"
    cluster.settle(pool_object(replicas=2))
    assert cluster.condition(pool_ref(), "Progressing") == ("False", "ChildRefused")
    cluster.apply(pool_object())
    cluster.wait(APPLY_RETRY_S)
    assert cluster.condition(pool_ref(), "Progressing") == ("False", "RunnersReady")


def test_a_refusal_for_a_group_that_is_no_longer_named_is_reported_no_more(cluster: ClusterWorld) -> None:
    cluster.cluster.refuses["Deployment"] = "no"
    cluster.settle(pool_object(runnerGroups=groups(("old", 0, None))))
    assert cluster.condition(pool_ref(), "Progressing") == ("False", "ChildRefused")
    cluster.cluster.refuses.clear()
    cluster.settle(pool_object(runnerGroups=groups(("new", 0, None))))
    assert cluster.condition(pool_ref(), "Progressing") == ("False", "RunnersReady")


def test_pods_that_the_api_server_refuses_are_reported_without_their_names(cluster: ClusterWorld) -> None:
    started(cluster, pool_object())

    def refused(name: str) -> None:
        failure = {"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate"}
        message = f'pods "base-runners-{name}" is forbidden: exceeded quota: gpus'
        cluster.cluster.objects[DEPLOYMENT]["status"] = {"conditions": [failure | {"message": message}]}
        cluster.settle()

    refused("5c9d-x7k2p")
    assert cluster.condition(pool_ref(), "Progressing") == ("False", "PodsRefused")
    messages = [c["message"] for c in cluster.status(pool_ref())["conditions"] if c["type"] == "Progressing"]
    assert messages == ["pods is forbidden: exceeded quota: gpus"]
    writes = cluster.status_writes
    refused("5c9d-qqqqq")
    assert cluster.status_writes == writes


def test_a_runner_on_its_way_out_is_not_ready_whatever_the_scheduler_still_says(cluster: ClusterWorld) -> None:
    started(cluster, pool_object(replicas=2))
    report = cluster.observed.pool_reports[str(pool_ref())]
    cluster.observed.pool_reports[str(pool_ref())] = replace(report, ready_runners=3)
    pods = cluster.observed.pods[pool_ref()]
    pods["old"] = Pod("old", "u", "runners", "Leaving")
    (status,) = [action.status for action in cluster.plan() if isinstance(action, SetStatus)] or [
        cluster.status(pool_ref())
    ]
    assert (status["replicas"], status["readyReplicas"]) == (2, 2)


def test_an_adapter_has_its_finalizer_before_it_is_published(cluster: ClusterWorld) -> None:
    started(cluster, pool_object())
    cluster.apply(adapter_object("upper"))
    while not cluster.routed:
        cluster.step()
        if cluster.routed:
            break
    assert cluster.store.get(adapter_ref("upper"))["metadata"]["finalizers"] == [FINALIZER]
    started(cluster, adapter_object("missing"))
    cluster.remove(adapter_ref("missing"))
    with pytest.raises(LocalNotFound):  # a finalizer of what was never served keeps nothing
        cluster.store.get(adapter_ref("missing"))


def test_a_deleted_adapter_is_there_until_no_runner_holds_it(cluster: ClusterWorld) -> None:
    started(cluster, pool_object(), adapter_object("upper"))
    uid = cluster.store.get(adapter_ref("upper"))["metadata"]["uid"]
    cluster.scheduler_speaks = False
    cluster.store.delete(adapter_ref("upper"))
    cluster.wait(5.0)
    assert uid not in cluster.routed
    assert cluster.condition(adapter_ref("upper"), "Ready") == ("False", "Deleting")
    cluster.scheduler_speaks = True
    cluster.answers()
    cluster.settle()
    assert cluster.store.find(adapter_ref("upper")) is None


def test_a_restarted_operator_asks_again_whether_a_deleted_adapter_is_gone(cluster: ClusterWorld) -> None:
    started(cluster, pool_object(), adapter_object("upper"))
    cluster.scheduler_speaks = False
    cluster.remove(adapter_ref("upper"))
    after = cluster.restarted()
    after.scheduler_speaks = True
    after.settle()
    assert after.store.find(adapter_ref("upper")) is None


def test_a_deletion_is_bounded_in_time_and_says_so(cluster: ClusterWorld) -> None:
    started(cluster, pool_object(drainSeconds=60), adapter_object("upper"))
    cluster.scheduler_speaks = False
    cluster.store.delete(adapter_ref("upper"))
    cluster.wait(60 + UNLOAD_GRACE_S - 1)
    assert cluster.store.find(adapter_ref("upper")) is not None
    cluster.now = cluster.due(adapter_ref("upper"))
    cluster.settle()
    assert cluster.store.find(adapter_ref("upper")) is None
    assert cluster.announced[-1].reason == "UnloadTimeout"
    assert "within 90 s" in cluster.announced[-1].message


def test_nothing_is_remembered_of_what_is_gone(cluster: ClusterWorld) -> None:
    canary = {"source": {"uri": "file:lower"}, "weight": 10, "maxErrorPercent": 5, "minRequests": 20}
    started(cluster, pool_object(), adapter_object("upper", canary=canary))
    cluster.cluster.refuses["Deployment"] = "no"
    cluster.settle(pool_object(replicas=2))
    cluster.observed.foreign[pool_ref()] = {DEPLOYMENT: ForeignObject(cluster.cluster.objects[DEPLOYMENT], 0.0)}
    cluster.remove(adapter_ref("upper"))
    cluster.remove(pool_ref())
    cluster.wait(400)
    assert cluster.observed == ObservedState()
    cluster.expectations.applied.clear()  # with the watch of each object
    assert cluster.expectations == Expectations(retention=Retention(last_sent=frozenset()))


# ------------------------------------------------------------------------------------------------------- adoption


def child_of(cluster: ClusterWorld, **metadata: Any) -> tuple[ObjectKey, dict[str, Any]]:
    """The pool's disruption budget, as somebody else may have left it: with this in its metadata."""
    (budget,) = (a.child for a in cluster.plan() if isinstance(a, ApplyChild) and a.child.kind == "PodDisruptionBudget")
    kept = {name: budget.manifest["metadata"][name] for name in ("name", "namespace", "labels")}
    return budget.key, {**budget.manifest, "metadata": {**kept, "uid": "u", "resourceVersion": "7", **metadata}}


def versions_of(cluster: ClusterWorld, key: ObjectKey) -> list[str | None]:
    """Return the known version of what is there, for each child applied under that name."""
    return [a.resource_version for a in cluster.plan() if isinstance(a, ApplyChild) and a.child.key == key]


@pytest.fixture
def bare(cluster: ClusterWorld) -> ClusterWorld:
    """A pool whose base is there and that owns nothing yet."""
    cluster.apply(pool_object(replicas=1))
    cluster.step()
    return cluster


def test_an_object_that_nobody_controls_and_whose_labels_name_the_pool_is_adopted_as_it_was_read(bare: Any) -> None:
    key, there = child_of(bare)
    bare.observed.foreign[pool_ref()] = {key: ForeignObject(there, bare.now)}
    assert versions_of(bare, key) == ["7"]
    bare.settle()
    del bare.cluster.objects[key]
    bare.cluster.seen_by(bare.observed)
    assert versions_of(bare, key) == [None], "it is not there any more"


@pytest.mark.parametrize(
    "metadata",
    [
        {"labels": {}},
        {"labels": {"app.kubernetes.io/managed-by": "weft-operator", "serving.weft.dev/pool": "another"}},
        {"ownerReferences": [{"controller": True, "kind": "ServingPool", "name": "base", "uid": "an older one"}]},
    ],
)
def test_a_foreign_object_is_left_alone_named_in_conditions_and_read_again(bare: Any, metadata: dict[str, Any]) -> None:
    key, there = child_of(bare, **metadata)
    bare.observed.foreign[pool_ref()] = {key: ForeignObject(there, bare.now)}
    assert versions_of(bare, key) == []
    bare.settle()
    assert bare.condition(pool_ref(), "Progressing") == ("False", "ChildConflict")
    assert bare.due(pool_ref())
    bare.now += APPLY_RETRY_S
    assert versions_of(bare, key) == [None], "whether it is still there, the API server says"
    bare.settle()
    assert bare.condition(pool_ref(), "Progressing") == ("False", "RunnersReady")
