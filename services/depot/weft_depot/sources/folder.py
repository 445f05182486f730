"""A folder below a root, read without ever leaving the root.

Containment: the path has no `..`, no empty part and does not start at `/`. Links are resolved first, and the result has
to lie below the root. It is then opened part by part from the root's descriptor without following any link. So a link
changed between check and use leads nowhere. Links below the root work: Hugging Face caches and mounted volumes use
them.
"""

import contextlib
import hashlib
import os
import stat
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import BinaryIO

from weft.artifacts.digest import is_file_name
from weft.artifacts.errors import Reason, Refused
from weft.chat_template import NAMED_FILE
from weft.domain.text import quoted
from weft_depot.files import FileFilter
from weft_depot.sources.source import Identity, Marks

MAX_ENTRIES = 10_000
# A file changed this recently before its `stat` may change again under the same time stamp.
RACY_NS = 2_000_000_000
CTIME = 4  # of an Identity, the last


class Root:
    """A folder with readable files below it. `called` is its name in messages, for example `the file root`."""

    def __init__(self, root: Path, called: str, wall_ns: Callable[[], int]) -> None:
        """Set the folder. `wall_ns` is the clock of the file system's time stamps."""
        self._root, self._called, self._wall_ns = Path(os.path.realpath(root)), called, wall_ns

    @contextlib.contextmanager
    def open(self, path: Path, uri: str, file_filter: FileFilter) -> Generator["FolderSnapshot"]:
        """Open the folder at a relative path. Raises Refused: BadURI, SourceNotFound, TooLarge."""
        folder = self._resolve(path)
        fd = self._walk(folder, os.O_DIRECTORY)
        try:
            place = (str(self._root / path), identity_of(os.fstat(fd)))
            yield FolderSnapshot(self, folder, place, _list(fd, uri, file_filter), self._wall_ns())
        finally:
            os.close(fd)

    def file(self, folder: Path, name: str) -> BinaryIO:
        """Open a regular file of a folder, through links below the root."""
        fd = self._walk(self._resolve(folder / name), os.O_NONBLOCK)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise Refused(Reason.SOURCE_NOT_FOUND, f"{name} is not a regular file")
        return os.fdopen(fd, "rb")

    def _resolve(self, path: Path) -> Path:
        """Resolve a path below the root to its real path, relative to the root."""
        if not Path(os.path.realpath(self._root / path)).is_relative_to(self._root):
            raise self._leaves(path)  # before any answer about its existence
        try:
            real = Path(os.path.realpath(self._root / path, strict=True))
        except OSError as error:
            raise Refused(
                Reason.SOURCE_NOT_FOUND, f"{quoted(str(path), 300)}: {error.strerror} below {self._called}"
            ) from error
        if not real.is_relative_to(self._root):
            raise self._leaves(path)
        return real.relative_to(self._root)

    def _leaves(self, path: Path) -> Refused:
        return Refused(Reason.BAD_URI, f"{quoted(str(path), 300)} is a link that leaves {self._called}")

    def _walk(self, path: Path, flags: int) -> int:
        """Open a real path part by part, without following links. Return a descriptor."""
        *folders, last = path.parts or (".",)
        try:
            fd = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise _unreadable(path, error) from error
        try:
            for part, kind in [*((folder, os.O_DIRECTORY) for folder in folders), (last, flags)]:
                below = os.open(part, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | kind, dir_fd=fd)
                os.close(fd)
                fd = below
        except OSError as error:
            os.close(fd)
            raise _unreadable(path, error) from error
        return fd


class FolderSnapshot:
    """The plain files of a folder, in their state at its opening."""

    def __init__(self, root: Root, folder: Path, place: tuple[str, Identity], names: list[str], taken_ns: int) -> None:
        """Set the folder. `place`: the requested path of the folder, perhaps with links, and its identity."""
        self._root, self._folder, self._place, self._names, self._taken_ns = root, folder, place, names, taken_ns
        self._identities = self._stat_all()
        self._read: dict[str, Identity] = {}
        self.sizes: Mapping[str, int] = {name: identity[2] for name, identity in self._identities.items()}
        self.expected_sha256: Mapping[str, str] = {}

    @property
    def signature(self) -> str | None:
        """The size, times and inode of every file. None while a file is too young to distinguish two edits."""
        if any(map(self._is_young, self._identities.values())):
            return None
        return hashlib.sha256(repr(sorted(self._identities.items())).encode()).hexdigest()

    @property
    def marks(self) -> Marks | None:
        """The folder and its files, through every link on the way."""
        if self.signature is None or self._is_young(self._place[1]):
            return None
        files = ((f"{self._place[0]}/{name}", identity) for name, identity in self._identities.items())
        return (self._place, *files)

    def open(self, name: str) -> BinaryIO:
        file = self._root.file(self._folder, name)
        self._read[name] = _identity(file)
        return file

    def unchanged(self, but_links: bool = False, /) -> bool:
        """Return whether every opened file is unchanged since the folder was listed.

        A change of links, owner or mode gives a new ctime, as does a write that sets the old mtime afterwards.
        """
        compared = slice(CTIME) if but_links else slice(None)
        try:
            states = [*self._read.items(), *self._stat_all().items()]
        except Refused:  # a file went away
            return False
        return all(self._identities.get(name, ())[compared] == identity[compared] for name, identity in states)

    def _is_young(self, identity: Identity) -> bool:
        return max(identity[3:]) > self._taken_ns - RACY_NS

    def _stat_all(self) -> dict[str, Identity]:
        identities: dict[str, Identity] = {}
        for name in self._names:
            with self._root.file(self._folder, name) as file:
                identities[name] = _identity(file)
        return identities


def _list(fd: int, uri: str, file_filter: FileFilter) -> list[str]:
    """List plain names of files and links in a folder. Folders and special files are not part of an artifact."""
    names: list[str] = []
    with os.scandir(fd) as entries:
        for number, entry in enumerate(entries):
            if number >= MAX_ENTRIES:
                raise Refused(Reason.TOO_LARGE, f"{uri[:200]} holds more than {MAX_ENTRIES} entries")
            is_selected = file_filter(entry.name) and is_file_name(entry.name)
            if is_selected and (entry.is_symlink() or entry.is_file(follow_symlinks=False)):
                names.append(entry.name)
    if file_filter(NAMED_FILE) and _is_file_below(fd, NAMED_FILE):
        names.append(NAMED_FILE)
    return sorted(names)


def _is_file_below(fd: int, name: str) -> bool:
    """Return whether a file exists. It is opened by its real path later."""
    with contextlib.suppress(OSError):
        return stat.S_ISREG(os.stat(name, dir_fd=fd).st_mode)
    return False


def _identity(file: BinaryIO) -> Identity:
    return identity_of(os.fstat(file.fileno()))


def identity_of(status: os.stat_result) -> Identity:
    """Return the values that distinguish states of a file or folder."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _unreadable(path: Path, error: OSError) -> Refused:
    return Refused(Reason.SOURCE_NOT_FOUND, f"{quoted(str(path), 300)} cannot be read: {error.strerror}")
