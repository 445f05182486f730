"""langchain-openai: invoke, stream, batch, tools and their results, each way to structured outputs, completions."""

import asyncio

from asked import ANSWER, JSON_MODEL, KEY, MODEL, TEXT, URL, WORDS
from forms import Weather, Words
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI

HERE = {"base_url": URL, "api_key": KEY, "temperature": 0}


@tool
def weather(city: str, days: int) -> str:
    """The weather of a city for some days."""
    return f"{days} sunny days in {city}"


chat = ChatOpenAI(model=MODEL, **HERE)
first = chat.invoke(TEXT)
assert first.content == ANSWER
assert first.usage_metadata["output_tokens"] == len(ANSWER)
assert "".join(chunk.content for chunk in chat.stream(TEXT)) == ANSWER
assert [one.content for one in chat.batch([TEXT, "weft", TEXT])] == [ANSWER, "WEFT", ANSWER]
assert asyncio.run(chat.ainvoke(TEXT)).content == ANSWER
history = [SystemMessage("Answer."), HumanMessage("weft"), first, HumanMessage(TEXT)]
assert chat.invoke(history).content == ANSWER
likely = ChatOpenAI(model=MODEL, **HERE, logprobs=True, top_logprobs=2).invoke(TEXT)
assert len(likely.response_metadata["logprobs"]["content"]) == len(ANSWER)

assert chat.bind_tools([Weather]).invoke(TEXT).content == ANSWER  # it may call one and does not
called = chat.bind_tools([Weather], tool_choice="any").invoke(TEXT)
(call,) = called.tool_calls
assert call["name"] == "Weather"
Weather.model_validate(call["args"])
result = weather.invoke(call["args"])
back = [HumanMessage(TEXT), called, ToolMessage(result, tool_call_id=call["id"]), HumanMessage(TEXT)]
assert chat.bind_tools([Weather]).invoke(back).content == ANSWER
streamed = None
for chunk in chat.bind_tools([Weather], tool_choice="any").stream(TEXT):
    streamed = chunk if streamed is None else streamed + chunk
assert streamed.tool_calls[0]["args"] == call["args"]

for method in ("json_schema", "function_calling"):
    assert isinstance(chat.with_structured_output(Weather, method=method).invoke(TEXT), Weather)
words = ChatOpenAI(model=JSON_MODEL, **HERE).with_structured_output(Words, method="json_mode")
assert words.invoke(TEXT).words == WORDS

responses = ChatOpenAI(model=MODEL, use_responses_api=True, **HERE)
assert responses.invoke(TEXT).text == ANSWER
text = OpenAI(model=MODEL, **HERE)
assert text.invoke(TEXT) == ANSWER
assert text.batch([TEXT, "weft"]) == [ANSWER, "WEFT"]
assert [row[0].text for row in text.generate([TEXT, "weft"]).generations] == [ANSWER, "WEFT"]
