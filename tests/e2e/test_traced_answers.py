"""A stack whose runner follows a trace: answers end where a table says, others where the model ends them."""

import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from harness.quickstart import tokenizer
from harness.waiting import PATIENCE_S
from weft_stage.stack import Stack, quickstart
from weft_stage.trace_executor import TracedAnswer, trace_up, write_table

pytestmark = pytest.mark.slow

PROMPT = "hello there"
LENGTHS = {11: 1, 12: 3, 13: 150}


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    table = tmp_path_factory.mktemp("t") / "table"
    prompt_tokens = complete_tokens(PROMPT)
    write_table(table, (TracedAnswer(seed, prompt_tokens, tokens) for seed, tokens in LENGTHS.items()))
    up = trace_up(table)
    with Stack(quickstart(), tmp_path_factory.mktemp("w"), up=up) as made:
        made.wait_for_models()
        yield made


def complete_tokens(text: str) -> int:
    return len(tokenizer().encode(text).ids)


def complete(stack: Stack, **more: Any) -> tuple[str, int, int]:
    """Why an answer ended, and the tokens of prompt and answer."""
    body = {"model": "acme/upper", "prompt": PROMPT, "max_tokens": 500, "temperature": 0, **more}
    request = urllib.request.Request(
        f"{stack.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as found:
        answer = json.load(found)
    return answer["choices"][0]["finish_reason"], answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]


def test_answers_have_the_lengths_of_the_table(traced: Stack) -> None:
    expected = complete_tokens(PROMPT)
    assert {seed: complete(traced, seed=seed) for seed in LENGTHS} == {
        seed: ("stop", expected, tokens) for seed, tokens in LENGTHS.items()
    }


def test_an_answer_without_a_row_ends_as_the_model_ends_it(traced: Stack) -> None:
    reason, _, tokens = complete(traced, seed=99)
    assert reason == "stop"
    assert 1 < tokens < 100
