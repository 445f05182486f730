"""Render messages to a prompt through a model's own chat template, in an environment equal to transformers'.

A template is data, of the base model or of a tenant's adapter: it runs in jinja2's immutable sandbox, and sees what
Hugging Face templates expect (messages, tools, documents, add_generation_prompt, the special tokens, raise_exception,
strftime_now, tojson, `{% generation %}`). Its loops, calls and values and its output are bounded, so that a hostile one
costs a second of one thread and not the process.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set, Sized
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import groupby
from typing import Any, NoReturn

import jinja2
from jinja2 import TemplateSyntaxError, meta, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from weft.artifacts.digest import TEMPLATES_FOLDER
from weft.domain.model.generation import declared_tokens

MAX_WARNINGS = 3  # of one adapter's tokens
MAX_SOURCE = 1 << 18  # characters of a template; public ones have up to 30,000
MAX_STEPS = 500_000  # turns of loops and calls of one rendering: over 100 for each message of the longest chat
MAX_VALUE = 1 << 24  # characters of anything that a template makes
MAX_INT, MAX_DIGITS = 1 << 1024, 64  # of a number, as of the largest float; behind its point
CHARS_OF_STEP = 256  # that are made, or looked through, cost as much as a step
CHARS_OF_VALUE = 64  # that cost as much as a value inside another one
_SYSTEM_ROLES = ("system", "developer")
DEFAULT, TOOL_USE = "default", "tool_use"  # the named templates that are used, the second one where there are tools
TEMPLATE_FILE, CONFIG_FILE, SPECIAL_FILE = "chat_template.jinja", "tokenizer_config.json", "special_tokens_map.json"
NAMED_FILE = f"{TEMPLATES_FOLDER}{TOOL_USE}.jinja"
TEMPLATE_FILES = (TEMPLATE_FILE, NAMED_FILE, CONFIG_FILE, SPECIAL_FILE)  # where an artifact has templates and tokens
# With a space: no template can spell them.
_STEPS, _COUNTED, _MADE, _READ, _CUT, _SPENT = (
    f"weft {name}" for name in ("steps", "counted", "made", "read", "cut", "spent")
)
_END = "\U0010fffd"  # behind what is continued; callers keep it out of the messages
REASONING = ("reasoning_content", "thinking", "reasoning")  # of a message: a template reads one of these names
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# A width of 10,000 in a format, or one that comes with the values.
_WIDE = re.compile(r"%(\([^)%]*\))?[^a-zA-Z%]*?(\d{5}|\*)|%\([^)%]*%|\{[^{}]*:[^{}]*(\d{5}|\{)")
_LONGER = frozenset("center expandtabs indent ljust rjust tojson translate wordwrap zfill".split())
_COMPARING = "== eq equalto != ne < lt lessthan <= le > gt greaterthan >= ge in".split()
_ITERATING = frozenset(
    "batch dictsort groupby join list map max min reject rejectattr select selectattr slice sort sum unique".split()
)
_SLOW = ("pprint", "striptags", "urlize")  # filters that may take the square of what they get
Message = Mapping[str, Any]  # {"role": ..., "content": ..., "tool_calls": ...}
Sources = Mapping[str, str]  # name -> template


@dataclass(frozen=True, slots=True)
class Chat:
    """The input of a template. `variables`: the caller's additional variables."""

    messages: Sequence[Message]
    add_generation_prompt: bool = True
    continue_final_message: bool = False  # the prompt ends with the last message's content
    tools: Sequence[Mapping[str, Any]] = ()
    documents: Sequence[Mapping[str, Any]] = ()
    variables: Mapping[str, Any] = field(default_factory=dict[str, Any])
    add_special_tokens: bool = False  # what the tokenizer puts around a text, around the rendered prompt
    call_marks: Set[str] = frozenset()  # control tokens that earlier answers hold, where their calls are text


