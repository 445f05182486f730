"""`weft bench faults`: processes killed and stopped, links cut, stalled and made bad, while streams run.

A stack of its own: two runners of the quickstart's base on the CPU. Streams, greedy and sampled, go
through a gateway whose connections to its peers can be cut. A fault strikes in the phase that its cell names, which
runners' reports show: *decode* (every stream has tokens, none has ended), *prefill* (beside them a long prompt is in
KV in part), *loading* (beside them an adapter that no runner has is on its way; the depot stands still until the
strike), *swapping* (more streams than their KV has pages for, and that of one is in host memory or on its way there or
back). The runner that is struck is the one where the phase is. *streams* ran at that moment, over all runs.

Cells named *split* strike a pool of mode Split: one runner computes prompts, the other goes on from their KV, which
leaves while the prompt is computed. *before*: a long prompt has begun; *3/10*: that share is computed, and sent;
*after*: it was handed over. Pages of both runners are all free again afterwards. KV passes through shared memory; where
the link *between runners* is struck, over TCP, as between hosts.

- *kill*: SIGKILL; whatever ended is started again. *stop*: SIGSTOP, and SIGCONT after 10 s.
- *cut*: every connection of the gateway to that peer is reset in the middle of a message. *stall*: for 10 s no byte
  passes, and the connections stay. Between runners a cut resets the streams of KV of both, and a stall lasts 14 s: a
  runner waits for 10 s, then gives a transfer up, and its prompt is computed again.

Cells `FAULT SOURCE to TARGET` strike the link through which one process reaches another, or (*loss*) all links to it,
on a stack where every one can be struck; an adapter is applied at that moment, which has to be Ready afterwards, too.

- *delay*: for 10 s every byte is 200 ms late, and up to 200 more. *narrow*: for 10 s 32 KiB pass a second.
- *deaf*: for 14 s no byte reaches the target, *mute*: none comes from it; longer than a peer is waited for (6 s).
  *stall* for 14 s is both. *abandon*: what is written into the connections that there are is gone, and nobody is told;
  new ones are whole.
- *loss*: for 10 s a tenth of the packets to and from the target is dropped (iptables: needs its rights).

Cells `FAULT SQLite` and `FAULT PostgreSQL` strike the store for 10 s. *locked*: another process has the file.
*full*: its disk has no byte left. *kill*: SIGKILL, and started again. *stop*: it stands still. *read-only*: it takes
no writes. *slow*: every answer takes 2 s more. *crowded*: somebody else has all of its connections. *failover*:
SIGKILL, and after 3 s its synchronous replica takes its place. Afterwards there is one outcome of each stream, and
usage counts each once.

Cells of disks, clocks and memory strike what one process stands on, on the stack with links everywhere; an adapter is
applied at that moment, too. *disk-full*: for 10 s its files can be made no larger and no new one is made (ENOSPC).
*disk-broken*: reading, writing and syncing them are EIO. *disk-read-only*: EROFS. *clock-ahead*, *clock-behind*: for
10 s its clock is an hour off, then right again. *out-of-memory*: for 10 s it gets no more memory than it has; when it
asks for more than 64 KiB the kernel kills it.

Two requests more are sent right after the strike, and another every 2 s of a stop or stall. Every token and its log
probability are compared with those of the same request without a fault. *longest gap* is the longest time without a
token, of each stream that ended after the strike; of a request that was sent meanwhile, also its time to the first
token. A run counts once everything is ready and idle again, the store has one outcome of each stream, and no log says
that an invariant broke.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from itertools import product

from weft_stage.lines import Line, Origin, percentile
from weft_trouble.fault_host import CLOCK_FAULTS, DISK_FAULTS, OUT_OF_MEMORY
from weft_trouble.fault_streams import Difference

PROCESSES = ("runner", "scheduler", "supervisor", "predictor", "depot")
LINKED = ("runner", "scheduler", "predictor")
MIN_STREAMS = 8  # streams that run when a fault strikes
PHASES = ("decode", "prefill", "loading", "swapping")
PROMPT_RUNNER, TOKEN_RUNNER, RUNNERS = "prompt runner", "token runner", "runners"
PAIRS = (  # who reaches whom
    *(("gateway", target) for target in LINKED),
    *(("supervisor", target) for target in ("scheduler", "predictor")),
    *(("runner", target) for target in ("supervisor", "depot")),
    *(("controller", target) for target in ("scheduler", "depot")),
)
CLIENT = "client"
OF_CLIENTS = ("delay", "narrow", "stall")  # a stream outlives them
BAD_LINKS = ("delay", "narrow", "deaf", "mute", "abandon", "cut", "stall")
DISKS = ("runner", "predictor", "depot", "gateway", "controller")
CLOCKS = (*PROCESSES, "gateway", "controller")
LOSS, LOSSY = "loss", ("scheduler", "supervisor", "predictor", "runner", "depot")
SQLITE, POSTGRESQL = "SQLite", "PostgreSQL"
FAULTS_OF_STORES = {
    SQLITE: ("locked", "full"),
    POSTGRESQL: ("kill", "stop", "read-only", "slow", "crowded", "full", "failover"),
}
SPLIT_TARGETS = (PROMPT_RUNNER, TOKEN_RUNNER, "scheduler", "supervisor")
BEFORE, AFTER = "before", "after"
SPLIT_PHASES = (BEFORE, *(f"{tenth}/10" for tenth in range(1, 10)), AFTER)
NOT_AVAILABLE = {  # cells of the matrix that cannot be struck, and why
    "* link to depot *": "a gateway that has a pool's tokenizer has no connection to the depot",
    "cut gateway to *, stall gateway to *": "they are struck in every phase: `cut link to *`, `stall link to *`",
    "cut client to *, abandon client to *": "a stream ends with its client's connection; it is not resumed",
}
TOKENS = ("lost", "repeated", "wrong")
STRUCK, WRONG = "streams struck", "tokens lost, repeated or wrong, and streams failed"
GAP_P50, GAP_MAX, HEALTHY = "longest gap p50", "longest gap", "ready and idle again after"


@dataclass(frozen=True, slots=True)
class Cell:
    """A fault at a process or a link, in a phase."""

    fault: str  # kill, stop; cut, stall; one of BAD_LINKS; loss
    target: str
    phase: str
    split: bool = False  # of a pool in this mode
    source: str = ""  # of the link to the target, in a mesh of links

    @property
    def share(self) -> float:
        """The share of the long prompt that is computed at least when the fault strikes."""
        return SPLIT_PHASES.index(self.phase) / 10

    @property
    def lasts(self) -> bool:
        return self.of_store or self.fault not in ("kill", "cut")

    @property
    def is_link(self) -> bool:
        return self.fault in (*BAD_LINKS, LOSS)

    @property
    def of_store(self) -> bool:
        return self.target in FAULTS_OF_STORES

    @property
    def of_host(self) -> bool:
        """True for a fault of what a process stands on: disk, clock, memory."""
        return self.fault in (*DISK_FAULTS, *CLOCK_FAULTS, OUT_OF_MEMORY)

    @property
    def meshed(self) -> bool:
        """True for a cell on a stack where every process has links of its own."""
        return bool(self.source) or self.fault == LOSS

    @property
    def between_runners(self) -> bool:
        """True for a fault at the link that KV takes."""
        return self.target == RUNNERS

    @property
    def kind(self) -> str:
        """Return the kind of fault, by which runs are summed."""
        if self.of_store:
            return f"{self.fault} {self.target}"
        if self.is_link:
            return f"{self.fault} {'KV link' if self.between_runners else 'link'}"
        return f"{'split ' if self.split else ''}{self.fault}"

    def __str__(self) -> str:
        if self.meshed:
            return f"{self.fault} {f'{self.source} to' if self.source else 'at'} {self.target} {self.phase}"
        mode = "split " if self.split else ""
        link = "link between " if self.between_runners else "link to " if self.is_link else ""
        return f"{mode}{self.fault} {link}{self.target} {self.phase}"


CELLS = [
    *(Cell(*of) for of in product(("kill", "stop"), PROCESSES, PHASES)),
    *(Cell(*of) for of in product(("cut", "stall"), LINKED, PHASES)),
    *(Cell("kill", *of, split=True) for of in product(SPLIT_TARGETS, SPLIT_PHASES)),
    *(Cell(fault, RUNNERS, phase, split=True) for fault, phase in product(("cut", "stall"), SPLIT_PHASES)),
    *(
        Cell(fault, target, "loading" if target == "depot" else "decode", source=source)
        for (source, target), fault in product(PAIRS, BAD_LINKS)
        if source != "gateway" or fault not in ("cut", "stall")
    ),
    *(Cell(fault, "gateway", "decode", source=CLIENT) for fault in OF_CLIENTS),
    *(Cell(fault, store, "decode") for store, faults in FAULTS_OF_STORES.items() for fault in faults),
    *(
        Cell(fault, target, "loading" if target in ("depot", "runner") else "decode")
        for fault, target in product(DISK_FAULTS, DISKS)
    ),
    *(Cell(*of, "decode") for of in product(CLOCK_FAULTS, CLOCKS)),
    *(Cell(OUT_OF_MEMORY, target, "decode") for target in PROCESSES),
    *(Cell(LOSS, target, "loading" if target == "depot" else "decode") for target in LOSSY),
]


@dataclass(frozen=True, slots=True)
class Run:
    """What one strike did. `struck`: streams that ran then. `gaps_s`: the longest gap of each that ended after it."""

    cell: Cell
    number: int
    struck: int
    difference: Difference
    failed: int
    gaps_s: tuple[float, ...]
    healthy_s: float


def chosen(patterns: Sequence[str]) -> list[Cell]:
    """Return the cells whose name one of the patterns matches: `kill runner *`, `* prefill`."""
    return [cell for cell in CELLS if any(fnmatch(str(cell), pattern) for pattern in patterns)]


def listing(cells: Iterable[Cell]) -> Iterator[str]:
    """Yield a line for each cell, and one for each that cannot be struck."""
    yield from map(str, cells)
    for pattern, reason in NOT_AVAILABLE.items():
        yield f"{pattern}: not available: {reason}"


def lines(origin: Origin, runs: Sequence[Run], cells: str = "") -> Iterator[Line]:
    """Yield the figures of each kind of fault, summed over its runs. `cells`: which cells ran, if not all did."""
    by_kind = defaultdict[str, list[Run]](list)
    for run in runs:
        by_kind[run.cell.kind + (f", of {cells}" if cells else "")].append(run)
    for kind, of_kind in by_kind.items():
        gaps_s = [gap_s for run in of_kind for gap_s in run.gaps_s]
        wrong = sum(sum(getattr(run.difference, count) for count in TOKENS) + run.failed for run in of_kind)
        yield origin.line(kind, "runs", len(of_kind), "runs")
        yield origin.line(kind, STRUCK, sum(run.struck for run in of_kind), "streams")
        yield origin.line(kind, WRONG, wrong, "", target="<= 0")
        yield origin.line(kind, GAP_P50, percentile(gaps_s, 50), "s")
        yield origin.line(kind, GAP_MAX, max(gaps_s), "s")
        yield origin.line(kind, HEALTHY, max(run.healthy_s for run in of_kind), "s")


def told(run: Run) -> str:
    """Return one run in a line of text."""
    difference = ", ".join(f"{getattr(run.difference, count)} {count}" for count in TOKENS)
    figures = f"{run.struck} streams, {difference}, {run.failed} failed, longest gap {max(run.gaps_s):.2f} s"
    return f"{run.cell}, run {run.number}: {figures}"
