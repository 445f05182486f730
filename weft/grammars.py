"""Bounds of what a grammar may cost, the same where a gateway checks it and where a runner masks tokens by it.

A grammar is llguidance's: Lark text, or JSON with a list of Lark grammars and JSON schemas.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLParserLimits

# For one mask: some 15 ms of most grammars (llguidance: 14,000 fuel a ms), 300 ms of the worst. Steps do not wait.
_STEP_LEXER_FUEL, _STEP_ITEMS = 200_000, 50_000
_LEXER_STATES = 16_000  # some 2 kB each, and they stay: 32 MiB for a grammar
_GRAMMAR_SYMBOLS = 200_000


def parser_limits() -> "LLParserLimits":
    """Return the limits beyond which a grammar does not compile, or its state fails by name."""
    from llguidance import LLParserLimits  # engines on a GPU run without it where no request has a grammar

    return LLParserLimits(
        step_lexer_fuel=_STEP_LEXER_FUEL, step_max_items=_STEP_ITEMS, max_lexer_states=_LEXER_STATES,
        max_grammar_size=_GRAMMAR_SYMBOLS, verbose_errors=False,
    )  # fmt: skip


class Bytes:
    """A tokenizer for llguidance whose tokens are the bytes, and the end of sequence."""

    tokens = (*(bytes([i]) for i in range(256)), b"<end>")
    special_token_ids, eos_token_id, bos_token_id, is_tokenizer_wrapper = (256,), 256, None, True

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


def first_fault(grammar: str) -> str:
    """Compute the possible first bytes, and take one of them. Return the fault; "" if it succeeds.

    Most of what a grammar costs is paid here. Only a model's runner can tell whether its names of tokens are right.
    """
    from llguidance import LLMatcher, LLTokenizer

    matcher = LLMatcher(LLTokenizer(Bytes()), grammar, log_level=0, limits=parser_limits())  # pyright: ignore[reportArgumentType]
    if matcher.is_error():
        return ""
    allowed = int.from_bytes(matcher.compute_bitmask(), "little")
    if not matcher.is_error() and allowed:
        matcher.consume_token((allowed & -allowed).bit_length() - 1)
    return one_line(matcher.get_error())


def one_line(error: str) -> str:
    """Write llguidance's message for people: at most 300 characters, without the drawings."""
    return " ".join(error.replace("<non-verbose/>", "").replace("^", "").split())[:300]
