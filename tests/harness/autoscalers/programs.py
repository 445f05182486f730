"""What is built of KEDA and Prometheus, beside the tools of a test cluster, and only when somebody asks for it.

A module whose `go.mod` replaces another one cannot be installed at a version, so each is built in a copy of its
source, without the other modules of its `go.work`. The Go module proxy gives it, checked against Go's checksum
database.
"""

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import NamedTuple

from weft_devcluster import tools
from weft_devcluster.errors import BuildFailed, ToolMissing
from weft_devcluster.folders import owned_folder


class Source(NamedTuple):
    """Programs of a Go module, and the folder of its source that is kept beside them."""

    name: str
    module: str
    version: str
    packages: tuple[str, ...]
    tags: str = ""
    kept: str = ""


KEDA = Source("keda", "github.com/kedacore/keda/v2", "v2.21.0", ("./cmd/operator", "./cmd/adapter"), kept="config")
# 3.16.0, without the clients of the clouds that it can find its targets in: they are most of its build.
PROMETHEUS = Source(
    "prometheus", "github.com/prometheus/prometheus", "v0.316.0", ("./cmd/prometheus",), tags="remove_all_sd"
)


def place(source: Source) -> Path:
    """The folder of its programs and of what is kept, built or not."""
    parts = [*tools.go_flags(), *source[:3], *source.packages, source.tags, source.kept]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]
    return tools.folder() / f"{source.name}-{digest}"


def folder_of(source: Source) -> Path:
    """The folder, built. Raises ToolMissing."""
    found = place(source)
    if not found.is_dir():
        raise ToolMissing(f"{source.name} is not built ({found}): run `make autoscalers`")
    return found


def build_all() -> None:
    """What is not there. A second builder waits for the first. Raises BuildFailed, and ToolMissing without Go."""
    tools.folder().mkdir(parents=True, exist_ok=True)
    with (tools.folder() / "autoscalers.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for source in (KEDA, PROMETHEUS):
            if place(source).is_dir():
                os.utime(place(source))  # asked for: `make cluster-tools` removes what nobody has asked for in a month
            else:
                _build(source)


def _build(source: Source) -> None:
    go = shutil.which("go")
    if go is None:
        raise ToolMissing(
            f"Go is not installed, so {source.name} is not built: apt-get install golang-go, or https://go.dev/dl"
        )
    print(f"autoscalers: building {source.name} {source.version}", file=sys.stderr, flush=True)
    started = time.monotonic()
    with owned_folder("building-", tools.folder()) as made:
        root, programs = _copied(go, source, made), made / source.name
        programs.mkdir()
        tags = [f"-tags={source.tags}"] if source.tags else []
        _run([go, "build", *tools.go_flags(), *tags, "-o", f"{programs}/", *source.packages], root)
        if source.kept:
            shutil.copytree(root / source.kept, programs / source.kept)
        programs.replace(place(source))
    print(f"autoscalers: built {source.name} in {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)


def _copied(go: str, source: Source, into: Path) -> Path:
    """A copy of the module's source that can be written: in Go's cache of modules nothing can be built."""
    told = _run([go, "mod", "download", "-json", f"{source.module}@{source.version}"], into)
    with zipfile.ZipFile(json.loads(told)["Zip"]) as archive:
        archive.extractall(into)
    return into / f"{source.module}@{source.version}"


def _run(command: list[str], folder: Path) -> str:
    environment = {**os.environ, "CGO_ENABLED": "0", "GOWORK": "off"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BuildFailed(f"{' '.join(command)}:\n{done.stderr.strip() or done.stdout.strip()}")
    return done.stdout
