"""Several choices and the command line, with the real client and a real model."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from weft_stage.stack import Stack

pytestmark = pytest.mark.slow

BASE = "weft-quickstart"
SAMPLED: dict[str, Any] = {"model": BASE, "prompt": "qzx jkv wvu", "temperature": 2.0, "max_tokens": 40, "seed": 5}


@pytest.fixture(scope="module")
def client(stack: Stack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def texts(client: openai.OpenAI, **changes: Any) -> list[str]:
    return [choice.text for choice in client.completions.create(**SAMPLED | changes).choices]


def test_choices_are_drawn_apart_repeat_under_their_seed_and_do_not_depend_on_how_many_there_are(
    client: openai.OpenAI,
) -> None:
    eight = texts(client, n=8)
    assert len(set(eight)) > 1
    assert texts(client, n=8) == eight
    assert texts(client, n=3) == eight[:3]
    assert texts(client) == eight[:1]


def test_streamed_choices_are_the_whole_ones(client: openai.OpenAI) -> None:
    found = ["", "", ""]
    stream = client.completions.create(**SAMPLED, n=3, stream=True, stream_options={"include_usage": True})
    usage = None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            found[choice.index] += choice.text
    whole = client.completions.create(**SAMPLED, n=3)
    assert found == [choice.text for choice in whole.choices]
    assert usage == whole.usage


def test_chat_and_top_work_from_the_command_line(stack: Stack) -> None:
    assert stack.cli("chat", "acme/upper", "hello there", "--temperature", "0").stdout == "HELLO THERE\n"
    assert stack.cli("chat", "acme/upper", "--temperature", "0", stdin="hello\n").stdout == "HELLO\n"
    refused = stack.cli("chat", "acme/absent", "hello", check=False)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "acme/absent" in refused.stderr
    shown = stack.cli("top", "--interval", "0.2").stdout
    assert "1 of 1 runners ready" in shown
    assert "acme/upper" in shown, "it was just used, so it is on the device"
