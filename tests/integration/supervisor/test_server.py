import grpc
import grpc.aio
import pytest

from weft.wire.v1 import common_pb2, scheduler_pb2, supervisor_pb2


async def test_a_runner_is_registered_and_its_whole_state_reaches_the_scheduler(world):
    runner = world.runner()
    registered = await runner.hello()
    assert (registered.lease_ms, registered.report_ms) == (600_000, 10)
    adapters = [supervisor_pb2.AdapterState(digest="sha256:1", tier=supervisor_pb2.AdapterState.DEVICE)]
    await runner.state("r1", free=3, adapters=adapters, ready=True)
    hello = await world.scheduler.next("hello")
    assert hello.highest_term == 3
    report = await world.scheduler.next("report")
    [state] = report.runners
    assert state.runner.address == "h:1"
    assert state.id == runner.id
    assert state.ready
    assert state.adapters[0].digest == "sha256:1"
    assert [s.request_id for s in state.sequences] == ["r1"]


async def test_an_overrun_becomes_a_decision_and_the_counter_of_the_command(world):
    runner = world.runner()
    await runner.hello(total_pages=2)
    await runner.state("old", "new", grown_pages=7, doublings=1)
    await runner.state("old", "new", paused=("old",), grown_pages=7, doublings=2)
    report = await world.scheduler.report_with(lambda r: r.preempts)
    [preempt] = report.preempts
    assert (preempt.request_id, preempt.for_request_id, preempt.reservation_tokens) == ("new", "old", 16)
    assert preempt.epoch == common_pb2.Epoch(term=1, counter=1)
    told = await world.admin.ListRunners(supervisor_pb2.ListRunnersRequest())
    assert (told.grows, told.preempts, told.doublings) == (7, 1, 2)
    assert told.runners[0].runner.pool == "ns/pool"


async def test_orders_reach_their_runner_and_again_when_it_reconnects(world):
    runner = world.runner()
    await runner.hello()
    await runner.state(free=4)
    await world.scheduler.report_with(lambda r: r.runners)
    desired = supervisor_pb2.RunnerOrder(
        has_desired=True, desired_version=9, desired=[supervisor_pb2.DesiredAdapter(digest="sha256:1", rank=8)]
    )
    world.scheduler.send(orders=scheduler_pb2.RunnerOrders(runner=runner.id, order=desired))
    assert (await runner.read()).order == desired
    drain = supervisor_pb2.RunnerOrder(drain=True)
    world.scheduler.send(orders=scheduler_pb2.RunnerOrders(runner=runner.id, order=drain))
    whole = (await runner.read()).order
    assert (whole.drain, whole.desired_version, whole.desired[0].digest) == (True, 9, "sha256:1")
    runner.call.cancel()
    again = world.runner()
    await again.hello()
    assert (await again.read()).order == whole


async def test_a_broken_scheduler_stream_is_told_everything_again(world):
    runner = world.runner()
    await runner.hello()
    await runner.state("r1", free=3)
    await world.scheduler.report_with(lambda r: r.runners)
    await world.scheduler.next("hello")
    await world.scheduler.next("keys")
    world.scheduler.send(hello=scheduler_pb2.SchedulerHello(term=8))
    world.scheduler.break_stream()
    assert (await world.scheduler.next("hello")).highest_term == 8
    await world.scheduler.next("keys")
    report = await world.scheduler.report_with(lambda r: r.runners)
    assert [s.request_id for s in report.runners[0].sequences] == ["r1"]


async def test_a_new_incarnation_ends_the_old_stream_and_the_old_one_is_refused(world):
    old = world.runner(incarnation="1")
    await old.hello()
    await old.state(free=4)
    await world.scheduler.report_with(lambda r: r.runners)
    new = world.runner(incarnation="2")
    await new.hello()
    report = await world.scheduler.report_with(lambda r: r.lost)
    assert [lost.incarnation for lost in report.lost] == ["1"]
    assert await old.ended()
    late = world.runner(incarnation="1")
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await late.hello()
    assert refusal.value.code() == grpc.StatusCode.FAILED_PRECONDITION


async def test_a_state_before_the_hello_breaks_the_contract(world):
    runner = world.runner()
    await runner.state(free=4)
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await runner.read()
    assert refusal.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_a_key_is_known_to_the_scheduler_before_its_owner_sees_it(world):
    await world.scheduler.next("keys")
    created = await world.admin.CreateKey(supervisor_pb2.CreateKeyRequest(namespace="acme", note="demo"))
    keys = await world.scheduler.next("keys")
    assert [(key.namespace, key.key_id) for key in keys.keys] == [("acme", created.key_id)]
    assert created.key not in str(keys)
    assert (await world.admin.RevokeKey(supervisor_pb2.RevokeKeyRequest(key_id=created.key_id))).existed
    assert list((await world.scheduler.next("keys")).keys) == []
    [listed] = (await world.admin.ListKeys(supervisor_pb2.ListKeysRequest())).keys
    assert (listed.revoked, listed.note) == (True, "demo")


@pytest.mark.parametrize("namespace", ["", "Acme", "a b", "-a", "a" * 64])
async def test_a_namespace_that_is_no_dns_label_is_refused(world, namespace):
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await world.admin.CreateKey(supervisor_pb2.CreateKeyRequest(namespace=namespace))
    assert refusal.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_a_silent_runner_is_lost_and_may_come_back(world):
    runner, leases = world.runner(), world.server.core.leases
    await runner.hello()
    await runner.state(free=4)
    await world.scheduler.report_with(lambda r: r.runners)
    leases._lease_s = 0.05  # from the next message on
    await runner.beat()
    report = await world.scheduler.report_with(lambda r: r.lost)
    assert report.lost[0] == runner.id
    assert await runner.ended()
    leases._lease_s = 600.0
    again = world.runner()
    await again.hello()
    await again.state("r1", free=3)
    report = await world.scheduler.report_with(lambda r: r.runners)
    assert [s.request_id for s in report.runners[0].sequences] == ["r1"]
