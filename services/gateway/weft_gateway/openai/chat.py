"""`POST /v1/chat/completions`."""

from starlette.requests import Request
from starlette.responses import Response

from weft_gateway.openai.response_format import ChatEncoder
from weft_gateway.openai.schema import ChatRequest
from weft_gateway.openai.streaming_completion import StreamingCompletion
from weft_gateway.openai.validation import Encode, ParsedRequest, submit
from weft_gateway.shell.app_state import AppState


async def chat_completions(state: AppState, request: Request) -> Response:
    """A chat: through the model's chat template."""
    answer = await submit(state, request, ChatRequest, _prompt)
    return StreamingCompletion(state.manager, *answer, ChatEncoder)


def _prompt(parsed: ParsedRequest[ChatRequest]) -> tuple[str, Encode]:
    messages = [{"role": message.role, "content": message.content} for message in parsed.params.messages]
    text = "\n".join(message["content"] for message in messages)
    return text, lambda tokenizer, context_tokens: tokenizer.encode_chat(messages, context_tokens)
