"""litellm: each way to an OpenAI-compatible server, streams, tools, structured outputs, errors for fallbacks."""

import asyncio

import litellm
from asked import ANSWER, KEY, MODEL, TEXT, URL
from forms import Weather

MESSAGES = [{"role": "user", "content": TEXT}]
HERE = {"api_base": URL, "api_key": KEY, "temperature": 0}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": Weather.model_json_schema()}}

for provider in ("openai", "hosted_vllm", "litellm_proxy"):
    asked = {"model": f"{provider}/{MODEL}", "messages": MESSAGES, **HERE}
    answer = litellm.completion(**asked)
    assert answer.choices[0].message.content == ANSWER
    assert answer.usage.completion_tokens == len(ANSWER)
    chunks = litellm.completion(**asked, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ANSWER
    called = litellm.completion(**asked, tools=[TOOL], tool_choice="required", max_tokens=200)
    Weather.model_validate_json(called.choices[0].message.tool_calls[0].function.arguments)
    # an answer goes back as the client has it
    again = [*MESSAGES, answer.choices[0].message, {"role": "user", "content": TEXT}]
    assert litellm.completion(**asked | {"messages": again}).choices[0].message.content == ANSWER

asked = {"model": f"hosted_vllm/{MODEL}", "messages": MESSAGES, **HERE}
formed = litellm.completion(**asked, response_format=Weather, max_tokens=200)
Weather.model_validate_json(formed.choices[0].message.content)
assert litellm.completion(**asked, top_k=1, user="u", metadata={"k": "v"}).choices[0].message.content == ANSWER
assert asyncio.run(litellm.acompletion(**asked)).choices[0].message.content == ANSWER

text = litellm.text_completion(model=f"text-completion-openai/{MODEL}", prompt=TEXT, max_tokens=100, **HERE)
assert text.choices[0].text == ANSWER
response = litellm.responses(model=f"openai/{MODEL}", input=TEXT, **HERE)
assert response.output[0].content[0].text == ANSWER

try:
    litellm.completion(**asked | {"messages": [{"role": "user", "content": "long " * 1000}]})
except litellm.ContextWindowExceededError:
    pass
else:
    raise AssertionError("a prompt over the context is answered")
try:
    litellm.completion(**asked | {"model": "hosted_vllm/acme/nothing"})
except litellm.NotFoundError:
    pass
else:
    raise AssertionError("a model that is not there answers")