SMALLEST = Chat([{"role": "user", "content": "Hello"}])
_RESULT = Chat(
    [*SMALLEST.messages, {"role": "assistant", "content": "Call"}, {"role": "tool", "content": "Result"}], False
)
_CALL_ID = "123456789"  # as long as Mistral's templates want it
_BROKEN_CALL = Chat(
    [
        *SMALLEST.messages,
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": _CALL_ID, "type": "function", "function": {"name": "f", "arguments": "Broken"}}],
        },
        {"role": "tool", "tool_call_id": _CALL_ID, "name": "f", "content": "Result"},
    ],
    False,
)
_TOOL = {"type": "function", "function": {"name": "f", "description": "F", "parameters": {"type": "object"}}}


class TemplateFault(ValueError):
    """There is a chat template, and it can render no chat."""


class TemplateRefused(ValueError):
    """The template refuses these messages, with a reason."""


class TemplateFailed(TemplateRefused):
    """The template failed on these messages, or does too much."""


class RenderedTooLong(TemplateRefused):
    """The prompt's text is longer than its bound."""


class _Steps:
    """The remaining steps of a rendering, as a bound."""

    def __init__(self) -> None:
        self._left = MAX_STEPS
        self._weights: dict[int, tuple[object, int]] = {}  # of what is inside others, which no template can change

    def spend(self, steps: int = 1) -> None:
        self._left -= steps
        if self._left < 0:
            raise TemplateFailed(f"the model's chat template takes more than {MAX_STEPS} steps for these messages")

    def made(self, value: Any) -> Any:
        """Pay for a value that was made: it is bounded, with the values in it, each as often as it is in it."""
        _bounded(self._weight(value))
        self.spend(_length(value) // CHARS_OF_STEP)
        return value

    def read(self, value: Any) -> Any:
        """Pay for a value that is looked through."""
        self.spend(_bounded(self._weight(value)) // CHARS_OF_STEP)
        return value

    def check_product(self, value: Any, times: Any) -> None:
        """Bound what repeats a value, or widens it, before it is made."""
        if self._weight(value) * (abs(times) if isinstance(times, int | float) else self._weight(times)) > MAX_VALUE:
            raise TemplateFailed(f"the model's chat template has a product beyond {MAX_VALUE}")

    def _weight(self, value: Any) -> int:
        match value:
            case str() | bytes():
                return len(value)
            case int():
                return 1 if -MAX_INT < value < MAX_INT else MAX_VALUE + 1
            case list() | tuple():
                parts: Iterable[Any] = value
            case dict():
                parts = [part for item in value.items() for part in item]
            case _:
                return 1
        return CHARS_OF_VALUE + sum(map(self._inner_weight, parts))

    def _inner_weight(self, value: Any) -> int:
        if not isinstance(value, list | tuple | dict):
            return CHARS_OF_VALUE + self._weight(value)
        weight = self._weights.get(id(value))
        if weight is None:
            weight = self._weights[id(value)] = value, _bounded(self._weight(value))
        return weight[1]


class _Generation(Extension):
    """The block `{% generation %}`, which marks the assistant's text for training; here it renders what is inside."""

    tags = {"generation"}  # noqa: RUF012 (as jinja2 declares it)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


class _Namespace(Namespace):
    """A namespace as jinja2's, without names that begin with an underscore; its text does not hold its values."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # as jinja2's: `self` may be a name
        self, *values = args
        mapping = dict(*values, **kwargs)
        for name in mapping:
            _check_name(name)
        Namespace.__init__(self, mapping)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<Namespace>"


class _Dict:
    """`dict` of templates, without its attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Sandbox(ImmutableSandboxedEnvironment):
    """A sandbox like jinja2's, which bounds access of a template, with an additional bound on its work."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, strftime: Callable[[str], str]) -> None:
        extensions = ["jinja2.ext.loopcontrols", _Generation]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions, finalize=_read)
        filters = {name: function for name, function in self.filters.items() if name not in _SLOW} | {"tojson": _tojson}
        self.filters = {name: _paid(name, function) for name, function in filters.items()}
        self.filters |= {_COUNTED: _counted, _MADE: _made, _READ: _read, _CUT: _cut, _SPENT: _spent}
        self.tests |= {name: _paid_test(self.tests[name]) for name in _COMPARING}
        helpers = {"raise_exception": _refuse, "strftime_now": strftime, "dict": _Dict(), "namespace": _Namespace}
        self.globals = {name: function for name, function in self.globals.items() if name != "lipsum"} | helpers

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Parse a template, and have what runs more than once, and what makes or compares values, pay for it."""
        tree = super()._parse(source, name, filename)
        for repeated in list(tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock, nodes.Block))):
            written = sum(len(data.data) for part in repeated.body for data in part.find_all(nodes.TemplateData))
            if written >= CHARS_OF_STEP:
                cost = nodes.Const(written // CHARS_OF_STEP, lineno=repeated.lineno)
                repeated.body.insert(0, nodes.ExprStmt(_through(_SPENT, cost), lineno=repeated.lineno))
            if isinstance(repeated, nodes.For):
                repeated.iter = _through(_COUNTED, repeated.iter)
        _pay_for_values(tree)
        return tree

    def call(self, context: Context, called: Any, /, *args: Any, **kwargs: Any) -> Any:
        steps: _Steps = context.parent[_STEPS]
        steps.spend()
        method = getattr(called, "__wrapped__", called)  # the sandbox wraps str.format
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str | bytes | int):
            _, args = _checked(steps, method.__name__, steps.read(owner), args, kwargs)
        return steps.made(super().call(context, called, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        steps: _Steps = context.parent[_STEPS]
        if operator == "**":
            raise TemplateFailed("the model's chat template has a power")
        if operator == "*":
            steps.check_product(left, right)
            steps.check_product(right, left)
        if operator == "%" and isinstance(left, str):
            _checked(steps, "format", left, (right,), {})
        return steps.made(super().call_binop(context, operator, left, right))


class ChatTemplate:
    """Compiled chat templates of one model: `default`, and optionally `tool_use` for chats with tools."""

    def __init__(
        self, sources: str | Sources, special_tokens: Mapping[str, str], strftime: Callable[[str], str] | None = None
    ) -> None:
        """Compile the templates. Raises TemplateFault when one is no template, or none is the default."""
        named = {DEFAULT: sources} if isinstance(sources, str) else sources
        if DEFAULT not in named:
            names = ", ".join(map(repr, sorted(named)))[:200]
            raise TemplateFault(f"there are several chat templates ({names}) and none is named default")
        environment = _Sandbox(strftime or _strftime)
        self._compiled = {name: _compiled(environment, named[name]) for name in (DEFAULT, TOOL_USE) if name in named}
        self.default, self.source = named[DEFAULT], "\n".join(named[name] for name in self._compiled)
        self._has_developer = "developer" in self.source
        self._special_tokens = dict(special_tokens)
        trees = [environment.parse(named[name]) for name in self._compiled]
        self.sought = frozenset(text for tree in trees for text in _sought(tree))  # what it looks for in messages
        self.variables = frozenset(name for tree in trees for name in _variables_of(tree))  # that it reads
        self._loses_results, self._shows_broken_calls = False, True
        self._takes_parts = self._misses_texts()
        self._loses_results = "tool" not in self.sought and not self._shows(_RESULT, "Result")
        chats = [replace(_BROKEN_CALL, tools=[_TOOL] if name == TOOL_USE else []) for name in self._compiled]
        if "arguments" in self.source:
            self._shows_broken_calls = all(self._shows(chat, "Broken") for chat in chats)

    def render(self, chat: Chat, max_chars: int) -> str:
        """Render a chat up to where the answer begins.

        The prompt ends with a message that is continued: what the template puts behind that is left out. Arguments of
        an earlier call that are no object are shown as their text, or as `{}` where the template shows objects alone.
        Where the template refuses messages, later system messages among them are folded. Raises TemplateRefused,
        RenderedTooLong.
        """
        messages = [self._known_fields(message) for message in chat.messages]
        if not self._shows_broken_calls:
            messages = [_with_objects(message) for message in messages]
        if self._loses_results:
            messages = _with_results(messages)
        try:
            return self._render(chat, messages, max_chars)
        except TemplateRefused as error:
            folded = _with_system_first(messages)
            if type(error) is not TemplateRefused or folded == messages:
                raise
        return self._render(chat, folded, max_chars)

    def _render(self, chat: Chat, messages: Sequence[Message], max_chars: int) -> str:
        """Render messages as they are. Raises TemplateRefused, RenderedTooLong."""
        if chat.continue_final_message:
            last = {**messages[-1], "content": f"{messages[-1].get('content', '')}{_END} "}
            messages = [*messages[:-1], last]
        if self._takes_parts:
            messages = [_in_parts(message) for message in messages]
        values = {
            **self._special_tokens,
            **chat.variables,
            "messages": messages,
            "tools": chat.tools or None,
            "documents": chat.documents or None,
            "add_generation_prompt": chat.add_generation_prompt,
        }
        compiled = self._compiled.get(TOOL_USE if chat.tools else DEFAULT, self._compiled[DEFAULT])
        rendered = _rendered(compiled, values, max_chars + 2 * len(_END))
        return _continued(rendered) if chat.continue_final_message else rendered

    def check(self) -> None:
        """Render the smallest conversation, or let the template itself refuse it. Raises TemplateFault."""
        try:
            self.render(SMALLEST, MAX_VALUE)
        except TemplateFailed as error:
            raise TemplateFault(str(error)) from error
        except TemplateRefused:
            pass

    def _misses_texts(self) -> bool:
        """Whether the template shows text only in lists of parts, as multimodal templates do."""
        shown: list[bool] = []
        for self._takes_parts in (False, True):
            shown.append(self._shows(SMALLEST, "Hello"))
        return shown == [False, True]

    def _shows(self, chat: Chat, text: str) -> bool:
        try:
            return text in self.render(chat, MAX_VALUE)
        except TemplateRefused:
            return False

    def _known_fields(self, message: Message) -> Message:
        """Replace OpenAI's newer name of a system message, for templates that do not know it, and name reasoning."""
        if (reasoning := message.get("reasoning_content")) is not None:
            message = {**message, **dict.fromkeys(REASONING, reasoning)}
        return message if message["role"] != "developer" or self._has_developer else {**message, "role": "system"}


def template_of(files: Mapping[str, bytes]) -> ChatTemplate | None:
    """Compile the template in an artifact's files; None: there is none. Raises TemplateFault."""
    config, special = (_object(files, name) for name in (CONFIG_FILE, SPECIAL_FILE))
    sources = sources_of(files, config)
    return ChatTemplate(sources, special_tokens_of(config, special)) if sources else None


def adapter_template(
    files: Mapping[str, bytes], base: Mapping[str, str], token_of: Callable[[str], int | None]
) -> tuple[ChatTemplate | None, tuple[str, ...]]:
    """Compile the template in an adapter's files. Returns it, and why some of the adapter's tokens are not used.

    `base`: the special tokens of the base, which count where the adapter names none; `token_of`: the id that the base
    has for a text, or None. The base's tokenizer reads the prompt, so a token of the adapter's is one of the base's.
    Raises TemplateFault.
    """
    config, special = (_object(files, name) for name in (CONFIG_FILE, SPECIAL_FILE))
    sources, own_tokens, ids = sources_of(files, config), special_tokens_of(config, special), declared_tokens(config)
    if not sources:
        return None, ()
    written = " ".join(sources.values())
    own_tokens = {name: text for name, text in own_tokens.items() if name in written}
    texts = dict.fromkeys((*own_tokens.values(), *(text for text in ids if text in written)))
    strange = [text for text in texts if (token_id := token_of(text)) is None or ids.get(text, token_id) != token_id]
    warnings = [
        f"the adapter's chat template writes {text[:100]!r}, which is another token of the base or none: it is text"
        for text in strange
    ]
    tokens = {**base, **{name: text for name, text in own_tokens.items() if text not in strange}}
    return ChatTemplate(sources, tokens), tuple(warnings[:MAX_WARNINGS])


def sources_of(files: Mapping[str, bytes], config: Mapping[str, Any]) -> Sources:
    """Read templates by name: from files of their own, else from tokenizer_config.json. Raises TemplateFault."""
    names = {TEMPLATE_FILE: DEFAULT, NAMED_FILE: TOOL_USE}
    try:
        templates = {name: files[file].decode() for file, name in names.items() if file in files}
    except UnicodeDecodeError as error:
        raise TemplateFault(f"the chat template is no text in UTF-8: {error}") from error
    if templates:
        return templates
    match config.get("chat_template") or {}:
        case str(source):
            return {DEFAULT: source}
        case [*rows]:
            pairs: list[Any] = [(row.get("name"), row.get("template")) for row in rows if isinstance(row, dict)]
        case dict(named):
            pairs = [*named.items()]
        case _:
            pairs = [(None, None)]
    if not all(isinstance(text, str) for pair in pairs for text in pair):
        raise TemplateFault(f"chat_template of {CONFIG_FILE} is neither a text nor a list of named texts")
    return dict(pairs)


def special_tokens_of(*configs: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token`, `eos_token`, ... of tokenizer_config.json and special_tokens_map.json, as plain strings."""
    templates: dict[str, str] = {}
    for config in configs:
        for name in _SPECIAL:
            match config.get(name):
                case str(text) | {"content": str(text)}:
                    templates.setdefault(name, text)
                case _:
                    pass
    return templates


def _object(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    try:
        value = json.loads(files.get(name, b"{}"))
    except (ValueError, RecursionError) as error:
        raise TemplateFault(f"{name} is no JSON: {error}") from error
    return value if isinstance(value, dict) else {}


def _compiled(environment: _Sandbox, source: str) -> jinja2.Template:
    if len(source) > MAX_SOURCE:
        raise TemplateFault(f"the chat template has {len(source)} characters, the limit is {MAX_SOURCE}")
    try:
        return environment.from_string(source)
    except TemplateSyntaxError as error:
        raise TemplateFault(f"line {error.lineno} of the chat template: {error.message}") from error
    except Exception as error:  # what jinja2 takes and Python's compiler does not: a break outside of loops, depth
        raise TemplateFault(f"the chat template cannot be compiled: {error or type(error).__name__}") from error


def _rendered(template: jinja2.Template, values: Mapping[str, Any], max_chars: int) -> str:
    parts: list[str] = []
    try:
        for part in template.generate({**values, _STEPS: _Steps()}):
            parts.append(part)
            max_chars -= len(part)
            if max_chars < 0:
                raise RenderedTooLong("the chat is too long as the model's template renders it")
        return "".join(parts)
    except TemplateRefused:
        raise
    except Exception as error:  # it is foreign code: it may raise anything
        raise TemplateFailed(f"the model's chat template failed: {error}") from error


def _continued(rendered: str) -> str:
    """The rendered text up to the end of the continued message, stripped where the template strips messages."""
    content, mark, rest = rendered.rpartition(_END)
    if not mark:
        raise TemplateRefused("the model's chat template leaves out the message that is to be continued")
    return content if rest.startswith(" ") else content.rstrip()


def _in_parts(message: Message) -> Message:
    if not isinstance(message.get("content"), str):
        return message
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


def _with_objects(message: Message) -> Message:
    """Replace the arguments of calls that are a text by an empty object."""
    if not message.get("tool_calls"):
        return message
    calls: list[Any] = []
    for call in message["tool_calls"]:
        match call:
            case {"function": {"arguments": str(), **function}, **others}:
                calls.append({**others, "function": {**function, "arguments": {}}})
            case _:
                calls.append(call)
    return {**message, "tool_calls": calls}


def _with_results(messages: Iterable[Message]) -> list[Message]:
    """Turn results of tools into turns of the user, for templates that drop or refuse such messages."""
    messages_out: list[Message] = []
    for is_result, group in groupby(messages, lambda message: message["role"] == "tool"):
        if is_result:
            texts = [f"<tool_response>\n{one.get('content', '')}\n</tool_response>" for one in group]
            messages_out.append({"role": "user", "content": "\n".join(texts)})
        else:
            messages_out += group
    return messages_out


def _with_system_first(messages: Sequence[Message]) -> list[Message]:
    """Fold system messages for templates that accept only a first system message.

    Those at the beginning become one message. A later one joins the turn of the user or the result of a tool before
    it, or the turn of the user behind it, or is one, so that what stands before it, and its cache, stays as it is.
    """
    folded: list[Message] = []
    takes_more = False  # the last one is a turn of the user that a system message has joined
    for message in messages:
        last_role = folded[-1]["role"] if folded else ""
        if message["role"] not in _SYSTEM_ROLES:
            joins, continues = takes_more and message["role"] == "user", False
        elif last_role in ("", *_SYSTEM_ROLES):
            joins, continues = bool(last_role), False
        else:
            message = {"role": "user", "content": f"<system>\n{message.get('content', '')}\n</system>"}
            joins, continues = last_role in ("user", "tool"), last_role != "tool"
        if joins:
            folded[-1] = _joined(folded[-1], message)
        else:
            folded.append(message)
        takes_more = continues
    return folded


def _joined(first: Message, second: Message) -> Message:
    return {**first, "content": "\n\n".join(filter(None, [first.get("content"), second.get("content")]))}


def _variables_of(tree: nodes.Template) -> set[str]:
    try:
        return meta.find_undeclared_variables(tree)
    except Exception as error:  # of depth, as for what cannot be compiled
        raise TemplateFault(f"the chat template cannot be read: {error or type(error).__name__}") from error


def _strftime(form: str) -> str:
    return datetime.now(UTC).strftime(form)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace has no attribute that begins with an underscore, as {name!r}")


def _sought(tree: nodes.Template) -> Iterator[str]:
    """The texts that values are compared with, split at, or searched for."""
    for node in tree.find_all((nodes.Compare, nodes.Call)):
        if isinstance(node, nodes.Call) and not isinstance(node.node, nodes.Getattr):
            continue
        yield from (const.value for const in node.find_all(nodes.Const) if isinstance(const.value, str))


def _through(name: str, value: nodes.Node) -> nodes.Filter:
    return nodes.Filter(value, name, [], [], None, None, lineno=value.lineno)


def _pay_for_values(node: nodes.Node) -> None:
    """Put what makes values inside a filter that pays for them, from the leaves on."""
    for name, value in node.iter_fields():
        if isinstance(value, list):
            setattr(node, name, [_paying(child) for child in value])
        elif isinstance(value, nodes.Node):
            setattr(node, name, _paying(value))


def _paying(value: Any) -> Any:
    if not isinstance(value, nodes.Node):
        return value
    _pay_for_values(value)
    match value:
        case nodes.Concat():
            return _through(_MADE, value)
        case nodes.Getitem(arg=nodes.Slice()):
            return _through(_CUT, value)
        case nodes.List(items=[_, *_]) | nodes.Dict(items=[_, *_]):
            return _through(_MADE, value)
        case nodes.Tuple(ctx="load", items=[_, *_]):
            return _through(_MADE, value)
        case nodes.Compare():
            value.expr = _through(_READ, value.expr)
        case nodes.Operand(expr=expr) if not isinstance(expr, nodes.Const):
            value.expr = _through(_READ, expr)
        case _:
            pass
    return value


@pass_context
def _counted(context: Context, iterable: Iterable[Any]) -> Iterator[Any]:
    steps: _Steps = context.parent[_STEPS]
    for item in iterable:
        steps.spend()
        yield item


def _paid(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a filter of jinja2's pay for its value and its result."""
    passed = getattr(getattr(function, "jinja_pass_arg", None), "name", "")

    @pass_context
    def paid(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        arguments = {"context": context, "eval_context": context.eval_ctx, "environment": context.environment}
        steps: _Steps = context.parent[_STEPS]
        steps.spend()
        if isinstance(value, str):
            steps.read(value)
            if name in _ITERATING:
                steps.check_product(value, CHARS_OF_VALUE)
        elif isinstance(value, Iterator):
            value = _counted(context, value)
        elif name in _ITERATING:
            steps.spend(_length(value) // CHARS_OF_STEP)
        value, args = _checked(steps, name, value, args, kwargs)
        return steps.made(function(*([arguments[passed]] if passed else []), value, *args, **kwargs))

    return paid


def _paid_test(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a test of jinja2's compare what it has paid for."""

    @pass_context
    def paid(context: Context, *values: Any) -> Any:
        return function(*map(context.parent[_STEPS].read, values))

    return paid


def _length(value: Any) -> int:
    """The size of a value in characters, without what is in the values in it."""
    if isinstance(value, str | bytes):
        return len(value)
    return CHARS_OF_VALUE * len(value) if isinstance(value, Sized) else 1


def _bounded(weight: int) -> int:
    if weight > MAX_VALUE:
        raise TemplateFailed(f"the model's chat template has a value beyond {MAX_VALUE} characters")
    return weight


def _checked(
    steps: _Steps, name: str, value: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, tuple[Any, ...]]:
    """Check that a method or filter may be called, with a bounded result. Return iterated values as lists."""
    if name == "join":
        value, *listed = [list(argument) if isinstance(argument, Iterator) else argument for argument in (value, *args)]
        args = tuple(listed)
    arguments = [*args, *kwargs.values()]
    for argument in arguments:
        if isinstance(argument, int) and abs(argument) > MAX_VALUE:
            raise TemplateFailed(f"the model's chat template has a number beyond {MAX_VALUE} for {name}")
        if name in _LONGER:
            steps.check_product(value, argument)
        if name == "join" and isinstance(value, Sized) and isinstance(argument, Sized):
            steps.check_product(" " * len(argument), len(value))
        if (name == "round" and isinstance(argument, int) and abs(argument) > MAX_DIGITS) or name == "encode":
            raise TemplateFailed(f"the model's chat template has {str(argument)[:100]!r} for {name}")
    if name == "sum" and not isinstance(kwargs.get("start", args[1] if len(args) > 1 else 0), int | float):
        raise TemplateFailed("the model's chat template has a sum of what are no numbers")
    match name, value, arguments:
        case "replace", str(), [str(old), str(new), *_]:
            steps.check_product(new, value.count(old))
        case "replace", _, [_, new, *_]:
            steps.check_product(value, new)
        case (("format" | "format_map"), str(), _):
            if _WIDE.search(value.replace("{{", "")):
                raise TemplateFailed("the model's chat template writes values too wide")
            for argument in arguments:
                steps.check_product(argument, value.count("%") + value.count("{"))
        case _:
            pass
    return value, args


@pass_context
def _spent(context: Context, steps: int) -> None:
    context.parent[_STEPS].spend(steps)


@pass_context
def _cut(context: Context, part: Any) -> Any:
    """Pay for a part that was copied, by its own length: no more is in it than in the whole."""
    context.parent[_STEPS].spend(_length(part) // CHARS_OF_STEP // 16)
    return part


@pass_context
def _made(context: Context, value: Any) -> Any:
    return context.parent[_STEPS].made(value)


@pass_context
def _read(context: Context, value: Any) -> Any:
    return context.parent[_STEPS].read(value)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: object) -> NoReturn:
    raise TemplateRefused(str(message))
