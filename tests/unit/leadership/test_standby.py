"""Who a process is, and a turn that needs no Lease. What needs one is in `tests/operator/test_standby.py`."""

import asyncio
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Gauge
from pydantic import ValidationError

from weft.leadership.election import new_identity
from weft.leadership.standby import Turn, holder_name, turn_of
from weft.process import CannotStart
from weft.settings import StandbySettings
from weft.telemetry.probes import Probes


def gauge() -> Gauge:
    return Gauge("weft_test_leader", "of a process", registry=CollectorRegistry())


@pytest.fixture
def probes() -> Iterator[Probes]:
    probes = Probes("127.0.0.1:0", lambda: None)
    probes.start()
    yield probes
    probes.close()


def test_a_name_is_the_data_directorys_and_no_other_has_it(tmp_path: Path) -> None:
    (first := tmp_path / "first").mkdir()
    (second := tmp_path / "second").mkdir()
    assert holder_name(first) == holder_name(first)
    assert holder_name(first) != holder_name(second)


async def test_without_a_lease_a_process_acts_at_once_and_for_ever(tmp_path: Path, probes: Probes) -> None:
    identity = partial(holder_name, tmp_path)
    async with turn_of(StandbySettings(), identity, asyncio.Event(), probes, leader := gauge()) as turn:
        assert isinstance(turn, Turn)
        assert leader.collect()[0].samples[0].value == 1
        assert (turn.term, turn.lost) == (0, None)
        turn.require()
    assert list(tmp_path.iterdir()) == []


async def test_a_lease_without_a_cluster_cannot_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, probes: Probes
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "absent"))
    settings = StandbySettings(lease="weft-system/weft-scheduler")
    with pytest.raises(CannotStart, match="absent"):
        async with turn_of(settings, new_identity, asyncio.Event(), probes, gauge()):
            pass


@pytest.mark.parametrize("lease", ["weft-scheduler", "weft-system/", "/weft-scheduler", "a/b/c", "Weft/scheduler"])
def test_a_lease_is_named_with_its_namespace(lease: str) -> None:
    with pytest.raises(ValidationError, match="pattern"):
        StandbySettings(lease=lease)
