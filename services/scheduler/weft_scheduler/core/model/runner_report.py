"""What a runner has reported last."""

from collections.abc import Iterator, Sequence

from weft.domain.adapter import AdapterState, Tier
from weft.domain.ids import Epoch
from weft.domain.runner import (
    ReportGap,
    ReportInvalid,
    RunnerFigures,
    RunnerReport,
    RunnerSpec,
    SequenceState,
    fault_of,
)


class StaleReport(Exception):
    """A report that is older than the last one."""


class LastReport:
    """The full report and the changes since, as one."""

    def __init__(self) -> None:
        self.version: int | None = None
        self.figures = RunnerFigures(ready=False)
        self.overdue_pages = 0  # that paused sequences wait for
        self.taken_s = 0.0
        self.sequences: dict[str, SequenceState] = {}
        self.progress: Sequence[int] = ()  # tokens in KV of each of `sequences`, in their order
        self.adapters: dict[str, AdapterState] = {}  # in host memory or nearer, loading, or with an error
        self.errors: dict[str, str] = {}  # digest -> why its last load failed

    def includes(self, request_id: str, epoch: Epoch) -> bool:
        """True where it counts that epoch."""
        sequence = self.sequences.get(request_id)
        return sequence is not None and sequence.epoch == epoch

    def in_kv(self) -> Iterator[tuple[str, int]]:
        """Return each sequence and the tokens that it had in KV."""
        return zip(self.sequences, self.progress or [0] * len(self.sequences), strict=False)

    def check(self, report: RunnerReport, spec: RunnerSpec) -> None:
        """Raise ReportGap, StaleReport or ReportInvalid for a report that cannot follow."""
        if report.full:
            if self.version is not None and report.version < self.version:
                raise StaleReport("older than the last one")
        elif self.version is None or report.version > self.version + 1:
            raise ReportGap(f"report {report.version} after {self.version}")
        elif report.version <= self.version:
            raise StaleReport("older than the last one")
        known, sequences = self.sequences, len(report.sequences)
        if not report.full and sequences:
            sequences = len(known) - len(report.ended) + len([s for s in report.sequences if s[0] not in known])
        if fault := fault_of(spec, report.figures, sequences):
            raise ReportInvalid(f"invalid: {fault}")

    def take_figures(self, report: RunnerReport, now: float) -> None:
        """Take over what a report says of the runner as a whole; a full one begins anew."""
        if report.full:
            self.sequences, self.adapters, self.errors = {}, {}, {}
        self.version, self.figures, self.taken_s = report.version, report.figures, now
        self.progress = report.progress
        self.overdue_pages = sum([overrun.wanted_pages for overrun in report.overruns]) if report.overruns else 0

    def put(self, sequence: SequenceState) -> None:
        """Take over a sequence, or what has changed of it."""
        self.sequences[sequence.request_id] = sequence

    def end(self, request_id: str) -> SequenceState | None:
        """Forget a sequence that has ended. Returns it; None: it was not known."""
        return self.sequences.pop(request_id, None)

    def take_adapters(self, report: RunnerReport) -> list[str]:
        """Take over the adapters that matter here. Returns the digests whose error has changed."""
        changed: list[str] = []
        for digest in report.removed_adapters:
            self.adapters.pop(digest, None)
            if self.errors.pop(digest, None) is not None:
                changed.append(digest)
        for adapter in report.adapters:
            if adapter.loading or adapter.error or adapter.tier >= Tier.HOST:
                self.adapters[adapter.digest] = adapter
            else:
                self.adapters.pop(adapter.digest, None)
            if adapter.error != self.errors.get(adapter.digest, ""):
                changed.append(adapter.digest)
                if adapter.error:
                    self.errors[adapter.digest] = adapter.error
                else:
                    del self.errors[adapter.digest]
        return changed
