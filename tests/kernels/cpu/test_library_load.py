"""Loading: which library, which level, and what a caller is told; pools and the callback of a step."""

import hashlib
import os
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from harness.small_native import compiler_script, small_sources
from harness.waiting import PATIENCE_S
from weft_kernels.cpu import (
    BF16,
    CHECKSUM,
    FP32,
    LEVEL_VARIABLE,
    LEVELS,
    LIBRARY,
    CallRefused,
    LevelUnusable,
    Library,
    ModelStruct,
    NativeUnavailable,
    Sources,
    StepStruct,
    build_library,
    cache_folders,
    cpu_quota,
    find_compiler,
    load,
)

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++: apt-get install g++")
ABSENT = Path("/nonexistent/weft_cpu.so")
X86 = os.uname().machine == "x86_64"
only_x86 = pytest.mark.skipif(not X86, reason="levels beyond the portable one are of x86")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def what(tmp_path_factory: pytest.TempPathFactory) -> Sources:
    """A machine that has the first three levels."""
    return small_sources(tmp_path_factory.mktemp("src"), usable="weft_compiled_levels() & 7")


@pytest.fixture(scope="module")
def one_level(what: Sources) -> Sources:
    """Quicker to build."""
    return Sources(what.folder, "aarch64")


@pytest.fixture(scope="module")
def built(one_level: Sources, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_library(one_level, find_compiler(), tmp_path_factory.mktemp("package")).library


def environment(home: Path, **more: str) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "XDG_CACHE_HOME": str(home), **more}


@pytest.fixture(scope="module")
def library(what: Sources, home: Path) -> Library:
    return load(what=what, packaged=ABSENT, environment=environment(home))


@only_x86
def test_the_best_usable_level_is_taken(library: Library):
    assert library.levels == ("avx512", "avx2", "portable")
    assert library.level == "avx512"
    assert library.level_number == list(LEVELS).index("avx512") == 2


@only_x86
@pytest.mark.parametrize("level", ["portable", "avx2", "avx512"])
def test_a_level_can_be_forced_by_argument_and_by_environment(what: Sources, home: Path, level: str):
    assert load(level, what=what, packaged=ABSENT, environment=environment(home)).level == level
    told = environment(home, **{LEVEL_VARIABLE: level})
    assert load(what=what, packaged=ABSENT, environment=told).level == level
    assert load("portable", what=what, packaged=ABSENT, environment=told).level == "portable", "who asks, wins"


