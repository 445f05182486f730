"""A thousand runners: one adapter more costs those that need it, and a request one runner."""

from collections import Counter

import pytest

from weft.domain.adapter import Tier
from weft.domain.machine import Kind, Peer
from weft.domain.routes import AdapterSpec, RegistryChange
from weft.domain.runner import Registered
from weft_sim.clock import Rank
from weft_sim.laws import ClientRequest
from weft_sim.simulate import POOL, PoolDescription, deployment_of
from weft_sim.stack import World

RUNNERS = 1000


def adapter(name: str, tier: Tier = Tier.UNSPECIFIED) -> AdapterSpec:
    return AdapterSpec(
        f"default/{name}", "default", POOL, f"sha256:{name}", 16, f"uid-{name}", bytes=1 << 20, tier=tier
    )


@pytest.mark.slow
def test_one_adapter_more_at_a_thousand_runners_touches_only_those_that_need_it() -> None:
    world = World(
        deployment_of(PoolDescription(runners=RUNNERS, adapters=0, total_pages=64, cpu=False)), 0, check=False
    )
    world.contents |= {f"sha256:{name}": 1 << 20 for name in ("on-demand", "on-disk")}
    clock, received = world.clock, Counter[Peer]()
    gateway_bytes = 0

    def delivered(sender: Peer, receiver: Peer, data: bytes) -> None:
        nonlocal gateway_bytes
        if receiver.kind is Kind.RUNNER:
            message = world.network.codec.decode(sender.kind, receiver.kind, data)
            if not isinstance(message, Registered):  # heartbeats are answered, whatever changes
                received[receiver] += len(data)
        elif receiver.kind is Kind.GATEWAY:
            gateway_bytes += len(data)

    world.start()
    clock.run(end_s=clock.now + 3.0)
    assert world.scheduler.machine is not None
    world.network.on_delivery = delivered

    def declare(one: AdapterSpec) -> None:
        received.clear()
        world.registry.post(RegistryChange(False, adapters=(one,)))
        clock.run(end_s=clock.now + 2.0)

    declare(adapter("on-demand"))
    assert not received, "no byte to a runner"
    assert 0 < gateway_bytes < 1000
    request = ClientRequest("r", "r", "gateway-0", "default", "default/on-demand", (1, 2, 3), 8, 1 << 40)
    clock.at(clock.now, Rank.ARRIVAL, world.submit, request.id, [request])
    clock.run(end_s=clock.now + 2.0)
    assert request.finish == "length"
    assert len(received) == 1, "the runner that computes it"
    declare(adapter("on-disk", Tier.DISK))
    assert len(received) == RUNNERS, "a tier is asked of every runner of the pool"
    assert max(received.values()) < 200
    print(f"gateway {gateway_bytes} bytes, a runner that holds it {max(received.values())} bytes")
