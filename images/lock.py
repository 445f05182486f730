"""`make lock`: the locks of the images and of `make up`, of the same versions as requirements.lock."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
CONTROL = ("kubernetes", "gateway", "scheduler", "encoder", "supervisor", "batch", "depot", "cli", "tracing")
RUNNER = ("runner", "offload", "tracing")
UP = ("operator", "gateway", "scheduler", "predictor", "supervisor", "batch", "depot", "runner", "cli")


def main() -> int:
    lock("images/build.lock", "images/build.in")
    lock("images/control.lock", *extras(*CONTROL))
    lock("images/runner.lock", *extras("torch", *RUNNER))
    lock("images/runner-cpu.lock", *extras(*RUNNER))
    lock("up.lock", *extras(*UP))
    return 0


def extras(*names: str) -> tuple[str, ...]:
    flags = (word for name in names for word in ("--extra", name))
    return ("pyproject.toml", *flags, "--constraint", "requirements.lock")


def lock(path: str, *what: str) -> None:
    how = ("--python-version", "3.11", "--universal", "--generate-hashes", "--no-emit-index-url", "--quiet")
    command = (
        Path(sys.executable).with_name("uv"),
        "pip",
        "compile",
        *what,
        *how,
        "--output-file",
        path,
    )
    subprocess.run(command, cwd=ROOT, check=True)  # noqa: S603 (our own words)


if __name__ == "__main__":
    sys.exit(main())
