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

ARCTIC = "arctic-inference==0.3.0"
ARCTIC_WHEELS = ("numpy>=2", "setuptools>=80", "wheel", "cmake>=3.18", "ninja", "nanobind==2.9.2", "grpcio-tools")
INSTALL_S = 1800.0  # of one of them, with what it needs
SAID_CHARS = 2000
Bar = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]


def environment(folder: Path, bar: Bar, wheels: Sequence[str], source: str = "") -> Path:
    """Return a Python below `folder` that has these wheels. They are installed if they are not there yet.

    `source`: a package that is built with the wheels, by a compiler of this machine, and without its other
    requirements. Raises PeerFailed.
    """
    names = (*wheels, source) if source else (*wheels,)
    name = hashlib.sha256("\n".join((sys.version, *names)).encode()).hexdigest()[:12]
    home = folder / f"peers-{name}"
    python, whole = home / "bin" / "python", home / "whole"
    if whole.exists():
        return python
    shutil.rmtree(home, ignore_errors=True)
    with bar(f"installing {', '.join(names)}", len(names)) as advance, TemporaryDirectory(prefix="weft-bench-") as fake:
        venv.create(home, with_pip=True)
        # the build of a suffix cache asks torch for CMake files and does not use them
        (Path(fake) / "torch.py").write_text('class utils:\n    cmake_prefix_path = ""\n', encoding="utf-8")
        path = f"{python.parent}{os.pathsep}{os.environ.get('PATH', '')}"
        environ = os.environ | {"PATH": path, "VIRTUAL_ENV": str(home), "PYTHONPATH": fake}
        for name in names:
            flags = ("--no-deps", "--no-build-isolation") if name == source else ()
            command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *flags, name]
            try:
                subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, check=True, env=environ)
            except (OSError, subprocess.SubprocessError) as error:
                said = getattr(error, "stderr", None) or ""
                raise PeerFailed(f"{name} cannot be installed: {error} {said[-SAID_CHARS:]}") from error
            advance(1)
    whole.touch()
    return python
