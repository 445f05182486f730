"""Forms of answers, from the official client to the runner."""

from typing import Any

import openai
import pytest

from .conftest import World

HELLO: Any = [{"role": "user", "content": "hello"}]
OBJECT: Any = {"type": "json_object"}


async def test_the_grammar_of_a_form_reaches_the_runner_and_no_other_does(world: World) -> None:
    client = world.client()
    await client.chat.completions.create(model="tiny", messages=HELLO, response_format=OBJECT)
    assert '"type":"object"' in (await world.runner.next("start")).sampling.grammar
    await client.completions.create(model="tiny", prompt="hello", extra_body={"structured_outputs": {"regex": "[ab]+"}})
    assert "/[ab]+/" in (await world.runner.next("start")).sampling.grammar
    await client.chat.completions.create(model="tiny", messages=HELLO, response_format={"type": "text"})
    assert (await world.runner.next("start")).sampling.grammar == ""


async def test_a_form_that_does_not_compile_is_a_400_that_names_it(world: World) -> None:
    with pytest.raises(openai.BadRequestError, match="look-ahead") as refused:
        await world.client().completions.create(
            model="tiny", prompt="hello", extra_body={"structured_outputs": {"regex": "a(?=b)"}}
        )
    assert (refused.value.param, refused.value.code) == ("structured_outputs.regex", "invalid_parameter")
