"""anthropic: messages, streams, history, tools, forms, hints that the API ignores, tokens, errors."""

from typing import Literal

import anthropic
from asked import ANSWER, CITIES, KEY, MODEL, TEXT, URL
from forms import Weather
from pydantic import BaseModel


class City(BaseModel):
    """A form without bounds of numbers: the client takes those out of the schema."""

    city: Literal["Rome", "Oslo"]


client = anthropic.Anthropic(base_url=URL.removesuffix("/v1"), api_key=KEY)
GREEDY = {"temperature": 0}
ASKED = {"model": MODEL, "max_tokens": 200, "messages": [{"role": "user", "content": TEXT}], "extra_body": GREEDY}
HINTS = {
    "thinking": {"type": "adaptive", "display": "omitted"},
    "output_config": {"effort": "high"},
    "context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]},
    "betas": ["context-management-2025-06-27"],
    "system": [{"type": "text", "text": "Answer.", "cache_control": {"type": "ephemeral"}}],
}
WEATHER = {"name": "weather", "input_schema": Weather.model_json_schema(), "defer_loading": True}
SEARCH = {"type": "web_search_20250305", "name": "web_search"}

answer = client.messages.create(**ASKED)
assert answer.content[0].text == ANSWER
assert answer.usage.output_tokens == len(ANSWER)
assert client.messages.count_tokens(model=MODEL, messages=ASKED["messages"]).input_tokens == answer.usage.input_tokens
again = [*ASKED["messages"], {"role": "assistant", "content": answer.content}, *ASKED["messages"]]
assert client.messages.create(**ASKED | {"messages": again}).content[0].text == ANSWER
with client.messages.stream(**ASKED) as stream:
    assert "".join(stream.text_stream) == ANSWER
    assert stream.get_final_message().content[0].text == ANSWER

hinted = client.beta.messages.with_raw_response.create(**ASKED, **HINTS, tools=[SEARCH])
assert hinted.parse().content[0].text == ANSWER
ignored = {"cache_control", "context_management", "thinking.display", "tools.web_search"}
assert set(hinted.headers["weft-ignored"].split(", ")) == ignored
forced = {"tool_choice": {"type": "tool", "name": "weather"}}
called = client.beta.messages.create(**ASKED, tools=[WEATHER, SEARCH], **forced)
assert Weather.model_validate(called.content[0].input).city in CITIES
formed = client.messages.parse(**ASKED, output_format=City)
assert formed.parsed_output.city in CITIES

for wrong, error in (
    ({"model": "acme/nothing"}, anthropic.NotFoundError),
    ({"extra_body": {"top_k": -2}}, anthropic.BadRequestError),
):
    try:
        client.messages.create(**ASKED | wrong)
    except error:
        pass
    else:
        raise AssertionError(f"{wrong} is answered")
