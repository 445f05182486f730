"""The folder of `file:` URIs outlives the command that named it."""

from pathlib import Path

import pytest

from weft_operator.errors import FileRootGone
from weft_operator.local import settle_file_root


def test_a_folder_that_was_named_once_is_used_by_the_next_start(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "s\u00e9cond\n"
    for folder in (first, second):
        folder.mkdir()
        assert settle_file_root(tmp_path, folder) == folder
        assert settle_file_root(tmp_path, None) == folder


def test_where_none_was_ever_named_there_is_none(tmp_path: Path) -> None:
    assert settle_file_root(tmp_path, None) is None
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_gone_is_reported_and_can_be_named_anew(tmp_path: Path) -> None:
    gone, there = tmp_path / "gone", tmp_path / "there"
    gone.mkdir()
    there.mkdir()
    settle_file_root(tmp_path, gone)
    gone.rmdir()
    with pytest.raises(FileRootGone, match=r"gone.*--file-root"):
        settle_file_root(tmp_path, None)
    settle_file_root(tmp_path, there)
    assert settle_file_root(tmp_path, None) == there
