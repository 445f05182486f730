import asyncio
import hashlib
import time
from typing import Any

import grpc
import grpc.aio
import pytest
from sqlalchemy import event

from weft.domain.adapter import AdapterState, Tier
from weft.domain.ids import Epoch
from weft.domain.limits import LimitRule
from weft.domain.request import FinishReason, Outcome
from weft.domain.routes import Keys, KeysConfirmed, KeyScope, limits_entry
from weft.domain.runner import ClusterReport, Registered, SchedulerHello, SupervisorHello
from weft.store import outcomes
from weft.wire.codec.cluster import REPORTED
from weft.wire.codec.scheduling import LIMIT_RULE
from weft.wire.v1 import supervisor_pb2
from weft_supervisor import server as shell
from weft_supervisor.admin import AdminServer
from weft_supervisor.server import MAX_MESSAGE_BYTES


async def test_a_runner_is_registered_and_its_reports_reach_the_scheduler(world):
    runner = world.runner()
    assert await runner.hello() == Registered(600_000, 10)
    await runner.report("r1", free=3, adapters=[AdapterState("sha256:1", Tier.DEVICE)], ready=True)
    assert (await world.scheduler.next(SupervisorHello)).highest_term == 3
    [reported] = (await world.scheduler.next(ClusterReport)).reports
    assert (reported.spec.address, reported.spec.runner, reported.runner) == ("h:1", runner.id, runner.id)
    assert (reported.report.full, reported.report.figures.ready) == (True, True)
    assert reported.report.adapters == (AdapterState("sha256:1", Tier.DEVICE),)
    assert [s.request_id for s in reported.report.sequences] == ["r1"]
    await runner.report(free=4, full=False, ended=["r1"])
    [reported] = (await world.scheduler.next(ClusterReport)).reports
    assert (reported.spec, reported.report.full, list(reported.report.ended)) == (None, False, ["r1"])


async def test_an_overrun_becomes_a_decision_and_the_counter_of_the_command(world):
    runner = world.runner()
    await runner.hello(total_pages=2)
    await runner.report("old", "new", grown_pages=7, doublings=1)
    await runner.report("old", "new", full=False, paused=("old",), grown_pages=7, doublings=2)
    [preempt] = (await world.scheduler.report_with(lambda r: r.preempts)).preempts
    assert (preempt.request_id, preempt.for_request_id, preempt.reservation_tokens) == ("new", "old", 16)
    assert preempt.epoch == Epoch(1, 1)
    listed = await world.admin.ListRunners(supervisor_pb2.ListRunnersRequest())
    assert (listed.grows, listed.preempts, listed.doublings) == (7, 1, 2)
    [reported] = map(REPORTED.read, listed.runners)
    assert (reported.spec.pool, reported.report.full, reported.report.version) == ("ns/pool", True, 2)


async def test_the_list_of_runners_fits_in_a_message_whatever_they_report(world, monkeypatch):
    monkeypatch.setattr("weft_supervisor.admin.MAX_LISTED_BYTES", 3_000)
    for i in range(3):
        runner = world.runner(uuid=f"u{i}")
        await runner.hello()
        await runner.report(free=4, adapters=[AdapterState(f"sha256:{i}", Tier.DISK, error="e" * 1000)])
        await world.scheduler.report_with(lambda r: r.reports)
    listed = await world.admin.ListRunners(supervisor_pb2.ListRunnersRequest())
    assert [reported.runner.uuid for reported in listed.runners] == ["u0", "u1"]


