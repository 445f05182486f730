"""The build of what `tools` names, once. A tool that is there is not built again; a build that fails, fails.

Sources come from the Go module proxy, checked against the committed go.sum files or Go's checksum database; Debian's
packages for a node and for the store's tests are installed where this is root and apt is there.
"""

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from weft_devcluster import tools
from weft_devcluster.errors import BuildFailed, ToolMissing
from weft_devcluster.folders import owned_folder
from weft_devcluster.machine import missing_packages

BOUND_S = 4 * 3600.0  # of a hang: no build and no installation comes near it
KEPT_S = 30 * 86400.0  # how long a version stays that nobody asked for


def build_all() -> Path:
    """Build everything for both levels; returns the folder. Raises BuildFailed, and ToolMissing without Go."""
    build(tools.chosen())
    _download(tools.ELSEWHERE)
    install_packages()
    build([tools.PAUSE])
    return tools.folder()


def build(names: Iterable[str]) -> None:
    """Build what is not there. A second builder waits for the first and finds its work done."""
    names = list(names)
    tools.folder().mkdir(parents=True, exist_ok=True)
    with (tools.folder() / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        missing = [name for name in names if not tools.place(name).exists()]
        with owned_folder("building-", tools.folder()) as made:
            _build_go([tool for name, tool in tools.chosen().items() if name in missing], made)
            if tools.PAUSE in missing:
                _build_pause(made)
        _forget(names)


def _download(modules: Iterable[tools.Definitions]) -> None:
    """Download CRDs of other projects into Go's cache of modules: seconds, and nothing where they are there."""
    for of in modules:
        with contextlib.suppress(ToolMissing):
            tools.definitions_of(of)
            continue
        _say(f"downloading {of.module}")
        _run(["go", "mod", "download", f"{of.module}@{of.version}"], Path("/"), {})


def install_packages() -> None:
    """Install Debian packages of a node and of the store's tests where allowed; else say what will be skipped."""
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
    _run(["apt-get", "update", "-qq"], Path("/"), quiet)
    _run(["apt-get", "install", "-qq", "--no-install-recommends", *missing], Path("/"), quiet)


def _build_go(missing: Sequence[tools.Tool], made: Path) -> None:
    """Build the tools of a module of ours in one command: it compiles and links side by side, and each package once."""
    if not missing:
        return
    go = shutil.which("go")
    if go is None:
        raise ToolMissing(
            f"Go is not installed, so {missing[0].name} is not built: apt-get install golang-go, or https://go.dev/dl"
        )
    for module in sorted({tool.module for tool in missing if not tool.version}, reverse=True):
        together = [tool for tool in missing if not tool.version and tool.module == module]
        command = [go, "build", *tools.go_flags(module), "-o", f"{made}/", *(tool.package for tool in together)]
        _compile(together, command, tools.MODULES / module, made)
    for tool in missing:
        if tool.version:
            _compile([tool], [go, "install", *tools.go_flags(), f"{tool.package}@{tool.version}"], made, made)


def _compile(group: Sequence[tools.Tool], command: Sequence[str], folder: Path, made: Path) -> None:
    names = ", ".join(tool.name for tool in group)
    _say(f"building {names}")
    started = time.monotonic()
    _run(command, folder, {"CGO_ENABLED": "0", "GOBIN": str(made)})
    for tool in group:
        _keep(made, tool.name)
    _say(f"built {names} in {time.monotonic() - started:.0f} s")


def _build_pause(made: Path) -> None:
    """Build the program of the sandbox image. Without a C compiler there is no node; what it lacks is told then."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return
    command = [
        compiler,
        *tools.pause_flags(),
        "-o",
        str(made / tools.PAUSE),
        str(tools.MODULES / "tools" / f"{tools.PAUSE}.c"),
    ]
    _run(command, tools.MODULES / "tools", {})
    _keep(made, tools.PAUSE)


def _keep(made: Path, name: str) -> None:
    """Give a whole tool its place."""
    place = tools.place(name)
    place.parent.mkdir(exist_ok=True)
    (made / name).replace(place)


def _forget(names: Iterable[str]) -> None:
    """Remove other versions of tools, which nobody asked for in a long time. `names` are asked for now."""
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            os.utime(tools.place(name).parent)
    for folder in filter(Path.is_dir, tools.folder().iterdir()):
        if folder.stat().st_mtime < time.time() - KEPT_S:
            shutil.rmtree(folder)


def _run(command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> None:
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=BOUND_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise BuildFailed(f"{' '.join(command)}: no end after {BOUND_S:.0f} s") from error
    if done.returncode != 0:
        raise BuildFailed(f"{' '.join(command)}:\n{done.stderr.strip() or done.stdout.strip()}")


def _say(text: str) -> None:
    print(f"cluster-tools: {text}", file=sys.stderr, flush=True)
