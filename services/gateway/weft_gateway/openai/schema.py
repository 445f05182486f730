"""The requests of clients. The parameters here are honoured; `tolerance` says which others are accepted without effect.

A `null` counts as absent. Types are strict, but that 5.0 is 5: no text for a number, no number for a flag.
"""

import contextlib
import re
import secrets
from collections.abc import Generator, Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    model_validator,
)
from pydantic.json_schema import SkipJsonSchema
from pydantic_core import ErrorDetails, PydanticCustomError

from weft.chat_template import REASONING
from weft.domain.request import (
    MAX_ALLOWED_TOKENS,
    MAX_ALTERNATIVES,
    MAX_BAD_WORDS,
    MAX_STOP_TOKENS,
    Sampling,
    SamplingDefaults,
)
from weft.domain.routes import PoolRoute
from weft.domain.strict_json import MAX_CONTAINERS, too_many_containers
from weft_gateway import exact_json
from weft_gateway.core.answer_text import MAX_STOPS
from weft_gateway.errors import BadRequest, ParameterError
from weft_gateway.hints import HintScope, take_hints
from weft_gateway.openai.fields import (
    MAX_BIAS,
    MAX_BIASES,
    MAX_FLOAT32,
    MAX_INT32,
    AllowedTokens,
    BadWords,
    Biases,
    Bounded,
    Prompts,
    Stops,
    StopTokens,
    ToolChoice,
    Tools,
    Whole,
    bounded,
    check_member_names,
)
from weft_gateway.shell.request_ids import MAX_N
from weft_gateway.shell.tokenizer import UNKNOWN_CONTEXT_TOKENS, ModelTokenizer
from weft_gateway.tolerance import advice, tolerated, unknown_of

ROLE = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
MAX_MESSAGES = 4096
MAX_CALLER_ID = 512
MAX_LOGPROBS = 1 << 19  # of one answer: some 60 MB while it is held
# Of the parts of content; those in the second line change no text (an answer that is sent back, Anthropic's caches).
_PART_FIELDS = frozenset(
    "type text refusal "
    "annotations logprobs citations cache_control prompt_cache_breakpoint id status signature thinking".split()
)
T = TypeVar("T", bound="Strict")


def _role(value: Any) -> Any:
    """Check a role: a name and no more, since the model's chat template decides which roles there are."""
    if not isinstance(value, str) or not ROLE.fullmatch(value):
        raise PydanticCustomError("role", "must be system, user, assistant, tool or another name of a role")
    return value


def _content(value: Any) -> str:
    """Read a text, or a line for each text part of a list, as vLLM joins them."""
    if value is None:
        return ""
    if isinstance(value, list):
        return "\n".join(map(_part, value))
    if not isinstance(value, str):
        raise PydanticCustomError("content", "must be a string or a list of text parts")
    return value


def _prediction(value: Any) -> str:
    match value:
        case {"type": "content", "content": str(text), **others} if not others:
            return text
        case {"type": "content", "content": list(parts), **others} if not others:
            return "".join(map(_part, parts))
        case _:
            text = 'must be {"type": "content", "content": "..."}, where content is a string or a list of text parts'
            raise PydanticCustomError("prediction", text)


def text_of(content: Any, param: str) -> str | None:
    """Read the content of a message as chats do; None stays None. Raises ParameterError that names `param`."""
    try:
        return None if content is None else _content(content)
    except PydanticCustomError as error:
        raise ParameterError(f"{param}: {error.message()}.", param=param) from error


def _part(part: Any) -> str:
    match part:
        case str(text):
            return text
        case (
            {"type": "text" | "input_text" | "output_text" | "thinking", "text": str(text)}
            | {"type": "refusal", "refusal": str(text)}
            | {"type": "thinking", "thinking": str(text)}
        ):
            check_member_names("of a part of content", part, _PART_FIELDS)
            return text
        case _:
            raise PydanticCustomError("content", 'takes text parts only: {"type": "text", "text": "..."}')


