"""What a chat template and its tokenizer say of answers: found once a template. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from weft_gateway.forms.marks import MARKS, NO_TOKENS, REASONING, MarkTokens, ReasoningMarks
from weft_gateway.forms.tool_formats import HERMES, LLAMA, MISTRAL, MISTRAL_NAMED, PARSERS, ToolFormat


@dataclass(frozen=True, slots=True)
class TemplateForms:
    """The forms of answers that a template shows.

    `marks`: those that are one token. `tool_formats`: by the parser that a pool names; "": the one that the template
    shows. `reasoning`: the marks that the template has; some models reason, or do not, as they like. `shows_tools`,
    `shows_calls`: the template itself shows tools, and earlier calls, to the model.
    """

    template: str
    marks: MarkTokens
    tool_formats: Mapping[str, ToolFormat]
    reasoning: tuple[ReasoningMarks, ...]
    shows_tools: bool
    shows_calls: bool

    @classmethod
    def of(cls, template: str, added: MarkTokens = NO_TOKENS) -> "TemplateForms":
        """Scan a template. `added`: the tokenizer's added tokens."""
        marks = {mark: added[mark] for mark in MARKS if mark in added}
        formats = {name: _of_version(form, template) for name, form in (("", _shown(template)), *PARSERS.items())}
        return cls(
            template,
            marks,
            {name: replace(form, marks=marks) for name, form in formats.items()},
            tuple(around for around in REASONING if around.end in template),
            shows_tools="tools" in template,
            shows_calls="tool_calls" in template,
        )

    def tool_format(self, parser: str) -> ToolFormat:
        """Return the parser's format; where a pool names none, or one of a newer gateway, the template's."""
        return self.tool_formats.get(parser, self.tool_formats[""])

    def reasoning_before(self, prompt_end: str) -> ReasoningMarks | None:
        """Return the marks of the template, or those at the end of a prompt; of several those that are tokens."""
        known = [around for around in REASONING if around in self.reasoning or prompt_end.endswith(around.begin)]
        return min(known, key=lambda one: (not prompt_end.endswith(one), one.end not in self.marks), default=None)


def _shown(template: str) -> ToolFormat:
    """Find the format that a template shows; Hermes's where it shows no calls."""
    if "[TOOL_CALLS]" in template:
        return MISTRAL
    return LLAMA if "<tool_call>" not in template and "python_tag" in template else HERMES


def _of_version(form: ToolFormat, template: str) -> ToolFormat:
    """Choose the version: Mistral's newer models write a name and its arguments."""
    if form is not MISTRAL or "[ARGS]" not in template:
        return form
    return replace(MISTRAL_NAMED, id_mark="[CALL_ID]") if "[CALL_ID]" in template else MISTRAL_NAMED
