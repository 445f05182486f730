"""How much memory this process may still take: of the machine, and of the control group it runs in."""

from dataclasses import dataclass
from pathlib import Path

import psutil

PROC, CGROUP = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
NO_LIMIT = 1 << 60  # cgroup v1 writes a number near 2^63 where there is none, v2 the word `max`


@dataclass(frozen=True, slots=True)
class Available:
    """`limit` says whose memory it is, for whoever is told that it does not suffice."""

    n_bytes: int
    limit: str


def available_memory(proc: Path = PROC, cgroup: Path = CGROUP) -> Available:
    """The least that the machine and any control group above this process have left. Page cache counts as free."""
    machine = Available(psutil.virtual_memory().available, "this machine")
    return min((machine, *_groups(proc, cgroup)), key=lambda one: one.n_bytes)


def _groups(proc: Path, cgroup: Path) -> list[Available]:
    """Every group from the process's own up to the root. In a container the own one may be mounted as the root."""
    try:
        lines = proc.read_text().splitlines()
    except OSError:
        return []  # not Linux, or no /proc: the machine is all there is to ask
    found: list[Available] = []
    for _, controllers, path in (line.split(":", 2) for line in lines if line.count(":") >= 2):
        if controllers in ("", "memory"):
            root = cgroup / controllers if controllers else cgroup
            inside = root / path.lstrip("/")
            found += [
                left for group in (inside, *inside.parents) if group.is_relative_to(root) if (left := _left(group))
            ]
    return found


def _left(group: Path) -> Available | None:
    """v2's names, then v1's; None where the group has no limit or is not visible from here."""
    for most, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
        limit, usage = _number(group / most), _number(group / used)
        if limit is not None and usage is not None and limit < NO_LIMIT:
            left = max(0, limit - usage + _cache(group / "memory.stat"))
            return Available(min(left, limit), f"this container (limit {limit / (1 << 30):.2f} GiB)")
    return None


def _cache(stat: Path) -> int:
    """Bytes of files in memory, which give way: v1 counts those of groups below in names of their own."""
    try:
        rows = dict(line.split() for line in stat.read_text().splitlines())
    except (OSError, ValueError):
        return 0
    return sum(int(rows.get(f"total_{name}", rows.get(name, 0))) for name in ("active_file", "inactive_file"))


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
