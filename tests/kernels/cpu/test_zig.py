"""A compiler that is fetched: by the real pip, of an index that is a folder, where a stub stands for zig."""

import base64
import hashlib
import logging
import platform
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from harness.small_native import compiler_stub, small_sources
from weft_kernels.cpu import CHECKSUM, LIBRARY, FetchedZig, NoCompiler, Sources, build_library, find_or_fetch

VERSION = "9.9.9"


@pytest.fixture
def calls(tmp_path: Path) -> Path:
    return tmp_path / "calls"


@pytest.fixture
def package(tmp_path: Path, calls: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package as zig's is laid out, in the only index that pip knows."""
    stub = compiler_stub(tmp_path / "stub", calls).read_bytes()
    folder = tmp_path / "index"
    folder.mkdir()
    info, wheel = f"ziglang-{VERSION}.dist-info", folder / f"ziglang-{VERSION}-py3-none-any.whl"
    files = {
        "ziglang/zig": stub,
        "ziglang/lib/libcxx/include/vector": b"",
        "ziglang/lib/libc/musl/of_no_use.c": b"",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: ziglang\nVersion: {VERSION}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(wheel, "w") as archive:
        record = ""
        for name, content in files.items():
            archive.writestr(name, content)
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            record += f"{name},sha256={digest},{len(content)}\n"
        archive.writestr(f"{info}/RECORD", f"{record}{info}/RECORD,,\n")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return wheel


def fetched(tmp_path: Path, package: Path | None, digest: str = "", uv: str = "") -> FetchedZig:
    """What the lock asks for. `digest`: another than the package's."""
    found = digest or hashlib.sha256(package.read_bytes() if package else b"").hexdigest()
    lock = tmp_path / "zig.lock"
    lock.write_text(f"ziglang=={VERSION} --hash=sha256:{found}\n")
    environment = {"PATH": str(tmp_path), **({"UV": uv} if uv else {})}
    return FetchedZig(("zig", "c++"), lock.read_text(), lock=lock, environment=environment)


def folder_in(tmp_path: Path) -> Path:
    (folder := tmp_path / "built").mkdir()
    return folder


def small(tmp_path: Path) -> Sources:
    return Sources(small_sources(tmp_path / "src").folder, "aarch64")


def test_it_compiles_a_build_and_is_gone_after_it(
    tmp_path: Path, package: Path, calls: Path, caplog: pytest.LogCaptureFixture
):
    done = build_library(small(tmp_path), fetched(tmp_path, package), folder_in(tmp_path))
    assert done.library.stat().st_size > 0
    assert {path.name for path in done.library.parent.iterdir() if path.suffix != ".o"} == {LIBRARY, CHECKSUM}
    said = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert len(said) == 1
    assert said[0].startswith("there is no C++ compiler: fetching one for this build")
    assert "`apt install g++`" in said[0]
    lines = calls.read_text().splitlines()
    assert all(f"-target {platform.machine()}-linux-gnu" in line for line in lines), (
        "else zig compiles for this very CPU"
    )
    assert ["-nostdlib++" in line for line in lines] == ["-shared" in line for line in lines]


def test_another_content_than_the_locks_is_not_run(tmp_path: Path, package: Path, calls: Path):
    with pytest.raises(NoCompiler, match="apt install g"):
        build_library(small(tmp_path), fetched(tmp_path, package, digest="0" * 64), folder_in(tmp_path))
    assert not calls.exists()
    assert list((tmp_path / "built").iterdir()) == []


def test_where_it_cannot_be_had_one_sentence_says_what_to_install(tmp_path: Path, package: Path):
    package.unlink()
    with pytest.raises(NoCompiler) as refused:
        build_library(small(tmp_path), fetched(tmp_path, None), folder_in(tmp_path))
    assert refused.value.reason == (
        "there is no C++ compiler, and none can be fetched "
        f"(No matching distribution found for ziglang=={VERSION}): "
        "install one, on Debian and Ubuntu with `apt install g++`"
    )


def test_uv_runs_pip_where_this_python_has_none(
    tmp_path: Path, package: Path, calls: Path, monkeypatch: pytest.MonkeyPatch
):
    venv = [Path(sys.executable).with_name("uv"), "venv", "--quiet", "--python", sys.executable, tmp_path / "venv"]
    subprocess.run(venv, check=True)
    uv = tmp_path / "uv"
    uv.write_text(
        f'#!/bin/sh\necho "$*" > {tmp_path}/uv-calls\n'
        f'while [ "$1" != pip ]; do shift; done\nexec {sys.executable} -m "$@"\n'
    )
    uv.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "venv" / "bin" / "python"))
    build_library(small(tmp_path), fetched(tmp_path, package, uv=str(uv)), folder_in(tmp_path))
    assert calls.exists()
    assert (tmp_path / "uv-calls").read_text().startswith("tool run ")


def test_the_machines_own_compiler_comes_first_and_one_that_is_named_is_not_replaced(
    tmp_path: Path, calls: Path, monkeypatch: pytest.MonkeyPatch
):
    assert isinstance(find_or_fetch({"PATH": str(tmp_path)}), FetchedZig)
    compiler_stub(tmp_path / "clang++", calls)
    assert find_or_fetch({"PATH": str(tmp_path)}).command == (str(tmp_path / "clang++"),)
    (tmp_path / "clang++").unlink()
    monkeypatch.setattr(platform, "machine", lambda: "s390x")
    with pytest.raises(NoCompiler, match=r"no C\+\+ compiler .*: install one"):
        find_or_fetch({"PATH": str(tmp_path)})
