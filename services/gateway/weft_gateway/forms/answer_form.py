"""The form of an answer, chosen per request: its possible parts, its grammar, its reader. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from weft_gateway.core.events import BytesOf
from weft_gateway.forms.marks import NO_TOKENS, MarkTokens, ReasoningMarks, showing
from weft_gateway.forms.structured_outputs import StructuredOutput, behind_reasoning
from weft_gateway.forms.template_forms import TemplateForms
from weft_gateway.forms.tool_formats import ToolFormat

PROMPT_END_TOKENS = 16  # read to see how an answer begins


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """The parts of an answer besides its content.

    `output`: the grammar of its text; None: any text. `template`: the forms of a chat; None: the answer is plain text.
    `tools`: the format of calls; None: no calls. `reasoning`: the marks of possible reasoning at its start;
    `in_reasoning`: the prompt ends inside it. `continues`: the text of the continued message. `shows_reasoning`:
    clients get the reasoning. `spells_marks`: readers get the letters of special tokens as part of the text.
    `calls_are_asked`: the request names the called tool, so the answer's end is expected (OpenAI). `one_call`: the
    request takes a single call, the first of several (vLLM). `calls_alone`: the answer has to call. Text next to its
    calls then comes from a cut call and is dropped.
    """

    output: StructuredOutput | None = None
    template: TemplateForms | None = None
    tools: ToolFormat | None = None
    reasoning: ReasoningMarks | None = None
    in_reasoning: bool = False
    continues: str | None = None
    shows_reasoning: bool = True
    spells_marks: bool = False
    calls_are_asked: bool = False
    calls_alone: bool = False
    one_call: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether the answer is plain text without a reader."""
        return self.tools is None and self.reasoning is None

    @property
    def marks(self) -> MarkTokens:
        """Return the marks encoded as a single token."""
        return self.template.marks if self.template else NO_TOKENS

    def readable(self, bytes_of: BytesOf, spelled_bytes_of: BytesOf) -> BytesOf:
        """Return the bytes of tokens for clients and for the readers of an answer's parts."""
        if self.spells_marks:
            return spelled_bytes_of
        return bytes_of if self.is_plain else showing(bytes_of, self.marks)

    def completed_by(self, prompt: Sequence[int], spelled: Callable[[Sequence[int]], str]) -> "AnswerForm":
        """Complete the form by the end of a prompt, in case the prompt begins or ends the reasoning."""
        end = spelled(prompt[-PROMPT_END_TOKENS:]).rstrip() if self.template else ""
        around = self.template and self.template.reasoning_before(end)
        if not around:
            return self
        last = self.continues or ""
        begun = end.endswith(around.begin) or last.rfind(around.begin) > last.rfind(around.end)
        ended = not begun and (end.endswith(around.end) or self.continues is not None)
        output = self.output
        if output and not ended:
            output = behind_reasoning(output, around, self.marks, begun=begun)
        return replace(self, output=output, reasoning=around, in_reasoning=begun)
