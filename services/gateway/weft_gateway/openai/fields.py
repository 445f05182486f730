"""The values of parameters: what a client's JSON may hold, as typed values.

Each raises PydanticCustomError, or ParameterError where it names a part of the parameter.
"""

import re
from collections.abc import Collection, Sequence
from typing import Annotated, Any, LiteralString

from pydantic import BeforeValidator, PlainValidator
from pydantic_core import PydanticCustomError

from weft.domain.batch import METADATA_KEY, METADATA_PAIRS, METADATA_VALUE
from weft.domain.request import MAX_ALLOWED_TOKENS, MAX_BAD_WORDS, MAX_STOP_TOKENS
from weft_gateway.core.answer_text import MAX_STOP_CHARS, MAX_STOPS
from weft_gateway.errors import ParameterError
from weft_gateway.shell.request_ids import MAX_PROMPTS
from weft_gateway.tolerance import unknown_of

MAX_INT32 = 2**31 - 1
MAX_FLOAT32 = (2 - 2**-23) * 2.0**127
MAX_EXACT = 2**53  # of a float: every whole number up to it is one
MAX_BIASES, MAX_BIAS = 300, 100
NAMED, NAMED_CHARS = 8, 32  # of what is wrong in a map
MAX_TOKENS = 1 << 20  # of a text
MAX_BAD_TEXT_CHARS = 256
MAX_TOOLS = 128
MAX_DEPTH = 32  # of values inside values that a chat template gets, or that an answer repeats
MAX_VALUES = 1 << 19  # of such a value
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,8}", re.ASCII)
_FUNCTION_FIELDS = frozenset("name description parameters strict return".split())  # return: Hugging Face's
_TOOL_FIELDS = frozenset(("type", "function"))
_KINDS = (("parameters", dict, "an object"), ("description", str, "a string"), ("strict", bool, "true or false"))
_TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}", re.ASCII)


def _stops(value: Any) -> tuple[str, ...]:
    rule = "must be a string or a list of at most {count} strings of 1 to {chars} characters"
    return _texts([value] if isinstance(value, str) else value, MAX_STOPS, MAX_STOP_CHARS, rule)


def _bad_words(value: Any) -> tuple[str, ...]:
    rule = "must be a list of at most {count} strings of 1 to {chars} characters"
    return _texts(value, MAX_BAD_WORDS, MAX_BAD_TEXT_CHARS, rule)


def _texts(value: Any, count: int, chars: int, rule: LiteralString) -> tuple[str, ...]:
    fits = isinstance(value, list) and len(value) <= count
    if not fits or not all(isinstance(text, str) and 0 < len(text) <= chars for text in value):
        raise PydanticCustomError("texts", rule, {"count": count, "chars": chars})
    return tuple(value)


def _token_ids(max_ids: int) -> BeforeValidator:
    def check(value: Any) -> tuple[int, ...]:
        if not isinstance(value, list) or len(value) > max_ids or not _are_tokens(value):
            raise PydanticCustomError("token_ids", "must be a list of at most {count} token ids", {"count": max_ids})
        return tuple(value)

    return BeforeValidator(check)


def _are_tokens(values: Sequence[Any]) -> bool:
    return all(type(token) is int and 0 <= token <= MAX_INT32 for token in values)


def _biases(value: Any) -> tuple[tuple[int, float], ...]:
    """Read a map from token ids, which are texts as JSON's keys, to biases."""
    wrong = [name for name, bias in value.items() if not _is_bias((name, bias))] if isinstance(value, dict) else []
    if not isinstance(value, dict) or len(value) > MAX_BIASES or wrong:
        named = ", ".join(repr(name[:NAMED_CHARS]) for name in wrong[:NAMED])
        raise PydanticCustomError(
            "logit_bias",
            "must be a map of at most {count} token ids, as texts, to numbers from -{bound} to {bound}{but}",
            {"count": MAX_BIASES, "bound": MAX_BIAS, "but": f": see {named}" if named else ""},
        )
    return tuple((int(token), float(bias)) for token, bias in value.items())


def _is_bias(item: tuple[Any, Any]) -> bool:
    token, bias = item
    return _TOKEN_ID.fullmatch(token) is not None and type(bias) in (int, float) and -MAX_BIAS <= bias <= MAX_BIAS


def _prompts(value: Any) -> tuple[str | list[int], ...]:
    """Read a text or a list of token ids, or a list of either."""
    several = value if isinstance(value, list) and value and isinstance(value[0], str | list) else [value]
    if len(several) > MAX_PROMPTS or not all(map(_is_prompt, several)):
        raise PydanticCustomError(
            "prompt",
            "must be a string or a list of token ids, or a list of at most {count} of either",
            {"count": MAX_PROMPTS},
        )
    return tuple(several)


def _is_prompt(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and bool(value) and _are_tokens(value))


def check_member_names(subject: str, value: dict[str, Any], names: frozenset[str]) -> None:
    """Refuse unknown names: an object inside a request is as strict as the request."""
    if unknown := unknown_of(value, names):
        text = "{unknown} {what} is not supported; {known} are"
        about = {"unknown": repr(unknown), "what": subject, "known": ", ".join(sorted(names))}
        raise PydanticCustomError("unknown", text, about)


