"""What a sender has offered on a stream, and which parts of its KV have arrived: each exactly once, none elsewhere."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from weft.domain.ids import Epoch
from weft.domain.kv_transfer import KvComplete, KvOffer
from weft.wire.codec.kv_transfer import KvPages
from weft.wire.errors import PeerError
from weft_runner.model.kv_memory import Guard

MAX_OFFERS = 4096  # of one stream, those that ended last included
Key = tuple[str, Epoch]


class BrokenOrder(PeerError):
    """A message that the contract does not allow there."""


class WrongPages(PeerError):
    """Parts of KV that were not to come, or came before, or are missing at the end, or have another size."""


class ExpectedPages(Guard):
    """Pages of a sequence from `first_page` on, that its KV is written to. Its lock is held while bytes are."""

    def __init__(self, first_page: int, pages: Sequence[int], layers: int, fence: Any) -> None:
        super().__init__()
        self.first_page, self.pages, self.fence = first_page, tuple(pages), fence
        self._there = np.zeros((len(pages), layers), bool)

    def take(self, part: KvPages) -> tuple[int, ...]:
        """The pages of a part that begins to arrive. Raises WrongPages."""
        begin, layers = part.first_page - self.first_page, slice(part.first_layer, part.first_layer + part.layers)
        if begin < 0 or begin + part.pages > len(self.pages) or layers.stop > self._there.shape[1]:
            raise WrongPages(f"{_named(part)}: outside of what is expected")
        there = self._there[begin : begin + part.pages, layers]
        if there.any():
            raise WrongPages(f"{_named(part)}: received before")
        there[:] = True
        return self.pages[begin : begin + part.pages]

    def check_complete(self, complete: KvComplete, page_tokens: int) -> None:
        """Every part of the pages of `in_kv` tokens is there, and none beyond. Raises WrongPages."""
        needed = -(-complete.in_kv // page_tokens) - self.first_page
        if needed > len(self.pages):
            raise WrongPages(f"{complete.in_kv} tokens in KV: more than the pages that are expected")
        needed = max(needed, 0)
        if missing := int((~self._there[:needed]).sum()):
            raise WrongPages(f"KV of {complete.in_kv} tokens is complete, they say: {missing} parts of it are missing")
        if self._there[needed:].any():
            raise WrongPages(f"pages beyond those of {complete.in_kv} tokens")


@dataclass(slots=True)
class OfferedSequence:
    """A sequence between its offer and its end. `arrival`: None until it is accepted; `ended`: completed or dropped."""

    arrival: ExpectedPages | None = None
    ended: bool = False


class OfferedKv:
    """KV offered on one stream. The machine's orders and the receiving thread call it, under the stream's lock."""

    def __init__(self, layers: int, page_tokens: int) -> None:
        self._layers, self._page_tokens = layers, page_tokens
        self._offered: dict[Key, OfferedSequence] = {}  # the oldest first

    def offer(self, offer: KvOffer) -> None:
        """Take an offer. Raises BrokenOrder."""
        key = offer.request_id, offer.epoch
        if key in self._offered:
            raise BrokenOrder(f"{offer.request_id}: offered before")
        if len(self._offered) >= MAX_OFFERS:
            self._forget()
        self._offered[key] = OfferedSequence()

    def expect(self, key: Key, first_page: int, pages: Sequence[int], fence: Any) -> None:
        """The machine accepts."""
        if (offered := self._offered.get(key)) is not None:
            offered.arrival = ExpectedPages(first_page, pages, self._layers, fence)

    def drop(self, key: Key) -> ExpectedPages | None:
        """What arrives of it from now on is thrown away; the arrival, to be dropped, if its end had not come."""
        offered = self._offered.get(key)
        if offered is None or offered.ended:
            return None
        offered.ended = True
        return offered.arrival

    def part(self, part: KvPages) -> tuple[ExpectedPages, tuple[int, ...]] | None:
        """Return the pages that a part goes to; None: it was dropped or refused. Raises BrokenOrder, WrongPages."""
        offered = self._known(part.request_id, part.epoch, "pages")
        if offered.ended:
            return None
        if offered.arrival is None:
            raise BrokenOrder(f"{part.request_id}: pages that were not accepted")
        return offered.arrival, offered.arrival.take(part)

    def complete(self, complete: KvComplete) -> bool:
        """All of it is there; False: it was dropped. Raises BrokenOrder, WrongPages."""
        offered = self._known(complete.request_id, complete.epoch, "complete")
        if offered.ended:
            return False
        if offered.arrival is None:
            raise BrokenOrder(f"{complete.request_id}: complete before it was accepted")
        offered.arrival.check_complete(complete, self._page_tokens)
        offered.ended = True
        return True

    def end(self) -> list[ExpectedPages]:
        """Return the incomplete transfers at the end of the stream."""
        keys = list(self._offered)
        return [arrival for key in keys if (arrival := self.drop(key)) is not None]

    def _known(self, request_id: str, epoch: Epoch, subject: str) -> OfferedSequence:
        offered = self._offered.get((request_id, epoch))
        if offered is None:
            raise BrokenOrder(f"{request_id}: {subject} of an epoch that was not offered")
        return offered

    def _forget(self) -> None:
        """Forget the offers that ended first. Raises BrokenOrder."""
        ended = [key for key, offered in self._offered.items() if offered.ended]
        if not ended:
            raise BrokenOrder(f"{MAX_OFFERS} offers at a time")
        for key in ended[: max(1, len(ended) // 2)]:
            del self._offered[key]


def _named(part: KvPages) -> str:
    return (
        f"{part.request_id}: layers {part.first_layer} to {part.first_layer + part.layers - 1} of pages "
        f"{part.first_page} to {part.first_page + part.pages - 1}"
    )
