"""The term is durable, grows, and its directory has one owner."""

from pathlib import Path

import pytest

from weft_scheduler.errors import TermNotDurable
from weft_scheduler.term import TermFile


def test_what_was_written_is_read_by_the_next(tmp_path: Path) -> None:
    terms = TermFile(tmp_path / "scheduler")
    assert terms.read() == 0
    terms.write(7)
    terms.close()
    again = TermFile(tmp_path / "scheduler")
    assert again.read() == 7
    again.close()


def test_a_torn_write_leaves_the_old_term(tmp_path: Path) -> None:
    terms = TermFile(tmp_path)
    terms.write(7)
    (tmp_path / "term.new").write_text("9")  # a crash before the rename
    assert terms.read() == 7
    terms.write(8)
    assert terms.read() == 8
    terms.close()


def test_a_directory_has_one_owner(tmp_path: Path) -> None:
    terms = TermFile(tmp_path)
    with pytest.raises(TermNotDurable, match="another scheduler"):
        TermFile(tmp_path)
    terms.close()
    TermFile(tmp_path).close()


def test_a_file_that_is_no_number_is_said_and_not_taken_for_zero(tmp_path: Path) -> None:
    (tmp_path / "term").write_text("seven")
    terms = TermFile(tmp_path)
    with pytest.raises(TermNotDurable, match="not readable"):
        terms.read()
    terms.close()


def test_a_directory_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TermNotDurable, match="cannot be used"):
        TermFile(tmp_path / "file" / "scheduler")


def test_a_term_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    terms = TermFile(tmp_path)
    (tmp_path / "term.new").mkdir()
    with pytest.raises(TermNotDurable, match="was not written"):
        terms.write(3)
    terms.close()
