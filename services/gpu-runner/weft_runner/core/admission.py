"""Whether a request can be admitted, and with how many pages."""

from dataclasses import dataclass, field

from weft_runner.core.events import Ended, EndReason, Event, NoRoom, Tokens
from weft_runner.core.growth import first_reservation_pages
from weft_runner.core.iteration import Limits
from weft_runner.core.sequence import Finish, Request, shift_fault


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """What the runner has. `max_context_tokens` = min(model, total_pages * page_tokens).

    `page_bytes`: what adapters lend and borrow in; 0: they have memory of their own. `keep_copies`: device memory is
    not this machine's, so that a copy in host memory makes the next load shorter.
    """

    total_pages: int
    page_tokens: int
    max_sequences: int
    max_adapters: int
    max_context_tokens: int
    vocab_size: int
    eos: frozenset[int] = frozenset()
    batch: Limits = field(default_factory=Limits)
    starvation: int = 16
    host_bytes: int = 1 << 30
    page_bytes: int = 0
    keep_copies: bool = True

    def context_beside(self, n_pages: int) -> int:
        """The longest sequence where something else holds so many pages."""
        return min(self.max_context_tokens, (self.total_pages - n_pages) * self.page_tokens)


def first_pages(request: Request, limits: PoolLimits, context: int) -> int:
    """What is reserved at first: its text, and of the answer what leaves room for its adapter."""
    base_len = len(request.prompt) + len(request.emitted)
    most = max(base_len, context)
    return first_reservation_pages(base_len, request.reservation_tokens, limits.page_tokens, most)


def refusal(request: Request, limits: PoolLimits, context: int, free_pages: int) -> Event | None:
    """What is wrong with a request whatever else runs here, or that it has come to its end already."""
    emitted = len(request.emitted)
    if (fault := _fault(request, limits.vocab_size)) is not None:
        return ended(request, EndReason.INTERNAL, fault)
    if len(request.prompt) >= context:
        return no_room(request, free_pages, "context")
    if emitted >= request.max_tokens or len(request.prompt) + emitted >= context:
        return Tokens(request.owner, request.request_id, request.epoch, emitted, (), Finish.LENGTH, 0)
    return None


def ended(request: Request, reason: EndReason, detail: str) -> Ended:
    """It is not taken."""
    return Ended(request.owner, request.request_id, request.epoch, reason, detail, len(request.emitted))


def no_room(request: Request, free_pages: int, reason: str) -> NoRoom:
    """It is not taken now."""
    return NoRoom(request.owner, request.request_id, request.epoch, max(0, free_pages), reason)


def _fault(request: Request, vocab_size: int) -> str | None:
    """What makes a request impossible to run, found before it can disturb anybody."""
    if not request.prompt:
        return "the prompt has no tokens"
    if not 0.0 <= request.sampling.temperature < float("inf"):
        return f"temperature {request.sampling.temperature} is not a finite number >= 0"
    if not 0.0 < request.sampling.top_p <= 1.0:
        return f"top_p {request.sampling.top_p} is outside (0, 1]"
    if (fault := shift_fault(request.sampling, vocab_size)) is not None:
        return fault
    outside = next((t for t in (*request.prompt, *request.emitted) if not 0 <= t < vocab_size), None)
    return None if outside is None else f"token {outside} is outside the vocabulary of {vocab_size}"
