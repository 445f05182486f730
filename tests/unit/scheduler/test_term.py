"""The term is durable and grows."""

from pathlib import Path

import pytest

from weft_scheduler.errors import TermNotDurable
from weft_scheduler.term import TermFile


def test_what_was_written_is_read_by_the_next(tmp_path: Path) -> None:
    terms = TermFile(tmp_path)
    assert terms.read() == 0
    terms.write(7)
    again = TermFile(tmp_path)
    assert again.read() == 7


def test_a_torn_write_leaves_the_old_term(tmp_path: Path) -> None:
    terms = TermFile(tmp_path)
    terms.write(7)
    (tmp_path / "term.tmp").write_text("9")  # a crash before the rename
    assert terms.read() == 7
    terms.write(8)
    assert terms.read() == 8


def test_a_file_that_is_no_number_is_said_and_not_taken_for_zero(tmp_path: Path) -> None:
    (tmp_path / "term").write_text("seven")
    terms = TermFile(tmp_path)
    with pytest.raises(TermNotDurable, match="not readable"):
        terms.read()


def test_a_term_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    terms = TermFile(tmp_path)
    (tmp_path / "term.tmp").mkdir()
    with pytest.raises(TermNotDurable, match="was not written"):
        terms.write(3)
