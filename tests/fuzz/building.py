"""Values made of bytes: JSON of the words of some examples, and protobuf messages."""

import copy
import json
from collections.abc import Iterable, Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

DEPTH, MAX_ENTRIES = 6, 6  # of a value; entries of an object, a list or a repeated field
ODD: Sequence[Any] = (
    None, True, False, 0, 1, -1, 2**31, 2**63, 2**64, -(2**63), 10**30, 0.0, -0.0, 0.5, 1e308, 1e-320, "", " ", "\0",
    "a" * 300, "\ud800", "𝕏", "../..", "nan", "1", [], {}, [[]], [{}],
)  # fmt: skip


class Choices:
    """Decisions read from bytes, from their beginning; zeros once they are used up."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def number(self, below: int) -> int:
        """Choose a number: 0 <= number < below."""
        wide = 1 if below <= 1 << 8 else 2 if below <= 1 << 16 else 8
        piece = self._data[self._at : self._at + wide]
        self._at += wide
        return int.from_bytes(piece, "little") % below

    def of(self, options: Sequence[Any]) -> Any:
        return options[self.number(len(options))]

    def rest(self, most: int) -> bytes:
        piece = self._data[self._at : self._at + most]
        self._at += most
        return piece


class Words:
    """The names and the other values of some JSON examples."""

    def __init__(self, examples: Iterable[Any]) -> None:
        names, values = dict[str, None](), list[Any](ODD)
        todo = list(examples)
        while todo:
            match todo.pop():
                case dict() as found:
                    names |= dict.fromkeys(found)
                    todo += found.values()
                case list() as found:
                    todo += found
                case found:
                    values.append(found)
        self.names, self.values = [*names, "", "x", "__proto__"], values

    def value(self, choices: Choices, depth: int = DEPTH) -> Any:
        """Build an object, a list, a value of the examples or an odd one, or a text of the bytes."""
        kind = choices.number(8) if depth else 7
        if kind < 3:
            return {
                choices.of(self.names): self.value(choices, depth - 1) for _ in range(choices.number(MAX_ENTRIES + 1))
            }
        if kind == 3:
            return [self.value(choices, depth - 1) for _ in range(choices.number(MAX_ENTRIES + 1))]
        if kind == 4:
            return choices.rest(choices.number(40)).decode("utf-8", "replace")
        return copy.deepcopy(choices.of(self.values))

    def edited(self, choices: Choices, example: Any) -> Any:
        """Return the example with a few of its places replaced."""
        root = [json.loads(json.dumps(example))]
        for _ in range(choices.number(4) + 1):
            holder, key = root, 0
            while choices.number(4) and (inner := holder[key]) and isinstance(inner, dict | list):  # pyright: ignore
                holder, key = inner, choices.of(list(inner) if isinstance(inner, dict) else range(len(inner)))
            if isinstance(holder, dict) and not choices.number(3):
                holder[choices.of(self.names)] = self.value(choices, 2)  # pyright: ignore[reportArgumentType]
            else:
                holder[key] = self.value(choices, 2)
        return root[0]


def encoded(value: Any) -> bytes:
    """Encode a value as JSON; a lone surrogate stays one."""
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")


_INTEGERS = (0, 1, 2, 7, 64, 255, 2**16, 2**31 - 1, 2**32 - 1, 2**63 - 1, 2**64 - 1)
_RANGES = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
    FieldDescriptor.CPPTYPE_ENUM: (-(2**31), 2**31 - 1),
}


def filled(message: Message, choices: Choices, names: Sequence[str], depth: int = DEPTH) -> Message:
    """Fields of a protobuf message, chosen and set; texts are often of `names`, so that messages speak of the same."""
    fields = message.DESCRIPTOR.fields
    for _ in range(choices.number(2 * len(fields) + 1) if fields else 0):
        field: FieldDescriptor = choices.of(fields)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            continue
        if field.is_repeated:
            for _ in range(choices.number(MAX_ENTRIES)):
                if field.message_type is not None:
                    if depth:
                        filled(getattr(message, field.name).add(), choices, names, depth - 1)
                else:
                    getattr(message, field.name).append(_scalar(field, choices, names))
        elif field.message_type is not None:
            if depth:
                inner = getattr(message, field.name)
                inner.SetInParent()
                filled(inner, choices, names, depth - 1)
        else:
            setattr(message, field.name, _scalar(field, choices, names))
    return message


def _scalar(field: FieldDescriptor, choices: Choices, names: Sequence[str]) -> Any:
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_STRING if field.type == FieldDescriptor.TYPE_BYTES:
            return choices.rest(choices.number(80))
        case FieldDescriptor.CPPTYPE_STRING:
            return choices.of((*names, "", "\0", "x" * 300, choices.rest(9).decode("utf-8", "replace")))
        case FieldDescriptor.CPPTYPE_BOOL:
            return bool(choices.number(2))
        case FieldDescriptor.CPPTYPE_DOUBLE | FieldDescriptor.CPPTYPE_FLOAT:
            return choices.of((0.0, -1.0, 0.5, 1e30, float("inf"), float("-inf"), float("nan")))
        case FieldDescriptor.CPPTYPE_ENUM if field.enum_type is not None and choices.number(8):
            return choices.of([value.number for value in field.enum_type.values])
        case _:
            low, high = _RANGES[field.cpp_type]
            value = choices.of(_INTEGERS) if choices.number(2) else choices.number(2**62)
            return max(low, min(high, value))