async def test_a_full_report_that_no_message_takes_costs_its_runner_the_report_and_no_other(world, monkeypatch):
    monkeypatch.setattr(shell, "MAX_MESSAGE_BYTES", 2_000)
    await world.scheduler.next(SupervisorHello)
    for uuid, errors in (("a", 1), ("b", 4), ("c", 1)):
        runner = world.runner(uuid=uuid)
        await runner.hello()
        await runner.report(free=4)
        await world.scheduler.report_with(lambda r: r.reports)
        for i in range(errors):
            error = AdapterState(f"sha256:{i}", Tier.DISK, error="e" * 900)
            await runner.report(free=4, full=False, adapters=[error])
            await world.scheduler.report_with(lambda r: r.reports)
    world.scheduler.break_stream()
    await world.scheduler.next(SupervisorHello)
    found = [(await world.scheduler.report_with(lambda r: r.reports)).reports for _ in range(2)]
    assert [[reported.runner.uuid for reported in reports] for reports in found] == [["a"], ["c"]]
    assert MAX_MESSAGE_BYTES > 2_000


async def test_a_broken_scheduler_stream_is_sent_everything_again(world):
    runner = world.runner()
    await runner.hello()
    await runner.report("r1", free=3)
    await world.scheduler.report_with(lambda r: r.reports)
    await world.scheduler.next(SupervisorHello)
    await world.scheduler.next(Keys)
    world.scheduler.send(SchedulerHello(8))
    world.scheduler.break_stream()
    assert (await world.scheduler.next(SupervisorHello)).highest_term == 8
    await world.scheduler.next(Keys)
    [reported] = (await world.scheduler.report_with(lambda r: r.reports)).reports
    assert [s.request_id for s in reported.report.sequences] == ["r1"]


async def test_a_new_incarnation_ends_the_old_stream_and_the_old_one_is_refused(world):
    old = world.runner(incarnation="1")
    await old.hello()
    await old.report(free=4)
    await world.scheduler.report_with(lambda r: r.reports)
    new = world.runner(incarnation="2")
    await new.hello()
    report = await world.scheduler.report_with(lambda r: r.lost)
    assert [lost.incarnation for lost in report.lost] == ["1"]
    assert await old.ended()
    late = world.runner(incarnation="1")
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await late.hello()
    assert refusal.value.code() == grpc.StatusCode.FAILED_PRECONDITION


async def test_a_report_before_the_hello_breaks_the_contract(world):
    runner = world.runner()
    await runner.report(free=4)
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await runner.read()
    assert refusal.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_a_key_with_all_that_it_may_is_known_to_the_scheduler_before_its_owner_sees_it(world):
    await world.scheduler.next(Keys)
    asked = {"scope": supervisor_pb2.KEY_SCOPE_READ_ONLY, "models": ["acme/*"], "expires_unix_ms": 1 << 50}
    created = await world.admin.CreateKey(supervisor_pb2.CreateKeyRequest(namespace="acme", note="demo", **asked))
    keys = await world.scheduler.next(Keys)
    [key] = keys.keys
    assert (key.namespace, key.key_id) == ("acme", created.key_id)
    assert (key.scope, key.models, key.expires_unix_ms) == (KeyScope.READ_ONLY, ("acme/*",), 1 << 50)
    assert created.key not in str(keys)
    assert (await world.admin.RevokeKey(supervisor_pb2.RevokeKeyRequest(key_id=created.key_id))).existed
    assert (await world.scheduler.next(Keys)).keys == ()
    [listed] = (await world.admin.ListKeys(supervisor_pb2.ListKeysRequest())).keys
    assert (listed.revoked, listed.note) == (True, "demo")
    assert (listed.scope, [*listed.models], listed.expires_unix_ms) == tuple(asked.values())


async def test_keys_are_confirmed_each_time_that_the_store_was_read(world, store):
    first = await world.scheduler.next(Keys)
    await world.admin.CreateKey(supervisor_pb2.CreateKeyRequest(namespace="acme"))
    second = await world.scheduler.next(Keys)
    assert 0 < first.version < second.version
    following = asyncio.create_task(AdminServer(store, world.server).follow_keys(0.01))
    await world.scheduler.next(Keys)  # this one has not sent any
    assert await world.scheduler.next(KeysConfirmed) == KeysConfirmed(second.version)
    following.cancel()


