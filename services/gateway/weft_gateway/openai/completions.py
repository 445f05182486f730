"""`POST /v1/completions`: a raw prompt, as text or as token ids."""

from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from weft_gateway.errors import ParameterError
from weft_gateway.openai.response_format import CompletionEncoder
from weft_gateway.openai.schema import CompletionRequest
from weft_gateway.openai.streaming_completion import StreamingCompletion
from weft_gateway.openai.validation import prepare, read, response_meta
from weft_gateway.shell.active_request import MAX_PROMPT_CHARS
from weft_gateway.shell.app_state import AppState
from weft_gateway.shell.tokenizer import ModelTokenizer, TooLong


async def completions(gateway: AppState, request: Request) -> Response:
    """A completion of one prompt."""
    with gateway.preparing() as preparing:
        asked = await read(gateway, request, CompletionRequest, preparing)
        params, prompt = asked.params, asked.params.prompt
        model = await gateway.tokenizer(asked.pool)
        text = prompt if isinstance(prompt, str) else model.decode(prompt[-MAX_PROMPT_CHARS:])
        prepared = await prepare(gateway, request, asked, encode=partial(_encode, prompt), text=text)
        choices = await gateway.serving.submit(prepared)
    return StreamingCompletion(
        gateway.serving, choices, CompletionEncoder(response_meta(request, asked, prepared)), params
    )


def _encode(prompt: str | list[int], model: ModelTokenizer, context_tokens: int) -> list[int]:
    if isinstance(prompt, str):
        return model.encode(prompt, context_tokens)
    if len(prompt) > context_tokens:
        raise TooLong(f"this model's context is {context_tokens} tokens; the prompt has {len(prompt)}")
    if max(prompt) >= model.vocab_size:
        text = f"prompt: token {max(prompt)} is outside the model's vocabulary of {model.vocab_size}."
        raise ParameterError(text, param="prompt")
    return prompt
