"""A number of the contracts means what it has meant since it was given: processes of two versions run side by side."""

from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto

import weft.wire.v1 as contracts

LISTED = Path(__file__).with_name("contracts.txt")  # lines of what went stay, with their numbers reserved


def with_nested(messages: Iterable[Any]) -> Iterator[Any]:
    for one in messages:
        yield one
        yield from with_nested(one.nested_types)


FILES = [import_module(f"{contracts.__name__}.{info.name}").DESCRIPTOR
         for info in iter_modules(contracts.__path__) if info.name.endswith("_pb2")]  # fmt: skip
MESSAGES = [one for file in FILES for one in with_nested(file.message_types_by_name.values())]
ENUMS = [enum for one in (*FILES, *MESSAGES) for enum in one.enum_types_by_name.values()]


def field(one: Any) -> str:
    of = one.message_type or one.enum_type
    kind = of.full_name.removeprefix("weft.v1.") if of else FieldDescriptorProto.Type.Name(one.type)[5:].lower()
    return (
        f"{'repeated ' * one.is_repeated}{'optional ' * (one.has_presence and not one.message_type)}{kind} {one.name}"
    )


def listed() -> Iterator[str]:
    for one in MESSAGES:
        yield from (f"{one.full_name} {number} {field(of)}" for number, of in one.fields_by_number.items())
    for enum in ENUMS:
        yield from (f"{enum.full_name} {value.number} {value.name}" for value in enum.values)


def reserved() -> Iterator[str]:
    for one in MESSAGES:
        one.CopyToProto(proto := DescriptorProto())
        for span in proto.reserved_range:
            yield from (f"{one.full_name} {number}" for number in range(span.start, span.end))


def test_no_number_is_used_for_something_else() -> None:
    known, now, gone = set(LISTED.read_text().splitlines()), set(listed()), set(reserved())
    assert not now - known, "new, or renamed: lines for contracts.txt\n" + "\n".join(sorted(now - known))
    changed = {line for line in known - now if " ".join(line.split()[:2]) not in gone}
    assert not changed, f"another meaning, or gone without `reserved`: {sorted(changed)}"
