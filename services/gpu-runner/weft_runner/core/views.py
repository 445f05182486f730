"""What a report says of a sequence, an adapter, an overrun."""

from weft_runner.core.adapter import Adapter
from weft_runner.core.events import AdapterView, OverrunView, SequenceView, Tier
from weft_runner.core.pages import PageBook
from weft_runner.core.residency import Residency
from weft_runner.core.sequence import Phase, Sequence


def sequence_view(sequence: Sequence, pages: PageBook) -> SequenceView:
    request = sequence.request
    return SequenceView(
        request_id=request.request_id,
        epoch=request.epoch,
        gateway_id=request.gateway_id,
        adapter=request.adapter,
        reserved_pages=pages.reserved_by(sequence.key),
        used_pages=pages.used_by(sequence.key),
        tokens=sequence.in_kv,
        admitted=sequence.admitted,
        reservation_tokens=sequence.reservation_tokens,
        waiting=sequence.phase is Phase.WAITING,
    )


def adapter_view(adapter: Adapter, tier: Tier) -> AdapterView:
    return AdapterView(
        digest=adapter.digest,
        tier=tier,
        running=adapter.running,
        waiting=adapter.waiting,
        n_bytes=adapter.n_bytes,
        rank=adapter.rank,
        loading=adapter.loading or adapter.fetching,
        error=adapter.error,
        shortfall=adapter.shortfall or adapter.unpinned,
    )


def overrun_view(sequence: Sequence, wanted_pages: int) -> OverrunView:
    return OverrunView(sequence.key, sequence.request.epoch, wanted_pages, sequence.reservation_tokens)


def not_ready(residency: Residency) -> str:
    """Why requests should not come here yet; "" where they may."""
    if not residency.known.desired_known:
        return "desired adapters are not known yet"
    missing = residency.missing_pinned()
    if missing:
        return f"{len(missing)} pinned adapters are not resident yet"
    below = residency.keeper.missing()
    return f"{len(below)} adapters are not held at their tier yet" if below else ""
