"""Building: real compilers on small sources, and compilers that fail, hang, die, or know less than others."""

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from harness.small_native import compiler_script, small_sources
from weft_kernels.cpu import (
    CHECKSUM,
    FLAGS,
    LEVELS,
    SOURCES,
    Built,
    NativeUnavailable,
    Sources,
    build_library,
    checksum,
    find_compiler,
    for_this_cpu,
    trimmed,
)

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++: apt-get install g++")
X86 = os.uname().machine == "x86_64"
only_x86 = pytest.mark.skipif(not X86, reason="levels beyond the portable one are of x86")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("built")
    return build_library(small_sources(tmp_path_factory.mktemp("small")), find_compiler(), folder)


def folder_in(tmp_path: Path) -> Path:
    folder = tmp_path / "built"
    folder.mkdir()
    return folder


def compiled_levels(library: Path) -> set[str]:
    bits = ctypes.CDLL(str(library)).weft_compiled_levels()
    return {level for i, level in enumerate(LEVELS) if bits >> i & 1}


def test_a_library_is_built_with_its_checksum_and_the_hash_of_its_sources(built: Built, tmp_path: Path):
    native = ctypes.CDLL(str(built.library))
    native.weft_source_hash.restype = ctypes.c_char_p
    assert native.weft_source_hash().decode() == small_sources(tmp_path / "again").digest()
    assert built.library.with_name(CHECKSUM).read_text() == checksum(built.library)
    assert built.seconds >= 0


@only_x86
def test_every_level_is_compiled_by_this_compiler(built: Built):
    assert built.left_out == {}
    assert compiled_levels(built.library) == set(LEVELS)


@only_x86
def test_an_inline_function_of_several_levels_is_linked_as_the_portable_one(built: Built):
    native = ctypes.CDLL(str(built.library))
    native.linked.restype = ctypes.c_char_p
    assert native.linked() == b"portable"


def test_only_the_abi_is_visible_from_outside(built: Built):
    lines = subprocess.run(
        ["nm", "-D", "--defined-only", built.library], check=True, capture_output=True, text=True
    ).stdout.splitlines()
    assert {line.split()[-1] for line in lines} - {"linked"} >= {"weft_abi", "weft_run"}
    assert [line for line in lines if "compiled_for" in line or "used_by" in line] == []


