"""The requests of clients. The parameters here are honoured; every other one is refused by name, never ignored.

A `null` counts as absent. Types are strict: no text for a number, no number for a flag.
"""

import re
from typing import Annotated, Any, TypeVar

import orjson
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, ValidationError, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from weft.domain.batch import COMPLETION_WINDOW, ENDPOINTS
from weft.wire.codec.batch import METADATA_KEY, METADATA_PAIRS, METADATA_VALUE
from weft_gateway.core.stops import MAX_STOP_CHARS, MAX_STOPS
from weft_gateway.errors import BadRequest, ParameterError
from weft_gateway.openai.unsupported import advice
from weft_gateway.shell.request_ids import MAX_N

ROLES = ("system", "user", "assistant")
MAX_MESSAGES = 4096
MAX_INT32 = 2**31 - 1
MAX_ALTERNATIVES = 20  # reported beside each token
MAX_BIASES, MAX_BIAS = 300, 100
MAX_ID = 128
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,8}", re.ASCII)
T = TypeVar("T", bound="Strict")


def _stops(value: Any) -> Any:
    stops = [value] if isinstance(value, str) else value
    fits = isinstance(stops, list) and len(stops) <= MAX_STOPS and all(_is_stop(stop) for stop in stops)
    if not fits:
        raise PydanticCustomError(
            "stop",
            "must be a string or a list of at most {count} strings of 1 to {chars} characters",
            {"count": MAX_STOPS, "chars": MAX_STOP_CHARS},
        )
    return tuple(stops)


