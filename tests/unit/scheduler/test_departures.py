"""The registry's question: is this adapter gone from the route table and from every runner?"""

from collections.abc import Callable
from typing import Any

import pytest

from weft_scheduler.core.effects import AdapterStatus
from weft_scheduler.core.events import RegistryChange, RegistryUp

Picked = Callable[..., list[Any]]


@pytest.fixture
def removed(desk: Any, picked: Picked) -> Callable[..., list[str]]:
    """Remove adapters by uid, let some seconds pass; uids that were said to be gone."""

    def remove(*uids: str, seconds: float = 1.0) -> list[str]:
        effects = desk.handle(RegistryChange(False, removed_adapters=uids)) if uids else []
        statuses = picked(effects + desk.wait(seconds), AdapterStatus)
        return [s.uid for s in statuses if not s.routed and s.ready_runners == 0]

    return remove


def uid_of(desk: Any, digest: str) -> str:
    return next(uid for uid, a in desk.core.state.pools["acme/p"].adapters.items() if a.digest == digest)


def test_a_uid_that_nobody_knows_is_gone_and_said_once(desk: Any, removed: Any) -> None:
    desk.start()
    assert removed("old") == ["old"]
    assert removed() == []


def test_a_removed_adapter_is_gone_when_every_ready_runner_has_the_list_without_it(desk: Any, removed: Any) -> None:
    desk.start("sha256:1", "sha256:2")
    pool = desk.core.state.pools["acme/p"]
    desk.runner("r", desired_version=pool.desired.list.version, ready=True)
    uid = uid_of(desk, "sha256:1")
    assert removed(uid, seconds=60.0) == []  # the runner has not said that it knows the new list
    desk.runner("r", desired_version=pool.desired.list.version, ready=True)
    assert removed() == [uid]


def test_while_a_stream_uses_it_it_is_not_gone(desk: Any, removed: Any) -> None:
    desk.start("sha256:1", drain_s=30.0)
    pool = desk.core.state.pools["acme/p"]
    desk.runner("r", desired_version=pool.desired.list.version, ready=True)
    desk.place("q", "sha256:1")
    uid = uid_of(desk, "sha256:1")
    assert removed(uid, seconds=20.0) == []
    desk.wait(11.0)  # its drain time ends, and with it the stream
    desk.runner("r", desired_version=pool.desired.list.version, ready=True)
    assert removed() == [uid]


def test_content_that_another_adapter_has_too_holds_nobody_up(desk: Any, removed: Any, adapter_of: Any) -> None:
    desk.start("sha256:1")
    desk.handle(RegistryChange(False, adapters=(adapter_of("sha256:1", uid="twin", model_name="twin"),)))
    pool = desk.core.state.pools["acme/p"]
    desk.runner("r", desired_version=pool.desired.list.version, ready=True)
    assert removed("twin") == ["twin"]


def test_an_adapter_that_comes_back_is_not_said_to_be_gone(desk: Any, removed: Any, adapter_of: Any) -> None:
    desk.start("sha256:1")
    uid = uid_of(desk, "sha256:1")
    back = adapter_of("sha256:1", uid=uid)
    desk.handle(RegistryChange(False, removed_adapters=(uid,)))
    desk.handle(RegistryChange(False, adapters=(back,)))
    assert uid not in removed()
    assert not desk.core.context.told.departures


def test_a_registry_that_comes_back_may_ask_in_its_snapshot(desk: Any, picked: Picked) -> None:
    desk.start("sha256:1")
    spec, uid = desk.core.state.pools["acme/p"].spec, uid_of(desk, "sha256:1")
    desk.handle(RegistryUp())
    effects = desk.handle(RegistryChange(True, pools=(spec,), removed_adapters=(uid,))) + desk.wait(60.0)
    assert [s.uid for s in picked(effects, AdapterStatus)] == [uid]
