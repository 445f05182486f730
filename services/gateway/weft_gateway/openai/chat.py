"""`POST /v1/chat/completions`."""

from starlette.requests import Request
from starlette.responses import Response

from weft_gateway.openai.http_requests import completion
from weft_gateway.openai.response_format import ChatEncoder
from weft_gateway.openai.schema import ChatRequest
from weft_gateway.openai.validation import ModelEndpoint, ParsedRequest, Prompt
from weft_gateway.shell.app_state import AppState
from weft_gateway.shell.chat_template import Chat


def chat_of(params: ChatRequest) -> Chat:
    """What the model's chat template gets."""
    return Chat(
        [message.of_template() for message in params.messages],
        add_generation_prompt=params.add_generation_prompt and not params.continue_final_message,
        continue_final_message=params.continue_final_message,
        documents=params.documents,
        variables=params.chat_template_kwargs,
    )


def _prompts(parsed: ParsedRequest[ChatRequest]) -> list[Prompt]:
    chat = chat_of(parsed.params)
    text = "\n".join(message.content for message in parsed.params.messages)
    return [Prompt(text, lambda tokenizer, context_tokens: tokenizer.encode_chat(chat, context_tokens))]


CHAT = ModelEndpoint("/v1/chat/completions", ChatRequest, _prompts, ChatEncoder)


async def chat_completions(state: AppState, request: Request) -> Response:
    """A chat: through the model's chat template."""
    return await completion(CHAT, state, request)
