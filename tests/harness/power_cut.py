"""What of a folder is there after a power cut, at each moment of what a test does to it.

A file system may keep names and lose content, or the other way round, of everything that was not synced: `Disk` notes
what `os.fsync` was called for, and after each call that matters (sync, rename, link, removal) what could be left.
"""

import os
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

CALLS = ("fsync", "replace", "rename", "link", "unlink", "remove")


class _Moment(NamedTuple):
    names: dict[Path, int]  # every file there is, and its inode
    sizes: dict[int, int]
    synced: dict[int, bytes]  # content as it was synced last
    durable: dict[Path, dict[str, int]]  # of each folder, its names as they were synced last


class Disk:
    """A folder; `record` around what is done to it, then `states` for what a cut leaves at each moment."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self._monkeypatch = root, monkeypatch
        root.mkdir(exist_ok=True)
        self._synced = dict[int, bytes]()
        self._durable = dict[Path, dict[str, int]]()
        self._moments = list[_Moment]()
        self.acknowledged = dict[str, int]()  # what the test was promised, and before which moment

    @contextmanager
    def record(self) -> Generator[None]:
        """Record what is done; what is there already is on the disk."""
        for folder in (self.root, *(path for path in self.root.rglob("*") if path.is_dir())):
            self._durable[folder] = {path.name: path.stat().st_ino for path in folder.iterdir() if path.is_file()}
            self._synced |= {path.stat().st_ino: path.read_bytes() for path in folder.iterdir() if path.is_file()}
        with self._monkeypatch.context() as patched:
            for name in CALLS:
                patched.setattr(os, name, self._noting(name, getattr(os, name)))
            yield

    def done(self, what: str) -> None:
        """Note that something was acknowledged: it has to be there after every later cut."""
        self.acknowledged[what] = len(self._moments)

    def states(self, folder: Path) -> Iterator[tuple[Path, set[str]]]:
        """Yield folders as cuts leave them, each with what was acknowledged before."""
        seen = set[int]()
        for number, moment in enumerate(self._moments):
            acknowledged = {what for what, before in self.acknowledged.items() if before <= number}
            for kind, files in _left(moment).items():
                key = hash((frozenset((path, hash(data)) for path, data in files.items()), frozenset(acknowledged)))
                if key in seen:
                    continue
                seen.add(key)
                made = folder / f"{number}-{kind}"
                for path in (self.root, *moment.durable):
                    (made / path.relative_to(self.root)).mkdir(parents=True, exist_ok=True)
                for path, data in files.items():
                    target = made / path.relative_to(self.root)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(data)
                yield made, acknowledged

    def _noting(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any, **named: Any) -> Any:
            result = call(*arguments, **named)
            if name == "fsync":
                self._sync(arguments[0])
            self._note()
            return result

        return noted

    def _sync(self, descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}")
        inode = os.fstat(descriptor).st_ino
        if path.is_dir():
            folder = path.readlink()
            self._durable[folder] = {one.name: one.stat().st_ino for one in folder.iterdir() if one.is_file()}
        else:
            self._synced[inode] = path.read_bytes()

    def _note(self) -> None:
        files = {path: path.stat() for path in self.root.rglob("*") if path.is_file()}
        names = {path: stat.st_ino for path, stat in files.items()}
        sizes = {stat.st_ino: stat.st_size for stat in files.values()}
        self._moments.append(_Moment(names, sizes, dict(self._synced), dict(self._durable)))


def _left(moment: _Moment) -> dict[str, dict[Path, bytes]]:
    """Return the files by what the system had written of the unsynced: names alone, names and sizes, nothing."""
    durable = {folder / name: inode for folder, names in moment.durable.items() for name, inode in names.items()}
    synced = moment.synced
    return {
        "empty": {path: synced.get(inode, b"") for path, inode in moment.names.items()},
        "zeros": {
            path: synced.get(inode, b"").ljust(moment.sizes[inode], b"\0") for path, inode in moment.names.items()
        },
        "old-names": {path: synced.get(inode, b"") for path, inode in durable.items()},
    }
