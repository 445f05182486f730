"""What a report says of a sequence, an overrun."""

from weft_runner.core.events import OverrunView, SequenceView
from weft_runner.core.pages import PageBook
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


def overrun_view(sequence: Sequence, wanted_pages: int) -> OverrunView:
    return OverrunView(sequence.key, sequence.request.epoch, wanted_pages, sequence.reservation_tokens)
