"""Messages of runners that still send whole states and read complete lists. Goes when none of them does."""

from weft.domain.adapter import AdapterState, Tier
from weft.domain.ids import Epoch
from weft.domain.runner import (
    Overrun,
    RunnerFigures,
    RunnerOrder,
    RunnerReport,
    RunnerSpec,
    SequenceState,
)
from weft.wire.bounds import check_state
from weft.wire.codec.cluster import TIER, TIERS, fill_spec
from weft.wire.v1 import supervisor_pb2


def report_of(m: supervisor_pb2.RunnerState, spec: RunnerSpec) -> RunnerReport:
    """A whole state as a full report. Raises PeerError."""
    hello = supervisor_pb2.RunnerHello()
    fill_spec(spec, hello)
    check_state(m, hello)
    figures = RunnerFigures(
        m.free_pages, m.used_pages, m.adapter_pages, m.draining, m.ready, m.desired_version, m.iterations, m.forwards,
        m.grown_pages, m.doublings, m.tokens, m.prefix_reused_tokens,
    )  # fmt: skip
    sequences = [
        SequenceState(
            s.request_id, Epoch(s.epoch.term, s.epoch.counter), s.gateway_id, s.adapter_digest, s.reserved_pages,
            s.reservation_tokens, s.admitted,
        )
        for s in m.sequences
    ]  # fmt: skip
    adapters = [
        AdapterState(
            a.digest, TIERS.get(a.tier, Tier.UNSPECIFIED), a.running, a.bytes, a.rank, a.loading, a.error, a.shortfall
        )
        for a in m.adapters
    ]  # fmt: skip
    overruns = [
        Overrun(o.request_id, Epoch(o.epoch.term, o.epoch.counter), o.wanted_pages, o.reservation_tokens)
        for o in m.overruns
    ]
    progress = [s.tokens for s in m.sequences]
    return RunnerReport(m.sequence, True, figures, sequences, (), adapters, (), overruns, progress)


def add_list(m: supervisor_pb2.RunnerOrder, merged: RunnerOrder | None) -> None:
    """The complete list beside a change of it."""
    if m.HasField("change") and merged is not None and merged.desired is not None:
        m.has_desired, m.desired_version = True, merged.desired.version
        for a in merged.desired.adapters:
            m.desired.add(digest=a.digest, rank=a.rank, bytes=a.bytes, pinned=a.pinned, tier=TIER[a.tier])
