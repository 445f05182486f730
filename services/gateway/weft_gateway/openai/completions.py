"""`POST /v1/completions`: a raw prompt, as text or as token ids."""

from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from weft_gateway.errors import ParameterError
from weft_gateway.gateway import Gateway
from weft_gateway.live import MAX_PROMPT_CHARS
from weft_gateway.model_text import ModelText, TooLong
from weft_gateway.openai.answer import Answer
from weft_gateway.openai.prepare import envelope_of, prepare, read
from weft_gateway.openai.schema import CompletionRequest
from weft_gateway.openai.shapes import CompletionShape


async def completions(gateway: Gateway, request: Request) -> Response:
    """A completion of one prompt."""
    with gateway.preparing() as preparing:
        asked = await read(gateway, request, CompletionRequest, preparing)
        params, prompt = asked.params, asked.params.prompt
        model = await gateway.tokenizer(asked.pool)
        text = prompt if isinstance(prompt, str) else model.decode(prompt[-MAX_PROMPT_CHARS:])
        prepared = await prepare(gateway, request, asked, encode=partial(_encode, prompt), text=text)
        choices = await gateway.serving.submit(prepared)
    return Answer(gateway.serving, choices, CompletionShape(envelope_of(request, asked, prepared)), params)


def _encode(prompt: str | list[int], model: ModelText, context_tokens: int) -> list[int]:
    if isinstance(prompt, str):
        return model.encode(prompt, context_tokens)
    if len(prompt) > context_tokens:
        raise TooLong(f"this model's context is {context_tokens} tokens; the prompt has {len(prompt)}")
    if max(prompt) >= model.vocab_size:
        text = f"prompt: token {max(prompt)} is outside the model's vocabulary of {model.vocab_size}."
        raise ParameterError(text, param="prompt")
    return prompt
