"""A supervisor that does not reach a runner which the gateways reach: streams and new requests notice nothing."""

from weft_sim.clock import Rank
from weft_sim.hosts import Host
from weft_sim.laws import ClientRequest
from weft_sim.simulate import PoolDescription, deployment_of
from weft_sim.stack import World


def test_a_runner_that_its_supervisor_alone_does_not_reach_serves_on() -> None:
    deployment = deployment_of(PoolDescription(runners=1, adapters=1, total_pages=256, cpu=False))
    world = World(deployment, 0)
    clock = world.clock
    world.supervisor.host = Host("elsewhere", 1, clock)
    (runner,) = world.runners.values()
    (adapter,) = deployment.adapters
    requests = [
        ClientRequest(f"r{n}", f"r{n}", "gateway-0", "default", adapter.model_name, (1, 2, 3), 64, 1 << 40)
        for n in range(60)
    ]
    world.start()
    clock.run(end_s=clock.now + 3.0)
    hosts = ("elsewhere", runner.host_name)
    world.network.partition(hosts)
    first_s, leases = clock.now, world.supervisor.machine
    for number, request in enumerate(requests):
        clock.at(first_s + 0.2 * number, Rank.ARRIVAL, world.submit, request.id, [request])
    clock.run(end_s=first_s + 15.0)
    assert leases is not None
    assert not leases.live(), "its lease ran out"
    assert [request.finish for request in requests] == ["length"] * len(requests)
    waited_s = [request.first_at - request.arrived for request in requests if request.first_at is not None]
    assert max(waited_s) < 0.5, "nobody waits for the supervisor"
    world.network.heal(hosts)
    clock.run(end_s=clock.now + 3.0)
    assert [book.spec.runner for book in leases.live()] == [runner.shell.spec.runner]
