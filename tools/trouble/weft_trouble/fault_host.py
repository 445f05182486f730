"""What a process of `weft bench faults` stands on: its disk, its clock, its memory.

A library that is preloaded into every process (`host_faults.c`, made with `cc`) lets calls on files below a folder
fail, and the clock be off, as a control file says, one for each component. Memory: a control group in which the process
can have no more than it has; it takes the rights of the machine's administrator.
"""

import asyncio
import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from struct import Struct

from weft_stage.errors import StackFailed
from weft_stage.memory_group import memory_group

DISK_FAULTS: Mapping[str, bytes] = {"disk-full": b"F", "disk-broken": b"E", "disk-read-only": b"R"}
CLOCK_FAULTS: Mapping[str, int] = {"clock-ahead": 3600, "clock-behind": -3600}  # seconds
OUT_OF_MEMORY = "out-of-memory"
CONTROL_BYTES = 4096
CONTROL = Struct("<qc")  # what it begins with: seconds, the disk's fault; then the folder
NO_FAULT = CONTROL.pack(0, b"\0")
SOURCE, LIBRARY = Path(__file__).with_name("host_faults.c"), "host_faults.so"
LIMIT_BYTES = 64 << 10  # more than a process has
PROCESSES, LEFT_S, POLL_S = "cgroup.procs", 60.0, 0.01


def make(folder: Path) -> Path:
    """The folder, with what has to be preloaded. Raises StackFailed."""
    folder.mkdir(parents=True)
    if shutil.which("cc") is None:
        raise StackFailed("no C compiler makes what strikes disks and clocks: apt-get install gcc libc6-dev")
    command = ["cc", "-shared", "-fPIC", "-O2", "-o", str(folder / LIBRARY), str(SOURCE), "-ldl"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise StackFailed(f"{' '.join(command)}: {done.stderr.strip()}")
    return folder


def environment(folder: Path, component: str) -> Mapping[str, str]:
    """With it a component is struck by its name. Called before the component starts."""
    control = _control(folder, component)
    if not control.exists():
        control.write_bytes(bytes(CONTROL_BYTES))
    return {"LD_PRELOAD": str(folder / LIBRARY), "WEFT_BENCH_HOST_FAULTS": str(control)}


@asynccontextmanager
async def struck(folder: Path, fault: str, component: str, pid: int, files: Path) -> AsyncGenerator[None]:
    """The fault, from enter to exit. `files`: what is on its disk."""
    if fault == OUT_OF_MEMORY:
        with memory_group(LIMIT_BYTES) as group:
            (group.path / PROCESSES).write_text(str(pid))
            try:
                yield
            finally:
                await _left(group.path, pid)
        return
    with _control(folder, component).open("r+b", buffering=0) as file:
        file.seek(CONTROL.size)
        file.write(os.fsencode(files) + b"\0")
        file.seek(0)
        file.write(CONTROL.pack(CLOCK_FAULTS.get(fault, 0), DISK_FAULTS.get(fault, b"\0")))
        try:
            yield
        finally:
            file.seek(0)
            file.write(NO_FAULT)


async def _left(group: Path, pid: int) -> None:
    """Take the process out of the group; one that was killed goes by itself. Raises StackFailed."""
    with contextlib.suppress(ProcessLookupError):
        (group.parent / PROCESSES).write_text(str(pid))
    end = time.monotonic() + LEFT_S
    while (group / PROCESSES).read_text():
        if time.monotonic() > end:
            raise StackFailed(f"process {pid} stays in {group}")
        await asyncio.sleep(POLL_S)


def lives(pid: int) -> bool:
    """Whether a process is there."""
    return Path(f"/proc/{pid}").exists()


def _control(folder: Path, component: str) -> Path:
    return folder / f"{component}.faults"
