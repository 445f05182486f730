r"""Regular expressions from outside, matched in bounded time, with RE2 if possible.

PEFT lets `target_modules`, `rank_pattern` and `alpha_pattern` be regular expressions. Python's `re` backtracks, so one
line of a config could block a process for years. RE2 (Cox, "Regular Expression Matching in the Wild", 2010) takes at
most characters x instructions steps, for any expression. On 7,168 names (1,024 layers) a usual pattern takes 33 ms and
the worst found pattern 0.85 s. A step takes 1.3 ns (one core of a Xeon). MAX_PROGRAM limits the instructions of all
patterns of a config. They take at most 0.4 s on 126 layers and 3 s on 1,024.

RE2 has no look-around. Expressions with look-around are matched by `lookaround`, and their parts count as instructions:
8 ms for a usual expression on 882 names (126 layers), 0.11 s for the worst found. Constructs with a different meaning
in RE2 and `re`, or unknown to either, are refused: back-references, flags, named groups and classes, `{,n}`, escapes of
letters except `\d \w \s \D \W \S \b \B \n \t \r \f \v`, repeated anchors, possessive repeats. The rest agrees with
`re.fullmatch` on ASCII names without line breaks. The tests compare the two.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from weft.artifacts.lookaround import LOOKAROUNDS, LookaroundError, compile_lookaround

MAX_PATTERN_CHARS = 2048
MAX_PROGRAM = 8192  # instructions
_MEMORY_BYTES = 1 << 18  # of a compiled pattern with its cached states; above it RE2 matches without the cache

_TOKEN = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{[^}]*\}?|\(\?(?:<?[=!]|.?)|.", re.DOTALL)
_ESCAPE = re.compile(r"\\(?:[dwsDWSbBntrfv_]|\W)", re.ASCII)
_REPEAT = re.compile(r"\{[0-9]{1,4}(?:,[0-9]{0,4})?\}")
_SET = re.compile(r"(?:\\(?:[dws](?!-[^]])|[ntrfv_]|\W)|[^\\])*", re.ASCII)
_ANCHORS = ("^", "$", r"\b", r"\B")


class PatternError(ValueError):
    """The pattern is malformed, outside the supported language, or too large."""


@dataclass(slots=True)
class Budget:
    """The remaining instructions for the patterns of a config."""

    instructions: int = MAX_PROGRAM


def compile_pattern(text: str, budget: Budget) -> Callable[[str], bool]:
    """Compile an expression. Return a function that says whether a whole name matches. Raises PatternError."""
    if len(text) > MAX_PATTERN_CHARS:
        raise PatternError(f"{len(text)} characters, the limit is {MAX_PATTERN_CHARS}")
    tokens = _TOKEN.findall(text)
    _check_language(tokens, text)
    if not LOOKAROUNDS.keys().isdisjoint(tokens):
        return _with_lookaround(tokens, text, budget)
    import re2  # engines on a GPU run without RE2 if no adapter has a pattern

    options = re2.Options()
    options.max_mem, options.never_capture, options.log_errors = _MEMORY_BYTES, True, False
    try:
        pattern = re2.compile(text, options)
    except re2.error as error:
        reason = error.args[0].decode(errors="replace") if isinstance(error.args[0], bytes) else error
        raise PatternError(f"{reason}, in {text[:60]!r}") from error
    budget.instructions -= pattern.programsize
    if budget.instructions < 0:
        raise PatternError(f"too large a pattern, {text[:60]!r}; list the modules by name")
    return lambda name: pattern.fullmatch(name) is not None


def _with_lookaround(tokens: list[str], text: str, budget: Budget) -> Callable[[str], bool]:
    try:
        matches, cost = compile_lookaround(tokens, budget.instructions)
    except LookaroundError as error:
        raise PatternError(f"{error}, in {text[:60]!r}") from error
    budget.instructions -= cost
    return matches


def _check_language(tokens: list[str], text: str) -> None:
    """Refuse constructs that RE2 and `re` read differently. Raises PatternError."""
    previous = ""
    for part in tokens:
        if part[0] == "\\":
            wrong = not _ESCAPE.fullmatch(part)
        elif part[0] == "[" and len(part) > 1:
            wrong = not _SET.fullmatch(part) or any(mark in part[1:] for mark in ("[", "--", "&&", "||", "~~"))
        elif part[0] == "{":
            wrong = not _REPEAT.fullmatch(part) or previous in _ANCHORS
        else:
            wrong = (part[:2] == "(?" and part != "(?:" and part not in LOOKAROUNDS) or (
                part in "*+?" and previous in _ANCHORS
            )
        if wrong:
            raise PatternError(f"{part[:20]!r} is not supported, in {text[:60]!r}")
        previous = part
