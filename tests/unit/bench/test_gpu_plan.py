"""Rows of `gpu-bench` are named once, aims stand where they belong, and the page has all of them."""

import pickle

import pytest

from weft_bench.cpu_shapes import DISTINCT
from weft_bench.gpu_amounts import SQUARE, TINY, Amounts, Batch
from weft_bench.gpu_messages import share_of, shares
from weft_bench.gpu_page import NOWHERE, raw_path, unmeasured, write_page
from weft_bench.gpu_plan import AIMED_ROWS, BEYOND_FLOOR, CASES, Plan, decode_name
from weft_bench.lines import Origin, append

HERE = Origin(command="make gpu-bench", machine="a GPU", versions="torch 2")
TINY_PLAN = Plan(TINY, "tiny", "tiny")


@pytest.mark.parametrize("plan", [Plan(), Plan(shape="1B", text_shape="1B"), TINY_PLAN])
def test_no_two_rows_have_one_name(plan: Plan) -> None:
    names = [(row.case, row.metric) for case in CASES for row in plan.rows(case)]
    assert len(names) == len({*names})


def test_a_case_may_tell_what_it_announced_alone() -> None:
    plan, name = Plan(), SQUARE.case(Batch(64, DISTINCT))
    assert plan.row("operator", name, BEYOND_FLOOR).target == ">= 0.6"
    with pytest.raises(KeyError, match="has no row"):
        plan.row("operator", name, "beauty")


def test_aims_are_about_the_usual_shapes() -> None:
    aimed = {case: [row for row in Plan().rows(case) if row.target] for case in CASES}
    assert all(aimed[case] for case in ("operator", "decode", "prefill", "slots", "textgen"))
    assert not any(row.target for case in CASES for row in TINY_PLAN.rows(case))
    others = Plan(shape="1B", text_shape="1B")
    assert not any(row.target for case in CASES if case != "operator" for row in others.rows(case))
    base = decode_name(Plan(), Batch(AIMED_ROWS, "base"), 512)
    assert [row.target for row in aimed["decode"] if row.case == base] == [">= 0.85"]


def test_rows_of_an_adapter_are_beside_each_other() -> None:
    assert Batch(5, "Uniform").adapters == [0, 0, 1, 1, 2]
    assert (Batch(4, "base").adapters, Batch(4, "base").n_adapters) == ([None] * 4, 0)


def test_a_plan_is_the_same_in_another_process() -> None:
    plan = Plan()
    assert [pickle.loads(pickle.dumps(plan)).rows(case) for case in CASES] == [plan.rows(case) for case in CASES]


def test_the_number_of_texts_stands_in_the_name() -> None:
    rows = Plan(Amounts(texts=200)).rows("textgen")
    assert all("200 requests" in row.case for row in rows)


def test_shares_are_read_as_they_are_named() -> None:
    assert [share_of(name) for name in shares("8B", 3)] == [("8B", 0, 3), ("8B", 1, 3), ("8B", 2, 3)]
    assert [share_of(name) for name in shares("graphs", 1)] == [("graphs", 0, 1)]


def test_the_page_tells_what_was_measured_and_what_was_not(tmp_path) -> None:
    row = Plan().rows("prefill")[0]
    append(raw_path(tmp_path), [HERE.line(row.case, row.metric, 12.5, row.unit)])
    text = write_page(tmp_path).read_text()
    assert f"| {row.case} | {row.metric} | 12.5 | ms |" in text
    assert text.index("## Not measured yet") < text.index("## a GPU")
    left = unmeasured(Plan(), [HERE.line(row.case, row.metric, 12.5, row.unit)])
    assert len(left) == sum(len(Plan().rows(case)) for case in CASES) - 1
    assert {(line.machine, line.value, line.met) for line in left} == {(NOWHERE, None, None)}
