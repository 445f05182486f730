"""Grammars as masks over a model's tokens, by llguidance: https://github.com/guidance-ai/llguidance

A grammar is compiled once and copied for each sequence. Its next mask is computed as soon as the token before it is
known, on a thread beside the steps (`grammar_threads.py`) and without the GIL; a step takes what is there by its end.
A token is allowed where its bytes go on with the grammar, the end of sequence exactly where the grammar accepts;
special tokens and those that the tokenizer does not have never are.
"""

import ctypes
import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.domain.lru import LruDict
from weft.domain.model.token_bytes import UnsupportedDecoder, decoding_of, token_bytes
from weft.grammars import one_line, parser_limits
from weft_kernels.cpu.threads import cpu_quota
from weft_runner.core.events import CompileGrammar, GrammarCompiled
from weft_runner.core.token_mask import GrammarState, words_of
from weft_runner.model.grammar_threads import SHORT_S, GrammarThreads

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_COMPILED = 64  # grammars that are kept: some hundred KiB each, 32 MiB at the most
MAX_THREADS = 4  # for masks: one row over 49,152 tokens takes 20 to 300 us
MAX_MASK_S = 0.1  # of processor time for the mask behind a token: usual ones are far from it
WAIT_S = 5e-4  # of a step that has computed all else, for the masks of all its rows
_LONGEST = 64  # bytes of a token that the longest match looks for

log = logging.getLogger(__name__)


class GrammarRefused(ValueError):
    """This grammar cannot mask this model's tokens; the message has the reason."""


