"""Chat templates of the shapes that public models have, written for this: the prompt is the one of transformers.

A request goes from its JSON to token ids as in the gateway. Each template in chat_templates/ has the constructs of its
family, and little else.
"""

import json
from pathlib import Path
from typing import Any

import jinja2
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tests.unit.gateway.test_tokenizer import prompt_of
from weft.chat_template import NAMED_FILE

TEMPLATES = Path(__file__).parent / "chat_templates"
SPECIAL = [
    *("<s>", "</s>", "<pad>", "<sep>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "[INST]", "[/INST]"),
    *("<|end|>", "<tool_call>", "</tool_call>", "<|tool_call|>", "<|/tool_call|>", "<function_calls>"),
]
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Wetter für 東京 & <b>others</b>",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Oslo", "Rome"]}, "days": {"type": ["integer", "null"]}},
            "required": ["city"],
        },
    },
}
USER = [{"role": "user", "content": " hello there \n"}]
SYSTEM = [{"role": "system", "content": "be brief"}, *USER]
TURNS = [*SYSTEM, {"role": "assistant", "content": "hi"}, {"role": "user", "content": "more"}]
REASONED = [
    *USER,
    {"role": "assistant", "content": "<think>\nwell\n</think>\n\nhi", "reasoning_content": None},
    {"role": "user", "content": "again"},
    {"role": "assistant", "content": "ho", "reasoning": "hmm"},
    {"role": "user", "content": "and?"},
]
CALLS = [
    {"id": f"call_{i}", "type": "function", "function": {"name": "weather", "arguments": json.dumps(arguments)}}
    for i, arguments in enumerate([{"city": "Oslo", "days": 2}, {"city": "Rome", "near": {"to": ["é", True, None]}}])
]
CALLED = [
    *USER,
    {"role": "assistant", "content": None, "tool_calls": CALLS},
    {"role": "tool", "tool_call_id": "call_0", "content": "rain"},
    {"role": "tool", "tool_call_id": "call_1", "content": "sun", "name": "weather"},
]