def _tools(value: Any) -> list[dict[str, Any]]:
    """Check OpenAI's functions, no two of one name; they stay as they are: a chat template gets them.

    Raises ParameterError, which names the tool.
    """
    if not isinstance(value, list) or len(value) > MAX_TOOLS:
        raise PydanticCustomError("tools", "must be a list of at most {count} functions", {"count": MAX_TOOLS})
    indices: dict[str, int] = {}
    return bounded([_tool(tool, index, indices) for index, tool in enumerate(value)])


def _tool(tool: Any, index: int, indices: dict[str, int]) -> dict[str, Any]:
    """Check a function. `indices`: those of the functions before it, by name. Raises ParameterError."""
    path = f"tools[{index}]"
    match tool:
        case {"function": {"name": str(name)} as function, **more} if more.get("type") in (None, "function"):
            pass
        case _:
            form = '{"type": "function", "function": {"name": "...", "description": "...", "parameters": {...}}}'
            raise ParameterError(f"{path}: must be {form}.", param=path)
    fault = next(
        (f"{key}: must be {rule}" for key, kind, rule in _KINDS if not isinstance(function.get(key), kind | None)), ""
    )
    kind = "object" if fault else (function.get("parameters") or {}).get("type") or "object"
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        fault = f"parameters.type: expected 'object', got {str(kind)[:64]!r}"
    if not _TOOL_NAME.fullmatch(name):
        fault = "name: must be 1 to 64 letters, digits, _ . and -"
    elif (earlier := indices.setdefault(name, index)) != index:
        fault = f"name: must be another one than that of tools[{earlier}]"
    elif unknown := unknown_of(tool, _TOOL_FIELDS) or unknown_of(function, _FUNCTION_FIELDS):
        fault = f"{unknown}: is not supported; {', '.join(sorted(_FUNCTION_FIELDS))} are"
    if fault:
        raise ParameterError(f"{path} ({name[:64]}): {fault}.", param=path)
    return {"type": "function", "function": function}


def _tool_choice(value: Any) -> str | dict[str, str]:
    """Read a word, or the name of a function."""
    match value:
        case "none" | "auto" | "required":
            return value
        case {"type": "function", "function": {"name": str(name), **others}, **more} if not others and not more:
            return {"name": name}
        case _:
            raise PydanticCustomError(
                "tool_choice",
                'must be "none", "auto", "required", or {"type": "function", "function": {"name": "..."}}',
            )


def _whole_number(value: Any) -> Any:
    """Take 5.0 for 5, as JSON has one kind of number; beyond 2^53 a float may stand for another whole number."""
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) <= MAX_EXACT else value


def bounded(value: Any) -> Any:
    """Refuse JSON that is deeper, or has more values, than a template, a schema or an answer may hold."""
    level, count = [value], 0
    for _ in range(MAX_DEPTH):
        level = [item for outer in level if isinstance(outer, dict | list) for item in _items(outer)]
        count += len(level)
        if count > MAX_VALUES:
            raise PydanticCustomError("values", "holds more than {count} values", {"count": MAX_VALUES})
        if not level:
            return value
    raise PydanticCustomError("depth", "holds values more than {depth} deep", {"depth": MAX_DEPTH})


def _items(value: dict[str, Any] | list[Any]) -> Collection[Any]:
    return value.values() if isinstance(value, dict) else value


def _metadata(value: Any) -> Any:
    if not isinstance(value, dict) or len(value) > METADATA_PAIRS or not all(map(_is_metadata, value.items())):
        text = "must be a map of at most {pairs} texts of up to {value} characters, by names of up to {key}"
        bounds = {"pairs": METADATA_PAIRS, "key": METADATA_KEY, "value": METADATA_VALUE}
        raise PydanticCustomError("metadata", text, bounds)
    return value


def _is_metadata(item: tuple[Any, Any]) -> bool:
    key, value = item
    return len(key) <= METADATA_KEY and isinstance(value, str) and len(value) <= METADATA_VALUE


Whole = Annotated[int, BeforeValidator(_whole_number)]
Stops = Annotated[tuple[str, ...], BeforeValidator(_stops)]
BadWords = Annotated[tuple[str, ...], BeforeValidator(_bad_words)]
StopTokens = Annotated[tuple[int, ...], _token_ids(MAX_STOP_TOKENS)]
TokenIds = Annotated[tuple[int, ...], _token_ids(MAX_TOKENS)]
AllowedTokens = Annotated[tuple[int, ...], _token_ids(MAX_ALLOWED_TOKENS)]
Biases = Annotated[tuple[tuple[int, float], ...], PlainValidator(_biases, json_schema_input_type=dict[str, float])]
Prompts = Annotated[
    tuple[str | list[int], ...],
    PlainValidator(_prompts, json_schema_input_type=str | list[str] | list[int] | list[list[int]]),
]
Tools = Annotated[list[dict[str, Any]], BeforeValidator(_tools)]
ToolChoice = Annotated[str | dict[str, str], PlainValidator(_tool_choice, json_schema_input_type=str | dict[str, Any])]
Metadata = Annotated[dict[str, str], BeforeValidator(_metadata)]
Bounded = BeforeValidator(bounded)
