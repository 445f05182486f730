"""`make lock`: requirements.lock, and of the same versions the locks of the images and of `make up`.

Each is for all Pythons from the oldest one on: what differs between them has a marker.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
CONTROL = ("kubernetes", "gateway", "scheduler", "encoder", "supervisor", "batch", "depot", "cli", "tracing")
RUNNER = ("runner", "offload", "tracing")
# Of this checkout, which have no hash.
OWN = ("weft", "weft-bench", "weft-conformance", "weft-predictor-train", "weft-tools")
UP = ("operator", "gateway", "scheduler", "predictor", "supervisor", "batch", "depot", "runner", "cli")


def main() -> int:
    lock("requirements.lock", "pyproject.toml", "--extra", "dev")
    lock("images/build.lock", "images/build.in")
    lock("images/control.lock", *extras(*CONTROL))
    lock("images/runner.lock", *extras("torch", *RUNNER))
    lock("images/runner-cpu.lock", *extras(*RUNNER))
    lock("up.lock", *extras(*UP))
    return 0


def oldest_python() -> str:
    """Read it from pyproject.toml, as the first classifier with a minor version."""
    found = re.search(r"Programming Language :: Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())
    assert found is not None
    return found[1]


def extras(*names: str) -> tuple[str, ...]:
    flags = (word for name in names for word in ("--extra", name))
    return ("pyproject.toml", *flags, "--constraint", "requirements.lock")


def lock(path: str, *what: str) -> None:
    how = ("--python-version", oldest_python(), "--universal", "--generate-hashes", "--no-emit-index-url", "--quiet")
    own = (word for name in OWN for word in ("--no-emit-package", name))
    command = (Path(sys.executable).with_name("uv"), "pip", "compile", *what, *how, *own, "--output-file", path)
    subprocess.run(command, cwd=ROOT, check=True)  # noqa: S603 (our own words)


if __name__ == "__main__":
    sys.exit(main())
