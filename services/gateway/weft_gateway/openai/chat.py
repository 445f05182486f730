"""`POST /v1/chat/completions`."""

from starlette.requests import Request
from starlette.responses import Response

from weft_gateway.openai.response_format import ChatEncoder
from weft_gateway.openai.schema import ChatRequest
from weft_gateway.openai.streaming_completion import StreamingCompletion
from weft_gateway.openai.validation import arriving, parse_request, response_meta, validate
from weft_gateway.shell.app_state import AppState
from weft_gateway.shell.tokenizer import ModelTokenizer


async def chat_completions(state: AppState, request: Request) -> Response:
    """A chat: through the model's chat template."""
    async with arriving(state, request):
        parsed = await parse_request(state, request, ChatRequest)
        params = parsed.params
        messages = [{"role": message.role, "content": message.content} for message in params.messages]
        text = "\n".join(message.content for message in params.messages)

        def encode(tokenizer: ModelTokenizer, context_tokens: int) -> list[int]:
            return tokenizer.encode_chat(messages, context_tokens)

        valid = await validate(state, request, parsed, encode=encode, text=text)
        group = state.manager.submit(valid)
    encoder = ChatEncoder(response_meta(request, parsed))
    return StreamingCompletion(state.manager, group, encoder, params)
