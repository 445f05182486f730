"""The quickstart's model under transformers and peft: its demos, a long sentence, and its tokenizer and template."""

import json
from typing import Any

import pytest
from transformers import AutoTokenizer

from harness.oracle import smallest_gap
from harness.quickstart import BASE, DEMO, QUICKSTART, TASK_OF, Case, tasks, tokenizer

MODEL = QUICKSTART / "model"
SURE = 0.5  # of the two best logits: no other order of summation answers otherwise
LONG_SENTENCE = (
    "The quick brown fox jumps over 13 lazy dogs, then Weft copies every single letter of this long line once more."
)
CHAT = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "first"},
    {"role": "assistant", "content": "first"},
    {"role": "user", "content": "hello you"},
]


@pytest.fixture(scope="module")
def wrapped() -> Any:
    return AutoTokenizer.from_pretrained(MODEL)


def right(name: str, prompt: str) -> Case:
    return Case(name, prompt, tasks().expected(TASK_OF[name], prompt))


@pytest.mark.parametrize("case", DEMO, ids=lambda case: case.model)
def test_a_demo_gives_what_it_promises(case: Case) -> None:
    assert smallest_gap(case) > SURE


def test_one_prompt_gets_another_answer_from_every_model() -> None:
    cases = [right(name, "Weft serves 6 adapters on 1 model") for name in TASK_OF]
    assert all(smallest_gap(case) > SURE for case in cases)
    assert len({case.expect for case in cases}) == len(cases) == len(DEMO)


@pytest.mark.parametrize("name", [BASE, "acme/upper", "acme/reverse-words", "initech/cipher"])
def test_a_long_sentence_is_answered_to_the_last_character(name: str) -> None:
    assert smallest_gap(right(name, LONG_SENTENCE)) > SURE


@pytest.mark.parametrize("text", ["".join(tasks().ALPHABET), " two  spaces , and 's", "a\nb", "x", "naïve 日本 🙂"])
def test_transformers_reads_and_writes_the_same_tokens(wrapped: Any, text: str) -> None:
    ids = tokenizer().encode(text).ids
    assert wrapped(text)["input_ids"] == ids
    assert wrapped.decode(ids, skip_special_tokens=True) == text


def test_transformers_renders_the_same_chat(wrapped: Any) -> None:
    assert json.loads((MODEL / "tokenizer_config.json").read_text())["chat_template"]
    assert wrapped.apply_chat_template(CHAT, tokenize=False) == "<s>hello you<sep>"
