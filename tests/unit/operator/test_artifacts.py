"""One source over time: questions, answers, what stays good."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.operator.planning import digest, failed, pool_ref, verified
from weft.artifacts.depot_api import BaseRef, CredentialsRef, ResolveRequest
from weft_operator.core import OperationStatus
from weft_operator.core.artifacts import (
    MAX_FAILURE_PAUSE_S,
    Resolution,
    VerifiedArtifact,
    from_status,
    jittered,
    started,
    unreachable,
    updated,
)

ONE = ResolveRequest("adapter", "file:a", "acme", base=BaseRef(digest("b"), "base", ("tiny",)), max_rank=64)
TWO = ResolveRequest("adapter", "file:b", "acme", base=BaseRef(digest("b"), "base"), max_rank=64)


def test_a_body_leaves_out_what_is_absent() -> None:
    assert ONE.body() == {
        "kind": "adapter",
        "uri": "file:a",
        "namespace": "acme",
        "base": {"digest": digest("b"), "name": "base", "aliases": ["tiny"]},
        "maxRank": 64,
    }
    assert ResolveRequest("model", "file:m", "n", "main", digest("a"), version="v1").body() == {
        "kind": "model",
        "uri": "file:m",
        "revision": "main",
        "digest": digest("a"),
        "namespace": "n",
    }


def test_steps_towards_a_repeated_answer_are_no_news() -> None:
    again = started(updated(started(None, ONE, 0.0), verified("a"), 1.0), ONE, 0.0)
    assert updated(again, OperationStatus("Validated", None, {"rank": 1}), 2.0) == again
    assert again.answer == verified("a")


def test_another_question_forgets_the_answer_and_keeps_what_is_good() -> None:
    first = updated(started(None, ONE, 0.0), verified("a"), 1.0, pool_ref())
    other = started(first, TWO, 0.0)
    assert other.answer == OperationStatus()
    assert (
        other.verified
        == first.verified
        == VerifiedArtifact(digest("a"), verified("a").verdict or {}, pool_ref(), digest("b"))
    )


def test_a_depot_that_cannot_be_asked_says_nothing_about_the_source() -> None:
    first = updated(started(None, ONE, 0.0), verified("a"), 1.0)
    after = unreachable(started(first, ONE, 0.0), 5.0)
    assert (after.answer, after.verified, after.running) == (first.answer, first.verified, False)
    assert after.due_at(2.0) == 7.0


@given(st.lists(st.sampled_from(["good", "bad", "silent"]), max_size=40))
def test_the_pause_is_bounded_and_success_resets_it(history: list[str]) -> None:
    resolution: Resolution | None = None
    for now, what in enumerate(history):
        resolution = started(resolution, ONE, 0.0)
        if what == "silent":
            resolution = unreachable(resolution, float(now))
        else:
            resolution = updated(resolution, verified("a") if what == "good" else failed("NotFinite"), float(now))
        pause_s = resolution.due_at(2.0) - now
        assert 2.0 <= pause_s <= MAX_FAILURE_PAUSE_S
        if what == "good":
            assert pause_s == 2.0


@pytest.mark.parametrize("uri", [f"hf:org/{name}" for name in "abcdefgh"])
def test_a_source_is_not_resolved_before_retry_after(uri: str) -> None:
    request = replace(ONE, uri=uri)
    answer = replace(failed("SourceUnreachable"), retry_after_s=900.0)
    assert updated(started(None, request, 0.0), answer, 10.0).due_at(2.0) >= 910.0


def test_sources_of_one_host_are_asked_for_within_a_tenth_of_their_period_but_not_together() -> None:
    periods = sorted(jittered(replace(ONE, uri=f"hf:org/{number}"), 100.0) for number in range(100))
    assert 90 <= periods[0] < 92
    assert 108 < periods[-1] <= 110


@pytest.mark.parametrize("uri", ["file:a", "hf:org/a"])
@pytest.mark.parametrize("reason", ["NotFinite", "SourceUnreachable"])
@pytest.mark.parametrize(("failures", "pause_s"), [(1, 2.0), (3, 8.0), (9, 512.0), (99, 2048.0)])
def test_a_failing_source_is_asked_ever_less_often(uri: str, reason: str, failures: int, pause_s: float) -> None:
    resolution, request = Resolution(ONE), replace(ONE, uri=uri)
    for _ in range(failures):
        resolution = updated(started(resolution, request, 0.0), failed(reason), 10.0)
    most_s = 60.0 if reason == "SourceUnreachable" else MAX_FAILURE_PAUSE_S
    expected_s = jittered(request, min(pause_s, 600.0)) if request.remote else min(pause_s, most_s)
    assert resolution.due_at(2.0) == 10.0 + expected_s


@pytest.mark.parametrize("reason", ["SecretMissing", "SecretInvalid", "SourceForbidden", "SourceNotFound"])
@pytest.mark.parametrize(("credentials", "within_s"), [(CredentialsRef("hub"), 60.0), (None, 660.0)])
def test_a_corrected_secret_is_seen_soon(reason: str, credentials: CredentialsRef | None, within_s: float) -> None:
    resolution = Resolution(replace(ONE, uri="hf:org/a", credentials_ref=credentials))
    for _ in range(9):
        resolution = updated(started(resolution, resolution.request, 0.0), failed(reason), 0.0)
    assert 0.8 * within_s <= resolution.due_at(60.0) <= within_s


@pytest.mark.parametrize(
    ("status", "answer", "has_good"),
    [
        ({"observedGeneration": 2, "digest": digest("a")}, OperationStatus(), True),
        ({"observedGeneration": 1, "digest": digest("a")}, None, False),  # of which pool is not said
        ({"observedGeneration": 1, "digest": digest("a"), "pool": "default/base"}, OperationStatus(), True),
        ({"observedGeneration": 2}, None, False),
        ({}, None, False),
    ],
)
def test_a_status_has_what_was_good(status: dict[str, Any], answer: OperationStatus | None, has_good: bool) -> None:
    found = from_status(ONE, status, 2, pool_ref(), 0.0)
    assert (found.answer if found else None) == answer
    assert bool(found and found.verified) is has_good


def test_a_status_has_a_failure_with_its_reason() -> None:
    conditions = [
        {"type": "Validated", "status": "True", "reason": "Validated", "message": ""},
        {"type": "Fetched", "status": "False", "reason": "NotFinite", "message": "NaN"},
    ]
    found = from_status(ONE, {"observedGeneration": 1, "conditions": conditions}, 1, None, 0.0)
    assert found is not None
    assert (found.answer.reason, found.answer.message, found.verified) == ("NotFinite", "NaN", None)
    assert found.answer.verdict is not None
