"""The cache: one build for all, nothing broken or foreign loaded, and another place where the first cannot be used.

Where nothing is loaded, a stub stands for the compiler: what it builds, and what of, is `test_library_build`'s matter.
"""

import json
import os
import shutil
import stat
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from harness import processes
from harness.small_native import compiler_script, compiler_stub, small_sources
from weft_kernels.cpu import (
    CHECKSUM,
    KEPT,
    LIBRARY,
    Cache,
    Compiler,
    FolderUnusable,
    NativeUnavailable,
    Sources,
    cache_folders,
    cache_key,
    find_compiler,
    is_intact,
    untrusted_reason,
)

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++: apt-get install g++")

LOADS = """
import json, logging, sys
from pathlib import Path
from weft_kernels.cpu import load
from weft_kernels.cpu import Sources
sys.stdin.readline()  # all begin together
library = load(what=Sources(Path(sys.argv[1]), "aarch64"), packaged=Path("/nonexistent"))
with library.pool(1) as pool:
    print(json.dumps({"path": str(library.path), "levels": library.levels, "threads": pool.threads}))
"""


class Counting:
    """A compiler that is found as any other, and how often it linked."""

    def __init__(self, script: Path, calls: Path) -> None:
        self.script, self._calls = script, calls
        self.compiler = find_compiler({"CXX": str(script)})

    def builds(self) -> int:
        return sum("-shared" in line for line in self._calls.read_text().splitlines())


@pytest.fixture
def counting(tmp_path: Path) -> Counting:
    calls = tmp_path / "calls"
    return Counting(compiler_stub(tmp_path / "g++", calls), calls)


@pytest.fixture
def real(tmp_path: Path) -> Counting:
    calls = tmp_path / "calls"
    return Counting(compiler_script(tmp_path / "g++", f'echo "$@" >> "{calls}"'), calls)


@pytest.fixture
def what(tmp_path: Path) -> Sources:
    """Sources of one level: quicker."""
    return Sources(small_sources(tmp_path / "src").folder, "aarch64")


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache" / "weft" / "kernels", os.geteuid())


def test_the_first_builds_and_the_second_calls_no_compiler(what: Sources, cache: Cache, counting: Counting):
    first = cache.get(what, counting.compiler)
    assert is_intact(first)
    shutil.rmtree(what.folder / "none", ignore_errors=True)
    assert cache.get(what, Compiler(counting.compiler.command, counting.compiler.version)) == first
    assert counting.builds() == 1
    assert sorted(file.name for file in first.parent.iterdir()) == [CHECKSUM, LIBRARY], "no objects are kept"


def test_nobody_else_may_write_there(what: Sources, cache: Cache, counting: Counting):
    before = os.umask(0)
    try:
        library = cache.get(what, counting.compiler)
    finally:
        os.umask(before)
    for folder in (library.parent, *library.parent.parents[:3]):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700, folder
    assert cache.get(what, counting.compiler) == library


def test_other_sources_and_other_compilers_have_entries_of_their_own(what: Sources, counting: Counting):
    (what.folder / "shared.h").touch()
    keys = {
        cache_key(what, counting.compiler),
        cache_key(replace(what, machine="riscv64"), counting.compiler),
        cache_key(what, replace(counting.compiler, version="gcc version 99")),
        cache_key(what, replace(counting.compiler, command=("clang++",))),
    }
    assert len(keys) == 4
    assert cache_key(what, counting.compiler) in keys


