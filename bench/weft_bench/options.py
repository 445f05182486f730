"""Options of a benchmark: fields of a dataclass, from which the command line is made.

A field is `name: type = option(default, help, ...)`. Types: str, int, float, bool, Path, each of these or None, and
tuples of str, int or float, which the command line gives with commas.
"""

import argparse
from collections.abc import Collection, Sequence
from dataclasses import MISSING, Field, field, fields
from inspect import cleandoc
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

Options = TypeVar("Options")


def option(default: Any, help: str, choices: Collection[str] = (), minimum: float | None = None) -> Any:  # noqa: A002
    """Describe a field. `choices` and `minimum` hold for each value of a tuple. A default of `...`: required."""
    metadata = {"help": help, "choices": tuple(choices), "minimum": minimum}
    return field(metadata=metadata) if default is ... else field(default=default, metadata=metadata)


def option_flag(name: str) -> str:
    """Return the flag of a field: `max_rounds` is `--max-rounds`, `of_` is `--of`."""
    return "--" + name.rstrip("_").replace("_", "-")


def parse(name: str, options: type[Options], words: Sequence[str], docs: Path) -> tuple[Options, Path]:
    """Parse the words of `weft bench NAME`. Returns the options and the folder of pages (`--docs`).

    Exits as argparse does: code 0 after `--help`, 2 with a message for a wrong option.
    """
    parser = argparse.ArgumentParser(
        prog=f"weft bench {name}", description=cleandoc(options.__doc__ or ""), allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    types = get_type_hints(options)
    for each in fields(options):  # pyright: ignore[reportArgumentType] # every Options is a dataclass
        _add(parser, each, types[each.name])
    parser.add_argument("--docs", type=Path, default=docs, help=f"folder of pages and raw lines ({docs})")
    values = vars(parser.parse_args(words))
    docs = values.pop("docs")
    return options(**values), docs


def _add(parser: argparse.ArgumentParser, each: Field[Any], kind: Any) -> None:
    flag, metadata = option_flag(each.name), each.metadata
    choices: tuple[str, ...] = metadata["choices"]
    notes = [", ".join(choices)] if choices else []
    notes += [f"default: {_shown(each.default)}"] if each.default not in (MISSING, None, False, ()) else []
    text = (metadata["help"] + (f" ({'; '.join(notes)})" if notes else "")).replace("%", "%%")
    shared: dict[str, Any] = {"dest": each.name, "help": text}
    if kind is bool:
        parser.add_argument(flag, action="store_true", **shared)
        return
    required = each.default is MISSING
    convert = _converter(kind, choices, metadata["minimum"])
    parser.add_argument(flag, type=convert, default=None if required else each.default, required=required,
                        metavar=each.name.upper(), **shared)  # fmt: skip


def _converter(kind: Any, choices: Sequence[str], minimum: float | None) -> Any:
    """Return the function that reads an option's text. It raises argparse.ArgumentTypeError."""
    many = get_origin(kind) is tuple
    scalar = get_args(kind)[0] if many else next((part for part in get_args(kind) if part is not NoneType), kind)

    def single(text: str) -> Any:
        try:
            value = scalar(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"expected {_NOUNS[scalar]}, got {text!r}") from error
        if choices and str(value) not in choices:
            raise argparse.ArgumentTypeError(f"expected one of {', '.join(choices)}, got {text!r}")
        if minimum is not None and value < minimum:
            raise argparse.ArgumentTypeError(f"expected at least {minimum:g}, got {text!r}")
        return value

    def several(text: str) -> Any:
        values = tuple(dict.fromkeys(single(word.strip()) for word in text.split(",") if word.strip()))
        if not values:
            raise argparse.ArgumentTypeError("expected at least one value")
        return values

    return several if many else single


_NOUNS = {int: "a whole number", float: "a number", str: "text", Path: "a path"}


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(_shown(each) for each in value)  # pyright: ignore[reportUnknownVariableType]
    return f"{value:g}" if isinstance(value, float) else str(value)
