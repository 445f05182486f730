"""Adapters that come while a batch decodes: what its steps pay for the loads beside them.

Rows of the base decode. In every other round four slots are filled again and again meanwhile with adapters that were
never here: they are read, checked, packed and seated while the steps run. A machine whose CPUs the engine all uses has
none to spare for that: what a load computes, the steps lose.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import fmean, median

from weft.domain.adapter import DesiredAdapter, DesiredChange
from weft.domain.machine import Kind, Peer, Received
from weft.domain.runner import RunnerOrder
from weft_bench.cpu_context import Context
from weft_bench.cpu_decode import PROMPT_TOKENS, Decoded, Model, base, decode
from weft_bench.cpu_engine import Sizes, Subject
from weft_bench.cpu_slots import MIB
from weft_stage.lines import Line, percentile

SUPERVISOR = Peer(Kind.SUPERVISOR, "bench")
ROWS, SLOTS = 8, 4  # pinned adapters may hold all slots but one: an engine has one more
QUIET, LOADING = "nothing loads", "adapters load"


@dataclass(slots=True)
class Stream:
    """Adapters that never end. `wanted`: how many were asked for in all."""

    model: Model
    subject: Subject
    wanted: int = 0
    version: int = 0
    held: tuple[str, ...] = ()
    seated: int = 0
    n_bytes: int = 0

    def flow(self) -> None:
        """Ask for the next ones when all that were asked for sit in their slots."""
        self._count()
        if self.seated == self.wanted:
            numbers = range(self.wanted, self.wanted + SLOTS)
            self._desire(tuple(DesiredAdapter(self._digest(number), 0, 0, pinned=True) for number in numbers))
            self.wanted += SLOTS

    def dry(self) -> None:
        """Wait for those under way, then let all of them go."""
        self._count()
        while self.seated < self.wanted:
            self.subject.engine.run_once()
            self._count()
        self._desire(())

    def beside(self, run: Callable[[], Decoded]) -> tuple[Decoded, int, float]:
        """Run it: what it gives, the bytes of the adapters that were seated meanwhile, and its seconds."""
        self._count()
        before, started = self.n_bytes, time.perf_counter()
        done = run()
        wall_s = time.perf_counter() - started
        self._count()
        return done, self.n_bytes - before, wall_s

    def _desire(self, adapters: tuple[DesiredAdapter, ...]) -> None:
        self.version += 1
        removed, self.held = self.held, tuple(adapter.digest for adapter in adapters)
        change = DesiredChange(self.version, full=True, adapters=adapters, removed=removed)
        self.subject.engine.post(Received(SUPERVISOR, RunnerOrder(change)))

    def _count(self) -> None:
        self.seated += len(self.subject.witness.loads)
        self.n_bytes += sum(load.n_bytes for load in self.subject.witness.loads)
        self.subject.witness.loads.clear()

    def _digest(self, number: int) -> str:
        return self.model.alias(self.subject, f"stream-{self.model.name}-{number}", number)


def loading_case(context: Context) -> Iterator[Line]:
    """Decode steps with and without loads beside them, in turn."""
    tokens, repetitions = context.options.amounts.tokens, context.options.amounts.repetitions
    sizes = Sizes(rows=ROWS, slots=SLOTS + 1, context_tokens=PROMPT_TOKENS + tokens, prefills=ROWS)
    steps: dict[str, list[float]] = {QUIET: [], LOADING: []}
    with (
        context.subject(sizes) as subject,
        context.bar(f"{context.model.name}: loading", 2 * (repetitions + 1)) as advanced,
    ):
        stream, n_bytes, wall_s = Stream(context.model, subject), 0, 0.0
        context.model.write_folders(subject)  # not between two steps
        for number in range(repetitions + 1):
            for kind, between in ((QUIET, None), (LOADING, stream.flow)):
                done, seated, took_s = stream.beside(
                    lambda flow=between: decode(context.model, subject, base(ROWS), PROMPT_TOKENS, tokens, between=flow)
                )
                stream.dry()
                advanced(1)
                if number:
                    steps[kind] += done.steps_s
                if number and kind == LOADING:
                    n_bytes, wall_s = n_bytes + seated, wall_s + took_s
        reporter, case = context.on(subject), f"batch {ROWS}, base"
        for kind, seconds in steps.items():
            for percent in (50, 99):
                yield reporter.line(case, f"decode step p{percent}, {kind}", percentile(seconds, percent) * 1e3, "ms")
        dearer = median(steps[LOADING]) / median(steps[QUIET])
        yield reporter.line(case, f"decode step p50, {LOADING} / {QUIET}", dearer, "x", target="<= 1.1")
        mean = fmean(steps[LOADING]) / fmean(steps[QUIET])
        yield reporter.line(case, f"decode step mean, {LOADING} / {QUIET}", mean, "x")
        yield reporter.line(case, "adapters loaded beside the steps", n_bytes / MIB / wall_s, "MiB/s", target=">= 60")
