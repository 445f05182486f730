"""llama-index: OpenAILike as chat and completion model, streams, a function that is called, a program's form."""

from asked import ANSWER, KEY, MODEL, TEXT, URL
from forms import Weather
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike


def weather(city: str, days: int) -> str:
    """The weather of a city for some days."""
    return f"{days} sunny days in {city}"


HERE = {"model": MODEL, "api_base": URL, "api_key": KEY, "temperature": 0, "context_window": 1024}
text = OpenAILike(**HERE, max_tokens=100)
assert text.complete(TEXT).text == ANSWER
assert "".join(part.delta for part in text.stream_complete(TEXT)) == ANSWER
chat = OpenAILike(**HERE, is_chat_model=True, is_function_calling_model=True)
message = ChatMessage(role="user", content=TEXT)
assert chat.chat([message]).message.content == ANSWER
assert "".join(part.delta or "" for part in chat.stream_chat([message])) == ANSWER
tool = FunctionTool.from_defaults(weather, fn_schema=Weather)
called = chat.chat_with_tools([tool], user_msg=TEXT, tool_required=True)
(call,) = chat.get_tool_calls_from_response(called)
assert call.tool_name == "weather"
Weather.model_validate(call.tool_kwargs)
assert isinstance(chat.structured_predict(Weather, PromptTemplate("{text}"), text=TEXT), Weather)
