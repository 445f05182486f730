"""What stands in for a model: how long a step takes, and tokens that show whether a sequence was computed exactly.

Time: a step of n decode rows and p prompt tokens takes what the runner's own profile says of it. Tokens: a chain of
hashes runs through the KV pages. Its value at a position depends on the adapter in the row's *slot*, on every token up
to there and on what the *pages* hold, so a token is right only if slots, pages, prefixes, positions and the tokens that
were sent along are; `answer` computes the same without any of them.

The seed of a request also says how long its prompt and its answer are (`seed_of`): the end-of-sequence token comes at
its place wherever the request is computed.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from weft.domain.runner import RunnerSpec
from weft_runner.core import GuessTimes, StepModel

MASK = (1 << 64) - 1
PRIME, SECOND = 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F
EOS = 0
VOCABULARY = 94 * 94  # tokens 1..VOCABULARY are pairs of printable characters
LENGTH_BITS = 20
LENGTH_MASK = (1 << LENGTH_BITS) - 1


def seed_of(draw: int, prompt_tokens: int, output_tokens: int) -> int:
    """Make a 64-bit seed of `draw` and the lengths. Output 0: no end of its own."""
    assert prompt_tokens <= LENGTH_MASK
    assert output_tokens <= LENGTH_MASK
    return ((draw << 2 * LENGTH_BITS) | (prompt_tokens << LENGTH_BITS) | output_tokens) & MASK


_TEXTS = [b"", *(bytes((33 + first, 33 + second)) for first in range(94) for second in range(94))]


def bytes_of(token: int) -> bytes:
    """Return the text of a token: two characters; none for the end, and for what is no token, as a tokenizer's."""
    return _TEXTS[token] if token <= VOCABULARY else b""


def text_of(tokens: Iterable[int]) -> str:
    return b"".join(map(bytes_of, tokens)).decode()


def key_of(adapter: str) -> int:
    """Return what an adapter does to the chain; 0: the base."""
    return int.from_bytes(blake2b(adapter.encode(), digest_size=8).digest(), "big") if adapter else 0


def extend(chain: int, token: int, key: int) -> int:
    """Return the chain's value after a further token."""
    mixed = ((chain ^ key) + token + 1) * PRIME & MASK
    return mixed ^ (mixed >> 29)


def ends(seed: int, position: int) -> bool:
    """Return whether the token at an absolute position is the end of its sequence."""
    output_tokens = seed & LENGTH_MASK
    return output_tokens > 0 and position - ((seed >> LENGTH_BITS) & LENGTH_MASK) >= output_tokens


def sample(chain: int, seed: int, choice: int, position: int) -> int:
    """Sample the token at an absolute position, after the chain before it."""
    if ends(seed, position):
        return EOS
    mixed = (chain ^ (seed * SECOND) ^ ((choice + 1) * PRIME) ^ position) * SECOND & MASK
    return 1 + (mixed >> 40) % VOCABULARY


def answer(prompt: Sequence[int], adapter: str, seed: int, choice: int, max_tokens: int) -> list[int]:
    """Return the undisturbed answer, without the end-of-sequence token."""
    key, chain, tokens = key_of(adapter), 0, list[int]()
    for token in prompt:
        chain = extend(chain, token, key)
    while len(tokens) < max_tokens:
        token = sample(chain, seed, choice, len(prompt) + len(tokens))
        if token == EOS:
            break
        tokens.append(token)
        chain = extend(chain, token, key)
    return tokens


