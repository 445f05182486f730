"""Properties of answers by a chat template and its tokenizer, scanned once per template. Pure."""

import re
from collections.abc import Mapping, Set
from dataclasses import dataclass, replace

from weft.chat_template import ChatTemplate
from weft_gateway.forms.marks import MARKS, NO_TOKENS, REASONING, RESPONSE, MarkTokens, ReasoningMarks
from weft_gateway.forms.tool_formats import (
    GRANITE,
    HERMES,
    LLAMA,
    MISTRAL,
    MISTRAL_NAMED,
    OLMO,
    PARSERS,
    PHI,
    ToolFormat,
)

_SHOWN: Mapping[str, ToolFormat] = {  # texts of a format in a template: the first match counts
    "[TOOL_CALLS]": MISTRAL,
    "<function_calls>": OLMO,
    "<tool_call>": HERMES,
    "<|tool|>": PHI,  # around tools; the calls are not in Phi-4-mini's template
    "functools": PHI,
    "<|tool_call|>": GRANITE,
    "python_tag": LLAMA,
}
_TOOLS_VARIABLES = ("tools", "xml_tools")  # the second variable is SmolLM3's
_TOOLS_FIELD = re.compile(r"""\bmessage\[['"](tools|functions)['"]\]""")


@dataclass(frozen=True, slots=True)
class TemplateForms:
    """The forms of answers shown by a template.

    `marks`: the marks encoded as a single token. `tool_formats`: formats by a pool's parser; "": the template's format.
    `reasoning`: the template's marks; some models reason at will. `variables`: the variables read by the template.
    `tools_variable`, `tools_field`: the variable or the field (JSON) of a system message with the tools; "": none.
    `shows_calls`: it shows earlier calls. `has_response`: it asks for the marks of a response after reasoning.
    """

    variables: Set[str]
    marks: MarkTokens
    tool_formats: Mapping[str, ToolFormat]
    reasoning: tuple[ReasoningMarks, ...]
    tools_variable: str
    tools_field: str
    shows_calls: bool
    has_response: bool = False

    @classmethod
    def of_template(cls, chats: ChatTemplate | None, added: MarkTokens = NO_TOKENS) -> "TemplateForms":
        """Scan a chat template and its template for tools. `added`: the tokenizer's added tokens."""
        template, variables = (chats.source, chats.variables) if chats else ("", frozenset[str]())
        marks, field = {mark: added[mark] for mark in MARKS if mark in added}, _TOOLS_FIELD.search(template)
        formats = {name: _of_version(form, template) for name, form in (("", _shown(template)), *PARSERS.items())}
        return cls(
            variables,
            marks,
            {name: replace(form, marks=marks) for name, form in formats.items()},
            tuple(around for around in REASONING if around.end in template),
            tools_variable=next((name for name in _TOOLS_VARIABLES if name in variables), ""),
            tools_field=field[1] if field else "",
            shows_calls="tool_calls" in template,
            has_response=RESPONSE[1] in template,
        )

    def tool_format(self, parser: str) -> ToolFormat:
        """Return the parser's format; the template's format if the pool names no known parser."""
        return self.tool_formats.get(parser, self.tool_formats[""])

    def reasoning_before(self, prompt_end: str) -> ReasoningMarks | None:
        """Return the marks of the template, or at the end of a prompt. Of several, marks with tokens come first."""
        marks = [around for around in REASONING if around in self.reasoning or prompt_end.endswith(around.begin)]
        return min(marks, key=lambda mark: (not prompt_end.endswith(mark), mark.end not in self.marks), default=None)


def _shown(template: str) -> ToolFormat:
    """Find the format shown by a template; Hermes's if it shows no calls."""
    return next((form for mark, form in _SHOWN.items() if mark in template), HERMES)


def _of_version(form: ToolFormat, template: str) -> ToolFormat:
    """Choose the version: Mistral's newer models write a name and its arguments."""
    if form is not MISTRAL or "[ARGS]" not in template:
        return form
    return replace(MISTRAL_NAMED, id_mark="[CALL_ID]") if "[CALL_ID]" in template else MISTRAL_NAMED
