"""The term is durable and grows, whatever became of the file."""

from pathlib import Path

import pytest

from weft.domain.ids import MAX_TERM
from weft_scheduler.errors import TermNotDurable
from weft_scheduler.term_file import TERM_EPOCH_S, TermFile

DAY_S = 86_400


def at(day: int, folder: Path) -> TermFile:
    return TermFile(folder, clock=lambda: TERM_EPOCH_S + day * DAY_S)


def test_each_start_is_one_above_what_was_written(tmp_path: Path) -> None:
    terms = at(1, tmp_path)
    assert terms.read() is None
    terms.write(7)
    assert at(9, tmp_path).next() == 8
    assert at(9, tmp_path).read() == 8


def test_a_leases_term_is_taken_unless_more_was_used_here(tmp_path: Path) -> None:
    assert [at(1, tmp_path).next(at_least=term) for term in (5, 8, 3)] == [5, 8, 9]


def test_a_directory_that_was_lost_begins_above_all_that_was_used_in_it(tmp_path: Path) -> None:
    first = at(300, tmp_path).next()
    used = [at(300, tmp_path).next() for _ in range(20)]
    (tmp_path / "term").unlink()
    assert first < used[-1] < at(301, tmp_path).next()


@pytest.mark.parametrize(
    "content", [b"seven", b"", b"-3", b"\xff\xfe", b"%d\n" % MAX_TERM, b"%d\n" % 2**64, b"9" * 5000]
)
def test_a_file_without_a_term_is_replaced(tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "term").write_bytes(content)
    assert at(300, tmp_path).next() == 300 * DAY_S
    assert "terms start again" in caplog.text
    assert at(300, tmp_path).next() == 300 * DAY_S + 1


def test_a_clock_before_the_first_term_gives_one_all_the_same(tmp_path: Path) -> None:
    assert at(-9_000, tmp_path).next() == 1


def test_a_term_that_cannot_be_read_or_written_is_said(tmp_path: Path) -> None:
    terms = at(1, tmp_path)
    (tmp_path / "term.tmp").mkdir()
    with pytest.raises(TermNotDurable, match="was not written"):
        terms.next()
    (tmp_path / "term").mkdir()
    with pytest.raises(TermNotDurable, match="not readable"):
        terms.read()
