"""`POST /v1/chat/completions`."""

import time

from starlette.requests import Request
from starlette.responses import Response

from weft_gateway.gateway import Gateway
from weft_gateway.model_text import ModelText
from weft_gateway.openai.answer import Answer
from weft_gateway.openai.prepare import prepare, read
from weft_gateway.openai.schema import ChatRequest
from weft_gateway.openai.shapes import ChatShape


async def chat_completions(gateway: Gateway, request: Request) -> Response:
    """A chat: through the model's chat template."""
    with gateway.preparing():
        asked = await read(gateway, request, ChatRequest)
        params = asked.params
        messages = [{"role": message.role, "content": message.content} for message in params.messages]
        text = "\n".join(message.content for message in params.messages)

        def encode(model: ModelText, context_tokens: int) -> list[int]:
            return model.encode_chat(messages, context_tokens)

        prepared = await prepare(gateway, request, asked, encode=encode, text=text)
        live = await gateway.serving.submit(prepared)
    usage = params.include_usage
    shape = ChatShape(live.request_id, params.model, int(time.time()), include_usage=usage)
    return Answer(gateway.serving, live, shape, stream=params.stream, include_usage=usage)
