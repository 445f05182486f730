"""A Python environment for peers that are wheels: made once, in the user's cache, and kept."""

import hashlib
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from tempfile import TemporaryDirectory

from weft_stage.errors import PeerFailed

WHEELS = ("numpy>=2", "gguf>=0.19", "tokenizers>=0.22", "xllamacpp>=2026.10", "mistralrs>=0.9.5")
ARCTIC = "arctic-inference==0.3.0"
ARCTIC_WHEELS = ("numpy>=2", "setuptools>=80", "wheel", "cmake>=3.18", "ninja", "nanobind==2.9.2", "grpcio-tools")
INSTALL_S = 1800.0  # of one of them, with what it needs
SAID_CHARS = 2000
Bar = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]


def environment(folder: Path, bar: Bar, wheels: Sequence[str] = WHEELS, source: str = "") -> Path:
    """The Python that has `wheels`, installed below `folder` if it is not there yet.

    `source`: a package that is built with the wheels, by a compiler of this machine, and without what else it wants.
    Raises PeerFailed.
    """
    names = (*wheels, source) if source else wheels
    name = hashlib.sha256("\n".join((sys.version, *names)).encode()).hexdigest()[:12]
    home = folder / f"peers-{name}"
    python, whole = home / "bin" / "python", home / "whole"
    if whole.exists():
        return python
    shutil.rmtree(home, ignore_errors=True)
    with bar(f"installing {', '.join(names)}", len(names) + 1) as advanced:
        venv.create(home, with_pip=True)
        advanced(1)
        for wheel in wheels:
            _install(python, wheel)
            advanced(1)
        if source:
            _build(python, source)
            advanced(1)
    whole.touch()
    return python


def _build(python: Path, source: str) -> None:
    """Build it beside a torch that only tells where its parts for CMake are: nothing of a suffix cache uses them."""
    with TemporaryDirectory(prefix="weft-bench-") as beside:
        (Path(beside) / "torch.py").write_text('class utils:\n    cmake_prefix_path = ""\n', encoding="utf-8")
        path = f"{python.parent}{os.pathsep}{os.environ.get('PATH', '')}"
        own = {"PATH": path, "VIRTUAL_ENV": str(python.parent.parent), "PYTHONPATH": beside}
        _install(python, source, "--no-deps", "--no-build-isolation", **own)


def _install(python: Path, wheel: str, *flags: str, **environment: str) -> None:
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *flags, wheel]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=INSTALL_S, check=False, env=os.environ | environment
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PeerFailed(f"{wheel} cannot be installed: {error}") from error
    if done.returncode:
        raise PeerFailed(f"{wheel} cannot be installed: {done.stderr[-SAID_CHARS:]}")
