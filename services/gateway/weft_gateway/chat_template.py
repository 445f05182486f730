"""Messages to a prompt, through the model's own chat template in a sandbox.

The template comes with the base model, so it is data: it runs in jinja2's immutable sandbox and sees what Hugging Face
templates expect (messages, add_generation_prompt, the special tokens, raise_exception, strftime_now, tojson).
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from jinja2.sandbox import ImmutableSandboxedEnvironment

Message = Mapping[str, str]  # {"role": ..., "content": ...}


class TemplateRefused(ValueError):
    """The template does not take these messages, and says why."""


class ChatTemplate:
    """A compiled chat template. Raises jinja2.TemplateSyntaxError when the source is no template."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], strftime: Callable[[str], str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson
        known: dict[str, Any] = {"raise_exception": _refuse, "strftime_now": strftime}
        self._template = environment.from_string(source, globals=known)
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Message]) -> str:
        """The prompt's text up to where the assistant's answer begins. Raises TemplateRefused."""
        try:
            return self._template.render(messages=messages, add_generation_prompt=True, **self._special_tokens)
        except TemplateRefused:
            raise
        except Exception as error:  # it is foreign code: it may raise anything
            raise TemplateRefused(f"the model's chat template failed: {error}") from error


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


def _tojson(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> NoReturn:
    raise TemplateRefused(str(message))
