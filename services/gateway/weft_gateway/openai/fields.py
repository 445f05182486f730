"""The values of parameters: what a client's JSON may hold, as typed values. Each raises PydanticCustomError."""

import re
from collections.abc import Collection, Sequence
from typing import Annotated, Any, LiteralString

from pydantic import BeforeValidator, PlainValidator
from pydantic_core import PydanticCustomError

from weft.domain.batch import METADATA_KEY, METADATA_PAIRS, METADATA_VALUE
from weft.domain.request import MAX_ALLOWED_TOKENS, MAX_BAD_WORDS, MAX_STOP_TOKENS
from weft_gateway.core.answer_text import MAX_STOP_CHARS, MAX_STOPS
from weft_gateway.shell.request_ids import MAX_PROMPTS
from weft_gateway.tolerance import unknown_of

MAX_INT32 = 2**31 - 1
MAX_EXACT = 2**53  # of a float: every whole number up to it is one
MAX_BIASES, MAX_BIAS = 300, 100
NAMED, NAMED_CHARS = 8, 32  # of what is wrong in a map
MAX_TOKENS = 1 << 20  # of a text
MAX_BAD_TEXT_CHARS = 256
MAX_TOOLS = 128
MAX_DEPTH = 32  # of values inside values that a chat template gets, or that an answer repeats
MAX_VALUES = 1 << 19  # of such a value
MAX_CONTAINERS = 1 << 17  # arrays and objects of a body: they hold the interpreter for 30 ms while they are parsed
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,8}", re.ASCII)
_FUNCTION_FIELDS = frozenset("name description parameters strict return".split())  # return: Hugging Face's
_TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}", re.ASCII)


def _stops(value: Any) -> tuple[str, ...]:
    what = "must be a string or a list of at most {count} strings of 1 to {chars} characters"
    return _texts([value] if isinstance(value, str) else value, MAX_STOPS, MAX_STOP_CHARS, what)


def _bad_words(value: Any) -> tuple[str, ...]:
    what = "must be a list of at most {count} strings of 1 to {chars} characters"
    return _texts(value, MAX_BAD_WORDS, MAX_BAD_TEXT_CHARS, what)


def _texts(value: Any, count: int, chars: int, what: LiteralString) -> tuple[str, ...]:
    fits = isinstance(value, list) and len(value) <= count
    if not fits or not all(isinstance(text, str) and 0 < len(text) <= chars for text in value):
        raise PydanticCustomError("texts", what, {"count": count, "chars": chars})
    return tuple(value)


def _token_ids(most: int) -> BeforeValidator:
    def check(value: Any) -> tuple[int, ...]:
        if not isinstance(value, list) or len(value) > most or not _are_tokens(value):
            raise PydanticCustomError("token_ids", "must be a list of at most {count} token ids", {"count": most})
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


def check_member_names(what: str, value: dict[str, Any], known: frozenset[str]) -> None:
    """Refuse unknown names: an object inside a request is as strict as the request."""
    if unknown := unknown_of(value, known):
        text = "{unknown} {what} is not supported; {known} are"
        about = {"unknown": repr(unknown), "what": what, "known": ", ".join(sorted(known))}
        raise PydanticCustomError("unknown", text, about)


def _tools(value: Any) -> list[dict[str, Any]]:
    """Check OpenAI's functions, no two of one name; they stay as they are: a chat template gets them."""
    fits = isinstance(value, list) and len(value) <= MAX_TOOLS and all(map(_is_function, value))
    if not fits or len({tool["function"]["name"] for tool in value}) < len(value):
        raise PydanticCustomError(
            "tools",
            'must be a list of at most {count} functions of different names: {"type": "function", "function": '
            '{"name": "up to 64 letters, digits, _ . and -", "description": "...", "parameters": {...}}}',
            {"count": MAX_TOOLS},
        )
    functions = [_at_once(tool["function"]) for tool in value]
    for tool, function in zip(value, functions, strict=True):
        check_member_names("of a tool", _at_once(tool), frozenset(("type", "function", "cache_control")))
        check_member_names("of a tool's function", function, _FUNCTION_FIELDS)
    return bounded([{"type": "function", "function": function} for function in functions])


def _at_once(value: dict[str, Any]) -> dict[str, Any]:
    """Leave out vLLM's and SGLang's wish not to be loaded later, which is what happens."""
    return {name: item for name, item in value.items() if name != "defer_loading" or item is not False}


def _is_function(tool: Any) -> bool:
    match tool:
        case {"function": {"name": str(name), **others}, **more} if more.get("type") in (None, "function"):
            kinds = {"parameters": dict, "description": str, "strict": bool}
            typed = all(isinstance(others[key], kinds[key]) for key in kinds if others.get(key) is not None)
            return bool(_TOOL_NAME.fullmatch(name)) and typed
        case _:
            return False


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


def _whole(value: Any) -> Any:
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


Whole = Annotated[int, BeforeValidator(_whole)]
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
