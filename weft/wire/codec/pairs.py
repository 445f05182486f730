"""A value of weft.domain <-> the message with the same fields: the code for both ways is written when first used.

A number of the contract is an enum's member by its name, a text by its value; a tuple has the fields of the message in
their order; `_s` is milliseconds where the message has `_ms`. A number or text whose default is not its type's zero has
that default where it is unset. What a value inherits is in the part of the message that has its base's name, if there
is one. Bounds are the annotations' (weft.domain.bounds). TypeError where names, types or bounds do not fit.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache, cached_property, partial
from types import NoneType
from typing import Annotated, Any, Generic, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from weft.domain.bounds import FLAT, Bound
from weft.domain.text import quoted
from weft.wire.codec.values import check_non_empty, check_number
from weft.wire.errors import PeerError

V = TypeVar("V")
E = TypeVar("E", bound=Message)
MIN_FLOAT = 1e-30  # the contract's floats are short, and 0 is "not set" of one with another default
INTEGERS = {
    FieldDescriptor.CPPTYPE_INT32: (-1 << 31, (1 << 31) - 1), FieldDescriptor.CPPTYPE_UINT32: (0, (1 << 32) - 1),
    FieldDescriptor.CPPTYPE_INT64: (-1 << 63, (1 << 63) - 1), FieldDescriptor.CPPTYPE_UINT64: (0, (1 << 64) - 1),
}  # fmt: skip
TYPES = {
    FieldDescriptor.TYPE_BOOL: (bool,), FieldDescriptor.TYPE_FLOAT: (float,), FieldDescriptor.TYPE_DOUBLE: (float,),
    FieldDescriptor.TYPE_STRING: (str,), FieldDescriptor.TYPE_BYTES: (bytes,), FieldDescriptor.TYPE_MESSAGE: (),
}  # fmt: skip


class Custom(NamedTuple):
    """A field whose functions are written by hand. `names`: its fields of the message, if they are not its name."""

    fill: Callable[[Any, Any], None]  # the field's value into the message
    read: Callable[[Any], Any]  # from the message
    names: Sequence[str] = ()


class ByHand(NamedTuple):
    """A part whose functions are written by hand, in place of a pair."""

    of: Any
    fill: Callable[[Any, Any], None]
    read: Callable[[Any], Any]


class Pair(Generic[V, E]):
    """`parts`: in place of plain pairs of their values. `check`: raises PeerError. `who`: the beginning of refusals."""

    def __init__(
        self,
        of: type[V],
        message: type[E],
        *,
        parts: "Iterable[Pair[Any, Any] | ByHand]" = (),
        custom: Mapping[str, Custom] | None = None,
        check: Callable[[V], None] | None = None,
        who: Callable[[E], str] | None = None,
    ) -> None:
        self.of: Any = of
        self.message, self.custom, self._check, self._who = message, custom or {}, check, who
        self.parts = {part.of: part for part in parts}

    def encode(self, value: V) -> E:
        message = self.message()
        self.fill(value, message)
        return message

    def decode(self, message: E) -> V:
        """Read a value and check it. Raises PeerError."""
        return self.read(message)

    @cached_property
    def fill(self) -> Callable[[V, E], None]:
        """Make the function that writes a value into an empty message."""
        code = _Code(self)
        code.fill(self.of, "v")
        return code.compiled("fill(v, m)", code.lines or ["pass"])

    @cached_property
    def read(self) -> Callable[[E], V]:
        """Make the function that reads a value and checks it; it raises PeerError."""
        code = _Code(self)
        value = code.read(self.of)
        lines = [*code.lines, f"v = {value}", *([f"{code.name(self._check)}(v)"] if self._check else []), "return v"]
        if self._who:
            wrapped = f"raise {code.name(PeerError)}({code.name(self._who)}(m) + str(e)) from None"
            lines = ["try:", *(f" {line}" for line in lines), f"except {code.name(PeerError)} as e: {wrapped}"]
        return code.compiled("read(m)", lines)


@cache
def plain(of: Any, descriptor: Descriptor) -> Pair[Any, Any]:
    """Make the pair of a value whose fields are all the message's."""
    return Pair(of, GetMessageClass(descriptor))


def numbers(of: type[V], enum: EnumDescriptor) -> dict[int, V]:
    """Map an enum's numbers in the contract to its members; names there may begin with the enum's."""
    prefix = _words(enum.name, "_").upper() + "_"
    members: Any = of.__members__  # pyright: ignore[reportAttributeAccessIssue]
    found = {name.removeprefix(prefix): value.number for name, value in enum.values_by_name.items()}
    if (other := found.keys() ^ members.keys()) - {"UNSPECIFIED"} or members.keys() - found.keys():
        raise TypeError(f"{of.__name__} and {enum.name} differ in {sorted(other)}")
    return {found[name]: member for name, member in members.items()}


