"""What a grammar may cost: the same bounds where a gateway checks it and where a runner masks tokens by it.

A grammar is llguidance's: Lark text, or JSON with a list of Lark grammars and JSON schemas.
"""

from llguidance import LLParserLimits

MAX_BYTES = 64 << 10  # of a grammar's text
# A step of a runner waits for the masks of all its rows: at most some 15 ms for one (llguidance: 14,000 fuel a ms).
_STEP_LEXER_FUEL, _STEP_ITEMS = 200_000, 50_000
_LEXER_STATES = 16_000  # some 2 kB each, and they stay: 32 MiB for a grammar
_GRAMMAR_SYMBOLS = 200_000


def parser_limits() -> LLParserLimits:
    """Beyond them a grammar does not compile, or its state fails by name."""
    return LLParserLimits(
        step_lexer_fuel=_STEP_LEXER_FUEL, step_max_items=_STEP_ITEMS, max_lexer_states=_LEXER_STATES,
        max_grammar_size=_GRAMMAR_SYMBOLS, verbose_errors=False,
    )  # fmt: skip


def one_line(error: str) -> str:
    """llguidance's message for people: at most 300 characters, without the drawings."""
    return " ".join(error.replace("<non-verbose/>", "").replace("^", "").split())[:300]
