"""`POST /v1/chat/completions`."""

from starlette.requests import Request
from starlette.responses import Response

from weft_gateway.openai.http_requests import completion
from weft_gateway.openai.response_format import ChatEncoder
from weft_gateway.openai.schema import ChatRequest
from weft_gateway.openai.validation import Encode, ModelEndpoint, ParsedRequest
from weft_gateway.shell.app_state import AppState


def _prompt(parsed: ParsedRequest[ChatRequest]) -> tuple[str, Encode]:
    messages = [{"role": message.role, "content": message.content} for message in parsed.params.messages]
    text = "\n".join(message["content"] for message in messages)
    return text, lambda tokenizer, context_tokens: tokenizer.encode_chat(messages, context_tokens)


CHAT = ModelEndpoint("/v1/chat/completions", ChatRequest, _prompt, ChatEncoder)


async def chat_completions(state: AppState, request: Request) -> Response:
    """A chat: through the model's chat template."""
    return await completion(CHAT, state, request)
