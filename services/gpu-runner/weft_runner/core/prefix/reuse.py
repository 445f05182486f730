"""Prefix reuse: a sequence reads full pages that another one of its tenant and adapter has computed.

A new sequence takes the longest run of named pages from its text's beginning, and so does one that waits for its
prefill, since others may have computed them in the meantime. At least one token is left to prefill, so that there are
logits. Partial pages are never shared, and none is ever copied on the device.
"""

from collections.abc import Iterable
from itertools import islice

from weft.domain.request import Start
from weft_runner.core.page_table import PageTable
from weft_runner.core.prefix.cache import PageHashChain
from weft_runner.core.sequence import Sequence


class PrefixReuse:
    """One owner: the request pool. `device_tokens`, `host_tokens`: how many did not have to be computed again, by the
    memory that they were found in. What KV from another runner need not bring is none of them. `queried`: tokens of the
    texts that were looked up.
    """

    def __init__(self, pages: PageTable) -> None:
        self._pages = pages
        self.device_tokens = self.host_tokens = self.queried = 0

    @property
    def tokens(self) -> int:
        """Count the tokens that did not have to be computed again."""
        return self.device_tokens + self.host_tokens

    def chain(self, start: Start, *, long: bool = False) -> PageHashChain | None:
        """The hashes of a request's pages; None: without a salt nothing is shared.

        `long`: its keys are rotated as those of a long text, and no other one's are alike.
        """
        salt = start.cache_salt
        return PageHashChain(salt, start.adapter, self._pages.page_tokens, "long" if long else "") if salt else None

    def find(self, chain: PageHashChain | None, text: list[int], at: int = 0) -> list[int]:
        """Full pages of a text that are there, from its page `at` on, as far as a token is left."""
        return self._pages.prefixes.match(self.names(chain, text, at))

    def names(self, chain: PageHashChain | None, text: list[int], at: int) -> Iterable[bytes]:
        """Return the names of the full pages from page `at` on, leaving a token unnamed. Extends `chain`."""
        max_pages = (len(text) - 1) // self._pages.page_tokens
        if chain is None:
            return ()
        return islice(chain.extend(text, max_pages), at, max_pages)

    def admit(self, sequence: Sequence, shared: list[int]) -> None:
        """Count the tokens that an admitted sequence need not compute with these pages."""
        if sequence.chain is not None and sequence.start.kv_from is None:
            self.queried += len(sequence.tokens)
        self._reused(sequence, len(shared))

    def count_host_hits(self, n_tokens: int) -> None:
        """Count n tokens that have been copied from host memory."""
        self.host_tokens += n_tokens

    def before_step(self, sequence: Sequence) -> None:
        """Read pages computed by other sequences since, before computing them again."""
        at, rest = divmod(sequence.in_kv, self._pages.page_tokens)
        if not rest and (shared := self.find(sequence.chain, sequence.tokens, at)):
            self._pages.share(sequence.key, shared)
            self._reused(sequence, len(shared))

    def publish(self, sequence: Sequence) -> None:
        """Let its pages that have become full since the last time be found."""
        if sequence.chain is None:
            return
        full = sequence.in_kv // self._pages.page_tokens
        names = sequence.chain.extend(sequence.tokens, full)
        for index in range(sequence.named_pages, full):
            self._pages.name(sequence.key, index, names[index], sequence.start.adapter)
        sequence.share_pages(full)

    def _reused(self, sequence: Sequence, n_pages: int) -> None:
        n_tokens = n_pages * self._pages.page_tokens
        sequence.reuse(n_tokens)
        sequence.share_pages(sequence.in_kv // self._pages.page_tokens)
        if sequence.start.kv_from is None:
            self.device_tokens += n_tokens
