"""`POST /v1/completions`: a raw prompt, as text or as token ids."""

from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from weft_gateway.errors import ParameterError
from weft_gateway.openai.http_requests import completion
from weft_gateway.openai.response_format import CompletionEncoder
from weft_gateway.openai.schema import CompletionRequest
from weft_gateway.openai.validation import MAX_PROMPT_CHARS, Encode, ModelEndpoint, ParsedRequest
from weft_gateway.shell.app_state import AppState
from weft_gateway.shell.tokenizer import ModelTokenizer, TooLong


def _prompt(parsed: ParsedRequest[CompletionRequest]) -> tuple[str, Encode]:
    prompt = parsed.params.prompt
    text = prompt if isinstance(prompt, str) else parsed.tokenizer.decode(prompt[-MAX_PROMPT_CHARS:])
    return text, partial(_encode, prompt)


def _encode(prompt: str | list[int], tokenizer: ModelTokenizer, context_tokens: int) -> list[int]:
    if isinstance(prompt, str):
        return tokenizer.encode(prompt, context_tokens)
    if len(prompt) > context_tokens:
        raise TooLong(f"this model's context is {context_tokens} tokens; the prompt has {len(prompt)}")
    if max(prompt) >= tokenizer.vocab_size:
        text = f"prompt: token {max(prompt)} is outside the model's vocabulary of {tokenizer.vocab_size}."
        raise ParameterError(text, param="prompt")
    return prompt


COMPLETIONS = ModelEndpoint("/v1/completions", CompletionRequest, _prompt, CompletionEncoder)


async def completions(state: AppState, request: Request) -> Response:
    """A completion of one prompt."""
    return await completion(COMPLETIONS, state, request)
