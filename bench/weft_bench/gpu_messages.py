"""What parent and worker processes of `gpu-bench` and `gpu-check` say to each other. Pure: no torch here."""

from dataclasses import dataclass, field
from pathlib import Path

from weft_bench.gpu_plan import Plan
from weft_bench.lines import Line, Origin

BENCH, CHECK, COMPILE = "bench", "check", "compile"
OPERATORS = "operators"  # of what is compiled ahead; the rest are names of shapes


@dataclass(frozen=True, slots=True)
class Job:
    """What a worker is started for. `kind`: BENCH, CHECK or COMPILE; `tiny`: amounts that show that it works."""

    kind: str
    tiny: bool
    command: str
    folder: Path
    plan: Plan = field(default_factory=Plan)


@dataclass(frozen=True, slots=True)
class Hello:
    """The worker is ready."""

    origin: Origin


@dataclass(frozen=True, slots=True)
class Told:
    """A figure."""

    line: Line


@dataclass(frozen=True, slots=True)
class Outcome:
    """One check of a group, or of its share; `fault`: what is wrong, empty where nothing is."""

    group: str
    name: str
    fault: str


@dataclass(frozen=True, slots=True)
class Ended:
    """A case or a group is over. `error`: why it broke off; `lost`: this worker can run nothing more."""

    name: str
    seconds: float
    error: str = ""
    lost: bool = False


Message = Hello | Told | Outcome | Ended


def shares(what: str, count: int) -> list[str]:
    """Names of its shares, to be done by several processes; its own name where there is one."""
    if count == 1:
        return [what]
    return [f"{what} {share}/{count}" for share in range(count)]


def share_of(name: str) -> tuple[str, int, int]:
    """What it is, which share, of how many."""
    what, _, share = name.partition(" ")
    number, _, count = share.partition("/")
    return what, int(number or 0), int(count or 1)