class Grammars:
    """The grammars of one model. `begin`: on any thread; it takes milliseconds, or what a hostile grammar takes.

    `wake`: called, on any thread, when a mask is there that `GrammarState.ready` has missed. `steps_wait`: every step
    has all of its rows, and waits for their masks, however long: for measurements. `finds_forced`: states find what
    has to follow, for drafts.
    """

    def __init__(self, tokenizer: Path | None, vocab_size: int, eos: frozenset[int]) -> None:
        """`tokenizer`: the model's tokenizer.json. `vocab_size`: of its logits."""
        self._path, self._vocab_size, self._eos = tokenizer, vocab_size, sorted(eos)
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._compiled: LruDict[str, LLMatcher] = LruDict(MAX_COMPILED)
        self._own = threading.local()
        self.threads = GrammarThreads(max(1, min(MAX_THREADS, cpu_quota() // 2)))
        self._computed, self._waiting = threading.Condition(), False  # a mask; the engine's thread waits for one
        self.wake: Callable[[], None] = lambda: None
        self.steps_wait = self.finds_forced = False
        self.row_bytes = 4 * words_of(vocab_size)

    def prepare(self) -> "LLTokenizer":
        """Read the tokenizer, which holds the GIL for up to a second. Raises GrammarRefused."""
        with self._lock:
            self._tokenizer = self._tokenizer or self._begun()
            return self._tokenizer

    def knows(self, grammar: str) -> bool:
        """Say whether it is compiled."""
        return grammar in self._compiled

    def begin(self, grammar: str, emitted: Sequence[int], ends: Sequence[int] = ()) -> GrammarState:
        """Make its state behind these tokens, with its first mask. `ends`: allowed where the end of sequence is.

        Raises GrammarRefused.
        """
        matcher = self._copy_of(grammar) or self._compile(grammar)
        if not all(self.consume(matcher, token) for token in emitted):
            raise GrammarRefused(f"the answer so far is not of the grammar: {one_line(matcher.get_error())}")
        state = LlGrammarState(matcher, self, self._eos[0], ends)
        if state.fault:
            raise GrammarRefused(state.fault)
        return state

    def _copy_of(self, grammar: str) -> "LLMatcher | None":
        """Copy one that is compiled, before another thread displaces it; None: it is not."""
        with self._lock:
            if grammar not in self._compiled:
                return None
            self._compiled.move_to_end(grammar)
            return self._compiled[grammar].deep_copy()

    def _compile(self, grammar: str) -> "LLMatcher":
        """Compile it and keep it in place of the oldest. Raises GrammarRefused."""
        from llguidance import LLMatcher  # engines on a GPU run without it where no request has a grammar

        compiled = LLMatcher(self.prepare(), grammar, log_level=0, limits=parser_limits())
        if compiled.is_error():
            raise GrammarRefused(f"the grammar does not compile: {one_line(compiled.get_error())}")
        matcher = compiled.deep_copy()
        with self._lock:
            full = len(self._compiled) == self._compiled.limit and grammar not in self._compiled
            displaced = self._compiled.popitem(last=False)[1] if full else None
            self._compiled[grammar] = compiled
        if displaced is not None:  # an error frees its states without the GIL, which takes ms
            self.consume(displaced, self._vocab_size)
        return matcher

    def consume(self, matcher: "LLMatcher", token: int) -> bool:
        """Take a token without the GIL, which llguidance gives up for two matchers at a time: the other one is idle."""
        from llguidance import LLExecutor, LLMatcher

        if not hasattr(self._own, "executor"):
            self._own.executor, self._own.idle = LLExecutor(1), LLMatcher(self.prepare(), "", log_level=0)
        return self._own.executor.consume_token_par([(matcher, token), (self._own.idle, token)])[0]

    def wait(self, states: Sequence["LlGrammarState"], computing: Callable[[], bool]) -> None:
        """Until all have their masks, or WAIT_S after whatever computes meanwhile."""
        with self._computed:
            self._waiting = True  # before it is asked who is there: see `tell`
            until = time.monotonic() + WAIT_S
            while not all(state.there for state in states):
                now = time.monotonic()
                if self.steps_wait or computing():
                    until = now + WAIT_S
                elif now >= until:
                    break
                self._computed.wait(until - now)
            self._waiting = False

    def wait_for_forced(self, states: Sequence["LlGrammarState"], most_s: float) -> None:
        """Until all know what has to follow, `most_s` at most."""
        with self._computed:
            self._waiting = True
            until = time.monotonic() + most_s
            while not all(state.looked_ahead for state in states) and (left := until - time.monotonic()) > 0.0:
                self._computed.wait(left)
            self._waiting = False

    def tell(self) -> None:
        """A mask is there, or what has to follow."""
        if self._waiting:
            with self._computed:
                self._computed.notify_all()

    def _begun(self) -> "LLTokenizer":
        """Return the tokenizer, made at the first call. Raises GrammarRefused."""
        if self._path is None:
            raise GrammarRefused("the model has no tokenizer.json, which grammars need")
        if not self._eos:
            raise GrammarRefused("the model names no end of sequence, which grammars need")
        try:
            from llguidance import LLTokenizer

            text = self._path.read_text()
            known = _byte_level(json.loads(text))
            tokenizer = text if known else _GreedyTokenizer(json.loads(text), self._vocab_size, self._eos[0])
            return LLTokenizer(tokenizer, n_vocab=self._vocab_size, eos_token=self._eos)  # pyright: ignore[reportArgumentType]
        except ImportError as error:
            raise GrammarRefused("llguidance is not installed, which grammars need") from error
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, UnsupportedDecoder) as error:
            raise GrammarRefused(f"the model's tokenizer.json cannot be used for grammars: {error}") from error


class LlGrammarState:
    """A state of llguidance's, see `core.token_mask.GrammarState`.

    One thread at a time touches its matcher: who computes the mask.
    Tokens come one mask at a time, so that `_there` says whose turn it is, and the engine's thread takes no lock that
    a thread of a lower priority may hold.
    """

    def __init__(self, matcher: "LLMatcher", grammars: Grammars, eos: int, ends: Sequence[int]) -> None:
        self._matcher, self._grammars, self._eos, self._ends = matcher, grammars, eos, ends
        self._words = ctypes.create_string_buffer(grammars.row_bytes)  # the mask
        self._address = ctypes.addressof(self._words)
        self._there = True
        self.looked_ahead = True  # `forced` is of the whole answer
        self._slow = False  # the last mask was
        self.late = self._missed = False  # a step had no mask, and a later one was not offered the row
        self.fault = ""
        self.forced: Sequence[int] = ()
        self._compute(())

    @property
    def ready(self) -> bool:
        if self._there or self.quick:
            return True
        self._missed = True
        return self._there

    @property
    def quick(self) -> bool:
        return self._grammars.steps_wait or not (self._slow or self.late)

    def add(self, *tokens: int) -> None:
        assert self._there, "a token that no mask has allowed"
        for token in tokens:
            self.forced = self.forced[1:] if self.forced and self.forced[0] == token else ()
        self._there, self.looked_ahead = False, bool(self.forced) or self._slow or not self._grammars.finds_forced
        self._grammars.threads.put(partial(self._go_on, tokens), long=self._slow)

    def fill(
        self, states: Sequence[tuple[GrammarState, int]], address: int, row_bytes: int, computing: Callable[[], bool]
    ) -> None:
        rows = [(state, row) for state, row in states if isinstance(state, LlGrammarState)]
        if not all(state.there for state, _ in rows):
            self._grammars.wait([state for state, _ in rows], computing)
        for state, row in rows:
            state.late = not state._there
            if state.late:
                ctypes.memset(address + row * row_bytes, 0, row_bytes)
            else:
                ctypes.memmove(address + row * row_bytes, state._address, row_bytes)

    def await_forced(self, states: Sequence[GrammarState], most_s: float) -> None:
        own = [state for state in states if isinstance(state, LlGrammarState) and not state.looked_ahead]
        if own:
            self._grammars.wait_for_forced(own, most_s)

    def _allow_ends(self) -> None:
        """Let each of them come where the end of sequence may."""
        mask = (ctypes.c_uint8 * self._grammars.row_bytes).from_address(self._address)
        if mask[self._eos // 8] >> self._eos % 8 & 1:
            for end in self._ends:
                mask[end // 8] |= 1 << end % 8

    @property
    def there(self) -> bool:
        """Say whether the mask is computed."""
        return self._there

    def _go_on(self, tokens: Sequence[int]) -> None:
        self._compute(tokens)
        self._there = True
        self._grammars.tell()
        if self._missed:
            self._missed = False
            self._grammars.wake()

    def _compute(self, tokens: Sequence[int]) -> None:
        """The mask behind these tokens, or the fault: a token that the grammar has not, text that none continues."""
        matcher, fault, began = self._matcher, self.fault, time.thread_time()
        try:
            for token in tokens:  # one that it does not have is an error
                if self._slow:
                    self._grammars.consume(matcher, token)
                else:
                    matcher.consume_token(token)  # as quick as the mask was
            if self._grammars.finds_forced and not matcher.is_error():  # before the mask: the next step waits for it
                self.forced, self.looked_ahead = matcher.compute_ff_tokens(), True
                self._grammars.tell()
            matcher.unsafe_compute_mask_ptr(self._address, self._grammars.row_bytes)
            if matcher.is_error():  # llguidance lets it end there
                fault = f"the grammar cannot go on with this model's tokens: {one_line(matcher.get_error())}"
            elif self._ends:
                self._allow_ends()
        except BaseException as error:  # noqa: BLE001 (of the library: it ends this request, by name)
            fault = f"the grammar cannot go on: {type(error).__name__}: {one_line(str(error))}"
        spent = time.thread_time() - began
        if spent > MAX_MASK_S and not fault:
            fault = f"the grammar takes more than {MAX_MASK_S * 1e3:g} ms of processor time for a token"
        if fault:
            ctypes.memset(self._address, 0, self._grammars.row_bytes)
        self.fault, self._slow = fault, spent > SHORT_S


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


class GrammarPool:
    """Compiles grammars beside the steps. What waits is bounded by `core.awaited_grammars`.

    `report` is called from other threads, once for each order.
    """

    def __init__(self, grammars: Grammars, report: Callable[[GrammarCompiled], None]) -> None:
        self._grammars, self._report = grammars, report

    def execute(self, order: CompileGrammar) -> None:
        """Have it compiled; it is expected to be quick where it has been compiled before."""
        long = bool(order.emitted) or not self._grammars.knows(order.grammar)
        self._grammars.threads.put(partial(self._compile, order), long=long)

    def close(self) -> None:
        """What has begun is not waited for."""
        self._grammars.threads.close()

    def _compile(self, order: CompileGrammar) -> None:
        state, fault = None, ""
        try:
            state = self._grammars.begin(order.grammar, order.emitted, order.ends)
        except GrammarRefused as error:
            fault = str(error)
        except BaseException as error:  # our own mistake, or a panic, must not leave the request waiting
            log.exception("a grammar was not compiled")
            fault = f"{type(error).__name__}: {error}"
        self._report(GrammarCompiled(order.peer, order.request_id, order.epoch, state, fault))
