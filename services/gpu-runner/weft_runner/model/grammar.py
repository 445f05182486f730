"""Grammars as masks over a model's tokens, by llguidance: https://github.com/guidance-ai/llguidance

A grammar is compiled once and copied for each sequence. Masks of a step's rows are computed together, without the GIL.
A token is allowed where its bytes go on with the grammar, the end of sequence exactly where the grammar accepts;
special tokens and those that the tokenizer does not have never are.
"""

import ctypes
import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.domain.lru import LruDict
from weft.domain.model.token_bytes import UnsupportedDecoder, decoding_of, token_bytes
from weft.grammars import one_line, parser_limits
from weft_kernels.cpu.threads import cpu_quota
from weft_runner.core.token_mask import GrammarState

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

MOST_COMPILED = 64  # grammars that are kept: some hundred KiB each, 32 MiB at the most
MOST_THREADS = 4  # of a step's masks: 32 rows over 49,152 tokens take 0.6 ms on one
_LONGEST = 64  # bytes of a token that the longest match looks for


class GrammarRefused(ValueError):
    """This grammar cannot mask this model's tokens; the message has the reason."""


class Grammars:
    """Of one model. Any thread; `begin` takes milliseconds, the first one what reading the tokenizer takes."""

    def __init__(self, tokenizer: Path | None, vocab_size: int, eos: frozenset[int]) -> None:
        """`tokenizer`: the model's tokenizer.json. `vocab_size`: of its logits."""
        self._path, self._vocab_size, self._eos = tokenizer, vocab_size, sorted(eos)
        self._lock = threading.Lock()
        self._engine: tuple[LLTokenizer, LLExecutor] | None = None
        self._compiled: LruDict[str, LLMatcher] = LruDict(MOST_COMPILED)

    def begin(self, grammar: str, emitted: Sequence[int], ends: Sequence[int] = ()) -> GrammarState:
        """Its state behind these tokens. `ends`: allowed where the end of sequence is. Raises GrammarRefused."""
        from llguidance import LLMatcher  # engines on a GPU run without it where no request has a grammar

        with self._lock:
            tokenizer, executor = self._engine = self._engine or self._begun()
            known = self._compiled.get(grammar)
        if known is None:
            known = LLMatcher(tokenizer, grammar, log_level=0, limits=parser_limits())
            if known.is_error():
                raise GrammarRefused(f"the grammar does not compile: {one_line(known.get_error())}")
        with self._lock:
            self._compiled[grammar] = known
        matcher = known.deep_copy()
        if not matcher.consume_tokens(list(emitted)):
            raise GrammarRefused(f"the answer so far is not of the grammar: {one_line(matcher.get_error())}")
        return LlGrammarState(matcher, executor, self._eos[0], ends)

    def _begun(self) -> "tuple[LLTokenizer, LLExecutor]":
        """For the first grammar. Raises GrammarRefused."""
        from llguidance import LLExecutor, LLTokenizer

        if self._path is None:
            raise GrammarRefused("the model has no tokenizer.json, which grammars need")
        if not self._eos:
            raise GrammarRefused("the model names no end of sequence, which grammars need")
        try:
            text = self._path.read_text()
            known = _byte_level(json.loads(text))
            tokenizer = text if known else _GreedyTokenizer(json.loads(text), self._vocab_size, self._eos[0])
            made = LLTokenizer(tokenizer, n_vocab=self._vocab_size, eos_token=self._eos)  # pyright: ignore[reportArgumentType]
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, UnsupportedDecoder) as error:
            raise GrammarRefused(f"the model's tokenizer.json cannot be used for grammars: {error}") from error
        return made, LLExecutor(max(1, min(MOST_THREADS, cpu_quota() // 2)))


class LlGrammarState:
    """See `core.token_mask.GrammarState`."""

    __slots__ = ("_ends", "_eos", "_executor", "_matcher")

    def __init__(self, matcher: "LLMatcher", executor: "LLExecutor", eos: int, ends: Sequence[int]) -> None:
        self._matcher, self._executor, self._eos, self._ends = matcher, executor, eos, ends

    @property
    def fault(self) -> str:
        """A token of the answer that the grammar does not have, text that no token continues, or a bound."""
        if not self._matcher.is_error():
            return ""
        return f"the grammar cannot go on with this model's tokens: {one_line(self._matcher.get_error())}"

    def add(self, token: int) -> None:
        self._matcher.consume_token(token)  # one that it does not have shows in `fault`

    def fill(self, states: Sequence[tuple[GrammarState, int]], address: int, row_bytes: int, rows: int) -> None:
        matchers = [(state._matcher, row) for state, row in states if isinstance(state, LlGrammarState)]
        self._executor.unsafe_compute_mask_ptr(matchers, address, row_bytes, rows)
        for matcher, row in matchers:
            if matcher.is_error():  # llguidance lets it end there
                ctypes.memset(address + row * row_bytes, 0, row_bytes)
        for state, row in states:
            if isinstance(state, LlGrammarState) and state._ends:
                state._allow_ends(address + row * row_bytes, row_bytes)

    def _allow_ends(self, address: int, row_bytes: int) -> None:
        """Let each of them come where the end of sequence may, in the mask at `address`."""
        mask = (ctypes.c_uint8 * row_bytes).from_address(address)
        if mask[self._eos // 8] >> self._eos % 8 & 1:
            for end in self._ends:
                mask[end // 8] |= 1 << end % 8


def _byte_level(spec: dict[str, Any]) -> bool:
    """llguidance reads tokenizers of bytes itself, and encodes with them what a grammar leaves no choice about."""
    try:
        form = decoding_of(spec.get("decoder"))
    except UnsupportedDecoder:
        return False
    return form.byte_level or form.byte_fallback


class _GreedyTokenizer:
    """What llguidance asks of other tokenizers. A text's tokens are the longest ones that match, from its beginning."""

    def __init__(self, spec: dict[str, Any], vocab_size: int, eos: int) -> None:
        form, model = decoding_of(spec.get("decoder")), spec["model"]["vocab"]
        pairs = model.items() if isinstance(model, dict) else ((entry[0], i) for i, entry in enumerate(model))
        self.tokens = [b""] * vocab_size
        for text, token in pairs:
            self.tokens[token] = token_bytes(text, form)
        for added in spec.get("added_tokens", ()):
            self.tokens[added["id"]] = added["content"].encode()
        self.special_token_ids = [added["id"] for added in spec.get("added_tokens", ()) if added["special"]]
        self.eos_token_id, self.bos_token_id, self.is_tokenizer_wrapper = eos, None, True
        special = frozenset(self.special_token_ids)
        self._token_of = {text: token for token, text in enumerate(self.tokens) if text and token not in special}

    def __call__(self, text: bytes | str) -> list[int]:
        rest, found = text.encode() if isinstance(text, str) else text, list[int]()
        while rest:
            lengths = range(min(len(rest), _LONGEST), 0, -1)
            length = next((n for n in lengths if rest[:n] in self._token_of), 0)
            if length:
                found.append(self._token_of[rest[:length]])
            rest = rest[length or 1 :]
        return found
