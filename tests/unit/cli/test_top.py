"""`weft top`: figures from two looks, what is read of a runner and of a gateway, and its naps."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.domain.adapter import AdapterState, Tier
from weft.domain.ids import Epoch, RunnerId
from weft.domain.request import Priority
from weft.domain.runner import (
    OffloadState,
    RunnerBook,
    RunnerFigures,
    RunnerReport,
    RunnerRole,
    RunnerSpec,
    SequenceState,
)
from weft_cli.keyboard import NAP_S, rest
from weft_cli.top import gateway_of, runner_of
from weft_cli.top_figures import MAX_ADAPTERS, GatewayNow, Look, RunnerNow, SequenceNow, tables_of

UPPER, LOWER = "sha256:" + "a" * 64, "sha256:" + "b" * 64
PARTS = {"in_flight": 3, "held": 1, "pools": [], "models": []}


def sequence(name: str, adapter: str, tokens: int, counter: int = 1) -> SequenceNow:
    return SequenceNow((name, 1, counter), adapter, tokens)


def runner(
    name: str,
    tokens: int,
    *sequences: SequenceNow,
    pool: str = "team/base",
    incarnation: str = "1",
    ready: bool = True,
    draining: bool = False,
    on_device: frozenset[str] = frozenset(),
) -> RunnerNow:
    return RunnerNow((name, incarnation), name, pool, ready, draining, tokens, 60, 64, 8, sequences, on_device)


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


def test_two_looks_at_one_moment_make_no_rate() -> None:
    look = Look(1.0, (runner("a", 5, sequence("r", UPPER, 3)),))
    assert tables_of(look, look).runners[0][4] == "-"
    assert tables_of(look, look).adapters[0][2] == "-"


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


def test_a_runner_that_drains_says_so_and_is_not_ready_for_more() -> None:
    tables = tables_of(None, Look(1.0, (runner("a", 0, draining=True),)))
    assert tables.runners[0][2] == "Draining"
    assert tables.summary.startswith("0 of 1 runners ready")


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


def test_only_the_busiest_adapters_are_shown() -> None:
    digests = [f"sha256:{i:064x}" for i in range(30)]
    gained = [sequence(f"r{i}", digest, i) for i, digest in enumerate(digests)]
    rows = tables_of(Look(0.0, ()), Look(1.0, (runner("a", 0, *gained),))).adapters
    assert [float(row[2]) for row in rows] == [29.0 - i for i in range(MAX_ADAPTERS)]


names = st.sampled_from(["a", "b", "c"])
sequences = st.builds(sequence, names, st.sampled_from(["", UPPER, LOWER]), st.integers(0, 99), st.integers(1, 3))
runners = st.builds(
    lambda name, tokens, some, pool, incarnation: runner(name, tokens, *some, pool=pool, incarnation=incarnation),
    names,
    st.integers(0, 1000),
    st.lists(sequences, max_size=4),
    st.sampled_from(["p/1", "p/2"]),
    st.sampled_from(["1", "2"]),
)
looks = st.lists(runners, max_size=3, unique_by=lambda one: one.incarnation).map(tuple)


@given(looks, looks)
def test_whatever_came_and_went_every_runner_has_a_row_and_sums_agree(
    before: tuple[RunnerNow, ...], now: tuple[RunnerNow, ...]
) -> None:
    tables = tables_of(Look(0.0, before), Look(1.0, now))
    assert [row[0] for row in tables.runners] == [one.name for one in now]
    assert {row[0] for row in tables.pools} == {one.pool for one in now}
    batch = sum(int(row[2].partition("/")[0]) for row in tables.pools)
    assert batch == sum(len(one.sequences) for one in now)
    assert all(float(row[2]) >= 0 for row in tables.adapters)


def test_a_report_of_a_runner_is_read_whole() -> None:
    spec = RunnerSpec(
        RunnerId("0123456789abcdef", "7"), "h:1", "team/base", page_tokens=16, total_pages=64, max_sequences=8,
        max_adapters=4, max_rank=8, max_context_tokens=1024,
    )  # fmt: skip
    book = RunnerBook(spec)
    book.apply(
        RunnerReport(
            1,
            True,
            RunnerFigures(60, tokens=1234, role=RunnerRole.PROMPT, pending_prompt_tokens=96, offload=OffloadState(0.5)),
            sequences=[SequenceState("r", Epoch(1, 2), "g", UPPER, 1, 1, 1, priority=Priority.BATCH)],
            adapters=[AdapterState(UPPER, Tier.DEVICE), AdapterState(LOWER, Tier.HOST)],
            progress=[9],
        )
    )
    assert runner_of(book) == RunnerNow(
        ("0123456789abcdef", "7"),
        "01234567",
        "team/base",
        True,
        False,
        1234,
        60,
        64,
        8,
        (SequenceNow(("r", 1, 2), UPPER, 9, line=True),),
        frozenset({UPPER}),
        "prompt",
        96,
        OffloadState(0.5),
    )


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


def test_the_gateways_status_is_read() -> None:
    status = PARTS | {
        "pools": [{"name": "team/base", "held": 3, "held_lines": 2}],
        "models": [{"id": "tiny", "digest": ""}, {"id": "acme/upper", "digest": UPPER}],
    }
    assert gateway_of(status) == GatewayNow(3, 1, {"team/base": 1}, {UPPER: "acme/upper"})


def test_no_sleep_is_so_long_that_a_ctrl_c_just_before_it_goes_unheard(monkeypatch: pytest.MonkeyPatch) -> None:
    """One between the interpreter's last look at signals and the system call does not end that call."""
    naps: list[float] = []
    clock = SimpleNamespace(sleep=naps.append, monotonic=lambda: 7.0 + sum(naps))
    monkeypatch.setattr("weft_cli.keyboard.time", clock)
    rest(1.1)
    assert sum(naps) == pytest.approx(1.1)
    assert max(naps) <= NAP_S