@only_x86
def test_a_library_of_this_machines_best_level_serves_until_another_one_is_asked_for(
    what: Sources, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("weft_kernels.cpu.sources.for_this_cpu", lambda what: replace(what, only="avx512"))
    given = environment(tmp_path)
    own = load(what=what, packaged=ABSENT, environment=given, here=True).path
    assert load(what=what, packaged=ABSENT, environment=given).path == own
    every = load(what=what, packaged=ABSENT, environment=given, every=True).path
    whole = load("avx2", what=what, packaged=ABSENT, environment=given).path
    assert every == whole, "before the tests, which are of every level"
    assert whole != own
    assert load(what=what, packaged=ABSENT, environment=given, here=True).path == whole, "it has that level, too"


@only_x86
def test_an_unknown_level_is_named_with_those_that_can_be_used(what: Sources, home: Path):
    with pytest.raises(LevelUnusable) as refused:
        load("avx1024", what=what, packaged=ABSENT, environment=environment(home))
    assert str(refused.value) == (
        "instruction level 'avx1024': there is no such level; usable here: avx512, avx2, portable"
    )
    assert refused.value.usable == ("avx512", "avx2", "portable")


@only_x86
def test_a_level_that_the_cpu_lacks_is_told_from_one_that_was_not_compiled(what: Sources, home: Path, tmp_path: Path):
    with pytest.raises(LevelUnusable, match="'amx_bf16': this CPU lacks it"):
        load("amx_bf16", what=what, packaged=ABSENT, environment=environment(home))
    old = compiler_script(tmp_path / "old", 'case "$*" in *-mamx-bf16*) echo "unknown option"; exit 1;; esac')
    with pytest.raises(LevelUnusable, match="'amx_bf16': it was not compiled in"):
        load("amx_bf16", what=what, packaged=ABSENT, environment=environment(home, CXX=str(old)))


def test_another_abi_is_refused(tmp_path: Path):
    other = Sources(small_sources(tmp_path / "src", abi=99).folder, "aarch64")
    with pytest.raises(NativeUnavailable, match=r"speaks ABI 99, and this Weft speaks \d+:"):
        load(what=other, packaged=ABSENT, environment=environment(tmp_path))


def test_a_library_without_a_function_of_the_abi_is_refused_by_its_name(tmp_path: Path):
    lacking = Sources(small_sources(tmp_path / "src").folder, "aarch64")
    common = lacking.folder / "common.cpp"
    common.write_text(common.read_text().replace("weft_matmul", "weft_mutmal"))
    with pytest.raises(NativeUnavailable, match="undefined symbol: weft_matmul"):
        load(what=lacking, packaged=ABSENT, environment=environment(tmp_path))


def test_without_a_compiler_and_a_package_there_is_none(what: Sources, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(NativeUnavailable, match=r"no C\+\+ compiler"):
        load(what=what, packaged=ABSENT, environment={"PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)})


def test_without_a_home_the_temporary_folder_serves(what: Sources, tmp_path: Path):
    (tmp_path / "home").write_text("no folder")
    told = environment(tmp_path / "home", TMPDIR=str(tmp_path))
    loaded = load(what=Sources(what.folder, "aarch64"), packaged=ABSENT, environment=told)
    assert loaded.path.is_relative_to(tmp_path / f"weft-{os.geteuid()}")


def test_a_library_that_the_system_does_not_load_is_sought_in_the_next_place(what: Sources, tmp_path: Path):
    """The file is whole, and still cannot be loaded, as on a file system that is mounted noexec."""
    told = environment(tmp_path / "home", TMPDIR=str(tmp_path / "temporary"))
    one_level = Sources(what.folder, "aarch64")
    places = [place.get(one_level, find_compiler(told)) for place in cache_folders(told)]
    not_loadable(places[0])
    assert load(what=one_level, packaged=ABSENT, environment=told).path == places[1]


def not_loadable(library: Path) -> None:
    """Write a library that is whole, as far as its checksum says, and still nothing that the system loads."""
    library.write_text("text")
    library.with_name(CHECKSUM).write_text(hashlib.sha256(b"text").hexdigest())


class TestPackaged:
    """The wheel's library: preferred when it is whole and of these sources; else told, and another one is taken."""

    @pytest.fixture
    def packaged(self, built: Path, tmp_path: Path) -> Path:
        return shutil.copytree(built.parent, tmp_path / "package") / LIBRARY

    def test_it_is_preferred_and_needs_no_compiler(self, one_level: Sources, packaged: Path, tmp_path: Path):
        bare = {"PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "none")}
        assert load(what=one_level, packaged=packaged, environment=bare).path == packaged
        assert not (tmp_path / "none").exists()

    def test_of_other_sources_it_is_passed_over(
        self, one_level: Sources, packaged: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ):
        changed = tmp_path / "changed"
        shutil.copytree(one_level.folder, changed)
        (changed / "shared.h").write_text((changed / "shared.h").read_text() + "\n// changed\n")
        loaded = load(what=Sources(changed, "aarch64"), packaged=packaged, environment=environment(tmp_path / "home"))
        assert loaded.path.is_relative_to(tmp_path / "home")
        assert "it was built from other sources" in str([vars(record) for record in caplog.records])

    @pytest.mark.parametrize("damage", [0, 100, 5000, "no library"])
    def test_one_that_is_cut_short_or_no_library_is_passed_over(
        self, one_level: Sources, packaged: Path, home: Path, damage: int | str, caplog: pytest.LogCaptureFixture
    ):
        if isinstance(damage, int):
            packaged.write_bytes(packaged.read_bytes()[:damage])
        else:
            not_loadable(packaged)
        loaded = load(what=one_level, packaged=packaged, environment=environment(home))
        assert loaded.path.name == LIBRARY
        assert loaded.path != packaged
        why = "its checksum is another" if isinstance(damage, int) else "the packaged CPU kernels are not used"
        assert why in str([vars(record) for record in caplog.records])


def test_a_refused_call_names_the_function_and_the_reason(library: Library):
    with pytest.raises(CallRefused, match=r"weft_packed_bytes: a size is not supported \(-2\)"):
        library.packed_bytes(9, 16, 16)
    assert library.packed_bytes(BF16, 16, 16) == 256


def test_layers_are_told_as_they_are_done(library: Library):
    told: list[tuple[int, str]] = []
    step = StepStruct(first=2, last=5, workspace_bytes=64)
    with library.pool(1) as pool:
        library.run(pool, ModelStruct(), step, lambda layer: told.append((layer, threading.current_thread().name)))
        library.run(pool, ModelStruct(), step)
    assert told == [(layer, threading.current_thread().name) for layer in (2, 3, 4)]


def test_an_error_between_layers_comes_out_of_the_call(library: Library):
    told: list[int] = []

    def fails_at_one(layer: int) -> None:
        told.append(layer)
        if layer == 1:
            raise KeyError("ours")

    with library.pool(1) as pool, pytest.raises(KeyError, match="ours"):
        library.run(pool, ModelStruct(), StepStruct(first=0, last=4, workspace_bytes=64), fails_at_one)
    assert told == [0, 1]


class TestPool:
    def test_by_default_it_has_as_many_as_the_process_may_use(self, library: Library):
        with library.pool() as pool:
            assert pool.threads == cpu_quota() >= 1

    def test_calls_of_two_threads_wait_for_each_other(self, library: Library):
        inside, leave, second = threading.Event(), threading.Event(), threading.Event()

        def first_layer(_: int) -> None:
            inside.set()
            assert leave.wait(PATIENCE_S)

        step = StepStruct(first=0, last=1, workspace_bytes=64)
        with library.pool(1) as pool:
            one = threading.Thread(target=library.run, args=(pool, ModelStruct(), step, first_layer))
            two = threading.Thread(
                target=lambda: (
                    library.run(pool, ModelStruct(), StepStruct(first=0, last=1, workspace_bytes=64)),
                    second.set(),
                )
            )
            one.start()
            try:
                assert inside.wait(PATIENCE_S)
                two.start()
                assert not second.is_set()
                assert pool.lock.locked()
            finally:
                leave.set()
                one.join()
            assert second.wait(PATIENCE_S)
            two.join()

    def test_a_forked_child_is_told_to_make_its_own(self, library: Library):
        with library.pool(2) as pool:
            reader, writer = os.pipe()
            child = os.fork()
            if child == 0:
                try:
                    library.pack(pool, 0, FP32, 32, (16, 32), 0, BF16)
                except ValueError as error:
                    os.write(writer, str(error).encode())
                finally:
                    os._exit(0)
            os.close(writer)
            os.waitpid(child, 0)
            assert b"forked" in os.read(reader, 200)
            os.close(reader)