def _is_stop(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= MAX_STOP_CHARS


def _content(value: Any) -> Any:
    """A text, or a list of text parts, which are joined."""
    if isinstance(value, list):
        return "".join(_part(part) for part in value)
    if not isinstance(value, str):
        raise PydanticCustomError("content", "must be a string or a list of text parts")
    return value


def _part(part: Any) -> str:
    match part:
        case {"type": "text", "text": str(text)} if len(part) == 2:
            return text
        case _:
            raise PydanticCustomError("content", 'takes text parts only: {"type": "text", "text": "..."}')


def _role(value: Any) -> Any:
    if value not in ROLES:
        raise PydanticCustomError("role", "must be one of {roles}", {"roles": ", ".join(ROLES)})
    return value


def _biases(value: Any) -> Any:
    """A map from token ids, as JSON's keys are texts, to biases."""
    if not isinstance(value, dict) or len(value) > MAX_BIASES or not all(map(_is_bias, value.items())):
        raise PydanticCustomError(
            "logit_bias",
            "must be a map of at most {count} token ids, as texts, to numbers from -{bound} to {bound}",
            {"count": MAX_BIASES, "bound": MAX_BIAS},
        )
    return tuple((int(token), float(bias)) for token, bias in value.items())


def _is_bias(item: tuple[Any, Any]) -> bool:
    token, bias = item
    return _TOKEN_ID.fullmatch(token) is not None and type(bias) in (int, float) and -MAX_BIAS <= bias <= MAX_BIAS


def _prompt(value: Any) -> Any:
    """A text, a list of one text, or a list of token ids."""
    if isinstance(value, str):
        return value
    match value:
        case [str(text)]:
            return text
        case [int(), *_] if all(type(token) is int and 0 <= token <= MAX_INT32 for token in value):
            return value
        case _:
            raise PydanticCustomError("prompt", "must be a string, a list of one string, or a list of token ids")


def _endpoint(value: Any) -> Any:
    if value not in ENDPOINTS:
        raise PydanticCustomError("endpoint", "must be one of {endpoints}", {"endpoints": ", ".join(ENDPOINTS)})
    return value


def _window(value: Any) -> Any:
    if value != COMPLETION_WINDOW:
        raise PydanticCustomError("completion_window", 'must be "{window}"', {"window": COMPLETION_WINDOW})
    return value


def _metadata(value: Any) -> Any:
    bounds = {"pairs": METADATA_PAIRS, "key": METADATA_KEY, "value": METADATA_VALUE}
    fits = isinstance(value, dict) and len(value) <= METADATA_PAIRS and all(map(_is_metadata, value.items()))
    if not fits:
        text = "must be a map of at most {pairs} texts of up to {value} characters, by names of up to {key}"
        raise PydanticCustomError("metadata", text, bounds)
    return value


def _is_metadata(item: tuple[Any, Any]) -> bool:
    key, value = item
    return len(key) <= METADATA_KEY and isinstance(value, str) and len(value) <= METADATA_VALUE


class Strict(BaseModel):
    """An object of known names, typed strictly."""

    model_config = ConfigDict(strict=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _one_unknown(cls, value: Any) -> Any:
        """One unknown name is enough to refuse: an error for each of 100,000 would hold the loop for seconds."""
        if not isinstance(value, dict):
            return value
        unknown = next((name for name in value if name not in cls.model_fields), None)
        known = {name: value[name] for name in cls.model_fields if name in value}
        return known if unknown is None else known | {unknown: None}

    def check_together(self) -> None:
        """Rules across parameters. Raises ParameterError."""


class StreamOptions(Strict):
    """What a stream holds beside its text."""

    include_usage: bool = Field(False, description="a last chunk with the tokens used")


class Common(Strict):
    """What chats and completions share."""

    model: str = Field(
        min_length=1, max_length=512, description="an adapter or a base model, as GET /v1/models lists it"
    )
    stream: bool = Field(False, description="server-sent events, a chunk per step")
    stream_options: StreamOptions | None = None
    stop: Annotated[tuple[str, ...], BeforeValidator(_stops)] = Field(
        (), description="up to 4 texts that end the answer; they are not part of it"
    )
    seed: int | None = Field(None, ge=-(2**63), le=2**64 - 1, description="the same seed gives the same answer")
    temperature: float = Field(1.0, ge=0, le=2, description="0 is greedy")
    top_p: float = Field(1.0, gt=0, le=1)
    max_tokens: int | None = Field(None, ge=1, le=MAX_INT32)
    n: int = Field(1, ge=1, le=MAX_N, description="answers to this one prompt, each drawn by itself")
    frequency_penalty: float = Field(0.0, ge=-2, le=2, description="times how often a token stands in the answer")
    presence_penalty: float = Field(0.0, ge=-2, le=2, description="for each token that stands in the answer")
    logit_bias: Annotated[
        tuple[tuple[int, float], ...], PlainValidator(_biases, json_schema_input_type=dict[str, float])
    ] = Field((), description="token id -> what is added to its logit, -100 to 100; at most 300")

    @property
    def limit(self) -> int | None:
        """The answer's longest length, as the client asked."""
        return self.max_tokens

    @property
    def alternatives(self) -> int | None:
        """How many tokens are reported beside each sampled one; None: no log probabilities at all."""
        raise NotImplementedError

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def check_together(self) -> None:
        if self.stream_options and not self.stream:
            raise ParameterError("stream_options is only taken with stream: true.", param="stream_options")


class ChatMessage(Strict):
    """One message of a chat."""

    role: Annotated[str, BeforeValidator(_role)]
    content: Annotated[str, BeforeValidator(_content)]


class ChatRequest(Common):
    """`POST /v1/chat/completions`."""

    messages: list[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: int | None = Field(None, ge=1, le=MAX_INT32)
    logprobs: bool = Field(False, description="report the log probability of each token")
    top_logprobs: int | None = Field(
        None, ge=0, le=MAX_ALTERNATIVES, description="likeliest tokens reported beside each"
    )

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def alternatives(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def check_together(self) -> None:
        super().check_together()
        if self.top_logprobs is not None and not self.logprobs:
            raise ParameterError("top_logprobs is only taken with logprobs: true.", param="top_logprobs")
        if self.max_tokens and self.max_completion_tokens:
            raise ParameterError("Give max_tokens or max_completion_tokens, not both.", param="max_completion_tokens")


class CompletionRequest(Common):
    """`POST /v1/completions`."""

    prompt: Annotated[str | list[int], PlainValidator(_prompt, json_schema_input_type=str | list[int])]
    logprobs: int | None = Field(
        None,
        ge=0,
        le=MAX_ALTERNATIVES,
        description="report log probabilities, and so many likeliest tokens beside each",
    )
    best_of: int | None = Field(None, description="only when it equals n")

    @property
    def alternatives(self) -> int | None:
        return self.logprobs

    def check_together(self) -> None:
        super().check_together()
        if self.best_of not in (None, self.n):
            text = f"best_of is only taken when it equals n, here {self.n}: every answer is returned, none is selected."
            raise ParameterError(text, param="best_of", code="unsupported_value")


class BatchRequest(Strict):
    """`POST /v1/batches`."""

    input_file_id: str = Field(min_length=1, max_length=MAX_ID, description="a file of purpose `batch`: JSON lines")
    endpoint: Annotated[str, BeforeValidator(_endpoint)] = Field(description="of every line")
    completion_window: Annotated[str, BeforeValidator(_window)] = Field(description="after it what is left expires")
    metadata: Annotated[dict[str, str], BeforeValidator(_metadata)] = Field(
        default_factory=dict[str, str], description="up to 16 texts of up to 512 characters, by names of up to 64"
    )


def parse(kind: type[T], body: bytes) -> T:
    """A request body as a typed request. Raises BadRequest or ParameterError naming what is wrong and what is right."""
    try:
        value: Any = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"The body is not valid JSON: {error}.", code="invalid_json") from error
    if not isinstance(value, dict):
        raise BadRequest("The body must be a JSON object.", code="invalid_json")
    try:
        request = kind.model_validate(_without_nulls(value))
    except ValidationError as error:
        raise _explained(kind, error.errors(include_url=False, include_context=False)[0]) from error
    request.check_together()
    return request


def _without_nulls(value: dict[str, Any]) -> dict[str, Any]:
    present = {name: item for name, item in value.items() if item is not None}
    if isinstance(options := present.get("stream_options"), dict):
        present["stream_options"] = {name: item for name, item in options.items() if item is not None}
    return present


def _explained(kind: type[Strict], error: ErrorDetails) -> ParameterError:
    path = _path(error["loc"])
    match error["type"]:
        case "extra_forbidden" if len(error["loc"]) == 1:
            known = ", ".join(sorted(kind.model_fields))
            help_ = f": {found}" if (found := advice(path)) else ""
            text = f"The parameter {path} is not supported{help_}. Supported: {known}."
            return ParameterError(text, param=path, code="unsupported_parameter")
        case "extra_forbidden":
            return ParameterError(f"{path} is not supported.", param=path, code="unsupported_parameter")
        case "missing":
            return ParameterError(f"{path} is required.", param=path, code="missing_parameter")
        case _:
            text = error["msg"][:1].lower() + error["msg"][1:]
            return ParameterError(f"{path}: {text}.", param=path)


def _path(loc: tuple[int | str, ...]) -> str:
    """`messages[1].content`; a client's own key is cut."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part[:64]}" for part in loc)
    return text.removeprefix(".")
