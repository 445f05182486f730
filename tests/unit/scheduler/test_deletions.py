"""The registry's question: is this adapter gone from the route table and from every runner?"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from harness.scheduler_driver import Driver, adapter, of
from weft.domain.adapter import AdapterVersion
from weft.domain.routes import AdapterStatus, RegistryChange, RoutesApplied


@pytest.fixture
def removed(driver: Driver) -> Callable[..., list[str]]:
    """Remove adapters by uid, let some seconds pass; uids that were said to be gone."""

    def remove(*uids: str, seconds: float = 1.0) -> list[str]:
        effects = driver.change(RegistryChange(False, removed_adapters=uids)) if uids else []
        return [s.uid for s in of(effects + driver.wait(seconds), AdapterStatus) if s.removed]

    return remove


def knows_the_list(driver: Driver) -> None:
    """Let a runner say that it has the list as it is now."""
    driver.runner("r", desired_version=driver.pool().adapters.version, ready=True)


def uid_of(driver: Driver, digest: str) -> str:
    return next(iter(driver.pool().adapters.by_digest[digest]))


def test_a_uid_that_nobody_knows_is_gone_and_said_once(driver: Driver, removed: Any) -> None:
    driver.start()
    assert removed("old") == ["old"]
    assert removed() == []


def test_a_removed_adapter_is_gone_when_every_ready_runner_has_a_list_without_it(driver: Driver, removed: Any) -> None:
    driver.start("sha256:1", "sha256:2")
    knows_the_list(driver)
    uid = uid_of(driver, "sha256:1")
    assert removed(uid, seconds=60.0) == []  # the runner has not said that it knows the new list
    knows_the_list(driver)
    assert removed() == [uid]


def test_while_a_stream_uses_it_it_is_not_gone(driver: Driver, removed: Any) -> None:
    driver.start("sha256:1", drain_s=30.0)
    knows_the_list(driver)
    driver.place("q", "sha256:1")
    uid = uid_of(driver, "sha256:1")
    assert removed(uid, seconds=20.0) == []
    driver.wait(11.0)  # its drain time ends, and with it the stream
    knows_the_list(driver)
    assert removed() == [uid]


def test_while_a_gateway_may_still_route_to_it_it_is_not_gone(driver: Driver, removed: Any) -> None:
    driver.start("sha256:1")
    driver.gateway("g2", applies_routes=True)
    driver.gateway_sends(RoutesApplied(driver.state.routes.book.version), "g2")
    uid = uid_of(driver, "sha256:1")
    assert removed(uid, seconds=60.0) == []
    driver.gateway_sends(RoutesApplied(driver.state.routes.book.version), "g2")
    assert removed() == [uid]


def test_content_that_another_adapter_has_too_holds_nobody_up(driver: Driver, removed: Any) -> None:
    driver.start("sha256:1")
    driver.change(RegistryChange(False, adapters=(adapter("sha256:1", uid="twin", model_name="twin"),)))
    knows_the_list(driver)
    assert removed("twin") == ["twin"]


def test_an_adapter_that_comes_back_is_not_said_to_be_gone(driver: Driver, removed: Any) -> None:
    driver.start("sha256:1")
    uid = uid_of(driver, "sha256:1")
    back = adapter("sha256:1", uid=uid)
    driver.change(RegistryChange(False, removed_adapters=(uid,)))
    driver.change(RegistryChange(False, adapters=(back,)))
    assert uid not in removed()
    assert not driver.state.published.deletions


def test_a_registry_that_comes_back_may_ask_in_its_snapshot(driver: Any) -> None:
    driver.start("sha256:1")
    spec, uid = driver.pool().spec, uid_of(driver, "sha256:1")
    driver.connect_registry()
    effects = driver.change(RegistryChange(True, pools=(spec,), removed_adapters=(uid,))) + driver.wait(60.0)
    assert [s.uid for s in of(effects, AdapterStatus)] == [uid]


def test_an_earlier_content_is_served_until_the_adapter_has_it_no_more(driver: Driver, removed: Any) -> None:
    driver.start("sha256:2", drain_s=30.0)
    pool = driver.pool()
    knows_the_list(driver)
    [uid] = pool.adapters.by_digest["sha256:2"]
    earlier = (AdapterVersion("sha256:1", 4, 100), AdapterVersion("sha256:0", 4, 100))
    driver.change(RegistryChange(False, adapters=(replace(adapter("sha256:2", uid=uid), versions=earlier),)))
    driver.place("q", "sha256:1")
    assert pool.adapters.size("sha256:1") == (4, 100)
    assert not pool.adapters.published
    driver.change(RegistryChange(False, adapters=(replace(adapter("sha256:2", uid=uid), versions=earlier[1:]),)))
    assert "sha256:1" in pool.adapters.draining
    driver.wait(31.0)
    assert not pool.adapters.knows("sha256:1")
    assert pool.adapters.knows("sha256:0")
    driver.place("p", "sha256:0")
    assert removed(uid, seconds=20.0) == []  # a stream uses an earlier content
    driver.wait(11.0)
    knows_the_list(driver)
    assert removed() == [uid]