async def test_a_look_at_what_has_not_changed_is_one_statement(world, store):
    await world.admin.SetLimit(supervisor_pb2.LimitRule(subject="namespace/acme", requests_per_minute=5))
    admin, statements = AdminServer(store, world.server), list[str]()
    await admin.send_keys()
    event.listen(store.sync_engine, "before_cursor_execute", lambda _c, _u, statement, *_: statements.append(statement))
    following = asyncio.create_task(admin.follow_keys(0.01))
    await world.scheduler.next(KeysConfirmed)
    following.cancel()
    [asked] = {statement for statement in statements if not statement.startswith("BEGIN")}
    assert ("FROM api_keys" in asked, "FROM limits" in asked) == (True, True)


def declared(**fields: Any) -> supervisor_pb2.KeyDeclaration:
    return supervisor_pb2.KeyDeclaration(**{"owner": "uid", "namespace": "acme", "key_hash": "a" * 64, **fields})


async def test_a_declared_key_reaches_the_scheduler_with_its_limits_and_leaves_it_when_withdrawn(world):
    await world.scheduler.next(Keys)
    limits = supervisor_pb2.LimitRule(requests_per_minute=5)
    answer = await world.admin.DeclareKey(declared(models=["acme/*"], limits=limits))
    [key] = (await world.scheduler.next(Keys)).keys
    assert answer.outcome == supervisor_pb2.DeclareKeyResponse.DECLARED
    assert (key.key_hash, key.key_id, key.models) == ("a" * 64, answer.key_id, ("acme/*",))
    assert key.limits == (LimitRule(f"key/{answer.key_id}", "*", requests_per_minute=5),)
    assert (await world.admin.DeclareKey(declared(key_hash="b" * 64))).key_id != answer.key_id
    [key] = (await world.scheduler.next(Keys)).keys
    assert (key.key_hash, key.models, key.limits) == ("b" * 64, (), ())
    [listed] = (await world.admin.ListDeclaredKeys(supervisor_pb2.ListDeclaredKeysRequest())).keys
    assert (listed.key_id, listed.declaration.owner, listed.declaration.key_hash) == (key.key_id, "uid", "b" * 64)
    await world.admin.WithdrawKey(supervisor_pb2.WithdrawKeyRequest(owner="uid"))
    assert (await world.scheduler.next(Keys)).keys == ()


async def test_a_key_of_somebody_elses_cannot_be_declared(world):
    made = await world.admin.CreateKey(supervisor_pb2.CreateKeyRequest(namespace="globex"))
    stolen = declared(key_hash=hashlib.sha256(made.key.encode()).hexdigest())
    assert (await world.admin.DeclareKey(stolen)).outcome == supervisor_pb2.DeclareKeyResponse.TAKEN
    [listed] = (await world.admin.ListKeys(supervisor_pb2.ListKeysRequest())).keys
    assert (listed.namespace, listed.revoked) == ("globex", False)


PLATFORM = {"scope": supervisor_pb2.KEY_SCOPE_PLATFORM}
REFUSED = [
    *(("DeclareKey", declared(**wrong)) for wrong in (
        {"owner": ""}, {"owner": "x" * 129}, {"key_hash": "weft-key"}, {"key_hash": "A" * 64}, {"namespace": "A"},
        {"namespace": ""}, PLATFORM, {"models": [""]}, {"expires_unix_ms": 1}, PLATFORM | {"namespace": ""},
    )),
    *(("SetLimit", supervisor_pb2.LimitRule(**rule)) for rule in ({}, {"subject": "acme"}, {"subject": "key/"})),
    *(("CreateKey", supervisor_pb2.CreateKeyRequest(**{"namespace": "acme"} | asked)) for asked in (
        {"expires_unix_ms": 1}, {"models": [""]}, PLATFORM,
        *({"namespace": name} for name in ("", "Acme", "a b", "-a", "a" * 64)),
    )),
]  # fmt: skip


@pytest.mark.parametrize(("method", "asked"), REFUSED)
async def test_what_no_tenant_may_have_is_refused(world, method, asked):
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await getattr(world.admin, method)(asked)
    assert refusal.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert not (await world.admin.ListKeys(supervisor_pb2.ListKeysRequest())).keys


