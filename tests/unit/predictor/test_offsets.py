from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft_predictor.core import SHRINK_K, Offsets, shrunk_median
from weft_predictor.core import offsets as core

residual = st.floats(-10, 10)
few_or_many = st.lists(residual, max_size=20) | st.lists(residual, min_size=core.WINDOW + 1, max_size=3 * core.WINDOW)


def group_of(adapter, tenant=""):
    return tenant, adapter


steps = st.lists(st.tuples(st.sampled_from("abcd"), residual), max_size=200)


@given(few_or_many)
def test_the_offset_is_the_shrunk_median_of_the_latest_residuals(residuals):
    offsets = Offsets()
    for value in residuals:
        offsets.learn(group_of("a"), value)
    latest = residuals[-core.WINDOW :]
    expected = median(latest) * len(latest) / (len(latest) + SHRINK_K) if latest else 0.0
    assert offsets.of_group(group_of("a")) == pytest.approx(expected)
    assert abs(offsets.of_group(group_of("a"))) <= max(map(abs, residuals), default=0.0)


@given(steps)
def test_adapters_do_not_touch_each_other_and_the_state_can_be_put_back(events):
    offsets = Offsets()
    for adapter, value in events:
        offsets.learn(group_of(adapter), value)
    for adapter in "abcd":
        mine = [value for other, value in events if other == adapter][-core.WINDOW :]
        assert offsets.of_group(group_of(adapter)) == pytest.approx(shrunk_median(mine))
    again = Offsets()
    for group, window in offsets.items():
        again.restore(group, window, offsets.prior(group))
    assert dict(again.items()) == dict(offsets.items())
    assert [again.of_group(group_of(adapter)) for adapter in "abcd"] == [
        offsets.of_group(group_of(adapter)) for adapter in "abcd"
    ]


def test_a_tenant_has_a_window_of_its_own_that_begins_with_the_offset_of_the_adapter_of_then():
    offsets = Offsets()
    for _ in range(core.WINDOW):
        offsets.learn(("", "base"), 1.0)
    assert offsets.of_group(("acme", "base")) == offsets.of_group(("", "base")) == pytest.approx(64 / 72)
    for _ in range(2 * core.WINDOW):
        offsets.learn(("acme", "base"), -1.0)
    before = offsets.of_group(("acme", "base"))
    assert before == pytest.approx((-64 + 8 * 64 / 72) / 72)
    for _ in range(core.WINDOW):
        offsets.learn(("", "base"), 9.0)
    assert offsets.of_group(("acme", "base")) == before


def test_one_outlier_moves_nothing_much():
    offsets = Offsets()
    for value in (0.1, 0.2, 0.15, 0.12, 9.0):
        offsets.learn(group_of("a"), value)
    assert offsets.of_group(group_of("a")) < 0.2


def test_the_adapter_heard_of_longest_ago_is_forgotten_first():
    offsets = Offsets(max_adapters=2)
    for adapter in ("a", "b", "a", "c"):
        offsets.learn(group_of(adapter), 1.0)
    assert len(offsets) == 2
    assert offsets.of_group(group_of("b")) == 0.0
    assert offsets.of_group(group_of("a")) > 0


@given(few_or_many)
def test_the_offset_of_a_moment_is_known_for_a_window_of_changes_and_then_forgotten(residuals):
    offsets, past = Offsets(), []
    for now, value in enumerate(residuals):
        past.append(offsets.of_group(group_of("a")))
        offsets.learn(group_of("a"), value, now)
    for then in range(len(residuals)):
        found = offsets.at_version(group_of("a"), then)
        assert (found is None) == (then <= len(residuals) - 1 - (len(residuals) - 1) % 8 - core.WINDOW)
        assert found is None or found in [*past[then : then + 8], offsets.of_group(group_of("a"))]
    assert offsets.at_version(group_of("a"), len(residuals)) == offsets.of_group(group_of("a"))
    assert offsets.at_version(group_of("never seen"), 0) == 0.0
