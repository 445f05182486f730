# pyright: reportUnusedImport=false
"""Forms of answers: calls of tools, reasoning and structured output. A form is chosen per request and read by a single
reader.

Tests import these names from here: the inner modules may change. `grammar_checker` is imported by its module, because
its process runs a module of this package without it.
"""

from weft_gateway.forms.answer_form import AnswerForm
from weft_gateway.forms.answer_reader import AnswerReader, message_of
from weft_gateway.forms.marks import MARKS, REASONING, THINK, ReasoningMarks, showing, stand_in
from weft_gateway.forms.reasoning import ReasoningParser
from weft_gateway.forms.structured_outputs import (
    WHITESPACE,
    StructuredOutput,
    grammar_of,
    grammar_of_lead,
    structured_output,
    with_tools,
)
from weft_gateway.forms.template_forms import TemplateForms
from weft_gateway.forms.tool_calls import ArgumentsPart, CallBegun, Content, Part, ToolCallParser
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
    call_id,
    render_calls,
)
from weft_gateway.forms.tool_grammars import FaultyTool