async def test_limits_reach_the_scheduler_with_the_keys_that_they_are_for(world):
    await world.scheduler.next(Keys)
    made = [await world.admin.CreateKey(supervisor_pb2.CreateKeyRequest(namespace=name)) for name in ("acme", "b")]
    for _ in made:
        await world.scheduler.next(Keys)
    of_key = LimitRule(f"key/{made[0].key_id}", "acme/*", requests_per_minute=5)
    of_namespace = LimitRule("namespace/acme", concurrent=2)
    for rule in (of_key, of_namespace):
        message = supervisor_pb2.LimitRule()
        LIMIT_RULE.fill(rule, message)
        await world.admin.SetLimit(message)
        keys = await world.scheduler.next(Keys)
    assert {key.namespace or key.key_hash: key.limits for key in keys.keys} == {
        "acme": (of_key, of_namespace),
        "b": (),
        limits_entry("acme"): (of_namespace,),
    }
    listed = (await world.admin.ListLimits(supervisor_pb2.ListLimitsRequest())).limits
    assert [LIMIT_RULE.read(rule) for rule in listed] == [of_key, of_namespace]


async def test_a_quota_is_spent_by_the_outcomes_of_the_day_that_are_stored(world, store):
    await world.scheduler.next(Keys)
    await world.admin.CreateKey(supervisor_pb2.CreateKeyRequest(namespace="acme"))
    rule = {"subject": "namespace/acme", "model": "acme/*", "tokens_per_day": 8}
    await world.admin.SetLimit(supervisor_pb2.LimitRule(**rule))
    await world.scheduler.next(Keys)
    key, _ = (await world.scheduler.next(Keys)).keys
    assert key.limits[0].spent_until_unix_ms == 0
    now_ms = time.time_ns() // 1_000_000
    row = Outcome("r", "acme/p", "acme", "acme/m", "", 3, 5, FinishReason.EOS, now_ms)
    await outcomes.record(store, [row], now_unix_ms=now_ms)
    following = asyncio.create_task(AdminServer(store, world.server).follow_keys(0.01))
    key, of_namespace = (await world.scheduler.next(Keys)).keys
    assert of_namespace.limits == key.limits
    following.cancel()
    assert now_ms < key.limits[0].spent_until_unix_ms <= now_ms + 86_400_000
    [used] = (await world.admin.GetUsage(supervisor_pb2.GetUsageRequest(since_day=now_ms // 86_400_000 - 1))).rows
    assert (used.namespace, used.model_name, used.requests) == ("acme", "acme/m", 1)
    assert (used.prompt_tokens, used.completion_tokens) == (3, 5)


async def test_a_quota_of_a_key_is_spent_by_its_own_outcomes_alone(world, store):
    made = await world.admin.CreateKey(supervisor_pb2.CreateKeyRequest(namespace="acme"))
    rule = {"subject": f"key/{made.key_id}", "tokens_per_day": 8}
    await world.admin.SetLimit(supervisor_pb2.LimitRule(**rule))
    now_ms = time.time_ns() // 1_000_000

    async def spent_by(request_id: str, key_id: str) -> bool:
        row = Outcome(request_id, "acme/p", "acme", "acme/m", "", 3, 5, FinishReason.EOS, now_ms, key_id=key_id)
        await outcomes.record(store, [row], now_unix_ms=now_ms)
        (listed,) = (await world.admin.ListLimits(supervisor_pb2.ListLimitsRequest())).limits
        return listed.spent_until_unix_ms > now_ms

    assert not await spent_by("r1", "")
    assert not await spent_by("r2", "another")
    assert await spent_by("r3", made.key_id)
    since = supervisor_pb2.GetUsageRequest(since_day=now_ms // 86_400_000 - 1, by_key=True)
    rows = (await world.admin.GetUsage(since)).rows
    assert {row.key_id: row.requests for row in rows} == {"another": 1, made.key_id: 1}
