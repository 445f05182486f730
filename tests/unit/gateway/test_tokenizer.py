"""Prompts: equal to what the tokenizer and its template make, and a user cannot type a control token."""

import contextlib
import json
from dataclasses import replace
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models, normalizers

from harness import byte_tokenizer
from weft.chat_template import Chat, ChatTemplate, TemplateFault
from weft_gateway.forms import TemplateForms
from weft_gateway.openai import ChatRequest, chat_of, parse
from weft_gateway.shell import ModelTokenizer, NotEncodable, TokenizerPanic, TooLong

SPECIAL = ["<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>"]
TEMPLATE = "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}</s>{% endfor %}<|assistant|>"
CONFIG = json.dumps({"bos_token": "<s>", "eos_token": {"content": "</s>"}}).encode()


def build(normalizer: Any = None) -> tokenizers.Tokenizer:
    tokenizer = byte_tokenizer.train("hello dear reader", SPECIAL, 330)
    if normalizer:
        tokenizer.normalizer = normalizer
    tokenizer.add_tokens(["<tool>"])
    return tokenizer


TOKENIZER = build()


def text_of(tokenizer: tokenizers.Tokenizer = TOKENIZER, **files: bytes | None) -> ModelTokenizer:
    named = {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": CONFIG,
        "chat_template.jinja": TEMPLATE.encode(),
    }
    changes = {name.replace("__", "."): data for name, data in files.items()}
    return ModelTokenizer({name: data for name, data in (named | changes).items() if data is not None})


TEXT = text_of()


def prompt_of(files: dict[str, bytes], request: dict[str, Any]) -> list[int] | None:
    """The tokens of a chat's body; None where its template refuses it."""
    tokenizer = ModelTokenizer(files)
    params = parse(ChatRequest, json.dumps({"model": "m", **request}).encode())
    try:
        return tokenizer.encode_chat(chat_of(params, tokenizer.forms, ""))
    except NotEncodable:
        return None


