"""Whether a request can be admitted, and with how many pages."""

from dataclasses import dataclass, field
from math import inf

from weft.domain.ids import Epoch
from weft.domain.lru import LruDict
from weft.domain.request import Ended, EndReason, FinishReason, NoCapacity, SequenceTokens, Start
from weft_runner.core.batch import BatchLimits
from weft_runner.core.sampling import sampling_fault
from weft_runner.core.transfer.transfers import KvIdentity


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """What the runner has. `max_context_tokens` = min(model, total_pages * page_tokens).

    `page_bytes`: of a page, for adapters that live in pages; 0: they have memory of their own. `keep_copies`: device
    memory is not this machine's, so that a copy in host memory makes the next load shorter. `swap_page_bytes`: of a
    page's KV, where it can be copied to host memory and back; 0: it cannot. `most_adapter_pages`: what adapters may
    hold together, where other pages are on a disk (None: no bound). `kv`: what it says of itself to runners that it
    exchanges KV with; None: to none. KV that nobody has claimed after `kv_claim_s` is dropped. The KV of a
    batch of `layer_by_layer_tokens` prompt tokens or more is sent layer by layer (Splitwise, section 4.2). Positions
    of requests that may become longer than `short_tokens` are rotated by factors of their own (LongRoPE; None: no such
    model).
    """

    total_pages: int
    page_tokens: int
    max_sequences: int
    max_adapters: int
    max_context_tokens: int
    vocab_size: int
    eos: frozenset[int] = frozenset()
    batch: BatchLimits = field(default_factory=BatchLimits)
    host_bytes: int = 1 << 30
    page_bytes: int = 0
    keep_copies: bool = True
    swap_page_bytes: int = 0
    most_adapter_pages: int | None = None
    kv: KvIdentity | None = None
    kv_page_bytes: int = 0
    kv_claim_s: float = 10.0  # an offer is claimed in a moment; by then whoever was to claim it is gone
    layer_by_layer_tokens: float = inf
    short_tokens: int | None = None

    def is_long(self, start: Start) -> bool:
        """Say whether positions are those of a long text: for a request's whole life, wherever it runs."""
        return self.short_tokens is not None and len(start.prompt) + start.max_tokens > self.short_tokens

    def context_beside(self, n_pages: int) -> int:
        """Return the tokens of the longest sequence where something else holds `n_pages` pages."""
        return min(self.max_context_tokens, (self.total_pages - n_pages) * self.page_tokens)


def refusal(
    start: Start, limits: PoolLimits, context: int, free_pages: int
) -> Ended | NoCapacity | SequenceTokens | None:
    """Say why a request is wrong whatever else runs here, or that it has come to its end already."""
    emitted = len(start.emitted)
    if (fault := _fault(start, limits.vocab_size)) is not None:
        return ended(start, EndReason.INTERNAL, fault)
    if len(start.prompt) + min(start.max_tokens, 1) > context:
        return no_capacity(start, free_pages, "context")
    asks = start.sampling.pooling or start.sampling.prompt_logprobs is not None
    scores = start.max_tokens == 0 and asks
    if not scores and (emitted >= start.max_tokens or len(start.prompt) + emitted >= context):
        return SequenceTokens(start.request_id, start.epoch, emitted, (), FinishReason.LENGTH)
    return None


def ended(start: Start, reason: EndReason, detail: str) -> Ended:
    """Report that the request is not admitted, here or anywhere."""
    return Ended(start.request_id, start.epoch, reason, detail, len(start.emitted))


def no_capacity(start: Start, free_pages: int, reason: str) -> NoCapacity:
    """Report that the request is not admitted for lack of capacity."""
    return NoCapacity(start.request_id, start.epoch, max(0, free_pages), reason)


def _fault(start: Start, vocab_size: int) -> str | None:
    """Find the fault of an impossible request, before it can disturb others."""
    if not start.prompt:
        return "the prompt has no tokens"
    if (fault := sampling_fault(start.sampling, vocab_size)) is not None:
        return fault
    outside = next((t for t in (*start.prompt, *start.emitted, *start.draft) if not 0 <= t < vocab_size), None)
    return None if outside is None else f"token {outside} is outside the vocabulary of {vocab_size}"


class HighestEpochs:
    """The highest epoch seen for each request: a runner ignores a Start that is not above it.

    Beyond `limit` the least recently seen are forgotten: far more than can be in flight between gateways and a runner.
    """

    def __init__(self, limit: int = 16_384) -> None:
        self._seen: LruDict[str, Epoch] = LruDict(limit)

    def __len__(self) -> int:
        return len(self._seen)

    def is_stale(self, request_id: str, epoch: Epoch) -> bool:
        """Say whether this epoch or a higher one was seen before."""
        seen = self._seen.get(request_id)
        return seen is not None and epoch <= seen

    def see(self, request_id: str, epoch: Epoch) -> None:
        """Remember an epoch; a lower one than known changes nothing."""
        self._seen[request_id] = max(epoch, self._seen.get(request_id, epoch))
