"""Books of reports and of routes hold after changes what their sender holds."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.domain import runner
from weft.domain.adapter import AdapterState, Tier
from weft.domain.ids import Epoch, RunnerId
from weft.domain.routes import KeyRoute, PoolRoute, Route, RouteBook, Routes, RoutesGap
from weft.domain.runner import (
    ReportGap,
    ReportInvalid,
    RunnerBook,
    RunnerFigures,
    RunnerReport,
    RunnerSpec,
    SequenceState,
)

SPEC = RunnerSpec(
    RunnerId("ns.u", "i"), "h:1", "ns/p", page_tokens=16, total_pages=64, max_sequences=4, max_adapters=4, max_rank=8,
    max_context_tokens=1024,
)  # fmt: skip
IDS = ["a", "b", "c"]
NINE = st.integers(1, 9)
SEQUENCES = st.lists(
    st.builds(SequenceState, st.sampled_from(IDS), st.just(Epoch(1, 1)), st.just("g"), st.just(""), NINE, NINE, NINE),
    unique_by=lambda one: one.request_id,
)
ADAPTERS = st.lists(
    st.builds(AdapterState, st.sampled_from(IDS), st.sampled_from(Tier)), unique_by=lambda one: one.digest
)
CHANGES = st.lists(
    st.tuples(SEQUENCES, st.sets(st.sampled_from(IDS)), ADAPTERS, st.sets(st.sampled_from(IDS))), max_size=8
)


@given(CHANGES)
def test_a_book_of_changes_equals_the_book_of_the_whole(changes: list[Any]) -> None:
    book = RunnerBook(SPEC)
    book.apply(RunnerReport(7, True))
    sequences: dict[str, SequenceState] = {}
    adapters: dict[str, AdapterState] = {}
    for version, (changed, ended, moved, removed) in enumerate(changes, 8):
        for ids, gone in ((sequences, ended), (adapters, removed)):
            for one in gone:
                ids.pop(one, None)
        sequences |= {one.request_id: one for one in changed}
        adapters |= {one.digest: one for one in moved}
        book.apply(RunnerReport(version, False, RunnerFigures(), changed, tuple(ended), moved, tuple(removed)))
        whole = RunnerBook(SPEC)
        whole.apply(book.full())
        for one in (book, whole):
            assert list(one.sequences.items()) == list(sequences.items())
            assert one.adapters == adapters
            assert one.reserved_pages == sum(sequence.reserved_pages for sequence in sequences.values())


def test_a_gap_leaves_the_book_as_it_was() -> None:
    book = RunnerBook(SPEC)
    with pytest.raises(ReportGap):
        book.apply(RunnerReport(1, False))
    book.apply(RunnerReport(5, True, RunnerFigures(tokens=9)))
    for version in (5, 7):
        with pytest.raises(ReportGap):
            book.apply(RunnerReport(version, False))
    assert (book.version, book.figures.tokens) == (5, 9)
    book.apply(RunnerReport(3, True))  # a new stream: what counts is the whole state


@pytest.mark.parametrize(
    "report",
    [
        RunnerReport(1, True, RunnerFigures(free_pages=65)),
        RunnerReport(1, True, RunnerFigures(used_pages=65)),
        RunnerReport(1, True, RunnerFigures(adapter_pages=65)),
        RunnerReport(1, True, sequences=[SequenceState(str(n), Epoch(1, 1), "g", "", 1, 1, n) for n in range(9)]),
    ],
)
def test_a_report_beyond_the_specification_is_refused(report: RunnerReport) -> None:
    with pytest.raises(ReportInvalid, match=r"ns\.u"):
        RunnerBook(SPEC).apply(report)


def test_a_specification_says_what_a_runner_runs_well_by_the_line_through_its_measured_steps() -> None:
    spec = replace(SPEC, max_sequences=20, best_batch=11, step_ms_1=10.0, step_ms_best=20.0)
    assert [spec.step_s(count) for count in (0, 1, 6, 11)] == [0.010, 0.010, 0.015, 0.020]
    within = {0.0: 20, 0.005: 1, 0.010: 1, 0.0149: 5, 0.015: 6, 0.020: 11, 1.0: 20}
    assert {seconds: spec.sequences_within(seconds) for seconds in within} == within
    assert (spec.good_sequences, spec.packed_sequences) == (11, 13), "a tenth slower"
    assert replace(spec, step_ms_best=10.5).packed_sequences == 16, "half as many more at the most"
    assert replace(spec, best_batch=99).good_sequences == 20
    two = replace(spec, best_batch=2)
    assert (two.step_s(2), two.sequences_within(0.020), two.sequences_within(0.030)) == (0.020, 2, 3)
    for unmeasured in (replace(spec, best_batch=1), replace(spec, step_ms_best=10.0), SPEC):
        assert unmeasured.sequences_within(0.001) == unmeasured.max_sequences
    assert (SPEC.good_sequences, SPEC.packed_sequences, SPEC.step_s(3)) == (4, 4, 0.0)
    assert [replace(SPEC, total_pages=pages).kv_pages for pages in (1, 64)] == [1, 16]


NAMES = st.lists(st.sampled_from(IDS), unique=True).map(tuple)


def test_changes_do_not_make_a_book_larger_than_a_full_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "MAX_BOOK_CHARS", 90)  # of one sequence and one adapter
    book = RunnerBook(SPEC)
    book.apply(RunnerReport(1, True))
    sequence = SequenceState("r" * 10, Epoch(1, 1), "g" * 10, "a" * 10, 1, 1, 1)
    adapters = [AdapterState(f"{i:010}", Tier.DISK, error="e" * 50) for i in range(2)]
    for version in range(2, 9, 3):  # what is replaced or goes makes space
        book.apply(RunnerReport(version, False, sequences=[sequence], adapters=[adapters[0]]))
        book.apply(RunnerReport(version + 1, False, ended=[sequence.request_id]))
        book.apply(RunnerReport(version + 2, False, removed_adapters=[adapters[0].digest], adapters=[adapters[1]]))
        book.apply(RunnerReport(version + 2, True))
    with pytest.raises(ReportInvalid, match="150 characters"):
        book.apply(RunnerReport(11, False, sequences=[sequence], adapters=adapters))


@given(st.lists(st.tuples(*[NAMES] * 6), max_size=6))
def test_a_table_of_changes_equals_the_whole_table(changes: list[Any]) -> None:
    book = RouteBook()
    book.apply(Routes(1, True))
    models, pools, keys = set[str](), set[str](), set[str]()
    for version, (routes, no_models, rows, no_pools, hashes, no_keys) in enumerate(changes, 2):
        models, pools, keys = (
            models - set(no_models) | set(routes), pools - set(no_pools) | set(rows), keys - set(no_keys) | set(hashes),
        )  # fmt: skip
        book.apply(
            Routes(
                version, False, version - 1,
                tuple(Route(name, "ns", "ns/p", "d") for name in routes), no_models,
                tuple(PoolRoute(name, "", "") for name in rows), no_pools,
                tuple(KeyRoute(name, "ns", "id") for name in hashes), no_keys,
            )
        )  # fmt: skip
        assert (set(book.routes), set(book.pools), set(book.keys)) == (models, pools, keys)


@given(st.lists(st.tuples(*[st.sets(st.sampled_from("abcdefg"))] * 3), min_size=1, max_size=4), st.integers(1, 3))
def test_tables_that_come_in_parts_are_whole_with_the_last_part(tables: list[Any], most: int) -> None:
    book = RouteBook()
    for version, (models, rows, hashes) in enumerate(tables, 1):
        table = Routes(
            version,
            full=True,
            routes=tuple(Route(name, "ns", f"ns/p{version}", "d") for name in sorted(models)),
            pools=tuple(PoolRoute(name, "", "") for name in sorted(rows)),
            keys=tuple(KeyRoute(name, "ns", "id") for name in sorted(hashes)),
            keys_known=True,
        )
        before, (*parts, last) = dict(book.routes), table.parts(most)
        for part in parts:
            book.apply(part)
            assert before.keys() <= book.routes.keys(), "nothing is missing while the table comes"
            assert book.keys_known == (version > 1), "a key may come with the next part"
        book.apply(last)
        assert set(book.routes.values()) == set(table.routes)
        assert (book.pools.keys(), book.keys.keys()) == (rows, hashes)
        assert all(len(part.routes) <= most for part in (*parts, last))


def test_a_change_of_another_table_is_a_gap() -> None:
    book = RouteBook()
    book.apply(Routes(5, True))
    with pytest.raises(RoutesGap):
        book.apply(Routes(7, False, base_version=6))
    assert book.version == 5
