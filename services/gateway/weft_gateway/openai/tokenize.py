"""`/tokenize`, `/detokenize` and `/tokenizer_info`: a model's tokenizer for its clients, as vLLM serves them."""

from functools import partial
from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from weft.domain.routes import PoolRoute
from weft_gateway.core.routes import Principal
from weft_gateway.errors import BadRequest, ParameterError
from weft_gateway.openai import prepare
from weft_gateway.openai.chat import chat_of
from weft_gateway.openai.fields import TokenIds
from weft_gateway.openai.http_requests import caller_of, json_body, json_response
from weft_gateway.openai.schema import ChatPrompt, Strict, checked, naming, object_of, parse
from weft_gateway.shell.app_state import AppState
from weft_gateway.shell.auth import Action
from weft_gateway.shell.tokenizer import UNKNOWN_CONTEXT_TOKENS, ModelTokenizer, NotEncodable

MAX_TEXT_TOKENS = UNKNOWN_CONTEXT_TOKENS  # of a text: one may count the tokens of what fits no context
Model = Annotated[str | None, Field(min_length=1, max_length=512, description="absent: the only base of this caller")]


class TokenizeRequest(Strict):
    """`POST /tokenize` of a text, as in vLLM."""

    model: Model = None
    prompt: str
    add_special_tokens: bool = Field(True, description="what the tokenizer puts around a text")
    return_token_strs: bool = Field(False, description="each token's text, too")


class TokenizeChatRequest(ChatPrompt):
    """`POST /tokenize` of a chat, as in vLLM: its prompt as the model's chat template renders it."""

    model: Model = None
    return_token_strs: bool = Field(False, description="each token's text, too")


class DetokenizeRequest(Strict):
    """`POST /detokenize`, as in vLLM."""

    model: Model = None
    tokens: TokenIds


async def tokenize(state: AppState, request: Request) -> Response:
    """Answer with the tokens of a text or of a chat."""
    caller = await caller_of(state, request, Action.INFER)
    body = await json_body(state, request, caller.tenant)
    params = await state.turns.parse(caller.tenant, tokenize_request, body)
    pool, tokenizer = await tokenizer_of(state, caller, params.model)
    try:
        work = partial(_tokenized, params, pool, tokenizer)
        return await state.turns.encode(caller.tenant, work, request.is_disconnected)
    except NotEncodable as error:
        raise BadRequest(f"The prompt cannot be encoded: {error}.", code=error.code) from error


def tokenize_request(body: bytes) -> TokenizeRequest | TokenizeChatRequest:
    """Raises BadRequest, ParameterError."""
    value = object_of(body)
    return checked(TokenizeChatRequest if "messages" in value else TokenizeRequest, value)


def _tokenized(params: TokenizeRequest | TokenizeChatRequest, pool: PoolRoute, tokenizer: ModelTokenizer) -> Response:
    """Return the whole answer: a million tokens are written, too. Raises NotEncodable."""
    tokens = _tokens(params, pool, tokenizer)
    answer: dict[str, Any] = {"count": len(tokens), "max_model_len": pool.max_context_tokens, "tokens": tokens}
    answer["token_strs"] = [_spelled(tokenizer, token) for token in tokens] if params.return_token_strs else None
    return json_response(answer, params.ignored)


def _tokens(params: TokenizeRequest | ChatPrompt, pool: PoolRoute, tokenizer: ModelTokenizer) -> list[int]:
    """Raises NotEncodable."""
    if isinstance(params, TokenizeRequest):
        return tokenizer.encode(params.prompt, MAX_TEXT_TOKENS, add_special_tokens=params.add_special_tokens)
    return tokenizer.encode_chat(chat_of(params, tokenizer.forms, pool.tool_call_parser), MAX_TEXT_TOKENS)


def chat_length(params: ChatPrompt, pool: PoolRoute, tokenizer: ModelTokenizer) -> int:
    """Count the tokens of a chat's prompt. Raises BadRequest."""
    try:
        with naming(params.asked_as):
            return len(_tokens(params, pool, tokenizer))
    except NotEncodable as error:
        raise BadRequest(f"The prompt cannot be encoded: {error}.", code=error.code) from error


def _spelled(tokenizer: ModelTokenizer, token: int) -> str:
    return tokenizer.name_of(token) or tokenizer.bytes_of(token).decode("utf-8", "backslashreplace")


async def detokenize(state: AppState, request: Request) -> Response:
    """Answer with the text of tokens. Special tokens have no text."""
    caller = await caller_of(state, request, Action.INFER)
    body = await json_body(state, request, caller.tenant)
    params = await state.turns.parse(caller.tenant, partial(parse, DetokenizeRequest), body)
    _, tokenizer = await tokenizer_of(state, caller, params.model, for_chats=False)
    if (unknown_token := max(params.tokens, default=0)) >= tokenizer.vocab_size:
        text = f"tokens: token {unknown_token} is outside the model's vocabulary of {tokenizer.vocab_size}."
        raise ParameterError(text, param="tokens")
    text = await state.turns.encode(caller.tenant, partial(tokenizer.decode, params.tokens))
    return json_response({"prompt": text}, params.ignored)


async def tokenizer_info(state: AppState, request: Request) -> Response:
    """Answer with the tokenizer_config.json of the model in `?model=`."""
    caller = await caller_of(state, request, Action.INFER)
    _, tokenizer = await tokenizer_of(state, caller, request.query_params.get("model"))
    return json_response(tokenizer.config)


async def tokenizer_of(
    state: AppState, caller: Principal, name: str | None, *, for_chats: bool = True
) -> tuple[PoolRoute, ModelTokenizer]:
    """Return pool and tokenizer of a model that this caller may use; None: of the caller's only base (vLLM's clients).

    Raises ModelNotFound, ParameterError, ServiceUnavailable.
    """
    route, pool = state.model(_only_base(state, caller) if name is None else name, caller)
    return pool, await prepare.tokenizer_of(state, route, pool, " yet", for_chats=for_chats)


def _only_base(state: AppState, caller: Principal) -> str:
    """Raises ParameterError."""
    bases = [route.model_name for route, _ in state.machine.routes.bases(caller)]
    if len(bases) != 1:
        raise ParameterError(f"This key may use {len(bases)} bases: name one as `model`.", param="model")
    return bases[0]