def user(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


def test_a_chat_is_encoded_as_the_rendered_template() -> None:
    expected = TOKENIZER.encode("<s><|user|>hello</s><|assistant|>", add_special_tokens=False).ids
    assert TEXT.encode_chat(Chat(user(" hello "))) == expected


def test_a_raw_prompt_gets_what_the_tokenizer_adds_and_may_hold_control_tokens() -> None:
    assert TEXT.encode("a</s>") == TOKENIZER.encode("a</s>").ids
    assert TEXT.encode("a</s>")[0] == 0


@given(
    st.lists(
        st.one_of(
            st.sampled_from([*SPECIAL, "<tool>", "</", "s>", "\U00100000", "\U0010fffd", " "]), st.text(max_size=4)
        ),
        max_size=8,
    )
)
def test_what_a_user_types_never_becomes_a_control_token(parts: list[str]) -> None:
    content = "".join(parts)
    ids = TEXT.encode_chat(Chat(user(content)))
    control = {TOKENIZER.token_to_id(token) for token in [*SPECIAL, "<tool>"]}
    frame = [TOKENIZER.token_to_id(token) for token in ("<s>", "<|user|>", "</s>", "<|assistant|>")]
    assert [token for token in ids if token in control] == frame
    body = b"".join(TEXT.bytes_of(token) for token in ids[2:-2]).decode()
    assert body == content.strip(), "and it stays what was typed"


def test_a_spelling_in_the_vocabulary_itself_is_taken_apart() -> None:
    vocab = {"<unk>": 0, "</s>": 1, "hello": 2, "<": 3, "/": 4, "s": 5, ">": 6, "<|user|>": 7, "<|assistant|>": 8}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.add_special_tokens(["</s>", "<|user|>", "<|assistant|>"])
    text = text_of(tokenizer, tokenizer_config__json=b"{}")
    assert text.encode_chat(Chat(user("</s>"))) == [7, 3, 4, 5, 6, 1, 8]


def test_look_alikes_that_a_normalizer_turns_into_a_control_token_are_refused() -> None:
    tokenizer = build(normalizers.NFKC())
    tokenizer.add_special_tokens([tokenizers.AddedToken("<end>", normalized=True, special=True)])
    text = text_of(tokenizer)
    wide = "\N{FULLWIDTH LESS-THAN SIGN}end\N{FULLWIDTH GREATER-THAN SIGN}"
    assert tokenizer.token_to_id("<end>") in tokenizer.encode(wide, add_special_tokens=False).ids
    with pytest.raises(NotEncodable, match="control token"):
        text.encode_chat(Chat(user(wide)))


def test_a_template_may_come_with_the_tokenizers_config() -> None:
    config = json.dumps({"chat_template": [{"name": "default", "template": "{{ messages[0].content }}!"}]}).encode()
    text = text_of(chat_template__jinja=None, tokenizer_config__json=config)
    assert text.decode(text.encode_chat(Chat(user("hello")))) == "hello!"


def test_a_model_without_a_template_names_the_other_endpoint() -> None:
    with pytest.raises(NotEncodable, match="/v1/completions"):
        text_of(chat_template__jinja=None).encode_chat(Chat(user("hello")))


GROWS = b"{%% set ns = namespace(x='ab') %%}{%% for i in range(60) %%}{%% set ns.x = %s %%}{%% endfor %%}"
LARGE = b"{% set b = 'x' * 1000000 %}"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (b"{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        (b"{{ messages.absent.deeper }}", "no attribute"),
        (b"{{ messages.__class__.__mro__ }}", "unsafe"),
        (b"{{ messages.append(1) }}", "unsafe"),
        (b"{% for i in range(1000000) %}{% endfor %}", "Range too big"),
        (b"{{ 1 // 0 }}", "zero"),
        (b"{% for i in range(90000) %}{% for k in range(90000) %}{% endfor %}{% endfor %}", "more than 20000 steps"),
        (b"{% macro f(n) %}{{ f(n - 1) ~ f(n - 1) if n }}{% endmacro %}{{ f(60) }}", "more than 20000 steps"),
        (b"{{ 'x' * 1000000000 }}", "a product beyond"),
        (b"{{ 9 ** 9 ** 9 }}", "a power"),
        *(
            (GROWS % step, "a value beyond|20000 steps")
            for step in (b"ns.x ~ ns.x", b"ns.x + ns.x", b"[ns.x, ns.x]", b"dict(a=ns.x, b=ns.x)")
        ),
        (LARGE + b"{{ b.replace('x', b) }}", "a product beyond"),
        (LARGE + b"{{ b | replace('x', b) }}", "a product beyond"),
        (LARGE + b"{{ range(99) | map('string') | join(b) }}", "a product beyond"),
        (LARGE + b"{{ b.join('x' * 99) }}", "a product beyond"),
        (LARGE + b"{{ ('{0}' * 99).format(b) }}", "a product beyond"),
        (LARGE + b"{{ [b] | tojson(indent=99) }}", "a product beyond"),
        (LARGE + b"{{ b | sort }}", "a product beyond"),
        (LARGE + b"{% for i in range(9) %}{% if 'y' in b %}{% endif %}{% endfor %}", "more than 20000 steps"),
        (LARGE + b"{% for i in range(9) %}{{ b.find('y') }}{% endfor %}", "more than 20000 steps"),
        (LARGE + b"{% set y %}{% for i in range(9) %}{{ b }}{% endfor %}{% endset %}", "more than 20000 steps"),
        (
            b"{% macro f() %}{% for i in range(9000) %}" + b"y" * 9000 + b"{% endfor %}{% endmacro %}{{ f() }}",
            "more than",
        ),
        (b"{{ range(90000) | map('string') | list }}", "more than 20000 steps"),
        (b"{{ 'x' | center(1000000000) }}", "a number beyond"),
        (b"{{ (1).to_bytes(1000000000, 'big') }}", "a number beyond"),
        (b"{{ 1.5 | round(99) }}", "'99' for round"),
        (b"{{ ('f' * 999) | int(0, 16) }}", "a value beyond"),
        (b"{{ [[1], [2]] | sum(start=[]) }}", "no numbers"),
        *(
            (b"{{ " + form + b" }}", "too wide")
            for form in (b"'%99999d' % 1", b"'%*d' % (9, 1)", b"'{:99999}'.format(1)", b"'{:{}}'.format(1, 9)")
        ),
        (b"{{ lipsum() }}", "undefined"),
        (b"{% set ns = namespace(_a=1) %}", "underscore"),
    ],
)
def test_a_template_that_refuses_or_misbehaves_is_the_requests_error(
    template: bytes, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft.chat_template.MAX_STEPS", 20_000)
    with pytest.raises(NotEncodable, match=reason):
        text_of(chat_template__jinja=template).encode_chat(Chat(user("hello")))


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (b"{% if %}", "line 1 of the chat template: Expected an expression"),
        (b"{% break %}", "cannot be compiled"),
        (b"\xff", "no text in UTF-8"),
        (b"x" * (1 << 19), "the limit is"),
        (b"{{ messages.absent.deeper }}", "no attribute"),
    ],
)
def test_a_fault_of_a_template_is_one_of_chats_alone_and_has_a_name(template: bytes, reason: str) -> None:
    text = text_of(chat_template__jinja=template)
    assert text.encode("hello") == TEXT.encode("hello")
    with pytest.raises(NotEncodable, match=reason) as raised:
        text.encode_chat(Chat(user("hello")))
    assert raised.value.code == "chat_template_error"


