"""What a gateway's page is sent of the runners."""

from harness.scheduler_driver import Driver
from weft.domain.adapter import AdapterState, Tier
from weft.domain.fleet import MAX_LISTED_ADAPTERS, FleetQuery, FleetReport
from weft.domain.machine import Kind, Peer, Received, Send


def ask(driver: Driver) -> FleetReport:
    asked = Received(Peer(Kind.GATEWAY, "g"), FleetQuery())
    (answer,) = [one.message for one in driver.core.handle(asked, driver.now) if isinstance(one, Send)]
    assert isinstance(answer, FleetReport)
    return answer


def test_a_runner_is_listed_with_its_batch_and_where_its_adapters_are(driver: Driver) -> None:
    driver.start("sha256:1")
    adapters = (
        AdapterState("sha256:1", Tier.DEVICE, running=2),
        AdapterState("sha256:2", Tier.HOST),
        AdapterState("sha256:3", Tier.DISK),
        AdapterState("sha256:4", Tier.DISK, error="it holds NaN"),
    )
    driver.runner("a", adapters=adapters)
    (runner,) = ask(driver).runners
    assert (runner.pool, runner.ready, runner.sequences, runner.max_sequences) == ("acme/p", True, 0, 4)
    assert [(one.digest, one.tier, one.running, one.error) for one in runner.adapters] == [
        ("sha256:1", Tier.DEVICE, 2, ""), ("sha256:4", Tier.DISK, 0, "it holds NaN"), ("sha256:2", Tier.HOST, 0, ""),
    ]  # fmt: skip
    driver.lost("a")
    assert ask(driver).runners == ()


def test_of_very_many_adapters_the_first_are_listed_and_the_others_counted(driver: Driver) -> None:
    driver.start("sha256:1").runner(
        "a", adapters=tuple(AdapterState(f"sha256:{n}", Tier.HOST) for n in range(MAX_LISTED_ADAPTERS + 10))
    )
    (runner,) = ask(driver).runners
    assert (len(runner.adapters), runner.adapters_left_out) == (MAX_LISTED_ADAPTERS, 10)