FAMILIES: dict[str, Any] = {path.stem: path.read_text() for path in sorted(TEMPLATES.glob("*.jinja"))}
FAMILIES["command-r"] = [
    {"name": "default", "template": FAMILIES["chatml"]},
    {"name": "tool_use", "template": FAMILIES.pop("command-r.tool_use")},
    {"name": "rag", "template": "{{ raise_exception('nobody asked for it') }}"},
]
REQUESTS: dict[str, dict[str, Any]] = {
    "user": {"messages": USER},
    "system": {"messages": SYSTEM},
    "turns": {"messages": TURNS},
    "reasoned": {"messages": REASONED},
    "tools": {"messages": SYSTEM, "tools": [TOOL]},
    "called": {"messages": CALLED, "tools": [TOOL]},
    "variables": {"messages": TURNS, "chat_template_kwargs": {"enable_thinking": False, "date_string": "now"}},
    "continued": {"messages": TURNS[:3], "continue_final_message": True},
    "whole": {"messages": TURNS[:3], "add_generation_prompt": False},
}
# Templates that take tools elsewhere than transformers gives them, and show no calls: what transformers gets instead.
FUNCTIONS = json.dumps([TOOL["function"]], ensure_ascii=False)
ELSEWHERE: dict[str, Any] = {
    "smollm3": {"chat_template_kwargs": {"xml_tools": [TOOL]}},
    "phi-4-mini": {"messages": [{**SYSTEM[0], "tools": FUNCTIONS}]},
    "olmo-3-think": {"messages": [{**SYSTEM[0], "functions": FUNCTIONS}]},
    "granite-3": {"tools": [TOOL]},
}
WRITTEN = {
    "smollm3": '<tool_call>\n{"name": "weather", "arguments": %s}\n</tool_call>',
    "phi-4-mini": '<|tool_call|>[{"name": "weather", "arguments": %s}]<|/tool_call|>',
    "olmo-3-think": '<function_calls>weather(city="Oslo", days=2)</function_calls>',
    "granite-3": '<|tool_call|>[{"name": "weather", "arguments": %s}]',
}
# What a family's templates do not have: one construct each.
CONSTRUCTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "tojson": (
        "{{ tools | tojson }}{{ tools | tojson(ensure_ascii=True, indent=2) }}"
        "{{ tools | tojson(separators=(',', ':'), sort_keys=true) }}{{ '<&>' | tojson }}",
        REQUESTS["tools"],
    ),
    "special tokens": (
        "{{ bos_token }}{{ eos_token }}{{ pad_token }}{{ sep_token }}{{ cls_token is defined }}",
        REQUESTS["user"],
    ),
    "special tokens of the caller": (
        "{{ bos_token }}a",
        REQUESTS["user"] | {"chat_template_kwargs": {"bos_token": "x"}},
    ),
    "loop controls": (
        "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}{{ m.content }}{% break %}"
        "{% endfor %}",
        REQUESTS["turns"],
    ),
    "documents": (
        "{% for d in documents %}{{ d.title }}: {{ d['text'] }};{% endfor %}",
        {"messages": USER, "documents": [{"title": "a", "text": "b"}]},
    ),
    "dict and namespace": (
        "{% set d = dict(a=1, **{'b': 2}) %}{% set ns = namespace(d, c=3) %}{% set ns.a = 4 %}{{ ns.a ~ ns.b ~ ns.c }}"
        "{{ dict.fromkeys(['x'], 1) }}{{ d.items() | list }}",
        REQUESTS["user"],
    ),
    "private names": ("{% set ns = namespace(_a=1) %}{{ ns._a }}", REQUESTS["user"]),
    "blocks": (
        "  {% if true %}\n  a\n  {% endif %}\n  b {#- c #}\n"
        "{% set x %}{{ messages[0].content }}!{% endset %}{{ x | upper }}",
        REQUESTS["user"],
    ),
    "texts": (
        "{{ '%s and %5.1f' | format('a', 2) }}{{ '{:>6}|{}'.format('b', 1) }}{{ ['a', 'b'] | join(', ') }}{{ 'x' * 3 }}"
        "{{ messages | map(attribute='role') | join('-') }}{{ 'a,b'.split(',')[-1].replace('b', 'cc').center(9) }}"
        "{{ [3, 1] | sort | first }}{{ messages | rejectattr('role', 'in', ['user']) | list | length }}"
        "{{ ('a' ~ 1) in 'ba1' }}",
        REQUESTS["turns"],
    ),
    "content that is left out": (
        "{% for m in messages %}{{ 'content' in m }}{{ m.content is defined }}{{ m.get('content', '-') }}"
        "{{ m.content is none }}{% endfor %}{# tool_calls #}",
        {
            "messages": [
                *USER,
                {"role": "assistant", "content": None, "tool_calls": CALLS},
                {"role": "assistant", "content": ""},
            ]
        },
    ),
    "names of reasoning": (
        "{% for m in messages %}{{ m.reasoning_content }}|{{ m.thinking }};{% endfor %}",
        {
            "messages": [
                *USER,
                {"role": "assistant", "content": "a", "thinking": "b"},
                {"role": "assistant", "content": "c", "reasoning_content": "d"},
            ]
        },
    ),
    "continued and stripped": (
        "{% for m in messages %}<{{ m.content | trim }}>{% endfor %}",
        {"messages": [*USER, {"role": "assistant", "content": "so \n"}], "continue_final_message": True},
    ),
    "named without tools": (
        [{"name": "tool_use", "template": "b"}, {"name": "default", "template": "a"}],
        REQUESTS["user"],
    ),
    "named by an object": (
        {"default": "a{{ messages[0].content }}", "tool_use": "b{{ tools | length }}"},
        REQUESTS["tools"],
    ),
    "named without a default": ([{"name": "tool_use", "template": "b"}], REQUESTS["user"]),
    "no template": ("{% if %}", REQUESTS["user"]),
    "a failure": ("{{ messages.absent.deeper }}", REQUESTS["user"]),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["hello there"], trainer)
    whole = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>", sep_token="<sep>"
    )
    path = tmp_path_factory.mktemp("tokenizer")
    whole.save_pretrained(path)
    return path


