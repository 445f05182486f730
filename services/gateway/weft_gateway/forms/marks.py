"""Marks in an answer: texts around its reasoning and its calls of tools. Pure.

A tokenizer may have a mark as a single token. For a special token the readers of an answer get a character unused in
texts. So the same letters from further tokens do not count as a mark. Clients do not get the character. In the
arguments of a call it is part of a text, and they get the letters.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from types import MappingProxyType
from typing import NamedTuple


class ReasoningMarks(NamedTuple):
    """The marks of a family around its reasoning."""

    begin: str
    end: str


THINK = ReasoningMarks("<think>", "</think>")  # DeepSeek, Qwen, GLM and most families
REASONING = (
    THINK,
    ReasoningMarks("<seed:think>", "</seed:think>"),  # Seed-OSS
    ReasoningMarks("<mm:think>", "</mm:think>"),  # MiniMax M3
    ReasoningMarks("[THINK]", "[/THINK]"),  # Mistral
    ReasoningMarks("<|START_THINKING|>", "<|END_THINKING|>"),  # Cohere
    ReasoningMarks("◁think▷", "◁/think▷"),  # Kimi-VL
    ReasoningMarks("<thought>", "</thought>"),  # EXAONE Deep
    ReasoningMarks("<reasoning>", "</reasoning>"),  # adapters trained by GRPO
    ReasoningMarks("Here is my thought process:", "Here is my response:"),  # Granite 3.2
)
RESPONSE = ("<response>", "</response>")  # around the answer after the reasoning: Granite 3.3
CALL_MARKS = (
    *("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    *("<|tool_call|>", "<|/tool_call|>", "<function_calls>", "</function_calls>"),
)
MARKS = (*chain(*REASONING), *CALL_MARKS)
MarkTokens = Mapping[str, tuple[int, bool]]  # by mark: the tokenizer's token, and whether it is special
NO_TOKENS: MarkTokens = MappingProxyType({})
_STAND_INS = {mark: chr(0xFDD0 + index) for index, mark in enumerate(MARKS)}  # noncharacters of Unicode
_LEFT_OUT = {ord(char): None for char in _STAND_INS.values()}
_SPELLED = {ord(char): mark for mark, char in _STAND_INS.items()}
_ANY = re.compile(f"({'|'.join(map(re.escape, MARKS))})")


def showing(bytes_of: Callable[[int], bytes], tokens: MarkTokens) -> Callable[[int], bytes]:
    """Return the function from a token to its bytes for readers."""
    shown = {id_: _STAND_INS[mark].encode() for mark, (id_, special) in tokens.items() if special}
    return (lambda token: shown.get(token) or bytes_of(token)) if shown else bytes_of


def in_text(mark: str, tokens: MarkTokens) -> str:
    """Return a mark as readers get it."""
    return _STAND_INS[mark] if is_special(mark, tokens) else mark


def stand_in(mark: str) -> str:
    """Return the stand-in of a special token's mark for readers; an unknown mark is its letters."""
    return _STAND_INS.get(mark, mark)


def begun(text: str, marks: Iterable[str]) -> int:
    """Count the characters at a text's end that more text may complete to a mark."""
    return max((n for mark in marks for n in range(1, len(mark)) if text.endswith(mark[:n])), default=0)


def is_special(mark: str, tokens: MarkTokens) -> bool:
    """Whether a mark is a special token."""
    return mark in tokens and tokens[mark][1]


def left_out(text: str) -> str:
    """Drop the marks of special tokens."""
    return text.translate(_LEFT_OUT)


def spelled(text: str) -> str:
    """Spell the marks of special tokens by their letters."""
    return text.translate(_SPELLED)


def in_grammar(text: str, tokens: MarkTokens) -> str:
    """Write a text in Lark. llguidance does not treat added tokens as text: a mark may be the token or its letters."""
    return " ".join(_in_grammar(part, tokens) for part in _ANY.split(text) if part)


def _in_grammar(part: str, tokens: MarkTokens) -> str:
    letters = json.dumps(part, ensure_ascii=False)
    if part not in tokens:
        return letters
    id_, special = tokens[part]
    return f"<[{id_}]>" if special else f"(<[{id_}]> | {letters})"
