"""Libraries that were compiled on this machine: `$XDG_CACHE_HOME/weft/kernels/KEY/weft_cpu.so`, its checksum beside it.

KEY covers the sources, the flags, the levels where not all are compiled, the compiler, the architecture and the C
library, so an entry is never out of date.
Of processes that start together one builds and the others wait, on a lock that ends with its holder. Code is loaded
only from folders that no other user can write to. Where the cache folder cannot be used (a container without a home)
the system's temporary folder takes its place.
"""

import fcntl
import hashlib
import logging
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from weft_kernels.cpu.build import CHECKSUM, LIBRARY, LIMIT_S, build_library, checksum
from weft_kernels.cpu.compiler import Compiler
from weft_kernels.cpu.errors import NativeUnavailable
from weft_kernels.cpu.sources import Sources

KEPT = 8  # entries, newest first, of about half a MiB
POLL_S = 0.05

log = logging.getLogger(__name__)


class FolderUnusable(NativeUnavailable):
    """A folder cannot be written to, or others can write to it: the next one is tried."""


@dataclass(frozen=True, slots=True)
class Cache:
    """A folder of entries. `uid`: whose code may be loaded from there, beside root's."""

    folder: Path
    uid: int

    def get(self, what: Sources, compiler: Compiler, *, limit_s: float = LIMIT_S) -> Path:
        """Find the library of these sources by this compiler, or build it if it is not there or not whole.

        Raises NativeUnavailable: the folder cannot be trusted or written, the compiler failed, or another process held
        the lock for longer than a build may take.
        """
        if (found := self.find(what, compiler)) is not None:
            return found
        entry = self.folder / cache_key(what, compiler)
        with self._lock(limit_s):
            if not is_intact(entry / LIBRARY):
                self._build(what, compiler, entry, limit_s)
        return entry / LIBRARY

    def find(self, what: Sources, compiler: Compiler) -> Path | None:
        """Find the library, if it is there and whole. Raises NativeUnavailable for a folder that is unsafe."""
        self._prepare()
        library = self.folder / cache_key(what, compiler) / LIBRARY
        return library if is_intact(library) else None

    def _prepare(self) -> None:
        """Make the folder if need be, and refuse one where another user could change its content."""
        self._refuse_foreign()
        try:
            for folder in (*reversed(self.folder.parents), self.folder):
                folder.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise FolderUnusable(f"{self.folder} cannot be made: {error.strerror}") from error
        self._refuse_foreign()

    def _refuse_foreign(self) -> None:
        """Refuse folders of others. Every one on the way counts, as written and as links lead."""
        for end in (self.folder, self.folder.resolve()):
            for folder in (end, *end.parents):
                with suppress(OSError):  # not there: `_prepare` makes it, or says why not
                    if why := untrusted_reason(folder.lstat(), self.uid):
                        raise FolderUnusable(f"{folder} {why}: code is not loaded from there")

    def _build(self, what: Sources, compiler: Compiler, entry: Path, limit_s: float) -> None:
        """Build in a folder beside the entry, with the lock held, then put it in the entry's place."""
        work = entry.with_suffix(".building")
        for left in self.folder.glob("*.building"):  # by processes that were killed
            shutil.rmtree(left, ignore_errors=True)
        try:
            work.mkdir(mode=0o700)
            build_library(what, compiler, work, limit_s=limit_s)
            for rest in work.glob("*.o"):
                rest.unlink()
            shutil.rmtree(entry, ignore_errors=True)
            work.rename(entry)
        except OSError as error:
            raise FolderUnusable(f"{self.folder} cannot be written to: {error.strerror}") from error
        finally:
            shutil.rmtree(work, ignore_errors=True)
        # beyond KEPT entries the oldest go; a process that has one loaded keeps it
        entries = [folder for folder in self.folder.iterdir() if (folder / LIBRARY).is_file()]
        for old in sorted(entries, key=lambda folder: folder.stat().st_mtime, reverse=True)[KEPT:]:
            shutil.rmtree(old, ignore_errors=True)

    @contextmanager
    def _lock(self, limit_s: float) -> Generator[None]:
        """Lock this folder: one build at a time."""
        try:
            lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise FolderUnusable(f"{self.folder} cannot be written to: {error.strerror}") from error
        try:
            started, logged = time.monotonic(), False
            while True:  # at the latest until its holder's own time is over
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() - started > limit_s:
                        why = f"another process has been building in {self.folder} for {limit_s:g} s"
                        raise NativeUnavailable(why) from None
                if not logged:
                    log.info("another process builds the CPU kernels: waiting", extra={"kv": {"at_most_s": limit_s}})
                    logged = True
                time.sleep(POLL_S)
            yield
        finally:
            os.close(lock)


def cache_folders(environment: Mapping[str, str] = os.environ) -> list[Cache]:
    """The folders of entries, in the order in which they are tried: $XDG_CACHE_HOME, ~/.cache, a temporary folder."""
    uid, given = os.geteuid(), environment.get("XDG_CACHE_HOME", "")
    home = Path(given) if given.startswith("/") else Path(environment.get("HOME") or "/nonexistent") / ".cache"
    folders = [home / "weft"]
    with suppress(FileNotFoundError):  # nothing at all can be written to
        folders.append(Path(environment.get("TMPDIR") or tempfile.gettempdir()).absolute() / f"weft-{uid}")
    return [Cache(folder / "kernels", uid) for folder in folders]


def cache_key(what: Sources, compiler: Compiler) -> str:
    """Make the key of sources, flags and architecture, the compiler's description, and its C library."""
    only = () if what.only is None else (what.only,)
    parts = (what.digest(), *only, *compiler.command, compiler.version, os.confstr("CS_GNU_LIBC_VERSION") or "")
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def is_intact(library: Path) -> bool:
    """Whether the library is there with the checksum that was written beside it."""
    try:
        return library.with_name(CHECKSUM).read_text() == checksum(library)
    except (OSError, UnicodeDecodeError):
        return False


def untrusted_reason(status: os.stat_result, uid: int) -> str | None:
    """Explain why another user could change what a folder or a link leads to; None where only `uid` and root can."""
    if status.st_uid not in (uid, 0):
        return f"belongs to user {status.st_uid}"
    open_to_others = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not stat.S_ISLNK(status.st_mode)
    if open_to_others and not status.st_mode & stat.S_ISVTX:
        return f"can be written to by others (mode {stat.S_IMODE(status.st_mode):o})"
    return None
