"""Wheels, really built and really installed: with the kernels where there is a compiler, pure where there is none.

The kernels' sources are small ones, so that a build takes seconds; all else is the project's own.
"""

import os
import shutil
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

from harness.containerfile import ROOT
from harness.small_native import small_sources

pytestmark = [
    pytest.mark.skipif(
        find_spec("hatchling") is None, reason="no hatchling: .venv/bin/uv pip install -p .venv hatchling"
    ),
    pytest.mark.skipif(shutil.which("g++") is None, reason="no g++: apt-get install g++"),
]

CARRIED = {"weft_kernels/cpu/weft_cpu.so", "weft_kernels/cpu/weft_cpu.sha256"}
LOADS = """
from weft_kernels.cpu import load
library = load()
print(library.path, *library.levels)
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a wheel is built from, copied."""
    folder = tmp_path_factory.mktemp("project")
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    for name in ("weft", "cli", "operator", "services", "kernels"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    sources = folder / "kernels" / "weft_kernels" / "cpu" / "src"
    shutil.rmtree(sources)
    small_sources(sources)
    return folder


@pytest.fixture(scope="module")
def no_compiler(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A PATH without any compiler."""
    return str(tmp_path_factory.mktemp("empty"))


def run_build(project: Path, folder: Path, code: str = "build_wheel", **more: str) -> subprocess.CompletedProcess[str]:
    """Build as a build front end would, in this environment: nothing is downloaded."""
    folder.mkdir(parents=True, exist_ok=True)
    environment = {name: value for name, value in os.environ.items() if name not in ("CXX", "WEFT_WHEEL_KERNELS")}
    return subprocess.run(
        [sys.executable, "-c", f"from hatchling.build import {code}; print({code}({str(folder)!r}))"],
        cwd=project, env={**environment, **more}, capture_output=True, text=True, check=False,
    )  # fmt: skip


def wheel_in(folder: Path) -> Path:
    (wheel,) = folder.glob("*.whl")
    return wheel


def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.fixture(scope="module")
def wheel(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheels")
    done = run_build(project, folder)
    assert done.returncode == 0, done.stderr
    assert "CPU kernels built in" in done.stderr + done.stdout
    return wheel_in(folder)


def test_a_wheel_with_kernels_is_for_one_platform_and_any_python(wheel: Path):
    assert wheel.name.startswith("weft-0.1.0-py3-none-linux_")
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = [name for name in archive.namelist() if name.endswith(".dist-info/WHEEL")]
        assert "Root-Is-Purelib: false" in archive.read(metadata).decode()
    assert names(wheel) >= CARRIED
    others = ("weft_bench", "weft_conformance", "weft_predictor_train", "weft_stage", "weft_trouble")
    assert not [name for name in names(wheel) if name.startswith(others)]


def test_installed_it_serves_where_there_is_no_compiler_no_home_and_no_cache(
    wheel: Path, tmp_path: Path, no_compiler: str
):
    uv = Path(sys.executable).with_name("uv")
    subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, tmp_path / "venv"], check=True)
    install = [
        uv, "pip", "install", "--quiet", "--offline", "--no-deps", "--python", tmp_path / "venv/bin/python", wheel,
    ]  # fmt: skip
    subprocess.run(install, check=True)
    done = subprocess.run(
        [tmp_path / "venv" / "bin" / "python", "-I", "-c", LOADS],
        env={"PATH": no_compiler, "TMPDIR": "/nonexistent"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    path, *levels = done.stdout.split()
    assert Path(path).is_relative_to(tmp_path / "venv")
    assert "portable" in levels


def test_without_a_compiler_the_wheel_is_pure_and_says_so(project: Path, tmp_path: Path, no_compiler: str):
    done = run_build(project, tmp_path, PATH=no_compiler, PIP_NO_INDEX="1")
    assert done.returncode == 0, done.stderr
    assert "A pure wheel, without the CPU kernels: there is no C++ compiler" in done.stderr + done.stdout
    assert wheel_in(tmp_path).name == "weft-0.1.0-py3-none-any.whl"
    assert names(wheel_in(tmp_path)) & CARRIED == set()


def test_a_compiler_that_fails_gives_a_pure_wheel_with_its_message(project: Path, tmp_path: Path):
    failing = tmp_path / "failing"
    failing.write_text('#!/bin/sh\n[ "$*" = -v ] || { echo "error: our own words"; exit 1; }\necho failing version 1\n')
    failing.chmod(0o755)
    done = run_build(project, tmp_path / "wheels", CXX=str(failing))
    assert done.returncode == 0, done.stderr
    assert (done.stderr + done.stdout).count("our own words") == 1
    assert wheel_in(tmp_path / "wheels").name.endswith("-any.whl")


def test_where_kernels_are_required_there_is_no_wheel_without(project: Path, tmp_path: Path, no_compiler: str):
    done = run_build(project, tmp_path, PATH=no_compiler, PIP_NO_INDEX="1", WEFT_WHEEL_KERNELS="require")
    assert done.returncode != 0
    assert "there is no C++ compiler" in done.stderr
    assert list(tmp_path.glob("*.whl")) == []


def test_an_editable_installation_compiles_nothing(project: Path, tmp_path: Path):
    done = run_build(project, tmp_path, "build_editable", WEFT_WHEEL_KERNELS="require", CXX="/nonexistent/g++")
    assert done.returncode == 0, done.stderr
    assert names(wheel_in(tmp_path)) & CARRIED == set()
