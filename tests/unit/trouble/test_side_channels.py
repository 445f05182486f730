from hypothesis import given
from hypothesis import strategies as st

from weft_stage.lines import Origin
from weft_trouble.side_channels import CLOSED, LOAD, Timed, auc, lines

times = st.lists(st.integers(0, 8).map(float), min_size=1, max_size=20)


@given(times, times)
def test_the_share_is_that_of_all_pairs(quicker: list[float], slower: list[float]) -> None:
    wins = sum((s > q) + (s == q) / 2 for s in slower for q in quicker)
    assert abs(auc(quicker, slower) - wins / (len(quicker) * len(slower))) < 1e-9


def test_a_secret_that_is_to_be_closed_has_a_target_whichever_kind_is_quicker() -> None:
    for quicker, slower, met in (([1.0, 2.0], [1.0, 2.0], True), ([1.0], [2.0], False), ([2.0], [1.0], False)):
        (line,) = [one for one in lines(Origin("", "", ""), Timed(CLOSED[0], quicker, slower)) if one.metric == "AUC"]
        assert line.met is met
    stated = lines(Origin("", "", ""), Timed(LOAD, [1.0], [2.0]))
    assert [line.met for line in stated] == [None] * 3
