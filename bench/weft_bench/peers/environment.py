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

INSTALL_S = 1800.0  # of one of them, with what it needs
SAID_CHARS = 2000
Bar = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]


def environment(folder: Path, bar: Bar, wheels: Sequence[str]) -> Path:
    """Return a Python below `folder` that has these wheels, installed if they are not there yet. Raises PeerFailed."""
    name = hashlib.sha256("\n".join((sys.version, *wheels)).encode()).hexdigest()[:12]
    home = folder / f"peers-{name}"
    python, whole = home / "bin" / "python", home / "whole"
    if whole.exists():
        return python
    shutil.rmtree(home, ignore_errors=True)
    with bar(f"installing {', '.join(wheels)}", len(wheels)) as advance:
        venv.create(home, with_pip=True)
        for wheel in wheels:
            command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", wheel]
            try:
                subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, check=True)
            except (OSError, subprocess.SubprocessError) as error:
                said = getattr(error, "stderr", None) or ""
                raise PeerFailed(f"{wheel} cannot be installed: {error} {said[-SAID_CHARS:]}") from error
            advance(1)
    whole.touch()
    return python