def _effort(value: Any) -> Any:
    if value not in EFFORTS:
        raise PydanticCustomError("effort", "must be one of {efforts}", {"efforts": ", ".join(EFFORTS)})
    return value


_NO_NAMES = frozenset[str]()


class Strict(BaseModel):
    """An object of known names, typed strictly."""

    model_config = ConfigDict(strict=True, extra="forbid")
    api: ClassVar[HintScope | None] = HintScope.ANY  # whose hints it may have; None: it has none
    asked_as: ClassVar[Mapping[str, str]] = MappingProxyType({})  # by name here: what clients of its API call it

    @property
    def ignored(self) -> frozenset[str]:
        """The hints of the request that were ignored, as `hints.HINTS` names them."""
        return vars(self).get("ignored_hints", _NO_NAMES)  # a private attribute of pydantic costs 20 us

    def note_ignored(self, names: frozenset[str]) -> None:
        """Add hints that were ignored."""
        if names:
            vars(self)["ignored_hints"] = self.ignored | names

    @model_validator(mode="before")
    @classmethod
    def _one_unknown(cls, value: Any) -> Any:
        """Refuse the first unknown name: an error for each of 100,000 would hold the loop for seconds."""
        if not isinstance(value, dict):
            return value
        fields = cls.model_fields
        if None in value.values() or not value.keys() <= fields.keys():
            value = tolerated(value, fields)
        unknown = next((name for name in value if name not in fields), None)
        members = {name: value[name] for name in fields if name in value}
        return members if unknown is None else members | {unknown: None}

    def check_together(self) -> None:
        """Check rules across parameters. Raises ParameterError."""


