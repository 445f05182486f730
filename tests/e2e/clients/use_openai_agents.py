"""openai-agents: runs over chat completions and over responses, streams, a tool that is called, a form."""

import asyncio

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from asked import ANSWER, CITIES, KEY, MODEL, TEXT, URL
from forms import Weather
from openai import AsyncOpenAI

seen: list[Weather] = []


@function_tool
def weather(asked: Weather) -> str:
    """The weather of a city for some days."""
    seen.append(asked)
    return "sunny"


async def main() -> None:
    client = AsyncOpenAI(base_url=URL, api_key=KEY)
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        seen.clear()
        model = kind(model=MODEL, openai_client=client)
        plain = ModelSettings(temperature=0)
        agent = Agent(name="a", instructions="Answer.", model=model, model_settings=plain)
        first = await Runner.run(agent, TEXT)
        assert first.final_output == ANSWER
        again = [*first.to_input_list(), {"role": "user", "content": TEXT}]
        assert (await Runner.run(agent, again)).final_output == ANSWER
        streamed = Runner.run_streamed(agent, TEXT)
        async for _ in streamed.stream_events():
            pass
        assert streamed.final_output == ANSWER
        forced = ModelSettings(temperature=0, tool_choice="required")  # once: the agent then resets it
        caller = Agent(name="b", model=model, tools=[weather], model_settings=forced)
        assert (await Runner.run(caller, TEXT)).final_output == ANSWER
        assert [one.city in CITIES for one in seen] == [True]
        formed = Agent(name="c", model=model, output_type=Weather, model_settings=plain)
        assert (await Runner.run(formed, TEXT)).final_output.city in CITIES


set_tracing_disabled(True)
asyncio.run(main())
