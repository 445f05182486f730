"""A violation is logged with what was found, counted under the check that failed, and left to the caller."""

import logging

import pytest
from prometheus_client import REGISTRY

from weft.telemetry.invariants import MAX_VIOLATION_CHARS, violation


def check_pages(free: int, total: int) -> None:
    assert free <= total, ("free", free)


def check_books(free: int) -> None:
    check_pages(free, 10)


def counted(check: str) -> float:
    return REGISTRY.get_sample_value("weft_invariant_violations_total", {"check": check}) or 0.0


def test_what_holds_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    before = counted("check_pages")
    assert violation(check_books, 10) is None
    assert counted("check_pages") == before
    assert not caplog.records


def test_a_violation_is_logged_and_counted_under_the_innermost_check(caplog: pytest.LogCaptureFixture) -> None:
    before = counted("check_pages")
    assert violation(check_books, free=11) == "check_pages"
    assert counted("check_pages") == before + 1
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    about: dict[str, str] = record.kv  # type: ignore[attr-defined]
    assert about["check"] == "check_pages"
    assert about["where"].startswith("test_invariants.py:")
    assert about["failed"].startswith("assert free <= total")
    assert about["detail"].startswith("AssertionError: ('free', 11)")


def test_the_detail_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    def check_table() -> None:
        raise AssertionError("x" * 10 * MAX_VIOLATION_CHARS)

    assert violation(check_table) == "check_table"
    about: dict[str, str] = caplog.records[0].kv  # type: ignore[attr-defined]
    assert len(about["detail"]) == MAX_VIOLATION_CHARS


def test_a_state_that_cannot_be_read_is_a_violation(caplog: pytest.LogCaptureFixture) -> None:
    def check_owner() -> None:
        raise KeyError("a runner that is not there")

    assert violation(check_owner) == "check_owner"
    about: dict[str, str] = caplog.records[0].kv  # type: ignore[attr-defined]
    assert about["detail"].startswith("KeyError: ")
