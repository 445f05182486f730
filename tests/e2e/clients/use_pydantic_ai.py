"""pydantic-ai: chat and responses models, streams, history, tools, and each way to a form."""

import asyncio

from asked import ANSWER, CITIES, JSON_MODEL, KEY, MODEL, TEXT, URL, WORDS
from forms import Weather, Words
from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider


async def main() -> None:
    provider = OpenAIProvider(base_url=URL, api_key=KEY)
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        model = kind(MODEL, provider=provider)
        agent = Agent(model, instructions="Answer.", model_settings={"temperature": 0})
        first = await agent.run(TEXT)
        assert first.output == ANSWER
        assert first.usage.output_tokens == len(ANSWER)
        assert (await agent.run(TEXT, message_history=first.all_messages())).output == ANSWER
        async with agent.run_stream(TEXT) as streamed:
            assert await streamed.get_output() == ANSWER
        for way in (Weather, ToolOutput(Weather), NativeOutput(Weather)):
            formed = Agent(model, output_type=way, model_settings={"temperature": 0})
            assert (await formed.run(TEXT)).output.city in CITIES
        words = Agent(kind(JSON_MODEL, provider=provider), output_type=PromptedOutput(Words))
        assert (await words.run(TEXT)).output.words == WORDS


asyncio.run(main())