class StreamOptions(BaseModel):
    """Options of a stream in addition to its text."""

    model_config = ConfigDict(strict=True, extra="forbid")

    include_usage: bool = Field(False, description="a last chunk with the tokens used")
    continuous_usage_stats: bool = Field(False, description="every chunk has the tokens used so far")
    include_obfuscation: Literal[False] = Field(False, description="chunks are never padded")

    @model_validator(mode="before")
    @classmethod
    def _one_unknown(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        unknown = unknown_of(value, cls.model_fields)
        members = {name: value[name] for name in cls.model_fields if value.get(name) is not None}
        return members if unknown is None else members | {unknown: None}


class Common(Strict):
    """The common parameters of chats and completions. `prompt_name`: the name of the prompt's parameter."""

    prompt_name: ClassVar[str]
    unasked_tokens: ClassVar[int | None] = None  # of an answer without `limit`; None: what the context holds

    model: str = Field(
        min_length=1, max_length=512, description="an adapter or a base model, as GET /v1/models lists it"
    )
    stream: bool = Field(False, description="server-sent events, a chunk per step")
    stream_options: StreamOptions | None = None
    stop: Stops = Field((), description=f"up to {MAX_STOPS} texts that end the answer; they are not part of it")
    include_stop_str_in_output: bool = Field(False, description="they are part of it")
    stop_token_ids: StopTokens = Field((), description=f"tokens that end the answer; at most {MAX_STOP_TOKENS}")
    seed: Whole | None = Field(None, ge=-(2**63), le=2**63 - 1, description="the same seed gives the same answer")
    temperature: float = Field(1.0, ge=0, le=MAX_FLOAT32, description="0 is greedy")
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: Whole = Field(0, ge=-1, le=MAX_INT32, description="the likeliest tokens that are sampled from; 0, -1: all")
    min_p: float = Field(0.0, ge=0, le=1, description="of the likeliest token's probability, what a token needs")
    max_tokens: Whole | None = Field(
        None, ge=0, le=MAX_INT32, description="absent: 16 in completions, in chats what the context holds"
    )
    min_tokens: Whole = Field(0, ge=0, le=MAX_INT32, description="before them neither the end of sequence nor a stop")
    ignore_eos: bool = Field(False, description="go on after the model's end of sequence")
    n: Whole = Field(1, ge=1, le=MAX_N, description="answers to each prompt, each drawn by itself")
    frequency_penalty: float = Field(0.0, ge=-2, le=2, description="times how often a token stands in the answer")
    presence_penalty: float = Field(0.0, ge=-2, le=2, description="for each token that stands in the answer")
    repetition_penalty: float = Field(
        1.0, gt=0, le=100, description="divides a positive logit of a token of prompt or answer, multiplies a negative"
    )
    logit_bias: Biases = Field(
        (), description=f"token id -> what is added to its logit, -{MAX_BIAS} to {MAX_BIAS}; at most {MAX_BIASES}"
    )
    bad_words: BadWords = Field((), description=f"texts that the answer cannot hold; at most {MAX_BAD_WORDS}")
    allowed_token_ids: AllowedTokens = Field((), description=f"all that can be sampled; at most {MAX_ALLOWED_TOKENS}")
    response_format: Annotated[Any, Bounded] = Field(
        None, description='{"type": "text"}, {"type": "json_object"}, {"type": "json_schema", "json_schema": {...}}'
    )
    structured_outputs: Annotated[Any, Bounded] = Field(
        None, description="one of json, regex, choice, grammar and json_object, as vLLM has them"
    )
    prompt_logprobs: Whole | None = Field(
        None, ge=0, le=MAX_ALTERNATIVES, description="log probabilities of the prompt; likeliest tokens beside each"
    )
    truncate_prompt_tokens: Whole | None = Field(
        None, ge=-1, le=MAX_INT32, description="the prompt's tokens that are kept; -1: as many as fit"
    )
    truncation_side: Literal["left", "right"] = Field("left", description="where a prompt is cut; left: its last stay")
    thinking_token_budget: Whole = Field(-1, ge=-1, le=MAX_INT32, description="of models that do not reason; -1: none")
    skip_special_tokens: bool = Field(
        True, description="false: special tokens are part of the text, as they are spelled"
    )
    return_token_ids: bool = Field(False, description="prompt_token_ids and token_ids beside the text")
    return_weight_versions: bool = Field(False, description="weight_versions in each choice: which weights sampled it")
    return_tokens_as_token_ids: bool = Field(False, description="log probabilities name a token `token_id:N`")
    priority: Whole = Field(0, ge=0, le=MAX_INT32, description="above 0: may wait for interactive requests, as batches")
    cache_salt: str | None = Field(
        None, min_length=1, max_length=256, description="prompts are reused inside one salt (and namespace) only"
    )
    user: str = Field("", max_length=MAX_CALLER_ID, description="whom the caller asks for; logged hashed")
    safety_identifier: str = Field("", max_length=MAX_CALLER_ID, description="the newer name of user")

    @property
    def limit(self) -> int | None:
        """The answer's longest length, as the client asked."""
        return self.max_tokens

    @property
    def limit_name(self) -> str:
        """The name of the parameter that set `limit`."""
        return "max_tokens"

    def prompt_at(self, index: int) -> str:
        """The place of one prompt."""
        return f"{self.prompt_name}[{index}]" if self.prompts > 1 else self.prompt_name

    def of_several(self, param: str) -> str:
        """Name the prompt in question, of several prompts."""
        return f" ({param})" if self.prompts > 1 else ""

    @property
    def alternatives(self) -> int | None:
        """Return the number of tokens reported with each sampled token; None without log probabilities."""
        raise NotImplementedError

    @property
    def prompt_alternatives(self) -> int | None:
        """How many tokens are reported beside each of the prompt; None: no log probabilities of the prompt."""
        return self.prompt_logprobs

    @property
    def passes_eos(self) -> bool:
        """The end of sequence is a token of the answer like any other."""
        return self.ignore_eos

    @property
    def pools(self) -> bool:
        """The prompt's hidden state is asked for, and no answer."""
        return False

    @property
    def expected(self) -> str | None:
        """What the client expects of the answer, to be guessed by; None: nothing."""
        return None

    @property
    def prompts(self) -> int:
        """How many are answered."""
        return 1

    @property
    def drawn(self) -> int:
        """Answers that are generated to a prompt; the best `n` are returned."""
        return self.n

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def usage_in_chunks(self) -> bool:
        return self.include_usage and self.stream_options is not None and self.stream_options.continuous_usage_stats

    def check_together(self) -> None:
        if self.stream_options and not self.stream:
            raise ParameterError("stream_options is only taken with stream: true.", param="stream_options")
        if self.limit is not None and self.min_tokens > self.limit:
            text = f"min_tokens {self.min_tokens} is more than the {self.limit} tokens of {self.limit_name}."
            raise ParameterError(text, param="min_tokens")
        if self.stream and self.prompt_logprobs is not None:
            raise ParameterError("prompt_logprobs is only taken without stream.", param="prompt_logprobs")
        if self.limit == 0 and self.prompt_alternatives is None:
            text = (
                f"{self.limit_name} 0 is only taken where something of the prompt is asked for, as by prompt_logprobs."
            )
            raise ParameterError(text, param=self.limit_name)

    def check_answers(self, limit: int, *, is_line: bool) -> None:
        """Refuse more answers than a gateway takes at once, a stream to a line of a batch. Raises ParameterError."""
        if self.prompts * self.drawn > limit:
            name = self.prompt_name if self.prompts > 1 else "n"
            text = f"{name}: this gateway takes {limit} requests at once, and each choice of each prompt is one."
            raise ParameterError(text, param=name)
        if self.stream and is_line:
            text = "stream: the answer to a line of a batch is written whole; leave it out."
            raise ParameterError(text, param="stream")

    def with_defaults(self, defaults: SamplingDefaults) -> Self:
        """Set unset parameters by the base's defaults, except `max_tokens`, which depends on the prompt."""
        supplied = {
            field.name: getattr(defaults, field.name) for field in fields(defaults) if field.name != "max_tokens"
        }
        of_base = {name: v for name, v in supplied.items() if v is not None and name not in self.model_fields_set}
        return self.model_copy(update=of_base) if of_base else self

    def truncated(self, tokens: list[int], context_tokens: int) -> list[int]:
        """Keep the last tokens of a prompt, or its first; -1: as many as leave room. Raises ParameterError."""
        keep = self.truncate_prompt_tokens
        if keep == 0:
            text = "truncate_prompt_tokens 0 leaves nothing of the prompt; -1 keeps as much as fits."
            raise ParameterError(text, param="truncate_prompt_tokens")
        if keep is not None and 0 < context_tokens < keep:
            text = f"truncate_prompt_tokens {keep} is more than this model's context of {context_tokens} tokens."
            raise ParameterError(f"{text} Please request a smaller truncation size.", param="truncate_prompt_tokens")
        if keep == -1:
            answer_tokens = (self.unasked_tokens or 1) if self.limit is None else self.limit
            keep = max(1, context_tokens - answer_tokens) if context_tokens else None
        if keep is None or keep >= len(tokens):
            return tokens
        return tokens[:keep] if self.truncation_side == "right" else tokens[-keep:]

    def bound(self, index: int, prompt_tokens: int, pool: PoolRoute) -> int:
        """Return the most tokens of an answer to a prompt.

        A context of 0 is not known yet: no runner has reported it, and the scheduler decides. Raises ParameterError.
        """
        limit, context_tokens, max_tokens = self.limit, pool.max_context_tokens, pool.max_output_tokens
        if limit is not None and 0 < max_tokens < limit:
            text = (
                f"{self.limit_name}: {limit} is more than the {max_tokens} tokens of the longest answer of this model."
            )
            raise ParameterError(text, param=self.limit_name)
        left = (context_tokens or max(UNKNOWN_CONTEXT_TOKENS, prompt_tokens + (limit or 0))) - prompt_tokens
        usual = max(pool.sampling_defaults.max_tokens or left, self.min_tokens)
        bound = min(left, max_tokens or left, usual, self._unasked()) if limit is None else limit
        if bound > left or (bound < 1 and limit is None):
            param = self.prompt_at(index)
            completion_tokens = (not self.pools) if limit is None else max(0, limit)
            requested = f"you requested {prompt_tokens + completion_tokens} tokens ({prompt_tokens} in the prompt"
            requested += self.of_several(param)
            requested += f", {completion_tokens:d} in the completion)" if completion_tokens else ")"
            raise ParameterError(
                f"This model's maximum context length is {context_tokens} tokens. However, {requested}. "
                f"Please reduce the length of the {'input prompt' if self.pools else 'prompt or the completion'}.",
                param=self.limit_name if limit and left > 0 else param,
                code="context_length_exceeded",
            )
        return bound

    def _unasked(self) -> int:
        """Return the bound of an answer without a requested length, so that all its log probabilities can be sent."""
        reported, alternatives = MAX_INT32, self.alternatives
        if alternatives is not None:
            reported = MAX_LOGPROBS // 2 // (self.prompts * self.drawn * (1 + alternatives))
        return min(reported, MAX_INT32 if self.unasked_tokens is None else max(self.unasked_tokens, self.min_tokens))

    def sampling(self, tokenizer: ModelTokenizer, eos_token_ids: tuple[int, ...]) -> Sampling:
        """Return how the answers are sampled.

        Raises ParameterError for a token that the model does not have, and for what its runners cannot do.
        """
        named = {
            "logit_bias": [token for token, _ in self.logit_bias],
            "allowed_token_ids": self.allowed_token_ids,
            "stop_token_ids": self.stop_token_ids,
        }
        for name, tokens in named.items():
            if (unknown_token := next((token for token in tokens if token >= tokenizer.vocab_size), None)) is not None:
                text = f"{name}: token {unknown_token} is outside the model's vocabulary of {tokenizer.vocab_size}."
                raise ParameterError(text, param=name)
        if self.thinking_token_budget >= 0 and tokenizer.forms.reasoning:
            text = "thinking_token_budget: max_tokens bounds reasoning and answer of this model together."
            raise ParameterError(text, param="thinking_token_budget", code="unsupported_value")
        alternatives, selects = self.alternatives, self.drawn > self.n
        members: dict[str, Any] = {
            "seed": secrets.randbits(64) if self.seed is None else self.seed % 2**64,
            "top_k": max(0, self.top_k),
            "ignore_eos": self.passes_eos,
            "bad_words": tokenizer.sequences_of(self.bad_words) if self.bad_words else (),
            "top_logprobs": 0 if alternatives is None and selects else alternatives,
            "prompt_logprobs": self.prompt_alternatives,
            "pooling": self.pools,
            "eos_token_ids": eos_token_ids,
        }
        return Sampling(**{name: getattr(self, name) for name in SAME_NAMED} | members)


SAME_NAMED = tuple([field.name for field in fields(Sampling) if field.name in Common.model_fields])


def _call(call: dict[str, Any]) -> dict[str, Any]:
    match call:
        case {"function": {"name": str(name)}} if name:
            return call
        case _:
            raise PydanticCustomError("call", "function must be an object with a name and arguments")


_CONTINUES = "continue_final_message goes on with the last message"
_ASKING = {
    "prefix": _CONTINUES,
    "partial": _CONTINUES,
    "function_call": "it is the older form of tool_calls",
    "tools": "they stand beside the messages",
    "images": "prompts are texts",
    "audio": "prompts are texts",
}


class ChatMessage(BaseModel):
    """One message of a chat. Unknown fields have no effect, and fields in `_ASKING` are refused."""

    model_config = ConfigDict(strict=True, extra="ignore")
    ALL: ClassVar = ("name", "tool_call_id", "tool_calls")

    role: Annotated[str, BeforeValidator(_role)]
    content: Annotated[str, BeforeValidator(_content)]
    has_content: SkipJsonSchema[bool] = True  # its own, whatever a client says: it is not null
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: Annotated[list[Annotated[dict[str, Any], AfterValidator(_call)]] | None, Bounded] = None
    reasoning: str | None = None
    thinking: str | None = None
    reasoning_content: str | None = None  # last, so that an error names the field that was sent

    @model_validator(mode="before")
    @classmethod
    def _members(cls, value: Any) -> Any:
        """Leave out names beyond the known ones before they cost anything; reasoning has several names."""
        if not isinstance(value, dict):
            return value
        if request_name := next((name for name in _ASKING if value.get(name)), None):
            raise PydanticCustomError(
                "asks", "has {name}: {advice}", {"name": request_name, "advice": _ASKING[request_name]}
            )
        members = {name: value[name] for name in cls.model_fields if name in value}
        reasoning = (text for name in REASONING if (text := value.get(name)))
        members["reasoning_content"] = next(reasoning, members.get("reasoning_content"))
        if value.get("role") == "assistant":
            members["content"] = value.get("refusal") if members.get("content") is None else members["content"]
        return {**members, "has_content": members.get("content") is not None}

    def of_template(self) -> dict[str, Any]:
        """Write the message as transformers gives it to chat templates: arguments are objects, and nothing is null."""
        message: dict[str, Any] = {"role": self.role}
        if self.has_content:
            message["content"] = self.content
        if self.reasoning_content is not None:
            message["reasoning_content"] = self.reasoning_content
        message |= {name: member for name in self.ALL if (member := getattr(self, name))}
        if self.tool_calls:
            message["tool_calls"] = [_with_arguments(call) for call in self.tool_calls]
        return message


def _with_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """Read the arguments of a call. What is no JSON object within the bounds of values is a text."""
    function = call["function"]
    return {**call, "function": {**function, "arguments": _arguments(function.get("arguments"))}}


def _arguments(value: Any) -> dict[str, Any] | str:
    if isinstance(value, dict):
        return value
    text = value if isinstance(value, str) else exact_json.dumps(value).decode()
    if text.strip() in ("", "null"):
        return {}
    try:
        read = bounded(exact_json.loads(text))
    except ValueError:  # also what `bounded` raises
        return text
    return read if isinstance(read, dict) else text


class ChatPrompt(Strict):
    """What a chat template gets."""

    api: ClassVar[HintScope | None] = HintScope.CHATS

    messages: list[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    add_generation_prompt: bool = Field(True, description="the prompt ends where an answer of the assistant begins")
    continue_final_message: bool = Field(False, description="the answer goes on with the last message")
    add_special_tokens: bool = Field(False, description="what the tokenizer puts around a text, around the prompt too")
    chat_template_kwargs: Annotated[dict[str, Any], Bounded] = Field(
        default_factory=dict[str, Any], description="variables of the model's chat template"
    )
    reasoning_effort: Annotated[str | None, BeforeValidator(_effort)] = Field(
        None, description="a variable of the model's chat template"
    )
    enable_thinking: bool | None = Field(None, description="a variable of the model's chat template")
    documents: Annotated[list[dict[str, Any]], Bounded] = Field(
        default_factory=list[dict[str, Any]], description="for chat templates that place them"
    )
    tools: Tools = Field(default_factory=list[dict[str, Any]], description="functions that the model may call")
    tool_choice: ToolChoice = Field("auto", description="none, auto, required, or the function that is called")

    @property
    def callable_tools(self) -> list[dict[str, Any]]:
        """Return the tools callable by the answer."""
        return [] if self.tool_choice == "none" else self.tools

    @property
    def required_tools(self) -> list[dict[str, Any]]:
        """Return the tools of a required call; empty if no call is required."""
        if isinstance(self.tool_choice, dict):
            return [tool for tool in self.tools if tool["function"]["name"] == self.tool_choice["name"]]
        return self.tools if self.tool_choice == "required" else []

    def check_together(self) -> None:
        super().check_together()
        if self.tool_choice not in ("none", "auto") and not self.required_tools:
            name = self.tool_choice["name"][:64] if isinstance(self.tool_choice, dict) else ""
            lacking = f"no function {name!r}" if self.tools else "none"
            text = f"tool_choice asks for a call, and tools has {lacking}."
            raise ParameterError(text, param="tool_choice")
        prompts = self.add_generation_prompt and "add_generation_prompt" in self.model_fields_set
        if self.continue_final_message and prompts:
            text = "Where continue_final_message is true, add_generation_prompt is not: the prompt ends in one way."
            raise ParameterError(text, param="continue_final_message")


class ChatRequest(ChatPrompt, Common):
    """`POST /v1/chat/completions`."""

    prompt_name: ClassVar[str] = "messages"

    echo: bool = Field(False, description="a last message that the answer goes on with stands before it")
    max_completion_tokens: Whole | None = Field(
        None,
        ge=0,
        le=MAX_INT32,
        description="tokens of an answer at most, reasoning included; max_tokens is its older name",
    )
    logprobs: bool = Field(False, description="report the log probability of each token")
    top_logprobs: Whole = Field(0, ge=0, le=MAX_ALTERNATIVES, description="likeliest tokens reported beside each")
    parallel_tool_calls: bool = Field(True, description="an answer may have several calls")
    include_reasoning: bool = Field(True, description="false: reasoning is counted, and no part of the answer")
    prediction: Annotated[str | None, PlainValidator(_prediction, json_schema_input_type=dict[str, Any] | None)] = (
        Field(
            None, description='what the answer is expected to be: {"type": "content", "content": "text, or text parts"}'
        )
    )

    @property
    def expected(self) -> str | None:
        return self.prediction

    @property
    def limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def limit_name(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def alternatives(self) -> int | None:
        return self.top_logprobs if self.logprobs else None

    def check_together(self) -> None:
        super().check_together()
        if self.top_logprobs and not self.logprobs:
            raise ParameterError("top_logprobs is only taken with logprobs: true.", param="top_logprobs")
        if self.max_completion_tokens is not None and self.max_tokens not in (None, self.max_completion_tokens):
            text = f"expected max_tokens to equal max_completion_tokens or be absent, got {self.max_tokens}."
            raise ParameterError(text, param="max_tokens")


class CompletionRequest(Common):
    """`POST /v1/completions`."""

    prompt_name: ClassVar[str] = "prompt"
    unasked_tokens: ClassVar[int | None] = 16  # OpenAI's

    prompt: Prompts = Field(description="a text, token ids, or a list of either: each is answered by itself")
    echo: bool = Field(False, description="the prompt stands before the answer, with log probabilities if asked for")
    logprobs: Whole | None = Field(
        None, ge=0, le=MAX_ALTERNATIVES, description="report log probabilities; likeliest tokens beside each"
    )
    best_of: Whole | None = Field(
        None, ge=1, le=MAX_N, description="answers that are generated; the likeliest n a token are returned"
    )
    add_special_tokens: bool = Field(True, description="what the tokenizer puts around a text, as its first token")

    @property
    def alternatives(self) -> int | None:
        return self.logprobs

    @property
    def prompt_alternatives(self) -> int | None:
        return self.logprobs if self.echo and self.prompt_logprobs is None else self.prompt_logprobs

    @property
    def passes_eos(self) -> bool:
        """Evaluations score a text by `echo` and one token more, which they cut off: it comes even if it is the end."""
        return self.ignore_eos or (self.echo and self.logprobs is not None and self.max_tokens == 1)

    @property
    def prompts(self) -> int:
        return len(self.prompt)

    @property
    def drawn(self) -> int:
        return self.best_of or self.n

    def check_together(self) -> None:
        super().check_together()
        if self.drawn < self.n:
            text = f"best_of {self.best_of} is less than n, {self.n}: the best n of best_of answers are returned."
            raise ParameterError(text, param="best_of")
        if self.stream and self.drawn > self.n:
            raise ParameterError("best_of above n is only taken without stream.", param="best_of")
        if self.stream and self.echo and self.logprobs is not None:
            raise ParameterError("echo with logprobs is only taken without stream.", param="echo")


@contextlib.contextmanager
def naming(names: Mapping[str, str]) -> Generator[None]:
    """Give a ParameterError of the block the parameter's name in the API that was called (`Strict.asked_as`)."""
    try:
        yield
    except ParameterError as error:
        param, message = error.param or "", error.message
        for name, asked_as in names.items():
            place = rf"^(tools\[\d+\] \([^)]*\): )?{re.escape(name)}\b"
            param, message = (re.sub(place, rf"\g<1>{asked_as}", text) for text in (param, message))
        raise ParameterError(message, param=param or None, code=error.code) from error


def parse(kind: type[T], body: bytes) -> T:
    """Read a body as a typed request. Raises BadRequest or ParameterError with the fault and the valid form."""
    return checked(kind, object_of(body))


def object_of(body: bytes) -> dict[str, Any]:
    """Read a JSON object. Raises ParameterError, BadRequest; before it is parsed where it may hold too many values."""
    if too_many_containers(body):
        text = (
            f"The body has more than {MAX_CONTAINERS} arrays and objects; each [ and {{ counts, also inside of texts."
        )
        raise BadRequest(text, code="too_many_values")
    try:
        value: Any = exact_json.loads(body)
    except ValueError as error:
        if place := exact_json.place_beyond_floats(body):
            text = f"{_path(place)}: must be less than 2^1024, the bound of 64-bit floats."
            raise ParameterError(text, param=_path(place)) from error
        raise BadRequest(f"The body is not valid JSON: {error}.", code="invalid_json") from error
    if not isinstance(value, dict):
        raise BadRequest("The body must be a JSON object.", code="invalid_json")
    return value


def checked(kind: type[T], value: dict[str, Any]) -> T:
    """Take the hints that are ignored out of an object, and check it as a typed request. Raises ParameterError."""
    ignored = take_hints(kind.api, value, kind.model_fields) if kind.api else frozenset[str]()
    try:
        request = kind.model_validate(value)
    except ValidationError as error:
        raise _explained(kind, error.errors(include_url=False, include_context=False)[0]) from error
    request.check_together()
    request.note_ignored(ignored)
    return request


def _explained(kind: type[Strict], error: ErrorDetails) -> ParameterError:
    path = _path(error["loc"])
    match error["type"]:
        case "extra_forbidden" if len(error["loc"]) == 1:
            names = ", ".join(sorted(kind.model_fields))
            help_ = f": {found}" if (found := advice(path)) else ""
            text = f"The parameter {path} is not supported{help_}. Supported: {names}."
            return ParameterError(text, param=path, code="unsupported_parameter")
        case "extra_forbidden":
            return ParameterError(f"{path} is not supported.", param=path, code="unsupported_parameter")
        case "missing":
            return ParameterError(f"{path} is required.", param=path, code="missing_parameter")
        case _:
            text = error["msg"][:1].lower() + error["msg"][1:]
            return ParameterError(f"{path}: {text}.", param=path)


def _path(loc: tuple[int | str, ...]) -> str:
    """Write a place as `messages[1].content`; a client's own key is cut."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part[:64]}" for part in loc)
    return text.removeprefix(".")