@dataclass(frozen=True, slots=True)
class StepTimes:
    """ms of a step: of any, of a decode row, a prompt token, a key that rows attend to, an adapter in the batch.

    `page_copy_ms`: of a page of KV to host memory, or back, beside the steps. `guess_times`: of steps of one row
    with drafted tokens (`StepModel`); unmeasured: each costs a row.

    `curve`, where it was measured, is used instead of the first three: (tokens, ms), the fewest first, with lines
    between them. A few rows cost hardly more than one while weights stream, which no line through the origin says.
    """

    base_ms: float
    row_ms: float
    prompt_token_ms: float
    key_ms: float = 0.0
    adapter_ms: float = 0.0
    curve: tuple[tuple[float, float], ...] = ()
    page_copy_ms: float = 0.1
    guess_times: GuessTimes = ()

    @classmethod
    def of_spec(cls, spec: RunnerSpec) -> "StepTimes":
        """Return the times measured by a runner at its start, which exclude adapters."""
        best = max(spec.best_batch, 2)
        row_ms = max(0.0, (spec.step_ms_best - spec.step_ms_1) / (best - 1))
        rate = spec.prefill_tokens_per_s
        return cls(spec.step_ms_1 - row_ms, row_ms, 1e3 / rate if rate else 0.0)

    @property
    def model(self) -> StepModel:
        """The step times expected by a runner with these measurements."""
        return StepModel(self.base_ms, self.row_ms, self.key_ms, max(self.prompt_token_ms, 1e-3), self.guess_times)

    def seconds(
        self, decode_rows: int, prompt_tokens: int, keys: int = 0, adapters: int = 0, guesses: int = 0
    ) -> float:
        if self.curve:
            tokens_ms = self._on_curve(decode_rows + prompt_tokens)
        else:
            tokens_ms = self.base_ms + self.row_ms * decode_rows + self.prompt_token_ms * prompt_tokens
        guesses_ms = self.model.guesses_ms(decode_rows, guesses) if guesses else 0.0
        return (tokens_ms + guesses_ms + self.key_ms * keys + self.adapter_ms * adapters) / 1e3

    def _on_curve(self, tokens: int) -> float:
        """Return the time on the curve, which beyond its last point goes on as it came there."""
        curve = self.curve
        at = min(max(bisect_left(curve, (tokens, 0.0)), 1), len(curve) - 1)
        (low, low_ms), (high, high_ms) = curve[at - 1], curve[at]
        return low_ms + (high_ms - low_ms) * (tokens - low) / (high - low)


class Device:
    """The memory of one runner: pages of chains, slots of adapters. Computing a row reads and writes both.

    `host`: copies of pages, by their numbers there.
    """

    def __init__(self, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        self.slots: dict[int, str] = {}  # digest of the adapter in each slot in use
        self._keys: dict[str, int] = {"": 0}
        self._pages: dict[int, list[int]] = {}
        self.host: dict[int, list[int]] = {}

    def clear(self, pages: Iterable[int]) -> None:
        """Clear pages that change their owner."""
        for page in pages:
            self._pages.pop(page, None)

    def copy_out(self, pages: Iterable[int], hosts: Iterable[int]) -> None:
        self.host.update((host, list(self._pages.get(page, ()))) for page, host in zip(pages, hosts, strict=True))

    def copy_in(self, hosts: Iterable[int], pages: Iterable[int]) -> None:
        self._pages.update((page, list(self.host[host])) for host, page in zip(hosts, pages, strict=True))

    def read(self, page: int) -> bytes:
        """Return what a page holds."""
        content = self._pages.get(page)
        return b"" if content is None else b"".join(chain.to_bytes(8, "big") for chain in content)

    def write(self, page: int, data: bytes) -> None:
        """Write the content of a page of a second device."""
        self._pages[page] = [int.from_bytes(data[at : at + 8], "big") for at in range(0, len(data), 8)]

    def load(self, slot: int, adapter: str) -> None:
        self.slots[slot] = adapter
        self._keys[adapter] = key_of(adapter)

    def unload(self, slot: int) -> None:
        self.slots.pop(slot, None)

    def row(self, tokens: Sequence[int], start: int, pages: Sequence[int], adapter: str, seed: int, choice: int) -> int:
        """Feed `tokens` from position `start` of a sequence with these pages. Returns the token sampled after them."""
        size, memory, key = self.page_tokens, self._pages, self._keys.get(adapter, 1)
        index, offset = divmod(start, size)
        content = memory.get(pages[index]) if offset else None
        if offset:
            chain = content[offset - 1] if content is not None else SECOND
        elif start:
            previous = memory.get(pages[index - 1])
            chain = previous[-1] if previous is not None else SECOND
        else:
            chain = 0
        position = start
        for token in tokens:
            if content is None or offset == size:
                index, offset = divmod(position, size)
                content = memory.get(pages[index])
                if content is None:
                    content = memory[pages[index]] = [SECOND] * size
            mixed = ((chain ^ key) + token + 1) * PRIME & MASK  # `extend`, in place
            content[offset] = chain = mixed ^ (mixed >> 29)
            offset += 1
            position += 1
        return sample(chain, seed, choice, position)
