"""`POST /v1/completions`: a raw prompt, as text or as token ids."""

import time

from starlette.requests import Request
from starlette.responses import Response

from weft_gateway.errors import ParameterError
from weft_gateway.gateway import Gateway
from weft_gateway.model_text import ModelText
from weft_gateway.openai.answer import Answer
from weft_gateway.openai.prepare import prepare, read
from weft_gateway.openai.schema import CompletionRequest
from weft_gateway.openai.shapes import CompletionShape


async def completions(gateway: Gateway, request: Request) -> Response:
    """A completion of one prompt."""
    with gateway.preparing():
        asked = await read(gateway, request, CompletionRequest)
        params, prompt = asked.params, asked.params.prompt
        text = prompt if isinstance(prompt, str) else gateway.tokenizers.of(asked.pool).decode(prompt)
        prepared = await prepare(gateway, request, asked, encode=lambda model: _encode(model, prompt), text=text)
        live = await gateway.serving.submit(prepared)
    usage = params.include_usage
    shape = CompletionShape(live.request_id, params.model, int(time.time()), include_usage=usage)
    return Answer(gateway.serving, live, shape, stream=params.stream, include_usage=usage)


def _encode(model: ModelText, prompt: str | list[int]) -> list[int]:
    if isinstance(prompt, str):
        return model.encode(prompt)
    if max(prompt) >= model.vocab_size:
        text = f"prompt: token {max(prompt)} is outside the model's vocabulary of {model.vocab_size}."
        raise ParameterError(text, param="prompt")
    return prompt
