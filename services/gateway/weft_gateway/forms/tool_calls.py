"""Calls of tools in the text of an answer, in each model family's format, read as the text comes. Pure.

A call's name goes out as soon as it is known, and the arguments as they come. A possible beginning of a call is held
back. Text that proves to be no call is content, unchanged.
"""

import contextlib
import json
import re
from enum import Enum
from typing import Any, NamedTuple

import orjson

from weft_gateway import exact_json
from weft_gateway.forms.marks import begun, stand_in
from weft_gateway.forms.python_calls import PythonCalls
from weft_gateway.forms.tool_formats import MISTRAL, ToolFormat


class Content(NamedTuple):
    """Text of the answer outside calls."""

    text: str


class CallBegun(NamedTuple):
    """The start of a call; `number` counts the answer's calls from 0."""

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
    AFTER_CALL = "after"  # its end mark, another call, or content


_HEAD = re.compile(r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=[{\[])')
_BESIDE_ARGUMENTS = {"arguments", "parameters", "id", "type", "index"}  # fields of a call possibly without arguments
_CALL_ID, _ARGS = stand_in("[CALL_ID]"), stand_in("[ARGS]")
_NAMED = re.compile(
    rf"([A-Za-z0-9_.-]{{1,64}})\s*(?:(?:\[CALL_ID\]|{_CALL_ID})\s*[A-Za-z0-9]*\s*)?(?:(?:\[ARGS\]|{_ARGS})\s*)?"
)
_NAME_BEGUN = re.compile(rf"[A-Za-z0-9_.-]{{1,64}}\s*(?:[\[{_CALL_ID}{_ARGS}][^{{]{{0,64}})?")
_PIECE_CHARS = 4096  # the part of an answer read at once, so that no step copies a long rest
_BETWEEN = re.compile(r"[\s}\],;]*")  # calls: separators, and brackets too many


def call_begins(form: ToolFormat) -> re.Pattern[str]:
    """Compile the pattern of a mark with a call (group `call`), or of a text that may become a mark."""
    spelled = {*form.openings, *map(stand_in, form.openings)}
    marks = f"(?:{'|'.join(map(re.escape, spelled))})\\s*"
    parts = (mark[:n] for mark in form.openings for n in range(len(mark) - 1, 0, -1))
    opening = r"[\w{\[]" if form.python or form.name == MISTRAL.name else r"[{\[]"
    return re.compile(rf"(?P<call>{marks}{opening})|{marks}\Z|(?:{'|'.join(map(re.escape, parts))})\Z")


class ToolCallParser:
    """The reader of an answer: `push` text as it comes, then `flush` once. Parts come in the order of the text.

    A nearly correct call is a call. Its arguments go out as far as they are JSON; if they end too early, their open
    brackets are closed. A failed call is content, unless a part of it has already gone out.
    """

    def __init__(self, form: ToolFormat) -> None:
        self._form, self._state, self._pending = form, _State.CONTENT, ""
        letters, end = form.openings, form.closing
        self._marks, self._ends = (*letters, *map(stand_in, letters)), (end, stand_in(end)) if end else ()
        self._python = PythonCalls(self._marks) if form.python else None
        self._is_bare = not form.begin  # a call may stand here without a mark
        self._is_marked = False  # the end mark is missing yet
        self._object: _ObjectText | None = None
        self._lead = ""  # the text before the object, content if no call follows
        self._name = ""  # that stands there
        self._sent: int | None = None  # end of the sent arguments in the object's text; None: no name yet
        self.calls = 0  # whole or begun

    def push(self, text: str) -> list[Part]:
        """Return the parts certain by now."""
        return self._read(self._python.push(text) if self._python else text)

    def _read(self, text: str) -> list[Part]:
        parts: list[Part] = []
        for begin in range(0, len(text), _PIECE_CHARS):
            self._pending += text[begin : begin + _PIECE_CHARS]
            while (step := self._step()) is not None:
                parts += step
        return parts

    def flush(self, *, cut: bool = True) -> list[Part]:
        """Return the remaining parts at the end of the answer: the known part of an unfinished call, or content.

        `cut`: the answer was cut off. Otherwise the arguments of a begun call are completed.
        """
        parts = self._read(self._python.flush()) if self._python else []
        return [*parts, *self._flushed(cut=cut)]

    def _flushed(self, *, cut: bool) -> list[Part]:
        pending, self._pending = self._pending, ""
        match self._state:
            case _State.CALL if self._object is not None:
                self._object.end(cut=cut)
                parts = self._arguments()
                if self._sent is not None:
                    return parts if cut else [*parts, *self._closing()]
                if call := self._full_call(self._object.closed(), is_complete=False):
                    return call
                pending = self._lead + pending
            case _State.CALL:
                pending = self._lead + pending
            case _State.AFTER_CALL:
                left = pending[_BETWEEN.match(pending).end() :]  # pyright: ignore[reportOptionalMemberAccess]
                pending = "" if not left or self._may_be_end(left) else pending
            case _State.CONTENT:
                pass
        return [Content(pending)] if pending else []

    def _step(self) -> list[Part] | None:
        """Read the next parts; None: more text is needed."""
        match self._state:
            case _State.CALL:
                return self._begin_object() if self._object is None else self._read_object(self._object)
            case _State.AFTER_CALL:
                return self._read_after_call()
            case _State.CONTENT:
                return self._find_bare() if self._is_bare else self._find_mark()

    def _find_bare(self) -> list[Part] | None:
        """Look at the answer's start: a call of a format with an optional mark may begin there."""
        inside = self._pending.lstrip().removeprefix("[").lstrip()
        if not inside:
            return None
        self._is_bare = False
        if inside.startswith("{"):
            self._begin(self._pending[: -len(inside)], inside)
        return []

    def _find_mark(self) -> list[Part] | None:
        """Look for a mark: after a mark a call may stand anywhere."""
        pending = self._pending
        if positions := [(pending.index(mark), mark) for mark in self._marks if mark in pending]:
            at, mark = min(positions)
            self._begin(mark, pending[at + len(mark) :])
            self._is_marked = True
            return [Content(pending[:at])] if at else []
        n_kept = begun(pending, self._marks)
        certain, self._pending = pending[: len(pending) - n_kept], pending[len(pending) - n_kept :]
        return [Content(certain)] if certain else None

    def _begin(self, lead: str, pending: str) -> None:
        self._state, self._object, self._name, self._sent = _State.CALL, None, "", None
        self._lead, self._pending = lead, pending

    def _begin_object(self) -> list[Part] | None:
        """Find an object, a list of objects, or a name and an object (Mistral's newer format); else it is content."""
        text = self._pending.lstrip()
        inside = text.removeprefix("[").lstrip()
        if not inside:
            return None
        head, brace, _ = text.partition("{")
        if inside.startswith("{"):
            head = text[: -len(inside)]
        elif self._form.name == MISTRAL.name and brace and (named := _NAMED.fullmatch(head)):
            self._name = named[1]
        elif self._form.name == MISTRAL.name and not brace and _NAME_BEGUN.fullmatch(text):
            return None
        else:
            self._state = _State.CONTENT
            return [Content(self._lead)]
        full_text = self._pending
        self._pending = text[len(head) :]
        self._lead, self._object = self._lead + full_text[: -len(self._pending)], _ObjectText()
        return []

    def _read_object(self, read: "_ObjectText") -> list[Part] | None:
        """Send the arguments as far as known; text outside a call is content."""
        read.take(self._pending)
        parts = self._arguments()
        if not read.ended and not read.broken:
            return parts or None
        if self._sent is not None:
            parts += self._closing()
        elif call := self._full_call(
            read.text if read.ended else read.closed(), is_complete=read.ended and self._is_marked
        ):
            parts += call
        else:
            raw, self._pending, self._state = self._pending[: read.read], self._pending[read.read :], _State.CONTENT
            return [Content(self._lead + raw)]
        self._pending, self._state, self._is_bare = self._pending[read.certain :], _State.AFTER_CALL, False
        return parts

    def _arguments(self) -> list[Part]:
        """Read the next arguments of a call with a known name."""
        assert self._object
        text, parts = self._object.text, list[Part]()
        if self._sent is None:
            head = None if self._name else _HEAD.match(text)
            name = _name_of(head[1]) if head else self._name
            if not name or not text:
                return []
            self._sent, self.calls = head.end() if head else 0, self.calls + 1
            parts.append(CallBegun(self.calls - 1, name))
        end = len(text) if self._name or self._object.inner_end is None else self._object.inner_end
        if part := text[self._sent : end]:
            parts.append(ArgumentsPart(self.calls - 1, part))
            self._sent = end
        return parts

    def _closing(self) -> list[Part]:
        """Close the arguments of a begun call."""
        assert self._object
        owed = self._object.owed if self._name else self._object.owed[:-1] if self._object.inner_end is None else ""
        return [ArgumentsPart(self.calls - 1, owed)] if owed else []

    def _full_call(self, text: str, *, is_complete: bool) -> list[Part]:
        """Read a call with its fields in any order, or with arguments as a text; no part: not a call.

        `is_complete`: it may have no arguments.
        """
        with contextlib.suppress(ValueError, TypeError):  # not JSON, or too deep for writing
            match exact_json.loads(text):
                case {"function": {"name": str(name), **fields}} | {"name": str(name), **fields} if name:
                    arguments = fields.get("arguments", fields.get("parameters"))
                    if arguments is not None or (is_complete and fields.keys() <= _BESIDE_ARGUMENTS):
                        spelled = _json_of(arguments)
                        self.calls += 1
                        return [CallBegun(self.calls - 1, name), ArgumentsPart(self.calls - 1, spelled)]
                case _:
                    pass
        return []

    def _read_after_call(self) -> list[Part] | None:
        """Pass over the end mark, separators before a further call, and white space before content."""
        form, pending = self._form, self._pending
        separator = _BETWEEN.match(pending)
        assert separator
        left = pending[separator.end() :]
        if not left or self._may_be_end(left) or any(mark.startswith(left) and mark != left for mark in self._marks):
            return None
        if self._may_end and (end := next((end for end in self._ends if left.startswith(end)), "")):
            self._pending, self._is_marked = left[len(end) :], False
        elif left.startswith("{") and (self._is_marked or not form.begin):
            self._begin(separator[0], left)
        elif left.startswith(self._marks):
            self._pending, self._state = left, _State.CONTENT
        else:
            text = pending.lstrip()
            last = form.last.removesuffix(form.closing)
            self._pending, self._state = (text.removeprefix(last).lstrip() if last else text), _State.CONTENT
        return []

    @property
    def _may_end(self) -> bool:
        """Whether the end mark may come, also if the mark before all calls was missing."""
        return self._is_marked or not self._form.begin

    def _may_be_end(self, left: str) -> bool:
        return self._may_end and any(end.startswith(left) and end != left for end in self._ends)


_KEY, _COLON, _VALUE, _ITEM, _AFTER = "key", "colon", "value", "item", "after"  # the next part expected
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_ESCAPE_BEGUN = re.compile(r"\\u[0-9a-fA-F]{0,3}")
_QUOTE_ENDS = re.compile(r'"\s*[,}\]<\ufdd0-\ufdef]')  # ends a text, also before a mark
_QUOTE_LAST = re.compile(r'"\s*\Z')
_SCALAR_CHARS = frozenset("+-.0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_LITERALS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}


class _ObjectText:
    """The reader of a JSON object in a growing text. `text` is strict JSON up to the last begun value.

    Models' faults in JSON are mended: quotes and control characters in texts, unknown escapes, commas before a closing
    bracket, Python's literals.
    """

    def __init__(self) -> None:
        self.text = ""
        self.owed = ""  # the text to close it
        self.inner_end: int | None = None  # in `text`, after the first object or array inside
        self.read = self.certain = 0  # characters taken; characters in `text`
        self.ended = self.broken = False
        self._begun = ""  # text certain only with a following value
        self._open: list[str] = []  # closing brackets
        self._expects, self._scalar, self._escape = _VALUE, "", ""
        self._quoted = ""  # the kind of a begun text
        self._quote = ""  # its possible last quote

    def take(self, raw: str) -> None:
        """Continue after the last call of `take`. `raw` begins with the object."""
        self._quote = ""
        while self.read < len(raw) and not self.ended and not self.broken and not self._quote:
            if not self._quoted:
                self._take(raw[self.read])
            elif self._quoted != _KEY and not self._escape and (last := _QUOTE_LAST.match(raw, self.read)):
                self._quote = last[0]
            else:
                self._take_quoted(raw)

    def end(self, *, cut: bool) -> None:
        """End the object: no more text comes. `cut`: begun parts count, too."""
        if cut:
            self.text += self._begun + self._scalar + self._escape + self._quote
        elif self._quote:
            self._end_quoted()
        elif self._scalar:
            self._end_scalar()

    def closed(self) -> str:
        """Return the object as if it ended here; "": it cannot."""
        return self.text + self.owed if self._begun.strip() in ("", ",") and not self._scalar else ""

    def _take_quoted(self, raw: str) -> None:
        char = raw[self.read]
        if self._escape:
            self._escape += char
            if _ESCAPE_BEGUN.fullmatch(self._escape):
                self.read += 1
                return
            escape, self._escape = self._escape, ""
            mended = "'" if escape == r"\'" else escape if _ESCAPE.fullmatch(escape) else ""
            self.read += bool(mended)
            self._add(mended or "\\\\" + escape[1:-1])
        elif char == '"' and self._quoted != _KEY and not _QUOTE_ENDS.match(raw, self.read):
            self.read += 1
            self._add(r"\"")
        elif plain := _PLAIN.match(raw, self.read):
            self.read = plain.end()
            self._add(plain[0])
        else:
            self.read += 1
            if char == "\\":
                self._escape = char
            elif char == '"':
                self._end_quoted()
            else:
                self._add(json.dumps(char)[1:-1])

    def _end_quoted(self) -> None:
        quoted, self._quoted, self._begun = self._quoted, "", self._begun + '"'
        self._expects = _COLON if quoted == _KEY else _AFTER
        if quoted != _KEY:
            self._count()

    def _add(self, quoted: str) -> None:
        self._begun += quoted
        if self._quoted != _KEY:
            self._count()

    def _take(self, char: str) -> None:
        if char in _SCALAR_CHARS and (self._scalar or self._expects in (_VALUE, _ITEM)):
            self._scalar += char
            self.read += 1
            return
        if self._scalar and not self._end_scalar():
            self.broken = True
            return
        self.read += 1
        match char:
            case " " | "\t" | "\r" | "\n":
                self._begun += char
            case '"' if self._expects in (_KEY, _VALUE, _ITEM):
                self._quoted = self._expects
                self._add(char)
            case "{" | "[" if self._expects in (_VALUE, _ITEM):
                self._begun += char
                self._open.append("}" if char == "{" else "]")
                self._expects = _KEY if char == "{" else _ITEM
            case "}" | "]" if self._open[-1] == char and self._expects in (_AFTER, _KEY if char == "}" else _ITEM):
                self._close(char)
            case "," if self._expects == _AFTER:
                self._begun += char
                self._expects = _KEY if self._open[-1] == "}" else _ITEM
            case ":" if self._expects == _COLON:
                self._begun += char
                self._expects = _VALUE
            case _:
                self.read -= 1
                self.broken = True

    def _close(self, bracket: str) -> None:
        written = self._begun.rstrip()
        self._begun = (written[:-1] if written.endswith(",") else self._begun) + bracket
        self._open.pop()
        self._expects = _AFTER
        self._count()
        if len(self._open) == 1 and self.inner_end is None:
            self.inner_end = len(self.text)
        self.ended = not self._open

    def _end_scalar(self) -> bool:
        """Take a number or a literal; False: the text is neither."""
        value = self._scalar if _NUMBER.fullmatch(self._scalar) else _LITERALS.get(self._scalar)
        if value is not None:
            self._begun += value
            self._scalar, self._expects = "", _AFTER
            self._count()
        return value is not None

    def _count(self) -> None:
        """Count the begun text as certain."""
        self.text, self._begun, self.certain = self.text + self._begun, "", self.read
        self.owed = ('"' if self._quoted else "") + "".join(reversed(self._open))


def _json_of(arguments: Any) -> str:
    """Return the JSON text of arguments; text with JSON in it stays unchanged."""
    if isinstance(arguments, str) and arguments.strip():
        with contextlib.suppress(orjson.JSONDecodeError):
            orjson.loads(arguments)
            return arguments
    return exact_json.dumps(arguments or {}).decode()


def _name_of(spelled: str) -> str:
    try:
        return orjson.loads(spelled)
    except orjson.JSONDecodeError:
        return ""