class _Hint(NamedTuple):
    """A type without its annotations, and with `| None` apart."""

    of: Any
    optional: bool
    notes: Sequence[Any]
    whole: Any

    @property
    def list_like(self) -> bool:
        """Whether the type has any number of elements of one type."""
        origin, args = get_origin(self.of), get_args(self.of)
        return origin is Sequence or origin is Mapping or (origin is tuple and args[1:] == (Ellipsis,))

    @property
    def is_enum(self) -> bool:
        return isinstance(self.of, type) and issubclass(self.of, Enum)

    @property
    def bound(self) -> Bound | None:
        return next((note for note in self.notes if isinstance(note, Bound)), None)

    def element(self, place: int = 0) -> "_Hint":
        return _hint(get_args(self.of)[place])


def _hint(whole: Any) -> _Hint:
    of, *notes = get_args(whole) if get_origin(whole) is Annotated else (whole,)
    if NoneType in get_args(of):
        inner = _hint(next(arg for arg in get_args(of) if arg is not NoneType))
        return _Hint(inner.of, True, (*notes, *inner.notes), inner.whole)
    return _Hint(of, False, notes, whole)


class _Member(NamedTuple):
    """A field of a value. `get`: behind the value."""

    name: str
    get: str
    hint: _Hint
    default: Any = MISSING


def _members(of: Any, descriptor: Descriptor) -> Iterator[_Member]:
    hint = _hint(of)
    if hint.list_like:
        yield _Member(descriptor.fields[0].name, "", hint)
    elif get_origin(hint.of) is tuple:
        for place, arg in enumerate(get_args(hint.of)):
            yield _Member(descriptor.fields[place].name, f"[{place}]", _hint(arg))
    else:
        hints = get_type_hints(hint.of, include_extras=True)
        if is_dataclass(hint.of):
            defaults = {field.name: field.default for field in fields(hint.of)}
        else:
            defaults = {name: hint.of._field_defaults.get(name, MISSING) for name in hint.of._fields}
        for name, default in defaults.items():
            yield _Member(name, f".{name}", _hint(hints[name]), default)


