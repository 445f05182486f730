"""Calls of tools in the text of an answer: each model family's own form, read as the text comes. Pure.

Which form a model was trained on its pool says, or its chat template shows (`format_of`). A call is a JSON object with
a name and arguments; the name goes out as soon as it is known, and the arguments as they come. Text that may yet become
a call is held back; what turns out to be none is content, as it stands.
"""

import contextlib
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import orjson


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a family writes calls: `begin` object `end`, joined by `between`, all of them inside `first` and `last`.

    `spelled`: texts that may stand before the calls where the tokenizer does not make them special tokens. A format
    without `begin` and `first` has its calls where the answer begins.
    """

    name: str
    arguments: str  # the field that holds them
    begin: str = ""
    end: str = ""
    first: str = ""
    between: str = ""
    last: str = ""
    spelled: str = ""
    id_chars: int = 24


HERMES = ToolFormat("hermes", "arguments", "<tool_call>\n", "\n</tool_call>", between="\n")
LLAMA = ToolFormat("llama3_json", "parameters", between="; ", spelled="<|python_tag|>")
MISTRAL = ToolFormat("mistral", "arguments", first="[", between=", ", last="]", spelled="[TOOL_CALLS]", id_chars=9)
PARSERS: Mapping[str, ToolFormat] = {form.name: form for form in (HERMES, LLAMA, MISTRAL)}


def format_of(template: str, parser: str = "") -> ToolFormat:
    """That of the pool's parser; "", or one that only a newer gateway knows: by what the chat template says of calls.

    Hermes's form where the template says nothing.
    """
    if form := PARSERS.get(parser):
        return form
    if "[TOOL_CALLS]" in template:
        return MISTRAL
    if "<tool_call>" not in template and "python_tag" in template:
        return LLAMA
    return HERMES


def renders_tools(template: str) -> bool:
    """Whether the template itself shows tools to the model."""
    return "tools" in template


def instructions(form: ToolFormat, tools: Sequence[Mapping[str, Any]]) -> str:
    """Of a system message, for templates that do not show tools: what they are and how they are called."""
    call = f'{{"name": NAME, "{form.arguments}": {{ARGUMENTS}}}}'
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return (
        "You may call functions to answer. Their signatures, as JSON:\n"
        f"<tools>\n{listed}\n</tools>\n"
        "To call one, write its name and arguments in this form:\n"
        f"{form.first}{form.begin}{call}{form.end}{form.last}"
    )


def written_calls(form: ToolFormat, calls: Sequence[Mapping[str, Any]]) -> str:
    """OpenAI's calls of an earlier answer, as the family's text."""
    functions = [call.get("function") or {} for call in calls]
    objects = [{"name": one.get("name"), form.arguments: one.get("arguments")} for one in functions]
    written = [f"{form.begin}{json.dumps(one, ensure_ascii=False)}{form.end}" for one in objects]
    return form.first + form.between.join(written) + form.last


class Content(NamedTuple):
    """Text of the answer that belongs to no call."""

    text: str


class CallBegun(NamedTuple):
    """A call; `number` counts those of one answer, from 0."""

    number: int
    name: str


class ArgumentsPart(NamedTuple):
    """The next characters of the JSON text of a call's arguments."""

    number: int
    text: str


Part = Content | CallBegun | ArgumentsPart


class _State(Enum):
    CONTENT = "content"  # calls may follow
    CALL = "call"  # an object follows, or goes on
    BEHIND = "behind"  # a call: its end mark, another one, or content
    PLAIN = "plain"  # no call can follow


