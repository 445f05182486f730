"""Tokenizers of the shapes of public families: prompts and answers are transformers' own, grammars see their bytes."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from harness.tokenizer_shapes import SHAPES
from weft.chat_template import Chat
from weft_gateway.core import Detokeniser
from weft_gateway.shell import ModelTokenizer
from weft_runner.model import Grammars

EACH = pytest.mark.parametrize("family", SHAPES)
PIECES = [
    "hello",
    " there",
    "  ",
    "   ",
    "\n",
    "\n\n\n",
    "<b>",
    "</td>",
    "<s>",
    "é",
    "東京",
    "\N{SLIGHTLY SMILING FACE}",
    "12",
    ".",
]
texts = st.lists(st.sampled_from(PIECES), max_size=12).map("".join)


@cache
def made(family: str) -> tuple[ModelTokenizer, Any]:
    shape = SHAPES[family]
    built = shape.build()
    model = ModelTokenizer({"tokenizer.json": built.to_str().encode(), "tokenizer_config.json": b"{}"})
    return model, PreTrainedTokenizerFast(tokenizer_object=built, eos_token=shape.eos)


@EACH
@given(text=texts)
def test_a_raw_prompt_has_the_tokens_of_transformers(family: str, text: str) -> None:
    model, theirs = made(family)
    assert model.encode(text) == theirs(text).input_ids


@EACH
@given(text=texts, ends=st.booleans())
def test_an_answers_text_is_that_of_transformers_behind_its_prompt(family: str, text: str, ends: bool) -> None:
    model, theirs = made(family)
    prompt, answer = theirs("hello").input_ids, theirs(text, add_special_tokens=False).input_ids
    answer += [theirs.eos_token_id] * ends
    stream = Detokeniser(model.bytes_of)
    streamed = "".join([*map(stream.push, answer), stream.flush()])
    behind = theirs.decode(prompt + answer, skip_special_tokens=True)
    assert streamed == model.decode(answer) == behind.removeprefix(theirs.decode(prompt, skip_special_tokens=True))


@EACH
@given(text=texts)
def test_a_chat_has_the_tokens_of_transformers(family: str, text: str) -> None:
    """What spells a special token is no special token, which transformers makes it."""
    built, theirs = made(family)
    turn = SHAPES[family].special[-1]
    text = "".join(piece for piece in (text.split("<s>") if family != "gemma" else [text]))
    theirs.chat_template = f"{{% for m in messages %}}{turn}{{{{ m.role }}}}\n{{{{ m.content }}}}{turn}\n{{% endfor %}}"
    config = json.dumps({"chat_template": theirs.chat_template}).encode()
    model = built.with_template_of({"tokenizer_config.json": config})
    messages = [{"role": "user", "content": text}, {"role": "assistant", "content": f" {text}."}]
    assert model.encode_chat(Chat(messages)) == theirs.apply_chat_template(messages, return_dict=False)


@EACH
def test_the_bytes_of_a_token_are_those_that_its_grammars_see(family: str, tmp_path: Path) -> None:
    built = SHAPES[family].build()
    path = tmp_path / "tokenizer.json"
    path.write_text(built.to_str())
    model, theirs = made(family)
    seen = Grammars(path, model.vocab_size, frozenset({theirs.eos_token_id})).prepare()
    ids = [i for i in range(model.vocab_size) if model.bytes_of(i) != b"\xff"]  # in no text; a mark of llguidance
    assert {i: seen.decode_bytes([i]) for i in ids} == {i: model.spelled_bytes_of(i) for i in ids}