@pytest.mark.parametrize(
    ("template", "fault"),
    [
        (TEMPLATE, ""),
        ("{{ raise_exception('no') }}", ""),
        ("{{ messages.absent.deeper }}", "no attribute"),
        ("{% for i in range(900) %}{% for k in range(900) %}{% endfor %}{% endfor %}", "steps"),
    ],
)
def test_the_smallest_conversation_shows_a_fault(template: str, fault: str) -> None:
    found = contextlib.nullcontext() if not fault else pytest.raises(TemplateFault, match=fault)
    with found:
        ChatTemplate(template, {}).check()


def test_a_template_that_wants_texts_as_parts_gets_them() -> None:
    parts = b"{% for m in messages %}{% for p in m.content %}{{ p.text if p.type == 'text' }}{% endfor %}{% endfor %}"
    text = text_of(chat_template__jinja=parts)
    chat = Chat([*user("hello"), {"role": "assistant", "content": "dear"}], continue_final_message=True)
    assert text.decode(text.encode_chat(chat)) == "hellodear"


def test_an_earlier_answer_alone_shows_what_its_template_looks_for() -> None:
    template = b"{% for m in messages %}{{ m.content.split('<tool>')[-1] }}{% endfor %}"
    answer = {"role": "assistant", "content": "hello<tool></s>dear"}
    text = text_of(chat_template__jinja=template)
    ids = text.encode_chat(Chat([*user("reader<tool>"), answer]))
    assert text.decode(ids) == "reader<tool></s>dear"
    assert not {1, TOKENIZER.token_to_id("<tool>")} & {*ids}


def test_the_answers_text_is_the_tokenizers() -> None:
    typed = "hello \N{SLIGHTLY SMILING FACE}"
    assert TEXT.decode(TOKENIZER.encode(typed, add_special_tokens=False).ids) == typed
    assert TEXT.bytes_of(TOKENIZER.token_to_id("</s>")) == b""
    assert TEXT.bytes_of(10**6) == b""
    some = [*TOKENIZER.encode(f"<s>{typed}</s>").ids, 10**6]
    assert TEXT.spelled(some) == TOKENIZER.decode(some, skip_special_tokens=False)


