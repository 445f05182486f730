"""`POST /v1/chat/completions`."""

from starlette.requests import Request
from starlette.responses import Response

from weft_gateway.openai.response_format import ChatEncoder
from weft_gateway.openai.schema import ChatRequest
from weft_gateway.openai.streaming_completion import StreamingCompletion
from weft_gateway.openai.validation import prepare, read, response_meta
from weft_gateway.shell.app_state import AppState
from weft_gateway.shell.tokenizer import ModelTokenizer


async def chat_completions(gateway: AppState, request: Request) -> Response:
    """A chat: through the model's chat template."""
    with gateway.preparing() as preparing:
        asked = await read(gateway, request, ChatRequest, preparing)
        params = asked.params
        messages = [{"role": message.role, "content": message.content} for message in params.messages]
        text = "\n".join(message.content for message in params.messages)

        def encode(model: ModelTokenizer, context_tokens: int) -> list[int]:
            return model.encode_chat(messages, context_tokens)

        prepared = await prepare(gateway, request, asked, encode=encode, text=text)
        choices = await gateway.serving.submit(prepared)
    return StreamingCompletion(gateway.serving, choices, ChatEncoder(response_meta(request, asked, prepared)), params)
