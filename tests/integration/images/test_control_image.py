"""The commands of images/control.Containerfile, run in folders instead of an image: what they install runs.

Paths are moved below a temporary folder, packages may come from uv's cache, and nothing is compiled ahead of
its use; all else is as written.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pip
import pytest

from harness.containerfile import IMAGES, ROOT, stages
from harness.processes import tied

pytestmark = pytest.mark.slow

MODULES = (
    "weft_gateway", "weft_scheduler", "weft_predictor", "weft_supervisor", "weft_batch", "weft_depot",
    "weft_operator.kubernetes", "weft_cli",
)  # fmt: skip
MIGRATES = """
import asyncio, sys
from pathlib import Path
from weft.store import migrate
from weft.store.database import open_database, sqlite_url
print(asyncio.run(migrate.upgrade(open_database(sqlite_url(Path(sys.argv[1]))))))
"""


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What /opt/weft of the image holds."""
    folder = tmp_path_factory.mktemp("image")
    base = base_python(folder / "base")
    (build,) = [stage for stage in stages(IMAGES / "control.Containerfile") if stage.name == "build"]
    source = folder / "src"
    source.mkdir()
    for instruction in build.instructions:
        if instruction.name == "COPY":
            *sources, target = instruction.words.split()
            copy(sources, source / target)
        elif instruction.name == "RUN":
            run(instruction.words, folder, base)
    yield folder / "opt" / "weft"
    shutil.rmtree(folder)  # half a gigabyte


def base_python(folder: Path) -> Path:
    """The base image's Python: one that has pip and nothing else. The pip is the one that runs these tests."""
    subprocess.run(tied(sys.executable, "-m", "venv", "--without-pip", folder), check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "pip").symlink_to(Path(pip.__file__).parent)
    return folder


def copy(sources: list[str], target: Path) -> None:
    """Copy as COPY does: a folder's content into the target, files to it or into it."""
    for name in sources:
        origin = ROOT / name
        if origin.is_dir():
            shutil.copytree(origin, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            file = target / origin.name if target.is_dir() else target
            file.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(origin, file)


def run(words: str, folder: Path, base: Path) -> None:
    for path in ("/opt/weft", "/wheels"):
        words = words.replace(path, f"{folder}{path}")
    words = words.replace(" --no-cache ", " ").replace(" --compile-bytecode ", " ")
    environment = {**os.environ, "PATH": f"{base}/bin:/usr/bin:/bin"}  # how this machine reaches packages stays
    command = tied("/bin/sh", "-ec", words)
    done = subprocess.run(command, cwd=folder / "src", env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{words}\n{done.stdout}{done.stderr}"


def python(image: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = tied(image / "bin" / "python", "-I", *arguments)
    return subprocess.run(command, cwd=image, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("module", MODULES)
def test_every_process_of_the_control_plane_starts(image: Path, module: str) -> None:
    done = python(image, "-m", module, "--help")
    assert done.returncode == 0, done.stderr
    assert "--help" in done.stdout


def test_the_command_is_on_the_path(image: Path) -> None:
    command = tied(image / "bin" / "weft", "key", "create", "--help")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "--supervisor" in done.stdout, done.stderr


def test_there_is_no_torch(image: Path) -> None:
    done = python(image, "-c", "import torch")
    assert "No module named 'torch'" in done.stderr


def test_what_is_no_module_is_installed_too(image: Path, tmp_path: Path) -> None:
    done = python(image, "-c", MIGRATES, str(tmp_path / "weft.sqlite"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() not in ("", "None")
