"""One sequence on its way through a runner. Each transition asserts the phase that it leaves.

    WAITING --adapter on the device--> PREFILL --all tokens in KV--> DECODE <--> PAUSED      any --> ENDED
    PREFILL, DECODE, PAUSED --> SWAP_OUT --> SWAPPED --> SWAP_IN --> PREFILL, DECODE
    WAITING --its text's beginning is in host memory--> SWAP_IN
    WAITING --another runner sends its KV--> RECEIVE --KV and adapter are here--> PREFILL, DECODE
    PREFILL, DECODE, PAUSED --another runner takes it over--> SEND

Where several batches are in flight at a time a running sequence is in one of them at most, and its phase stays until
that batch is complete: only its end does not wait.

`tokens` holds prompt, emitted and generated tokens; `in_kv` counts those whose keys and values are in pages. The newest
generated token is not in KV yet: it is the next step's input.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Listed
from enum import Enum

from weft.domain.machine import Peer
from weft.domain.request import Start
from weft_runner.core.prefix.cache import PageHashChain
from weft_runner.core.sampling import logit_adjustments
from weft_runner.core.token_mask import TokenMask
from weft_runner.core.token_times import SequenceTimes


class SequencePhase(Enum):
    WAITING = "waiting"  # admitted, pages reserved, adapter on its way
    PREFILL = "prefill"
    DECODE = "decode"
    PAUSED = "paused"  # at a page boundary for want of a page
    SWAP_OUT = "swap out"  # its KV is being copied to host memory; its pages are its own until then
    SWAPPED = "swapped"  # its KV is in host memory alone
    SWAP_IN = "swap in"  # it has pages again, and its KV or its adapter is on the way to the device
    RECEIVE = "receive"  # it has pages, and waits for the KV that another runner sends, or for its adapter
    SEND = "send"  # nothing more is computed here; its pages are kept until another runner has its KV
    ENDED = "ended"


RUNNING = (SequencePhase.PREFILL, SequencePhase.DECODE)
SWAPPING = (SequencePhase.SWAP_OUT, SequencePhase.SWAPPED, SequencePhase.SWAP_IN)
BETWEEN_RUNNERS = (SequencePhase.RECEIVE, SequencePhase.SEND)


class Sequence:
    """An admitted request, owned by the request pool. `owner`: the session of its Start."""

    __slots__ = (
        "adjustments", "admitted", "arrived", "cached_tokens", "chain", "departed", "doublings", "early", "end_tokens",
        "gateway", "in_flight", "in_kv", "key", "long", "mask", "max_len", "named_pages", "owner", "phase",
        "reservation_tokens", "start", "stop_tokens", "swaps", "times", "tokens", "turn",
    )  # fmt: skip

    def __init__(
        self, start: Start, owner: Peer, gateway: str, *, admitted: int, now: float, max_context_tokens: int,
        chain: PageHashChain | None = None, eos: frozenset[int] = frozenset(), mask: TokenMask | None = None,
        long: bool = False,
    ) -> None:  # fmt: skip
        """`long`: its positions are rotated as those of a long text."""
        self.start, self.owner, self.gateway = start, owner, gateway
        self.key = start.request_id
        self.chain = chain
        self.named_pages = 0  # its first ones, that other sequences may find
        self.admitted, self.times = admitted, SequenceTimes(now)
        self.arrived = now - start.waited_s
        self.tokens: list[int] = [*start.prompt, *start.emitted]
        self.adjustments = logit_adjustments(start.sampling, start.emitted, start.prompt, eos)
        self.stop_tokens = frozenset(start.sampling.stop_token_ids)
        self.end_tokens = self.stop_tokens | eos
        self.early = 0  # tokens that what it may sample is ahead of `tokens`, while a draft is checked
        self.mask = mask
        self.in_kv = self.cached_tokens = 0  # the latter: of its text, reused instead of computed
        self.reservation_tokens = start.reservation_tokens
        self.doublings = self.swaps = 0
        self.departed = 0  # its rows in steps that were launched before that departure do not count
        self.phase = SequencePhase.WAITING
        self.in_flight, self.turn = False, 0  # in a batch that is not complete yet; its number
        self.max_len = min(len(start.prompt) + start.max_tokens, max_context_tokens)
        self.long = long

    @property
    def runs(self) -> bool:
        """Say whether its rows are computed here."""
        return self.phase in RUNNING

    def is_steady(self, n_tokens: int) -> bool:
        """Return whether the sampling stays the same for the next `n_tokens` tokens, whatever these are."""
        return (self.adjustments is None or self.adjustments.is_steady(n_tokens)) and (
            self.mask is None or self.mask.grammar is None
        )

    @property
    def order(self) -> tuple[int, float, int]:
        """The order of prompts: interactive prompts first, then by the pool's queue policy."""
        return self.start.priority, self.arrived + self.start.allotment.delay_s, self.admitted

    @property
    def base_len(self) -> int:
        """Tokens it was started with: what the reservation counts from."""
        return len(self.start.prompt) + len(self.start.emitted)

    @property
    def n_emitted(self) -> int:
        """Tokens of the answer so far, those of earlier epochs included."""
        return len(self.tokens) - len(self.start.prompt)

    @property
    def pending(self) -> int:
        """Tokens to feed before the next one can be chosen (1 in decode)."""
        return len(self.tokens) - self.in_kv

    def scored(self, n_tokens: int, lookahead: int = 0) -> int:
        """Count the next `n_tokens` tokens that precede a prompt token with a requested probability.

        `lookahead`: how many tokens are fed before, by a step in flight.
        """
        if self.start.sampling.prompt_logprobs is None:
            return 0
        return max(0, min(n_tokens, len(self.start.prompt) - 1 - self.in_kv - lookahead))

    def reuse(self, n_tokens: int) -> None:
        """Count the next `n_tokens` as in KV already: others have computed them."""
        assert self.phase in (SequencePhase.WAITING, SequencePhase.PREFILL), self.phase
        assert n_tokens == 0 or n_tokens < self.pending, (n_tokens, self.pending)
        self.in_kv += n_tokens
        self.cached_tokens += n_tokens

    def share_pages(self, n_pages: int) -> None:
        """Let other sequences find its first n pages."""
        self.named_pages = n_pages

    def enlarge(self, reservation_tokens: int, *, doubled: bool) -> None:
        """Reserve more tokens for its answer."""
        self.reservation_tokens = reservation_tokens
        self.doublings += doubled

    def join(self, most_tokens: int) -> None:
        """Run: its adapter is on the device (or it has none). `most_tokens`: in KV, beside its adapter."""
        self._enter(SequencePhase.PREFILL, SequencePhase.WAITING)
        self._limit(most_tokens)

    def launch(self, turn: int) -> None:
        """Join a batch in flight, until the batch is accounted for."""
        assert self.phase in RUNNING, self.phase
        assert not self.in_flight, self.key
        self.in_flight, self.turn = True, turn

    def sit_out(self) -> None:
        """Take its row of a complete batch back: its mask came too late for it."""
        self.in_flight = False

    def feed(self, n_tokens: int) -> None:
        """Take n more tokens into KV: the step that had them is complete."""
        in_kv, n_known = self.in_kv + n_tokens, len(self.tokens)
        assert self.phase in RUNNING, self.phase
        assert self.in_kv < in_kv <= n_known, (n_tokens, self.pending)
        self.in_kv, self.in_flight = in_kv, False
        if in_kv == n_known:
            self.phase = SequencePhase.DECODE

    def append(self, token: int) -> None:
        """Take the token chosen after everything was fed."""
        tokens = self.tokens
        assert self.phase is SequencePhase.DECODE, self.phase
        assert self.in_kv == len(tokens) < self.max_len, (self.in_kv, len(tokens), self.max_len)
        tokens.append(token)
        if self.early:
            self.early -= 1  # a guess whose successor could not be sampled
        elif self.adjustments is not None or self.mask is not None:
            self._advance(token)

    def check(self, guess: int) -> None:
        """Apply a right guess to the following sampling, before it is a token of the answer."""
        self._advance(guess)
        self.early += 1

    def accept(self, guesses: Listed[int]) -> None:
        """Take guesses that were right: they are in KV, once its pending token is."""
        assert self.phase is SequencePhase.DECODE, self.phase
        assert self.pending == 1, self.pending
        self.tokens.extend(guesses)
        assert len(self.tokens) < self.max_len, (len(self.tokens), self.max_len)
        if self.adjustments is not None or self.mask is not None:
            self._advance(*guesses[self.early :])
        self.early = max(0, self.early - len(guesses))

    def _advance(self, *tokens: int) -> None:
        """Bring what it may sample next up to date with its answer."""
        for token in tokens:
            if self.adjustments is not None and not self.adjustments.add(token):
                self.adjustments = None
        if self.mask is not None and tokens:
            self.mask.add(*tokens)

    def pause(self) -> None:
        self._enter(SequencePhase.PAUSED, SequencePhase.DECODE)

    def resume(self) -> None:
        self._enter(SequencePhase.DECODE, SequencePhase.PAUSED)

    def swap_out(self, departure: int) -> None:
        """Leave for host memory: its pages are about to be another sequence's. `departure`: the number of that."""
        assert self.in_kv, self.key
        self._enter(SequencePhase.SWAP_OUT, *RUNNING, SequencePhase.PAUSED)
        self.swaps, self.departed = self.swaps + 1, departure

    def release_pages(self) -> None:
        """Hold no page any more: its KV is in host memory."""
        self._enter(SequencePhase.SWAPPED, SequencePhase.SWAP_OUT)
        self.named_pages = 0

    def swap_in(self) -> None:
        """Wait for its KV: it has pages again, or for the first time."""
        self._enter(SequencePhase.SWAP_IN, SequencePhase.SWAPPED, SequencePhase.WAITING)

    def go_on(self, most_tokens: int) -> None:
        """Run: its KV and its adapter are on the device. `most_tokens`: in KV, beside its adapter."""
        phase = SequencePhase.DECODE if self.pending == 1 else SequencePhase.PREFILL
        self._enter(phase, SequencePhase.SWAP_IN, SequencePhase.RECEIVE)
        self._limit(most_tokens)

    def await_kv(self) -> None:
        """Wait for the sequence's KV, computed by another runner."""
        self._enter(SequencePhase.RECEIVE, SequencePhase.WAITING)

    def take_kv(self, in_kv: int, tokens: Iterable[int], cached_tokens: int) -> None:
        """Take KV and sampled tokens from another runner. `cached_tokens`: prompt tokens that the runner reused."""
        assert self.phase is SequencePhase.RECEIVE, self.phase
        self.tokens.extend(tokens)
        self._advance(*self.tokens[self.base_len :])
        assert self.in_kv <= in_kv < len(self.tokens), (self.in_kv, in_kv, len(self.tokens))
        self.in_kv, self.cached_tokens = in_kv, cached_tokens

    def send(self) -> None:
        """Leave the following tokens to another runner."""
        self._enter(SequencePhase.SEND, *RUNNING, SequencePhase.PAUSED)

    def _enter(self, phase: SequencePhase, *allowed: SequencePhase) -> None:
        """Enter a phase from an allowed phase, with no batch in flight."""
        assert self.phase in allowed, self.phase
        assert not self.in_flight, self.key
        self.phase = phase

    def _limit(self, most_tokens: int) -> None:
        self.max_len = min(self.max_len, max(most_tokens, len(self.tokens) + 1))  # the last token is never fed

    def end(self) -> None:
        assert self.phase is not SequencePhase.ENDED, self.phase
        self.phase = SequencePhase.ENDED


def check_sequence(sequence: Sequence) -> None:
    """Check the invariants between two iterations, valid after every event."""
    assert not sequence.early, sequence.early
    assert 0 <= sequence.in_kv <= len(sequence.tokens), (sequence.in_kv, len(sequence.tokens))
    assert sequence.base_len <= len(sequence.tokens) <= max(sequence.max_len, sequence.base_len)
    if sequence.phase in (SequencePhase.DECODE, SequencePhase.PAUSED):
        assert sequence.pending == 1, sequence.pending
    assert not sequence.in_flight or sequence.phase in RUNNING, sequence.phase
    if sequence.phase is SequencePhase.WAITING:
        assert sequence.in_kv == 0 or sequence.named_pages, sequence.in_kv