_HEAD = re.compile(r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=[{\[])')


class ToolCallParser:
    """Reads one answer: `push` text as it comes, then `flush` once. What it returns is in the order of the text."""

    def __init__(self, form: ToolFormat) -> None:
        self._form, self._state, self._held = form, _State.CONTENT, ""
        self._object, self._end_mark = _ObjectEnd(), ""
        self._lead = ""  # what stands before the object, to be content if it is no call
        self._arguments_at: int | None = None  # in `_held`, what of the arguments is to go out; None: no name yet
        self.calls = 0  # whole or begun

    def push(self, text: str) -> list[Part]:
        """What is certain by now."""
        self._held += text
        parts: list[Part] = []
        while (found := self._step()) is not None:
            parts += found
        return parts

    def flush(self) -> list[Part]:
        """What is left at the end of the answer: of a call that never ended what is known, or else content."""
        held, self._held = self._held, ""
        match self._state:
            case _State.CALL if self._arguments_at is not None:
                rest = held[self._arguments_at :]
                return [ArgumentsPart(self.calls - 1, rest)] if rest else []
            case _State.CALL:
                held = self._lead + held
            case _State.BEHIND if not held.strip() or held.strip() in self._form.end + self._form.last:
                held = ""
            case _:
                pass
        return [Content(held)] if held else []

    def _step(self) -> list[Part] | None:
        """Some progress; None: only more text brings any."""
        match self._state:
            case _State.CALL:
                return self._read_call()
            case _State.BEHIND:
                return self._read_behind()
            case _State.CONTENT:
                return self._find_mark() if self._form.begin else self._find_object((self._form.first,))
            case _State.PLAIN:
                held, self._held = self._held, ""
                return [Content(held)] if held else None

    def _find_mark(self) -> list[Part] | None:
        """A call of a format with marks may stand anywhere."""
        mark = self._form.begin.rstrip()
        before, found, behind = self._held.partition(mark)
        if found:
            self._held = behind
            self._begin(mark)
        else:
            kept = next((n for n in range(len(mark) - 1, 0, -1) if before.endswith(mark[:n])), 0)
            before, self._held = before[: len(before) - kept], before[len(before) - kept :]
        return [Content(before)] if before else [] if found else None

    def _find_object(self, openings: Sequence[str]) -> list[Part] | None:
        """A call of a format without marks stands where the answer begins, or behind another one."""
        text = self._held.lstrip()
        for opening in {self._form.spelled + one for one in openings} | set(openings):
            behind = text[len(opening) :].lstrip() if text.startswith(opening) else None
            if behind and behind.startswith("{"):
                lead = self._held[: -len(behind)]
                self._held = behind
                self._begin(lead)
                return []
            if behind == "" or opening.startswith(text):
                return None
        self._state = _State.PLAIN
        return []

    def _begin(self, lead: str) -> None:
        self._state, self._object, self._arguments_at, self._lead = _State.CALL, _ObjectEnd(), None, lead

    def _read_call(self) -> list[Part] | None:
        """The object goes out as far as it is known; what is no call is content."""
        if self._object.scanned == 0:
            text = self._held.lstrip()
            self._lead, self._held = self._lead + self._held[: len(self._held) - len(text)], text
            if text and not text.startswith("{"):
                self._state = _State.CONTENT
                return [Content(self._lead)]
        self._object.scan(self._held)
        parts: list[Part] = []
        if self._arguments_at is None and (head := _HEAD.match(self._held)) and _name_of(head[1]):
            parts.append(CallBegun(self.calls, _name_of(head[1])))
            self._arguments_at, self.calls = head.end(), self.calls + 1
        if self._arguments_at is not None:
            end = len(self._held) if self._object.inner_end is None else self._object.inner_end
            if text := self._held[self._arguments_at : end]:
                parts.append(ArgumentsPart(self.calls - 1, text))
                self._arguments_at = end
        if self._object.end is None:
            return parts or None
        whole, self._held = self._held[: self._object.end], self._held[self._object.end :]
        if self._arguments_at is None:
            parts += self._whole(whole)
        if self._state is _State.CALL:
            self._state, self._end_mark = _State.BEHIND, self._form.end.strip()
        return parts

    def _whole(self, text: str) -> list[Part]:
        """A call whose fields stand in another order, or whose arguments are a text; or else content."""
        with contextlib.suppress(orjson.JSONDecodeError):
            match orjson.loads(text):
                case {"name": str(name), **fields} if name:
                    arguments = fields.get("arguments", fields.get("parameters", {}))
                    spelled = arguments if isinstance(arguments, str) else orjson.dumps(arguments).decode()
                    self.calls += 1
                    return [CallBegun(self.calls - 1, name), ArgumentsPart(self.calls - 1, spelled)]
                case _:
                    pass
        self._state = _State.CONTENT if self._form.begin else _State.PLAIN
        return [Content(self._lead + text)]

    def _read_behind(self) -> list[Part] | None:
        """The end mark is passed over, and white space before another call or content."""
        form, text = self._form, self._held.lstrip()
        if not text or (self._end_mark.startswith(text) and text != self._end_mark):
            return None
        if self._end_mark and text.startswith(self._end_mark):
            self._held, self._end_mark = text[len(self._end_mark) :], ""
            return []
        if form.begin:
            self._held, self._state = text, _State.CONTENT
            return []
        if form.last and text.startswith(form.last):
            self._held, self._state = text[len(form.last) :].lstrip(), _State.PLAIN
            return []
        return self._find_object((form.between.strip(),))


class _ObjectEnd:
    """Where a JSON object ends in a text that grows, and where the last value inside it does."""

    def __init__(self) -> None:
        self.scanned = self._depth = 0
        self._in_text = self._escaped = False
        self.inner_end: int | None = None  # behind the first object or array inside
        self.end: int | None = None

    def scan(self, text: str) -> None:
        """Go on where the last scan ended. `text` begins with the object."""
        for at in range(self.scanned, len(text)):
            if self.end is not None:
                return
            self.scanned = at + 1
            self._take(text[at], at)

    def _take(self, char: str, at: int) -> None:
        if self._in_text:
            self._in_text = self._escaped or char != '"'
            self._escaped = char == "\\" and not self._escaped
        elif char == '"':
            self._in_text = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            if self._depth == 1 and self.inner_end is None:
                self.inner_end = at + 1
            if self._depth == 0:
                self.end = at + 1


def _name_of(spelled: str) -> str:
    try:
        return orjson.loads(spelled)
    except orjson.JSONDecodeError:
        return ""


def call_id(form: ToolFormat, answer_id: str, index: int) -> str:
    """Of a call: the same for the same answer, as long as the family's templates want it."""
    drawn = hashlib.sha256(f"{answer_id}/{index}".encode()).hexdigest()
    return drawn[: form.id_chars] if form is MISTRAL else f"call_{drawn[: form.id_chars]}"
