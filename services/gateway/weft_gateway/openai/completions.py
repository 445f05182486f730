"""`POST /v1/completions`: raw prompts, as texts or as token ids."""

from functools import partial

from weft_gateway.errors import ParameterError
from weft_gateway.openai.call import MAX_PROMPT_CHARS, Call, ModelEndpoint, Prompt
from weft_gateway.openai.response_format import CompletionEncoder
from weft_gateway.openai.schema import CompletionRequest, parse
from weft_gateway.shell.tokenizer import ModelTokenizer, TooLong


def _check(tokens: list[int], param: str, tokenizer: ModelTokenizer) -> None:
    """Raises ParameterError."""
    if max(tokens) >= tokenizer.vocab_size:
        text = f"{param}: token {max(tokens)} is outside the model's vocabulary of {tokenizer.vocab_size}."
        raise ParameterError(text, param=param)


def _encode(
    params: CompletionRequest, prompt: str | list[int], tokenizer: ModelTokenizer, context_tokens: int
) -> list[int]:
    """Encode a prompt, which may be longer than the context if it is to be truncated. Raises TooLong, NotEncodable."""
    truncates = params.truncate_prompt_tokens is not None
    if isinstance(prompt, str):
        max_chars = tokenizer.max_chars(context_tokens) if truncates else len(prompt)
        text = prompt[:max_chars] if params.truncation_side == "right" else prompt[-max_chars:]
        return tokenizer.encode(text, context_tokens, add_special_tokens=params.add_special_tokens)
    if len(prompt) > context_tokens and not truncates:
        raise TooLong.of_context(context_tokens, f"your prompt has {len(prompt)} tokens")
    return prompt


class CompletionEndpoint(ModelEndpoint[CompletionRequest]):
    """A completion of each prompt."""

    name = "completions"
    path, operation = "/v1/completions", "text_completion"
    encoder = CompletionEncoder

    def parse(self, body: bytes) -> CompletionRequest:
        return parse(CompletionRequest, body)

    def prompts(self, params: CompletionRequest, call: Call) -> list[Prompt]:
        tokenizer = call.tokenizer

        def prompt_of(index: int, prompt: str | list[int]) -> Prompt:
            if isinstance(prompt, str):
                return Prompt(
                    prompt[-MAX_PROMPT_CHARS:], partial(_encode, params, prompt), prompt if params.echo else ""
                )
            _check(prompt, params.prompt_at(index), tokenizer)
            text = tokenizer.decode(prompt[-MAX_PROMPT_CHARS:])
            echoed = tokenizer.decode if params.skip_special_tokens else tokenizer.spelled
            return Prompt(text, partial(_encode, params, prompt), echoed(prompt) if params.echo else "")

        return [prompt_of(index, prompt) for index, prompt in enumerate(params.prompt)]


COMPLETIONS = CompletionEndpoint()
