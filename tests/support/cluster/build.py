"""Builds what `tools.MODULES` names, once. A tool that is there is not built again; a build that fails, fails.

Sources come from the Go module proxy, checked against the committed go.sum files or Go's checksum database; Debian's
packages for a node and for the store's tests are installed where this is root and apt is there.
"""

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from cluster import tools
from cluster.errors import BuildFailed, ToolMissing
from cluster.machine import missing_packages

BUILD_S = 1800.0
INSTALL_S = 600.0


def build_all() -> Path:
    """Everything for both levels; returns the folder. Raises BuildFailed, and ToolMissing without Go."""
    build(tools.MODULES)
    install_packages()
    build_pause()
    return tools.folder()


def build(modules: Iterable[tools.Module]) -> None:
    """One after the other: each uses all cores. A second builder waits for the first and finds its work done."""
    folder = tools.folder()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for module in modules:
            if not (folder / module.name).exists():
                _build(module, folder)


def build_pause() -> None:
    """The program of the sandbox image. Without a C compiler there is no node; what it lacks is told then."""
    target, compiler = tools.folder() / tools.PAUSE, shutil.which("cc") or shutil.which("gcc")
    if target.exists() or compiler is None:
        return
    _say(f"building {tools.PAUSE}")
    part = target.with_suffix(".part")
    command = [compiler, "-Os", "-static", "-o", str(part), str(tools.SOURCES / f"{tools.PAUSE}.c")]
    _run(command, tools.SOURCES, {}, BUILD_S)
    part.replace(target)


def install_packages() -> None:
    """Debian packages of a node and of the store's tests, where that is allowed; else says what will be skipped."""
    missing = missing_packages()
    if not missing:
        return
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        _say(
            f"not installed: {' '.join(missing)} (needs root and apt-get); tests that need them say so and are skipped"
        )
        return
    _say(f"installing {' '.join(missing)}")
    quiet = {"DEBIAN_FRONTEND": "noninteractive"}
    _run(["apt-get", "update", "-qq"], Path("/"), quiet, INSTALL_S)
    _run(["apt-get", "install", "-qq", "--no-install-recommends", *missing], Path("/"), quiet, INSTALL_S)


def _build(module: tools.Module, folder: Path) -> None:
    go = shutil.which("go")
    if go is None:
        raise ToolMissing(f"Go is not installed, so {module.name} cannot be built: see https://go.dev/dl")
    _say(f"building {module.name} {module.version}")
    started = time.monotonic()
    flags = ["-trimpath", "-buildvcs=false", "-ldflags", f"-s -w {module.stamp}".strip()]
    with tempfile.TemporaryDirectory(dir=folder.parent) as made:
        environment = {"CGO_ENABLED": "0", "GOBIN": made}
        if module.folder is None:
            _run([go, "install", *flags, f"{module.package}@{module.version}"], Path(made), environment, BUILD_S)
        else:
            part = str(Path(made) / module.name)
            command = [go, "build", *flags, "-o", part, module.package]
            _run(command, tools.SOURCES / module.folder, environment, BUILD_S)
        (Path(made) / module.name).replace(folder / module.name)
    _say(f"built {module.name} in {time.monotonic() - started:.0f} s")


def _run(command: Sequence[str], folder: Path, environment: Mapping[str, str], limit_s: float) -> None:
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise BuildFailed(f"{' '.join(command)}: no end after {limit_s:.0f} s") from error
    if done.returncode != 0:
        raise BuildFailed(f"{' '.join(command)}:\n{done.stderr.strip() or done.stdout.strip()}")


def _say(text: str) -> None:
    print(f"cluster-tools: {text}", file=sys.stderr, flush=True)
