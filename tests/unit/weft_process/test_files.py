"""A file is replaced whole, and durable before the caller goes on."""

import os
import stat
from pathlib import Path

import pytest

from weft.files import write_atomically
from weft.process import lock_data_dir


def test_a_file_is_made_and_replaced_with_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "objects.json"
    write_atomically(path, b"a long first content")
    write_atomically(path, memoryview(b"second"))
    assert path.read_bytes() == b"second"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [file.name for file in tmp_path.iterdir()] == ["objects.json"]


def test_a_torn_write_leaves_the_old_file_and_the_next_write_clears_up(tmp_path: Path) -> None:
    path = tmp_path / "term"
    write_atomically(path, b"7")
    (tmp_path / "term.tmp").write_bytes(b"a crash before the rename")
    assert path.read_bytes() == b"7"
    write_atomically(path, b"8")
    assert path.read_bytes() == b"8"
    assert not (tmp_path / "term.tmp").exists()


def test_content_is_synced_before_the_rename_and_the_folder_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, bool]] = []
    real, path = os.fsync, tmp_path / "uuid"

    def watched(descriptor: int) -> None:
        seen.append((os.readlink(f"/proc/self/fd/{descriptor}"), path.exists()))  # noqa: PTH115 (a name of the kernel)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    write_atomically(path, b"x")
    assert seen == [(f"{path}.tmp", False), (str(tmp_path), True)]


def test_files_of_a_component_belong_to_its_user_alone(tmp_path: Path) -> None:
    with lock_data_dir(tmp_path / "data", "depot"):
        (tmp_path / "data" / "blob").touch()
        (tmp_path / "data" / "folder").mkdir()
    (tmp_path / "later").touch()
    made = [path.stat().st_mode & 0o077 for path in (tmp_path / "data").iterdir()]
    assert made == [0, 0, 0]
    assert (tmp_path / "later").stat().st_mode & 0o044 == 0o044