def of_transformers(folder: Path, request: dict[str, Any]) -> str:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    messages = json.loads(json.dumps(request["messages"]))
    for call in [call for message in messages for call in message.get("tool_calls", ())]:
        call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    continued = request.get("continue_final_message", False)
    try:
        ids = tokenizer.apply_chat_template(
            messages, tools=request.get("tools"), documents=request.get("documents"), return_dict=False,
            add_generation_prompt=request.get("add_generation_prompt", not continued), continue_final_message=continued,
            **request.get("chat_template_kwargs", {}),
        )  # fmt: skip
    except (jinja2.TemplateError, TypeError, ValueError):
        return "refused"
    return tokenizer.decode(ids)


def of_weft(folder: Path, request: dict[str, Any]) -> str:
    files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    ids = prompt_of(files, request)
    return "refused" if ids is None else PreTrainedTokenizerFast.from_pretrained(folder).decode(ids)


def in_config(folder: Path, template: Any, path: Path) -> Path:
    config = json.loads((folder / "tokenizer_config.json").read_text()) | {"chat_template": template}
    (path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize(
    ("family", "asked"),
    [
        (family, asked)
        for family, template in FAMILIES.items()
        for asked, request in REQUESTS.items()
        # Else the gateway shows tools and calls, and transformers does not.
        if "tools" not in request or ("tools" in str(template) and (asked != "called" or "tool_calls" in str(template)))
        if "tools" not in request or family not in ELSEWHERE or family == "granite-3"
    ],
)
def test_a_familys_template_renders_as_in_transformers(family: str, asked: str, folder: Path, tmp_path: Path) -> None:
    place, request = in_config(folder, FAMILIES[family], tmp_path), REQUESTS[asked]
    variables = request.get("chat_template_kwargs", {})  # others are refused
    request = request | {"chat_template_kwargs": {k: v for k, v in variables.items() if k in str(FAMILIES[family])}}
    assert of_weft(place, request) == of_transformers(place, request)


@pytest.mark.parametrize("family", ELSEWHERE)
def test_tools_and_calls_are_where_a_familys_template_takes_them(family: str, folder: Path, tmp_path: Path) -> None:
    """A call is the family's text, with its marks as tokens."""
    place, call = in_config(folder, FAMILIES[family], tmp_path), CALLS[0]
    arguments = call["function"]["arguments"]
    text = WRITTEN[family] % arguments if "%" in WRITTEN[family] else WRITTEN[family]
    turns = [*USER, {"role": "assistant", "content": text}, *TURNS[3:]]
    called = [*USER, {"role": "assistant", "content": None, "tool_calls": [call]}, *TURNS[3:]]
    given = {"messages": [SYSTEM[0]]} | ELSEWHERE[family]
    theirs = given | {"messages": [*given["messages"], *turns]}
    assert of_weft(place, {"messages": [SYSTEM[0], *called], "tools": [TOOL]}) == of_transformers(place, theirs)


@pytest.mark.parametrize(
    ("family", "asked"),
    [
        ("granite-3", {"documents": [{"doc_id": 1, "text": "a"}, {"doc_id": 2, "text": "b"}]}),
        ("granite-3", {"chat_template_kwargs": {"thinking": True}}),
        ("granite-3", {"chat_template_kwargs": {"controls": {"length": "short"}}}),
        ("granite-4", {"documents": [{"text": "a"}], "tools": [TOOL]}),
        ("smollm3", {"chat_template_kwargs": {"enable_thinking": False}}),
        ("smollm3", {"chat_template_kwargs": {"python_tools": ["def f(): ..."]}}),
        ("smollm3", {"messages": [{"role": "system", "content": "brief /no_think"}, *USER]}),
        ("smollm3", {"messages": [{"role": "system", "content": "brief /system_override"}, *USER]}),
    ],
)
def test_what_a_family_has_beside_turns_renders_as_in_transformers(
    family: str, asked: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    place, request = in_config(folder, FAMILIES[family], tmp_path), {"messages": USER} | asked
    assert of_weft(place, request) == of_transformers(place, request)


@pytest.mark.parametrize("family", ["gemma3", "phi", "phi-4", "olmo-2"])
def test_results_of_tools_are_turns_of_the_user_where_a_template_would_drop_or_refuse_them(
    family: str, folder: Path, tmp_path: Path
) -> None:
    place = in_config(folder, FAMILIES[family], tmp_path)
    result = "<tool_response>\nrain\n</tool_response>\n<tool_response>\nsun\n</tool_response>"
    answer = {"role": "assistant", "content": "hi"}
    theirs = {"messages": [*USER, answer, {"role": "user", "content": result}]}
    assert of_weft(place, {"messages": [*USER, answer, *CALLED[2:]]}) == of_transformers(place, theirs)


def of(**content_by_role: str) -> list[dict[str, Any]]:
    """Messages in their order; a number behind a role tells two of one role apart."""
    return [{"role": role.rstrip("0123456789"), "content": content} for role, content in content_by_role.items()]


@pytest.mark.parametrize("family", ["qwen3.5", "gemma3", "llama2"])
@pytest.mark.parametrize(
    ("messages", "folded"),
    [
        (of(system="a", developer="b", user="c"), of(system="a\n\nb", user="c")),
        (
            of(user="a", system="b", assistant="c", user2="d"),
            of(user="a\n\n<system>\nb\n</system>", assistant="c", user2="d"),
        ),
        (
            of(system="a", user="b", assistant="c", developer="d", system2="e", user2="f"),
            of(system="a", user="b", assistant="c", user2="<system>\nd\n</system>\n\n<system>\ne\n</system>\n\nf"),
        ),
        (
            of(user="a", assistant="b", system="c", assistant2="d"),
            of(user="a", assistant="b", user2="<system>\nc\n</system>", assistant2="d"),
        ),
    ],
)
def test_later_system_messages_are_folded_where_a_template_refuses_them(
    family: str, messages: list[dict[str, Any]], folded: list[dict[str, Any]], folder: Path, tmp_path: Path
) -> None:
    place = in_config(folder, FAMILIES[family], tmp_path)
    assert of_weft(place, {"messages": messages}) == of_transformers(place, {"messages": folded}) != "refused"


@pytest.mark.parametrize("family", ["qwen3.5", "mistral"])
def test_a_system_message_behind_a_result_joins_it(family: str, folder: Path, tmp_path: Path) -> None:
    """A turn of the user there would end the chain of calls: templates refuse it, or drop earlier reasoning."""
    place = in_config(folder, FAMILIES[family], tmp_path)
    joined = {**CALLED[-1], "content": "sun\n\n<system>\nc\n</system>"}
    ours = of_weft(place, {"messages": [*CALLED, *of(system="c")]})
    assert ours == of_transformers(place, {"messages": [*CALLED[:-1], joined]}) != "refused"


@pytest.mark.parametrize("family", ["qwen3", "llama3.1", "chatml"])
def test_later_system_messages_stay_where_a_template_takes_them(family: str, folder: Path, tmp_path: Path) -> None:
    place, request = in_config(folder, FAMILIES[family], tmp_path), {"messages": of(system="a", user="b", system2="c")}
    assert of_weft(place, request) == of_transformers(place, request) != "refused"


def test_what_a_template_refuses_after_folding_is_refused(folder: Path, tmp_path: Path) -> None:
    place = in_config(folder, FAMILIES["gemma3"], tmp_path)
    assert of_weft(place, {"messages": of(user="a", user2="b", system="c")}) == "refused"


@pytest.mark.parametrize("name", CONSTRUCTS)
def test_a_construct_renders_as_in_transformers(name: str, folder: Path, tmp_path: Path) -> None:
    template, request = CONSTRUCTS[name]
    place = in_config(folder, template, tmp_path)
    assert of_weft(place, request) == of_transformers(place, request)


@pytest.mark.parametrize("request_", [REQUESTS["user"], REQUESTS["tools"]])
def test_files_of_templates_come_before_the_configuration(request_: Any, folder: Path, tmp_path: Path) -> None:
    place = in_config(folder, "c", tmp_path)
    (place / "chat_template.jinja").write_text("a{{ messages[0].content }}")
    (place / NAMED_FILE).parent.mkdir()
    (place / NAMED_FILE).write_text("b{{ tools | length }}")
    assert of_weft(place, request_) == of_transformers(place, request_)