@only_x86
@pytest.mark.parametrize("unknown", ["-mamx-bf16", "-mavx512bf16"])
def test_a_level_that_the_compiler_does_not_know_is_left_out_and_named(
    unknown: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    old = compiler_script(
        tmp_path / "old", f'case " $* " in *" {unknown} "*) echo "error: unrecognized option {unknown}"; exit 1;; esac'
    )
    done = build_library(small_sources(tmp_path / "src"), find_compiler({"CXX": str(old)}), folder_in(tmp_path))
    lost = {level for level, flags in LEVELS.items() if unknown in flags}
    assert set(done.left_out) == lost
    assert compiled_levels(done.library) == set(LEVELS) - lost
    warned = {record.kv["level"] for record in caplog.records if "lack" in record.message}  # type: ignore[attr-defined]
    assert warned == lost
    assert all(unknown in why for why in done.left_out.values())


def test_another_architecture_gets_the_portable_level_only_and_nobody_is_warned(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    what = Sources(small_sources(tmp_path / "src").folder, "aarch64")
    done = build_library(what, find_compiler(), folder_in(tmp_path))
    assert compiled_levels(done.library) == {"portable"}
    assert done.left_out == {}
    assert [record for record in caplog.records if record.levelname == "WARNING"] == []


def test_sources_that_change_meanwhile_are_not_kept_under_the_old_hash(tmp_path: Path):
    what = small_sources(tmp_path / "src")
    script = compiler_script(
        tmp_path / "slow", f'case "$*" in *shared*) echo "// later" >> {what.folder}/shared.h;; esac'
    )
    with pytest.raises(NativeUnavailable, match="changed while it was compiled"):
        build_library(what, find_compiler({"CXX": str(script)}), folder_in(tmp_path))


def test_a_failing_compiler_is_told_once_and_trimmed(tmp_path: Path):
    what = small_sources(tmp_path / "src")
    errors = "\n".join(f"int broken_{i} = {{nothing_{i}}};" for i in range(60))
    (what.folder / "common.cpp").write_text(f"{errors}\n")
    with pytest.raises(NativeUnavailable) as failed:
        build_library(what, find_compiler(), folder_in(tmp_path))
    assert "common.cpp" in failed.value.reason
    assert failed.value.reason.count("nothing_0") >= 1
    assert failed.value.reason.endswith("...")
    assert len(failed.value.reason) < 1700


@only_x86
def test_a_compiler_that_is_killed_leaves_no_level_out_but_fails(tmp_path: Path):
    died = "g++: fatal error: Killed signal terminated program cc1plus"
    script = compiler_script(tmp_path / "dying", f'case "$*" in *amx*) echo "{died}"; exit 1;; esac')
    with pytest.raises(NativeUnavailable, match="terminated program"):
        build_library(small_sources(tmp_path / "src"), find_compiler({"CXX": str(script)}), folder_in(tmp_path))


def test_a_compiler_that_hangs_when_asked_what_it_is_is_ended_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("weft_kernels.cpu.compiler.ANSWER_LIMIT_S", 0.5)
    script = compiler_script(tmp_path / "mute", "exec sleep 600")
    with pytest.raises(NativeUnavailable, match=r"ended after 0\.5 s"):
        find_compiler({"CXX": str(script)})


def test_without_a_compiler_the_reason_names_what_was_looked_for(tmp_path: Path):
    with pytest.raises(NativeUnavailable, match=r"no C\+\+ compiler .*g\+\+, clang\+\+, c\+\+"):
        find_compiler({"PATH": str(tmp_path)})


def test_a_named_compiler_that_is_absent_is_not_replaced_by_another(tmp_path: Path):
    with pytest.raises(NativeUnavailable, match=r"'g\+\+-99', which \$CXX names"):
        find_compiler({"CXX": "g++-99", "PATH": os.environ["PATH"]})


def test_a_change_of_any_source_changes_the_hash(tmp_path: Path):
    what = small_sources(tmp_path / "src")
    seen = {what.digest()}
    for file in sorted(what.folder.iterdir()):
        file.write_text(file.read_text() + "\n")
        seen.add(what.digest())
    (what.folder / "new.h").write_text("")
    seen.add(what.digest())
    seen.add(Sources(what.folder, "other").digest())
    assert len(seen) == len(list(what.folder.iterdir())) + 2
    assert small_sources(tmp_path / "again").digest() in seen


def test_no_flag_lets_a_compiler_change_the_bits_or_the_machine_it_is_for():
    flags = {flag for level in LEVELS.values() for flag in level} | set(FLAGS)
    assert not any("fast-math" in flag or "native" in flag or "associative" in flag for flag in flags)
    assert "-ffp-contract=off" in FLAGS
    assert not any(flag.startswith("-m") for flag in FLAGS), "plain units run on any CPU"


def test_a_message_begins_with_its_first_error():
    warnings = "\n".join(f"a.h:{i}: warning: of no use" for i in range(1000))
    assert trimmed(f"{warnings}\na.cpp:1: error: here\nit is\n") == "a.cpp:1: error: here\nit is"


@pytest.mark.parametrize(
    ("flags", "best"),
    [
        ("sse2", "portable"),
        ("avx2 fma", "portable"),
        ("avx2 fma f16c", "avx2"),
        ("avx2 fma f16c avx512f avx512bw avx512vl avx512dq", "avx512"),
        ("avx2 fma f16c avx512f avx512bw avx512vl avx512dq avx512_bf16 amx_bf16 amx_tile", "amx_bf16"),
    ],
)
def test_what_the_system_says_of_the_cpu_names_its_best_level(tmp_path: Path, flags: str, best: str):
    (cpuinfo := tmp_path / "cpuinfo").write_text(f"processor\t: 0\nflags\t\t: fpu {flags} sse\n")
    found = for_this_cpu(Sources(SOURCES.folder, "x86_64"), cpuinfo)
    assert list(found.levels()) == list(dict.fromkeys(("portable", best)))
    assert list(for_this_cpu(Sources(SOURCES.folder, "aarch64"), cpuinfo).levels()) == ["portable"]
    assert for_this_cpu(SOURCES, tmp_path / "absent") == SOURCES