@pytest.mark.parametrize("damage", ["cut short", "one byte", "empty", "no library", "no checksum", "binary checksum"])
def test_a_broken_entry_is_built_again(what: Sources, cache: Cache, counting: Counting, damage: str):
    library = cache.get(what, counting.compiler)
    good, checksum = library.read_bytes(), library.with_name(CHECKSUM)
    match damage:
        case "cut short":
            library.write_bytes(good[: len(good) // 2])
        case "one byte":
            library.write_bytes(good[:5000] + bytes([good[5000] ^ 1]) + good[5001:])
        case "empty":
            library.write_bytes(b"")
        case "no library":
            library.unlink()
        case "no checksum":
            checksum.unlink()
        case _:
            checksum.write_bytes(b"\xff\xfe")
    assert not is_intact(library)
    assert cache.get(what, counting.compiler) == library
    assert library.read_bytes() == good
    assert counting.builds() == 2


def test_what_a_killed_process_left_behind_is_removed(what: Sources, cache: Cache, counting: Counting):
    first = cache.get(what, counting.compiler)
    left = [cache.folder / "0123.building", first.parent.with_suffix(".building")]
    for folder in left:
        folder.mkdir()
        (folder / "common.o").write_text("half an object")
    first.unlink()
    assert is_intact(cache.get(what, counting.compiler))
    assert [folder for folder in left if folder.exists()] == []


def test_processes_that_start_together_build_once(tmp_path: Path, what: Sources, real: Counting):
    count, environment = 6, {**os.environ, "CXX": str(real.script), "XDG_CACHE_HOME": str(tmp_path / "home")}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with ExitStack() as stack:
        started = [
            stack.enter_context(
                processes.started(sys.executable, "-c", LOADS, what.folder, env=environment, text=True, **pipes)
            )
            for _ in range(count)
        ]
        for process in started:
            process.stdin.write("go\n")
            process.stdin.flush()
        ends = [process.communicate() for process in started]
    assert [process.returncode for process in started] == [0] * count, [stderr for _, stderr in ends]
    told = [json.loads(stdout) for stdout, _ in ends]
    assert len({loaded["path"] for loaded in told}) == 1
    assert all(loaded["threads"] == 1 for loaded in told)
    assert real.builds() == 1


def test_a_failed_build_leaves_nothing_and_the_next_one_may_succeed(what: Sources, cache: Cache, real: Counting):
    text = (what.folder / "common.cpp").read_text()
    (what.folder / "common.cpp").write_text("this is no C++")
    with pytest.raises(NativeUnavailable, match=r"common\.cpp"):
        cache.get(what, real.compiler)
    assert [file.name for file in cache.folder.iterdir()] == ["lock"]
    (what.folder / "common.cpp").write_text(text)
    assert is_intact(cache.get(what, real.compiler))


def test_the_oldest_entries_go(what: Sources, cache: Cache, counting: Counting):
    cache._prepare()
    for age in range(KEPT + 3):
        old = cache.folder / f"old{age}"
        old.mkdir()
        (old / LIBRARY).write_text("")
        os.utime(old, (1_000_000 - age, 1_000_000 - age))
    library = cache.get(what, counting.compiler)
    kept = {folder.name for folder in cache.folder.iterdir() if folder.is_dir()}
    assert kept == {library.parent.name, *(f"old{age}" for age in range(KEPT - 1))}


def test_a_folder_of_somebody_else_is_refused_whatever_lies_in_it(what: Sources, cache: Cache, counting: Counting):
    library = cache.get(what, counting.compiler)
    other = Cache(cache.folder, os.geteuid() + 4242)
    if os.geteuid() == 0:  # root's folders are trusted by all: give them to a third
        for folder in (library.parent, cache.folder):
            os.chown(folder, 4711, 4711)
    with pytest.raises(FolderUnusable, match="belongs to user"):
        other.get(what, counting.compiler)
    assert counting.builds() == 1


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_folder_that_others_can_write_to_is_refused(
    what: Sources, cache: Cache, counting: Counting, mode: int, which: int
):
    cache.get(what, counting.compiler)
    (cache.folder, *cache.folder.parents)[which].chmod(mode)
    with pytest.raises(FolderUnusable, match=rf"can be written to by others \(mode {mode:o}\)"):
        cache.get(what, counting.compiler)


def test_somebody_elses_link_is_refused_and_ones_own_is_followed(
    what: Sources, cache: Cache, counting: Counting, tmp_path: Path
):
    real = tmp_path / "elsewhere"
    real.mkdir(mode=0o700)
    cache.folder.parents[1].mkdir(mode=0o700)
    cache.folder.parent.symlink_to(real)
    assert is_intact(cache.get(what, counting.compiler))
    real.chmod(0o777)
    with pytest.raises(FolderUnusable, match="elsewhere can be written to by others"):
        cache.get(what, counting.compiler)
    status = cache.folder.parent.lstat()
    assert untrusted_reason(status, os.geteuid()) is None
    if os.geteuid() == 0:
        os.lchown(cache.folder.parent, 4711, 4711)
        with pytest.raises(FolderUnusable, match="belongs to user 4711"):
            cache.get(what, counting.compiler)


def test_places_are_the_users_cache_and_then_the_temporary_folder():
    temporary = Path("/t") / f"weft-{os.geteuid()}" / "kernels"

    def places(**environment: str) -> list[Path]:
        return [place.folder for place in cache_folders({"TMPDIR": "/t", **environment})]

    assert places(XDG_CACHE_HOME="/c", HOME="/h") == [Path("/c/weft/kernels"), temporary]
    assert places(HOME="/h") == [Path("/h/.cache/weft/kernels"), temporary]
    assert places(XDG_CACHE_HOME="relative", HOME="/h")[0] == Path("/h/.cache/weft/kernels")
    assert places()[1:] == [temporary]
