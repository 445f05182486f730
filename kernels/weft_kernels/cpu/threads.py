"""The number of threads that this process may have working at a time: its affinity and its cgroups' quotas (version 2
and 1).

A quota may stand at any level above the process: the least one counts. A thread beyond it would make all of them wait
in turn at the kernels' barriers.
"""

import os
from collections.abc import Iterator
from pathlib import Path

MOUNT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
_V1_FOLDERS = ("cpu", "cpu,cpuacct", "cpuacct,cpu")


def cpu_quota(mount: Path = MOUNT, membership: Path = MEMBERSHIP, cpus: int | None = None) -> int:
    """The whole CPUs that this process may use, at least one. `cpus`: those that the affinity allows (default: this
    process's)."""
    allowed = len(os.sched_getaffinity(0)) if cpus is None else cpus
    return max(1, min([allowed, *(int(quota) for quota in cgroup_cpu_limits(mount, membership))]))


def cgroup_cpu_limits(mount: Path = MOUNT, membership: Path = MEMBERSHIP) -> Iterator[float]:
    """The CPUs that each cgroup with a quota grants, from the process's own one up. What cannot be read has none."""
    for controllers, path in _memberships(membership):
        if not controllers:  # "0::/path": version 2, all controllers in one tree
            for folder in _upwards(mount, path):
                yield from _v2(folder / "cpu.max")
        elif "cpu" in controllers.split(","):
            for root in (mount / name for name in _V1_FOLDERS if (mount / name).is_dir()):
                for folder in _upwards(root, path):
                    yield from _v1(folder)


def _memberships(file: Path) -> Iterator[tuple[str, str]]:
    """Yield (controllers, path) of each line of /proc/self/cgroup."""
    for line in _read(file).splitlines():
        _, controllers, path = line.split(":", 2)
        yield controllers, path


def _upwards(root: Path, path: str) -> Iterator[Path]:
    """Yield folders from the process's to the root; in a container perhaps only the root is there."""
    inside = Path(path.lstrip("/"))
    for part in (inside, *inside.parents):
        if ".." not in part.parts:
            yield root / part


def _v2(file: Path) -> Iterator[float]:
    match _read(file).split():
        case [quota, period] if quota.isdecimal():
            yield int(quota) / int(period)
        case _:  # "max", or no such file
            pass


def _v1(folder: Path) -> Iterator[float]:
    quota, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
    if quota.strip().isdecimal() and period.strip().isdecimal():  # -1: none
        yield int(quota) / int(period)


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
