"""A file system of a few megabytes in memory, for tests that fill it."""

import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a file system of 4 MiB."""
    folder = tmp_path / "files"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", folder], check=False).returncode:
        pytest.skip("no mount of a tmpfs: run as root, in a container with CAP_SYS_ADMIN")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def fill(folder: Path) -> Path:
    """Fill the file system of a folder. Returns the file that is to be removed for room."""
    filler = folder / "filler"
    with suppress(OSError), filler.open("wb", 0) as file:
        while file.write(b"x" * 4096):
            pass
    return filler
