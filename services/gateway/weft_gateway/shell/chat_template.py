"""Messages to a prompt, through the model's own chat template in a sandbox.

The template comes with the base model, so it is data: it runs in jinja2's immutable sandbox and sees what Hugging Face
templates expect (messages, add_generation_prompt, the special tokens, raise_exception, strftime_now, tojson). Its
loops, calls, products and output are bounded, so that a hostile one costs a second of one thread and not the process.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any, NoReturn

from jinja2 import TemplateSyntaxError, nodes, pass_context
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_STEPS = 500_000  # turns of loops and calls of one rendering: over 100 for each message of the longest chat
MAX_PRODUCT = 1 << 24  # of a multiplication: a value, or the length of a repeated text or list
_STEPS, _COUNTED = "weft steps", "weft counted"  # with a space: no template can spell them
Message = Mapping[str, Any]  # {"role": ..., "content": ..., "tool_calls": ...}


@dataclass(frozen=True, slots=True)
class Chat:
    """What a template renders; `variables`: the caller's own, beside them."""

    messages: Sequence[Message]
    add_generation_prompt: bool = True
    continue_final_message: bool = False  # the prompt ends with the last message's content
    tools: Sequence[Mapping[str, Any]] = ()
    documents: Sequence[Mapping[str, Any]] = ()
    variables: Mapping[str, Any] = field(default_factory=dict[str, Any])
    add_special_tokens: bool = False  # what the tokenizer puts around a text, around the rendered prompt


class TemplateRefused(ValueError):
    """The template refuses these messages, with a reason."""


class RenderedTooLong(TemplateRefused):
    """The prompt's text is longer than its bound."""


class _Steps:
    """What one rendering may still do."""

    def __init__(self) -> None:
        self._left = MAX_STEPS

    def spend(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise TemplateRefused(f"the model's chat template takes more than {MAX_STEPS} steps for these messages")


class _Sandbox(ImmutableSandboxedEnvironment):
    """jinja2's sandbox, which bounds what a template may reach, with a bound on what it may do."""

    intercepted_binops = frozenset({"*", "**"})

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Every loop runs over a counted iterable."""
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, _COUNTED, [], [], None, None, lineno=loop.lineno)
        return tree

    def call(self, context: Context, called: Any, /, *args: Any, **kwargs: Any) -> Any:
        context.parent[_STEPS].spend()
        return super().call(context, called, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" or _extent(left) * _extent(right) > MAX_PRODUCT:
            raise TemplateRefused(f"the model's chat template has a power, or a product beyond {MAX_PRODUCT}")
        return super().call_binop(context, operator, left, right)


class ChatTemplate:
    """A compiled chat template. Raises jinja2.TemplateSyntaxError when the source is no template."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], strftime: Callable[[str], str]) -> None:
        environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
        filters: dict[str, Any] = {"tojson": _tojson, _COUNTED: _counted}
        environment.filters.update(filters)
        known: dict[str, Any] = {"raise_exception": _refuse, "strftime_now": strftime}
        try:
            self._template = environment.from_string(source, globals=known)
        except TemplateSyntaxError:
            raise
        except Exception as error:  # what jinja2 takes and Python's compiler does not: a break outside of loops, depth
            raise TemplateSyntaxError(str(error) or type(error).__name__, 1) from error
        self.source, self._has_developer = source, "developer" in source
        self._special_tokens = dict(special_tokens)

    def render(self, chat: Chat, max_chars: int) -> str:
        """The prompt's text up to where the answer begins. Raises TemplateRefused, RenderedTooLong."""
        values = {
            **chat.variables,
            "messages": [self._known_role(message) for message in chat.messages],
            "tools": chat.tools or None,
            "documents": chat.documents or None,
            "add_generation_prompt": chat.add_generation_prompt,
            **self._special_tokens,
            _STEPS: _Steps(),
        }
        parts: list[str] = []
        try:
            for part in self._template.generate(values):
                parts.append(part)
                max_chars -= len(part)
                if max_chars < 0:
                    raise RenderedTooLong("the chat is too long as the model's template renders it")
            return "".join(parts)
        except TemplateRefused:
            raise
        except Exception as error:  # it is foreign code: it may raise anything
            raise TemplateRefused(f"the model's chat template failed: {error}") from error

    def _known_role(self, message: Message) -> Message:
        """OpenAI's newer name of a system message, for templates that do not have it."""
        return message if message["role"] != "developer" or self._has_developer else {**message, "role": "system"}


def template_source(template_file: str | None, config: Mapping[str, Any]) -> str | None:
    """`chat_template.jinja`, else `chat_template` of tokenizer_config.json: a text, or named ones ("default")."""
    match template_file, config.get("chat_template"):
        case (str(source), _) | (None, str(source)):
            return source
        case None, [*named]:
            return next((entry["template"] for entry in named if entry.get("name") == "default"), None)
        case _:
            return None


def special_tokens_of(*configs: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token`, `eos_token`, ... of tokenizer_config.json and special_tokens_map.json, as plain strings."""
    names = ("bos_token", "eos_token", "unk_token", "pad_token")
    found: dict[str, str] = {}
    for config in configs:
        for name in names:
            match config.get(name):
                case str(text) | {"content": str(text)}:
                    found.setdefault(name, text)
                case _:
                    pass
    return found


@pass_context
def _counted(context: Context, iterable: Iterable[Any]) -> Iterator[Any]:
    steps: _Steps = context.parent[_STEPS]
    for item in iterable:
        steps.spend()
        yield item


def _extent(value: object) -> float:
    if isinstance(value, Sized):
        return len(value)
    return abs(value) if isinstance(value, int | float) else 1


def _tojson(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> NoReturn:
    raise TemplateRefused(str(message))
