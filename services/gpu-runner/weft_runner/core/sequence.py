"""One sequence on its way through a runner. Each transition asserts the state it leaves (splitwise-sim's habit).

    WAITING --adapter on the device--> PREFILL --all tokens in KV--> DECODE <--> PAUSED      any --> ENDED

Where several batches are in flight at a time a running sequence is in one of them at most, and stays as it is until
that has landed: only its end does not wait.

`tokens` holds prompt, emitted and generated tokens; `in_kv` counts those whose keys and values are in pages. The newest
generated token is not in KV yet: it is the next step's input.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from math import isfinite
from typing import NamedTuple

from weft_runner.core.prefix import Chain
from weft_runner.core.shifts import Shifts

MAX_TOP_LOGPROBS = 20


class Epoch(NamedTuple):
    """One ownership of a request by a runner, ordered by (term, counter)."""

    term: int
    counter: int


class Finish(Enum):
    """How a sequence ends by itself. NONE while it runs."""

    NONE = "none"
    EOS = "eos"
    LENGTH = "length"


class Phase(Enum):
    WAITING = "waiting"  # admitted, pages reserved, adapter on its way
    PREFILL = "prefill"
    DECODE = "decode"
    PAUSED = "paused"  # at a page boundary for want of a page
    ENDED = "ended"


RUNNING = (Phase.PREFILL, Phase.DECODE)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a token is chosen: greedy at temperature 0, else from (seed, choice, absolute position) and the logits alone.

    `logit_bias`: (token, bias), each token once; `top_logprobs`: how many are told beside each token, with `logprobs`.
    `model/sampling.py` says in which order these work.
    """

    seed: int = 0
    choice: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    ignore_eos: bool = False
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: bool = False
    top_logprobs: int = 0

    def shifts(self, answer: Iterable[int]) -> Shifts | None:
        """What an answer so far adds to the logits; None where it never adds anything."""
        if not self.logit_bias and self.frequency_penalty == 0.0 == self.presence_penalty:
            return None
        return Shifts(self.frequency_penalty, self.presence_penalty, dict(self.logit_bias), answer)


def shift_fault(sampling: Sampling, vocab_size: int) -> str | None:
    """What is wrong with penalties, biases or log probabilities, found before they can disturb anybody."""
    numbers = {"frequency_penalty": sampling.frequency_penalty, "presence_penalty": sampling.presence_penalty}
    numbers.update((f"logit_bias of token {token}", bias) for token, bias in sampling.logit_bias)
    if (endless := next((name for name, value in numbers.items() if not isfinite(value)), None)) is not None:
        return f"{endless} {numbers[endless]} is not a finite number"
    if sampling.top_logprobs > MAX_TOP_LOGPROBS:
        return f"top_logprobs {sampling.top_logprobs} is more than {MAX_TOP_LOGPROBS}"
    outside = next((token for token, _ in sampling.logit_bias if not 0 <= token < vocab_size), None)
    return None if outside is None else f"logit_bias token {outside} is outside the vocabulary of {vocab_size}"


@dataclass(frozen=True, slots=True)
class Request:
    """A gateway's Start. `owner` is the session that sent it; `adapter` a digest, "" for the base.

    `cache_salt`: pages are shared only among requests of one salt, "" shares none.
    """

    request_id: str
    epoch: Epoch
    owner: int
    gateway_id: str
    adapter: str
    prompt: tuple[int, ...]
    emitted: tuple[int, ...]
    max_tokens: int
    reservation_tokens: int
    sampling: Sampling = Sampling()
    cache_salt: str = ""


class Sequence:
    """A request that was admitted. One owner: the request pool."""

    __slots__ = (
        "admitted", "chain", "doublings", "in_flight", "in_kv", "max_len", "named_pages", "phase", "request",
        "reservation_tokens", "shifts", "tokens", "turn",
    )  # fmt: skip

    def __init__(self, request: Request, *, admitted: int, max_context_tokens: int, chain: Chain | None = None) -> None:
        self.request = request
        self.chain = chain
        self.named_pages = 0  # its first ones, that others may find
        self.admitted = admitted
        self.tokens: list[int] = [*request.prompt, *request.emitted]
        self.shifts = request.sampling.shifts(request.emitted)
        self.in_kv = 0
        self.reservation_tokens = request.reservation_tokens
        self.doublings = 0
        self.phase = Phase.WAITING
        self.in_flight, self.turn = False, 0  # in a batch that has not landed yet; its number
        self.max_len = min(len(request.prompt) + request.max_tokens, max_context_tokens)

    @property
    def key(self) -> str:
        return self.request.request_id

    @property
    def base_len(self) -> int:
        """Tokens it was started with: what the reservation counts from."""
        return len(self.request.prompt) + len(self.request.emitted)

    @property
    def n_emitted(self) -> int:
        """Tokens of the answer so far, those of earlier epochs included."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def pending(self) -> int:
        """Tokens to feed before the next one can be chosen (1 in decode)."""
        return len(self.tokens) - self.in_kv

    def reuse(self, n_tokens: int) -> None:
        """The next n tokens are in KV already: others have computed them."""
        assert self.phase in (Phase.WAITING, Phase.PREFILL), self.phase
        assert n_tokens == 0 or n_tokens < self.pending, (n_tokens, self.pending)
        self.in_kv += n_tokens

    def join(self, most_tokens: int) -> None:
        """Its adapter is on the device (or it has none); that leaves room for so many tokens in KV."""
        assert self.phase is Phase.WAITING, self.phase
        self.phase = Phase.PREFILL
        self.max_len = min(self.max_len, max(most_tokens, len(self.tokens) + 1))  # the last token is never fed

    def launch(self, turn: int) -> None:
        """A batch that it is in has taken off; `in_flight` until it is accounted for."""
        assert self.phase in RUNNING, self.phase
        assert not self.in_flight, self.key
        self.in_flight, self.turn = True, turn

    def fed(self, n_tokens: int) -> None:
        """A step has put n more tokens into KV."""
        pending = self.pending
        assert self.phase in RUNNING, self.phase
        assert 0 < n_tokens <= pending, (n_tokens, pending)
        self.in_kv += n_tokens
        if n_tokens == pending:
            self.phase = Phase.DECODE

    def append(self, token: int) -> None:
        """The token chosen after everything was fed."""
        assert self.phase is Phase.DECODE, self.phase
        assert self.pending == 0, self.pending
        assert len(self.tokens) < self.max_len, (len(self.tokens), self.max_len)
        self.tokens.append(token)
        if self.shifts is not None:
            self.shifts.add(token)

    def pause(self) -> None:
        assert self.phase is Phase.DECODE, self.phase
        assert not self.in_flight, self.key
        self.phase = Phase.PAUSED

    def resume(self) -> None:
        assert self.phase is Phase.PAUSED, self.phase
        self.phase = Phase.DECODE

    def end(self) -> None:
        assert self.phase is not Phase.ENDED, self.phase
        self.phase = Phase.ENDED


def check_sequence(sequence: Sequence) -> None:
    """What holds between two iterations, whatever happened."""
    assert 0 <= sequence.in_kv <= len(sequence.tokens), (sequence.in_kv, len(sequence.tokens))
    assert sequence.base_len <= len(sequence.tokens) <= max(sequence.max_len, sequence.base_len)
    if sequence.phase in (Phase.DECODE, Phase.PAUSED):
        assert sequence.pending == 1, sequence.pending
    assert not sequence.in_flight or sequence.phase in RUNNING, sequence.phase
    if sequence.phase is Phase.WAITING:
        assert sequence.in_kv == 0 or sequence.named_pages, sequence.in_kv
