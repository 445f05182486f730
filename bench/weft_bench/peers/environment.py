"""A Python environment for peers that are wheels: made once, in the user's cache, and kept."""

import hashlib
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from weft_stage.errors import PeerFailed

WHEELS = ("numpy>=2", "gguf>=0.19", "tokenizers>=0.22", "xllamacpp>=2026.10", "mistralrs>=0.9.5")
INSTALL_S = 1800.0  # of one of them, with what it needs
SAID_CHARS = 2000
Bar = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]


def environment(folder: Path, bar: Bar, wheels: Sequence[str] = WHEELS) -> Path:
    """Return the Python that has `wheels`, installed below `folder` if it is not there yet. Raises PeerFailed."""
    name = hashlib.sha256("\n".join((sys.version, *wheels)).encode()).hexdigest()[:12]
    home = folder / f"peers-{name}"
    python, whole = home / "bin" / "python", home / "whole"
    if whole.exists():
        return python
    shutil.rmtree(home, ignore_errors=True)
    with bar(f"installing {', '.join(wheels)}", len(wheels) + 1) as advanced:
        venv.create(home, with_pip=True)
        advanced(1)
        for wheel in wheels:
            _install(python, wheel)
            advanced(1)
    whole.touch()
    return python


def _install(python: Path, wheel: str) -> None:
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", wheel]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PeerFailed(f"{wheel} cannot be installed: {error}") from error
    if done.returncode:
        raise PeerFailed(f"{wheel} cannot be installed: {done.stderr[-SAID_CHARS:]}")