@pytest.mark.parametrize(
    ("name", "data"), [("tokenizer__json", b"{"), ("tokenizer__json", b"\xff"), ("tokenizer_config__json", b"[]")]
)
def test_files_that_are_no_tokenizer_are_a_value_error(name: str, data: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 (the library words it)
        text_of(**{name: data})


def test_a_tokenizer_with_trainings_truncation_and_padding_encodes_whole_texts() -> None:
    tokenizer = build()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    assert text_of(tokenizer).encode("hello " * 20) == TOKENIZER.encode("hello " * 20).ids


# ---------------------------------------------------------------- bounds


def test_a_text_that_no_context_could_hold_is_refused_before_it_is_encoded() -> None:
    longest = TEXT.max_chars(8)
    assert longest >= 8 * max(map(len, TOKENIZER.get_vocab())), "a prompt that could fit is always tried"
    with pytest.raises(TooLong, match=rf"maximum context length is 8 tokens\. .* of {longest + 1} characters"):
        TEXT.encode("x" * (longest + 1), 8)
    with pytest.raises(TooLong, match="length is 8 tokens"):
        TEXT.encode_chat(Chat(user("x" * longest) + user("x")), 8)
    assert TEXT.encode("x" * longest, 8)


def test_a_template_cannot_make_more_text_than_the_bound() -> None:
    text = text_of(chat_template__jinja=b"{% for i in range(90000) %}{{ messages[0].content }}{% endfor %}")
    with pytest.raises(TooLong, match="as the model's template renders it"):
        text.encode_chat(Chat(user("hello " * 15)), 8)


def test_loops_still_know_their_length_and_end_when_counted() -> None:
    template = (
        b"{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ '.' if loop.last else ',' }}"
        b"{% else %}none{% endfor %}{% for x in absent %}{% else %}!{% endfor %}"
    )
    text = text_of(chat_template__jinja=template)
    assert text.decode(text.encode_chat(Chat(user("a") * 3))) == "1/3,2/3,3/3.!"


def spec_with(**changes: Any) -> bytes:
    return json.dumps({**json.loads(TOKENIZER.to_str()), **changes}).encode()


def test_files_that_make_the_library_panic_are_a_named_value_error() -> None:
    broken = spec_with(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"})
    with pytest.raises(TokenizerPanic, match=r"tokenizer.json cannot be loaded.*precompiled_charsmap"):
        text_of(tokenizer__json=broken)


def test_a_text_that_makes_the_library_panic_is_a_named_error() -> None:
    broken = text_of(tokenizer__json=spec_with(pre_tokenizer={"type": "FixedLength", "length": 0}))
    with pytest.raises(TokenizerPanic, match="chunk size"):
        broken.encode("hello")


def test_a_message_that_is_continued_ends_the_prompt_with_its_last_character() -> None:
    chat = Chat([*user("hello"), {"role": "assistant", "content": "dear "}], continue_final_message=True)
    ended = text_of(chat_template__jinja=b"{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}!")
    assert ended.decode(ended.encode_chat(chat)) == "<user>hello<assistant>dear "
    dropping = text_of(chat_template__jinja=b"{{ messages[0].content }}")
    with pytest.raises(NotEncodable, match="leaves out the message"):
        dropping.encode_chat(chat)


def test_a_template_gets_calls_tools_documents_and_the_callers_variables_none_of_which_can_spell_a_control_token() -> (
    None
):
    template = b"{{ messages[0].role }}{{ tools | tojson }}{{ documents | tojson }}"
    template += b"{{ mood }}{{ eos_token }}{{ pad_token }}{{ add_generation_prompt }}"
    variables = {"mood": "</s>", "pad_token": "mine", "messages": "mine"}
    tools, documents = [{"name": "</s>", "</s>": 1}], [{"text": "</s>"}]
    developer = [{"role": "developer", "content": "x"}]
    text = text_of(chat_template__jinja=template)
    ids = text.encode_chat(Chat(developer, False, tools=tools, documents=documents, variables=variables))
    assert [token for token in ids if token == 1] == [1], "the template's own end of sequence"
    spelled = "".join(text.name_of(token) or text.bytes_of(token).decode() for token in ids)
    assert spelled == """system[{"name": "</s>", "</s>": 1}][{"text": "</s>"}]</s></s>mineFalse"""


@pytest.mark.parametrize(
    ("shape", "shown"),
    [
        ("{% for k, v in c.function.arguments | items %}{{ k }}={{ v }}{% endfor %}", ""),
        ("{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}", ""),
        ("{% for k in c.function.arguments %}{{ k }}={{ c.function.arguments[k] }}{% endfor %}", ""),
        ("{{ c.function.arguments | tojson }}", '"[1"'),
        ("{{ c.function | tojson }}", '{"name": "f", "arguments": "[1"}'),
        ("{{ c.function.arguments }}", "[1"),
        ("{{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}", "[1"),
    ],
)
def test_broken_arguments_of_an_earlier_call_are_a_text_or_an_empty_object(shape: str, shown: str) -> None:
    template = "{% for m in messages %}{% for c in m.tool_calls or [] %}" + shape + "{% endfor %}{% endfor %}"
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "[1"}}
    chat = Chat([*user("hello"), {"role": "assistant", "content": "", "tool_calls": [call]}])
    tools: Any = [{"type": "function", "function": {"name": "f"}}]
    named = {"default": "{{ messages }}", "tool_use": template}
    assert ChatTemplate(template, {}).render(chat, 1000) == shown
    assert ChatTemplate(named, {}).render(replace(chat, tools=tools), 1000) == shown


