"""`make lock`: the locks of the images, of the same versions as requirements.lock."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
CONTROL = ("kubernetes", "gateway", "scheduler", "predictor", "supervisor", "batch", "depot", "cli", "tracing")
RUNNER = ("runner", "offload", "tracing")
NO_CUDA = ("--excludes", "images/no-cuda.txt", "--no-emit-package", "torch")


def main() -> int:
    lock("build", "images/build.in")
    lock("control", *extras(*CONTROL))
    lock("runner", *extras(*RUNNER))
    lock("runner-cpu", *extras(*RUNNER), *NO_CUDA)
    return 0


def extras(*names: str) -> tuple[str, ...]:
    flags = (word for name in names for word in ("--extra", name))
    return ("pyproject.toml", *flags, "--constraint", "requirements.lock")


def lock(name: str, *what: str) -> None:
    how = ("--python-version", "3.11", "--universal", "--generate-hashes", "--no-emit-index-url", "--quiet")
    command = (
        Path(sys.executable).with_name("uv"),
        "pip",
        "compile",
        *what,
        *how,
        "--output-file",
        f"images/{name}.lock",
    )
    subprocess.run(command, cwd=ROOT, check=True)  # noqa: S603 (our own words)


if __name__ == "__main__":
    sys.exit(main())