class _Code:
    """The lines of a function, and the values that they name."""

    def __init__(self, pair: Pair[Any, Any]) -> None:
        self.lines = list[str]()
        self._pair, self._descriptor = pair, pair.message.DESCRIPTOR
        self._values, self._left = dict[str, Any](), set(self._descriptor.fields_by_name)

    def name(self, value: Any) -> str:
        """Name a value."""
        self._values[name := f"x{len(self._values)}"] = value
        return name

    def compiled(self, head: str, lines: Iterable[str]) -> Any:
        if self._left:
            raise self._wrong(f"has no {', '.join(sorted(self._left))}")
        text = f"def {head}:\n " + "\n ".join(lines)
        exec(compile(text, f"<{self._descriptor.full_name}>", "exec"), self._values)  # noqa: S102 (names of our own)
        return self._values[head.partition("(")[0]]

    def _wrong(self, what: str) -> TypeError:
        return TypeError(f"{self._pair.of}, for {self._descriptor.full_name}, {what}")

    def _matched(self, of: Any) -> Iterator[tuple[_Member, Any]]:
        """Pair each field of a value with its own of the message; by hand: with its functions; FLAT: with None."""
        known, inherited = self._descriptor.fields_by_name, self._inherited(of)[2]
        for member in _members(of, self._descriptor):
            if member.name in inherited:
                continue
            if custom := self._pair.custom.get(member.name):
                self._left -= set(custom.names or (member.name,))
                yield member, custom
            elif FLAT in member.hint.notes:
                yield member, None
            else:
                milliseconds = member.hint.of is float and member.name not in known
                name = re.sub("_s$", "_ms", member.name) if milliseconds else member.name
                if name not in known:
                    raise self._wrong(f"has {member.name} beyond it")
                self._left.discard(name)
                if known[name].is_repeated is not member.hint.list_like:
                    raise self._wrong(f"has another type of {name}")
                yield member, known[name]

    def _inherited(self, of: Any) -> tuple[Pair[Any, Any] | None, str, Sequence[str]]:
        """Find the pair of a value's base, its part of the message, and the fields in it."""
        base: Any = of.__base__ if is_dataclass(of) and isinstance(of, type) else object
        for field in self._descriptor.fields:
            if field.message_type and field.message_type.name == base.__name__:
                self._left.discard(field.name)
                return plain(base, field.message_type), field.name, [one.name for one in fields(base)]
        return None, "", ()

    def _part(self, hint: _Hint, field: FieldDescriptor) -> Any:
        if isinstance(hint.of, type) and not is_dataclass(hint.of) and not hasattr(hint.of, "_fields"):
            raise self._wrong(f"has another type of {field.name}")
        return self._pair.parts.get(hint.of) or plain(hint.whole, field.message_type)

    def _bound(self, hint: _Hint, field: FieldDescriptor) -> Bound:
        if hint.bound is None:
            raise self._wrong(f"has no bound of {field.name}")
        return hint.bound

    # ---------------------------------------------------------------- filling

    def fill(self, of: Any, value: str) -> None:
        """Add the lines that write `value` into `m`."""
        base, part, _ = self._inherited(of)
        if base:
            self.lines.append(f"{self.name(base.fill)}({value}, m.{part})")
        for member, field in self._matched(of):
            got = value + member.get
            if isinstance(field, Custom):
                self.lines.append(f"{self.name(field.fill)}({got}, m)")
            elif field is None:
                self.fill(member.hint.whole, got)
            else:
                self._fill(member, field, got)

    def _fill(self, member: _Member, field: FieldDescriptor, got: str) -> None:
        hint, to = member.hint, f"m.{field.name}"
        condition = f"if {got} is not None: " if hint.optional else ""
        if field.is_repeated:
            if _is_map(field):
                self.lines.append(f"{to}.update({got})")
            elif field.message_type:
                add = self.name(self._part(hint.element(), field).fill)
                self.lines.append(f"for e in {got}: {add}(e, {to}.add())")
            else:
                self.lines.append(f"if {got}: {to}.extend({self._cut(hint, field, got)})")
        elif field.message_type:
            if isinstance(member.default, tuple):
                condition = f"if {got} != {self.name(member.default)}: "
            self.lines.append(f"{condition}{self.name(self._part(hint, field).fill)}({got}, {to})")
        elif field.enum_type:
            table = {one.name: of for of, one in numbers(hint.of, field.enum_type).items()}
            self.lines.append(f"{condition}{to} = {self.name(table)}[{got}._name_]")
        elif hint.is_enum:
            self.lines.append(f"{condition}{to} = {got}._value_")
        elif hint.of is float:
            if field.cpp_type in INTEGERS:
                got = f"round({'1000 * ' * (field.name != member.name)}{got})"
            self.lines.append(f"{condition}{to} = {f'max({got}, {MIN_FLOAT})' if _is_set(member, field) else got}")
        else:
            self.lines.append(f"{condition}{to} = {self._cut(hint, field, got)}")

    def _cut(self, hint: _Hint, field: FieldDescriptor, got: str) -> str:
        return f"{got}[:{self._bound(hint, field).maximum}]" if hint.bound and hint.bound.cut else got

    # ---------------------------------------------------------------- reading

    def read(self, of: Any) -> str:
        """Add the lines that read and check the fields of `m`. Returns the value of them."""
        base, part, inherited = self._inherited(of)
        held = self._local(f"{self.name(base.read)}(m.{part})") if base else ""
        arguments = [f"{held}.{name}" for name in inherited]
        for member, field in self._matched(of):
            if isinstance(field, Custom):
                arguments.append(f"{self.name(field.read)}(m)")
            elif field is None:
                arguments.append(self.read(member.hint.whole))
            else:
                arguments.append(self._read(member, field))
        hint = _hint(of)
        if hint.list_like:
            return arguments[0]
        if get_origin(hint.of) is tuple:
            return f"({', '.join(arguments)},)"
        return f"{self.name(hint.of)}({', '.join(arguments)})"

    def _local(self, value: str) -> str:
        self.lines.append(f"{(local := f'l{len(self.lines)}')} = {value}")
        return local

    def _read(self, member: _Member, field: FieldDescriptor) -> str:
        hint, got = member.hint, f"m.{field.name}"
        if field.is_repeated:
            return self._read_many(hint, field)
        present = f" if m.HasField({field.name!r}) else None" if hint.optional and field.has_presence else ""
        if field.message_type:
            return f"{self.name(self._part(hint, field).read)}({got}){present}"
        if hint.is_enum:
            return self._read_enum(hint, field, got)
        local = self._checked(hint, field, self._local(got))
        if hint.of is float and field.cpp_type in INTEGERS:
            local = f"{local} / 1000" if field.name != member.name else f"float({local})"
        return f"{local} or {member.default!r}" if _is_set(member, field) else local + present

    def _read_enum(self, hint: _Hint, field: FieldDescriptor, got: str) -> str:
        if field.enum_type:
            found, verdict = numbers(hint.of, field.enum_type), "is unknown"
            other = next((note for note in hint.notes if isinstance(note, hint.of)), None)
            if hint.optional or other is not None:
                return f"{self.name(found)}.get({got}, {self.name(other)})"
        else:
            found = {one.value: one for one in hint.of} | ({"": None} if hint.optional else {})
            verdict = f"is not {' or '.join([repr(one.value) for one in hint.of])}"
        local, table = self._local(got), self.name(found)
        self.lines.append(f"if {local} not in {table}: {self.name(_unknown(hint.of, verdict))}({local})")
        return f"{table}[{local}]"

    def _read_many(self, hint: _Hint, field: FieldDescriptor) -> str:
        bound, local = self._bound(hint, field), self._local(f"m.{field.name}")
        if bound.cut:
            local = self._local(f"{local}[:{bound.maximum}]")
        elif bound.maximum < INTEGERS[FieldDescriptor.CPPTYPE_UINT32][1] or bound.minimum:
            what = bound.subject or f"the number of {field.name}"
            self._refuse(f"not {bound.minimum} <= len({local}) <= {bound.maximum}", _length(bound, what), local)
        if _is_map(field):
            return self._read_map(hint, field, local)
        element = hint.element()
        if field.message_type:
            return f"(tuple([{self.name(self._part(element, field).read)}(e) for e in {local}]) if {local} else ())"
        at = len(self.lines)
        value = self._checked(element, field, "e")
        if len(self.lines) > at:
            self.lines[at:] = [f"for e in {local}:", *(f" {line}" for line in self.lines[at:])]
        return f"tuple({local})" if value == "e" else f"tuple([{value} for e in {local}])"

    def _read_map(self, hint: _Hint, field: FieldDescriptor, local: str) -> str:
        pair = hint if get_origin(hint.of) is Mapping else hint.element()
        at, entry = len(self.lines), field.message_type
        for place, (name, of) in enumerate(zip("kw", entry.fields if entry else (), strict=True)):
            self._checked(pair.element(place), of, name)
        self.lines[at:] = [f"for k, w in {local}.items():", *(f" {line}" for line in self.lines[at:]), " pass"]
        made = "dict" if pair is hint else "tuple"
        return f"{made}(sorted({local}.items()))"

    def _checked(self, hint: _Hint, field: FieldDescriptor, local: str) -> str:
        """Add the lines that refuse a number, text or bytes beyond its bound. Returns the value, cut where it is."""
        if hint.of not in TYPES.get(field.type, (int, float)):
            raise self._wrong(f"has another type of {field.name}")
        if field.cpp_type in INTEGERS:
            bound, (least, most) = self._bound(hint, field), INTEGERS[field.cpp_type]
            if bound.minimum < least or bound.maximum > most:
                raise self._wrong(f"has a bound of {field.name} that it cannot carry")
            above = [f"{local} > {bound.maximum}"] if bound.maximum < most else []
            below = [f"{local} < {bound.minimum}"] if bound.minimum > least else []
            refuse = partial(
                check_number, subject=bound.subject or field.name, maximum=bound.maximum, minimum=bound.minimum
            )
            self._refuse(" or ".join(above + below), refuse, local)
        elif hint.of in (str, bytes):
            bound = self._bound(hint, field)
            if bound.cut:
                return f"{local}[:{bound.maximum}]"
            refuse = partial(check_non_empty, subject=bound.subject or field.name, max_chars=bound.maximum)
            if hint.of is bytes:
                refuse = _length(bound, bound.subject or f"the length of {field.name}")
            below = f"{bound.minimum} > len({local}) or " if bound.minimum else ""
            self._refuse(f"{below}len({local}) > {bound.maximum}", refuse, local)
        return local

    def _refuse(self, condition: str, refuse: Callable[[Any], object], local: str) -> None:
        if condition:
            self.lines.append(f"if {condition}: {self.name(refuse)}({local})")


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def _is_set(member: _Member, field: FieldDescriptor) -> bool:
    """Whether the field has its default where it is unset, and that is not its type's zero."""
    if member.default is MISSING or not member.default or field.has_presence:
        return False
    return member.hint.of in (int, float, str) and not (member.hint.bound and member.hint.bound.minimum)


def _length(bound: Bound, what: str) -> Callable[[Any], object]:
    return lambda value: check_number(len(value), what, bound.maximum, bound.minimum)


def _unknown(of: type, verdict: str) -> Callable[[Any], object]:
    def refuse(value: object) -> None:
        raise PeerError(f"{_words(of.__name__, ' ')} {quoted(value)} {verdict}")

    return refuse


def _words(name: str, between: str) -> str:
    return re.sub("(?<!^)([A-Z])", rf"{between}\1", name).lower()
