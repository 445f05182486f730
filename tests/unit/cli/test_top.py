"""`weft top`: figures from two looks, and its naps."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from weft.domain.runner import OffloadState
from weft_cli.keyboard import NAP_S, rest
from weft_cli.top_figures import GatewayNow, Look, RunnerNow, SequenceNow, tables_of

UPPER, LOWER = "sha256:" + "a" * 64, "sha256:" + "b" * 64


def sequence(name: str, adapter: str, tokens: int, counter: int = 1) -> SequenceNow:
    return SequenceNow((name, 1, counter), adapter, tokens)


def runner(
    name: str,
    tokens: int,
    *sequences: SequenceNow,
    pool: str = "team/base",
    incarnation: str = "1",
    ready: bool = True,
    on_device: frozenset[str] = frozenset(),
) -> RunnerNow:
    return RunnerNow((name, incarnation), name, pool, ready, False, tokens, 60, 64, 8, sequences, on_device)


def test_rates_are_tokens_over_the_time_between_two_looks() -> None:
    before = Look(10.0, (runner("a", 100), runner("b", 0)))
    now = Look(12.5, (runner("a", 350), runner("b", 5)))
    tables = tables_of(before, now)
    assert [row[4] for row in tables.runners] == ["100.0", "2.0"]
    assert [row[3] for row in tables.pools] == ["102.0"]
    assert tables.summary == "2 of 2 runners ready, 102.0 tokens/s"


@pytest.mark.parametrize("before", [None, Look(0.0, ()), Look(0.0, (runner("a", 10, incarnation="0"),))])
def test_a_runner_that_was_not_there_before_has_no_rate_yet(before: Look | None) -> None:
    tables = tables_of(before, Look(1.0, (runner("a", 5),)))
    assert tables.runners[0][4] == tables.pools[0][3] == "-"
    assert tables.summary == "1 of 1 runners ready, - tokens/s"


def test_accepted_tokens_are_those_of_a_draft_between_two_looks() -> None:
    def drafting(drafts: int, accepted: int) -> Look:
        return Look(0.0, (replace(runner("a", 0), drafts=drafts, accepted_tokens=accepted),))

    rows = [tables_of(before, drafting(14, 45)).runners[0] for before in (drafting(10, 30), drafting(14, 45), None)]
    assert [row[-1] for row in rows] == ["3.8", "-", "-"]


def test_a_pool_is_the_sum_of_its_runners_and_who_waits_for_it() -> None:
    gateway = GatewayNow(5, 2, {"team/base": 2})
    one, two = sequence("r1", "", 1), SequenceNow(("r2", 1, 1), "", 1, line=True)
    now = Look(1.0, (runner("a", 0, one, two), runner("b", 0, ready=False), runner("c", 0, pool="x/y")), gateway)
    tables = tables_of(None, now)
    assert tables.pools == [
        ("team/base", "1/2", "2/16", "-", "120/128", "2", "1"),
        ("x/y", "1/1", "0/8", "-", "60/64", "-", "0"),
    ], "a pool that the gateway does not show has an unknown queue, not an empty one"
    assert tables.summary.endswith("5 requests, 2 waiting")


def test_adapters_are_ranked_by_what_their_sequences_gained() -> None:
    before = Look(0.0, (runner("a", 0, sequence("r1", UPPER, 100), sequence("r2", LOWER, 5)),))
    now = Look(
        2.0,
        (
            runner("a", 0, sequence("r1", UPPER, 104), sequence("r2", LOWER, 11), on_device=frozenset({UPPER, LOWER})),
            runner("b", 0, sequence("r3", LOWER, 4), sequence("r4", "", 900), on_device=frozenset({LOWER})),
        ),
        GatewayNow(4, 0, {}, {LOWER: "acme/lower"}),
    )
    assert tables_of(before, now).adapters == [("acme/lower", "2", "5.0", "2"), ("aaaaaaaaaaaa", "1", "2.0", "1")], (
        "the base is no adapter; one without a known name is its digest"
    )


def test_a_sequence_that_began_again_elsewhere_has_gained_its_own_tokens_only() -> None:
    before = Look(0.0, (runner("a", 0, sequence("r1", UPPER, 100)),))
    now = Look(1.0, (runner("b", 0, sequence("r1", UPPER, 30, counter=2)),))
    assert tables_of(before, now).adapters[0][2] == "30.0"


def test_an_offloading_runner_has_a_row_with_what_it_was_predicted_to_take() -> None:
    busy = OffloadState(0.25, 2.2e9, 610.4, 640.2, 599.0, disk_bound=True)
    idle = OffloadState(1.0, alone_ms=9.87)
    states = (busy, idle, OffloadState(0.5), None)
    now = Look(1.0, tuple(replace(runner(str(i), 0), offload=state) for i, state in enumerate(states)))
    assert tables_of(None, now).offloaded == [
        ("0", "25%", "2.20 GB/s", "640", "610", "599 ms a token, the disk's bound"),
        ("1", "100%", "-", "-", "-", "9.87 ms a token"),
        ("2", "50%", "-", "-", "-", "-"),
    ]


def test_no_sleep_is_so_long_that_a_ctrl_c_just_before_it_goes_unheard(monkeypatch: pytest.MonkeyPatch) -> None:
    """One between the interpreter's last look at signals and the system call does not end that call."""
    naps: list[float] = []
    clock = SimpleNamespace(sleep=naps.append, monotonic=lambda: 7.0 + sum(naps))
    monkeypatch.setattr("weft_cli.keyboard.time", clock)
    rest(1.1)
    assert sum(naps) == pytest.approx(1.1)
    assert max(naps) <= NAP_S
