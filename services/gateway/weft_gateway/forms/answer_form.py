"""The form of an answer, chosen once a request: what it may hold, what its text is bound to, who reads it. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from weft_gateway.core.events import BytesOf
from weft_gateway.forms.marks import NO_TOKENS, MarkTokens, ReasoningMarks, showing
from weft_gateway.forms.structured_outputs import StructuredOutput, behind_reasoning
from weft_gateway.forms.template_forms import TemplateForms
from weft_gateway.forms.tool_formats import ToolFormat

PROMPT_END_TOKENS = 16  # that show how an answer begins


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """What an answer may hold beside content.

    `output`: what its text is bound to; None: nothing. `template`: of a chat; None: the answer is text alone.
    `tools`: the format of calls; None: there are none. `reasoning`: the marks of reasoning that it may begin with;
    `in_reasoning`: the prompt ends inside it. `continues`: the text of the message that it goes on with.
    `shows_reasoning`: clients get it. `spells_marks`: readers get the letters of special tokens, which are part of the
    text. `calls_are_asked`: the request names the tool that is called, and the end of the answer is no surprise
    (OpenAI). `one_call`: the request takes one call, and the first of several is it (vLLM). `calls_alone`: the answer
    has to call: text beside its calls is that of a call which was cut, and no content.
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
        """Text alone, which has no reader."""
        return self.tools is None and self.reasoning is None

    @property
    def marks(self) -> MarkTokens:
        """The marks that are one token."""
        return self.template.marks if self.template else NO_TOKENS

    def readable(self, bytes_of: BytesOf, spelled_bytes_of: BytesOf) -> BytesOf:
        """Return what clients, and the readers of an answer's parts, get of a token."""
        if self.spells_marks:
            return spelled_bytes_of
        return bytes_of if self.is_plain else showing(bytes_of, self.marks)

    def complete(self, prompt: Sequence[int], spelled: Callable[[Sequence[int]], str]) -> "AnswerForm":
        """Complete the form by the end of a prompt: it may have begun the reasoning, or ended it."""
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