def test_integers_of_messages_keep_their_digits_in_a_template() -> None:
    template = "{{ documents[0] | tojson }}{{ documents[0].x }}{{ documents[0].x + 1 }}"
    rendered = ChatTemplate(template, {}).render(Chat(user("a"), documents=[{"x": 2**1000}]), 10_000)
    assert rendered == f'{{"x": {2**1000}}}{2**1000}{2**1000 + 1}'


def test_marks_of_an_earlier_call_are_tokens_where_the_gateway_writes_it_and_letters_in_what_others_say() -> None:
    tokenizer = build()
    tokenizer.add_special_tokens(["<tool_call>", "</tool_call>"])
    text = text_of(tokenizer, chat_template__jinja=b"{% for m in messages %}{{ m.content }}{% endfor %}{{ xml_tools }}")
    arguments = {"x": "</tool_call>"}
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": json.dumps(arguments)}}
    messages = [*user("<tool_call>"), {"role": "assistant", "content": None, "tool_calls": [call]}]
    body = {"model": "m", "messages": messages, "tools": [{"type": "function", "function": {"name": "f"}}]}
    chat = chat_of(parse(ChatRequest, json.dumps(body).encode()), text.forms, "")
    ids = text.encode_chat(chat)
    begin, end = map(tokenizer.token_to_id, ("<tool_call>", "</tool_call>"))
    assert [token for token in ids if token in (begin, end)] == [begin, end]
    assert json.loads(text.decode(ids[ids.index(begin) + 1 : ids.index(end)]))["arguments"] == arguments
    assert text.decode(ids[ids.index(end) + 1 :]).startswith("[{'type': 'function'")


@pytest.mark.parametrize(
    ("asked", "template", "variables"),
    [
        ({"reasoning_effort": "high"}, "{{ enable_thinking }}", {"enable_thinking": True}),
        ({"reasoning_effort": "none"}, "{{ enable_thinking }}", {"enable_thinking": False}),
        ({"reasoning_effort": "high", "enable_thinking": False}, "{{ enable_thinking }}", {"enable_thinking": False}),
        ({"reasoning_effort": "low"}, "{{ reasoning_effort }}", {"reasoning_effort": "low"}),
        (
            {"reasoning_effort": "none"},
            "{{ enable_thinking }}{{ reasoning_effort }}",
            {"enable_thinking": False, "reasoning_effort": "none"},
        ),
        ({"reasoning_effort": "high"}, "", {}),
        ({"reasoning_effort": "high"}, "{{ thinking }}", {"thinking": True}),  # Granite 3
        ({"enable_thinking": False}, "{{ thinking }}", {"thinking": False}),
        ({"reasoning_effort": "high"}, "thinking, enable_thinking", {}),
    ],
)
def test_a_degree_of_effort_is_what_the_template_reads(
    asked: dict[str, Any], template: str, variables: dict[str, Any]
) -> None:
    params = parse(ChatRequest, json.dumps({"model": "m", "messages": user("hello"), **asked}).encode())
    assert chat_of(params, TemplateForms.of_template(ChatTemplate(template, {})), "").variables == variables


def test_bad_words_are_banned_at_the_beginning_and_behind_a_space() -> None:
    spelled = [b"".join(map(TEXT.bytes_of, tokens)) for tokens in TEXT.sequences_of(["hello", " dear"])]
    assert spelled == [b"hello", b" hello", b" dear"]
