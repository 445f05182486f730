"""What stands beside each figure: the machine, the versions, the command."""

import os
import platform
import re
import shlex
import sys
from importlib import metadata
from pathlib import Path

from weft_stage.lines import Origin

_PATH = re.compile(r"(^|[\s=:])/(?:[^/\s:]+/)*([^/\s:]+)")
VERSIONED = ("torch", "transformers", "grpcio", "fastapi", "numpy")


def origin(*packages: str) -> Origin:
    """The origin of this process's figures; `packages` adds to the versions that are always told."""
    return Origin(command=command(), machine=machine(), versions=versions(*VERSIONED, *packages))


def command() -> str:
    """How this process was started; of absolute paths only the last part, since the rest says nothing elsewhere."""
    return shlex.join([Path(sys.argv[0]).name, *map(without_folders, sys.argv[1:])])


def without_folders(text: str) -> str:
    """Each absolute path in a word of a command as its last part: `LD_PRELOAD=/x/liba.so` -> `LD_PRELOAD=liba.so`."""
    return _PATH.sub(r"\1\2", text)


def machine() -> str:
    """Processor, cores this process may use, memory: e.g. `AMD EPYC 9655, 2 cores, 24 GiB, Linux x86_64`."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    cores = len(os.sched_getaffinity(0))
    return f"{_processor()}, {cores} cores, {memory:.0f} GiB, {platform.system()} {platform.machine()}"


def versions(*packages: str) -> str:
    """`Python 3.11.7, torch 2.15.0, ...`; packages that are not installed are left out."""
    found = [f"Python {platform.python_version()}"]
    for name in packages:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
