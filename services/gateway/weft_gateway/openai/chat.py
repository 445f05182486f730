"""`POST /v1/chat/completions`."""

from starlette.requests import Request
from starlette.responses import Response

from weft_gateway.gateway import Gateway
from weft_gateway.model_text import ModelText
from weft_gateway.openai.answer import Answer
from weft_gateway.openai.prepare import envelope_of, prepare, read
from weft_gateway.openai.schema import ChatRequest
from weft_gateway.openai.shapes import ChatShape


async def chat_completions(gateway: Gateway, request: Request) -> Response:
    """A chat: through the model's chat template."""
    with gateway.preparing() as preparing:
        asked = await read(gateway, request, ChatRequest, preparing)
        params = asked.params
        messages = [{"role": message.role, "content": message.content} for message in params.messages]
        text = "\n".join(message.content for message in params.messages)

        def encode(model: ModelText, context_tokens: int) -> list[int]:
            return model.encode_chat(messages, context_tokens)

        prepared = await prepare(gateway, request, asked, encode=encode, text=text)
        choices = await gateway.serving.submit(prepared)
    return Answer(gateway.serving, choices, ChatShape(envelope_of(request, asked, prepared)), params)
