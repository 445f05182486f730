"""From a body to a request that is valid, tokenised and allowed: what can be refused beforehand is refused here.

Requests of clients and lines of batches take this one way.
"""

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import orjson

from weft.domain.request import Priority, Sampling
from weft.domain.routes import PoolRoute, Route
from weft_gateway.core.events import ModelResolved, PreparedRequest
from weft_gateway.core.routes import Principal
from weft_gateway.errors import (
    ApiError,
    BadRequest,
    Internal,
    ModelNotFound,
    ParameterError,
    ServiceUnavailable,
    TooLarge,
)
from weft_gateway.openai.answer import Answer
from weft_gateway.openai.response_format import ResponseEncoder
from weft_gateway.openai.schema import Common, parse
from weft_gateway.shell.app_state import AppState
from weft_gateway.shell.request_ids import Ids
from weft_gateway.shell.tokenizer import UNKNOWN_CONTEXT_TOKENS, ModelTokenizer, NotEncodable, TokenizerPanic, TooLong

THREAD_BYTES = 20_000  # a body this long is parsed in a thread: the loop goes on streaming
MAX_ASKED_CHARS = 128  # of a model that there may not be, in the log
MAX_PROMPT_CHARS = 4096  # of a prompt that the predictor gets
MAX_LOGPROBS = 1 << 19  # of one answer: some 60 MB while it is held
T = TypeVar("T", bound=Common)
Encode = Callable[[ModelTokenizer, int], list[int]]  # within a context of so many tokens


@dataclass(slots=True)
class Call:
    """A request on its way: its ids, who asks, since when."""

    ids: Ids
    principal: Principal
    arrived_unix_ms: int
    priority: Priority = Priority.INTERACTIVE
    model: str | None = None  # once it is found
    asked: str | None = None  # the model that a refused request names, for the log


@dataclass(frozen=True, slots=True)
class ParsedRequest(Generic[T]):
    """A typed request and the model that it names, for a caller that may use it."""

    params: T
    route: Route
    pool: PoolRoute
    tokenizer: ModelTokenizer


@dataclass(frozen=True, slots=True)
class ModelEndpoint(Generic[T]):
    """One way to ask a model. `prompt_of` gives the prompt's text, for the predictor, and what tokenises it."""

    path: str
    kind: type[T]
    prompt_of: Callable[[ParsedRequest[T]], tuple[str, Encode]]
    encoder: type[ResponseEncoder]


async def submit(state: AppState, endpoint: ModelEndpoint[T], call: Call, body: bytes) -> Answer:
    """Check a request that counts already, whole, and hand it to the scheduler. Raises ApiError."""
    try:
        parsed = await _parse(state, endpoint.kind, call, body)
    except ApiError:
        call.asked = _asked(body)
        raise
    text, encode = endpoint.prompt_of(parsed)
    group = state.manager.submit(await _prepare(state, call, parsed, encode, text))
    return Answer(state.manager, parsed.params, parsed.tokenizer, group, endpoint.encoder)


def _asked(body: bytes) -> str | None:
    """The model that a body names which may be no request. None: it names none, or is too long to be read again."""
    try:
        value: Any = orjson.loads(body) if len(body) <= THREAD_BYTES else None
    except orjson.JSONDecodeError:
        return None
    model = value.get("model") if isinstance(value, dict) else None
    return model[:MAX_ASKED_CHARS] if isinstance(model, str) else None


async def _parse(state: AppState, kind: type[T], call: Call, body: bytes) -> ParsedRequest[T]:
    """Raises ApiError: everything but the prompt is checked."""
    if len(body) > state.settings.max_body_bytes:
        raise TooLarge(f"The body is larger than {state.settings.max_body_bytes} bytes.")
    params = await asyncio.to_thread(parse, kind, body) if len(body) > THREAD_BYTES else parse(kind, body)
    found = state.machine.routes.find(params.model, call.principal)
    if found is None:
        raise ModelNotFound(params.model)
    call.model = params.model
    _check_way(state, call, params)
    route, pool = found
    await state.manager.step(ModelResolved(call.ids.request_id, pool.pool, params.n))
    tokenizer = state.tokenizers.get(pool.base_digest)
    if tokenizer is None:
        text = f"The tokenizer of pool {pool.pool} is not available: the pool has changed."
        raise ServiceUnavailable(text, code="model_not_ready", retry_after_ms=1000)
    return ParsedRequest(params, route, pool, tokenizer)


def _check_way(state: AppState, call: Call, params: Common) -> None:
    """Whether so many answers, and streamed ones, can go this call's way. Raises ParameterError."""
    limit = state.settings.max_in_flight
    if params.n > limit:
        raise ParameterError(f"n: this gateway takes {limit} requests at once, and each choice is one.", param="n")
    if params.stream and call.priority is Priority.BATCH:
        raise ParameterError("stream: the answer to a line of a batch is written whole; leave it out.", param="stream")


async def _prepare(state: AppState, call: Call, parsed: ParsedRequest[T], encode: Encode, text: str) -> PreparedRequest:
    """Tokenise and check the lengths."""
    params, pool = parsed.params, parsed.pool
    tokens = await _encoded(parsed.tokenizer, encode, pool.max_context_tokens or UNKNOWN_CONTEXT_TOKENS)
    sampling = _sampling(params, parsed.tokenizer)
    limit = _max_tokens(params.limit, len(tokens), pool.max_context_tokens, state.settings.default_max_tokens)
    _check_logprobs(params, limit)
    return PreparedRequest(
        request_id=call.ids.request_id,
        client_request_id=call.ids.client_request_id,
        namespace=call.principal.namespace or "",
        route=parsed.route,
        prompt=tuple(tokens),
        prompt_text=text[-MAX_PROMPT_CHARS:],  # the end holds the question
        max_tokens=limit,
        sampling=sampling,
        bytes_of=parsed.tokenizer.bytes_of,
        arrived_unix_ms=call.arrived_unix_ms,
        stops=params.stop,
        n=params.n,
    )


async def _encoded(tokenizer: ModelTokenizer, encode: Encode, context_tokens: int) -> list[int]:
    """In a thread: the tokenizer releases the interpreter and the template is foreign code."""
    try:
        tokens = await asyncio.to_thread(encode, tokenizer, context_tokens)
    except TooLong as error:
        raise ParameterError(f"The prompt is too long: {error}.", code="context_length_exceeded") from error
    except TokenizerPanic as error:
        raise Internal(f"{error}. Other requests are not affected; a shorter or plainer prompt may pass.") from error
    except NotEncodable as error:
        raise BadRequest(f"The prompt cannot be encoded: {error}.") from error
    if not tokens:
        raise BadRequest("The prompt is empty: it has no token.")
    return tokens


def _max_tokens(asked: int | None, prompt_tokens: int, context_tokens: int, default: int) -> int:
    """The answer's bound. A context of 0 is not known yet: no runner has reported it; the scheduler decides then."""
    left = context_tokens - prompt_tokens if context_tokens else asked or default
    limit = min(default, left) if asked is None else asked
    if limit < 1 or limit > left:
        wanted = f"{prompt_tokens} tokens of prompt" + (f" and max_tokens {asked}" if asked else "")
        raise ParameterError(
            f"This model's context is {context_tokens} tokens; the request has {wanted}.",
            param="max_tokens" if asked and left > 0 else None,
            code="context_length_exceeded",
        )
    return limit


def _check_logprobs(params: Common, max_tokens: int) -> None:
    """An answer is held until it is sent: its log probabilities are bounded. Raises ParameterError."""
    count = 0 if params.alternatives is None else params.n * max_tokens * (1 + params.alternatives)
    if count > MAX_LOGPROBS:
        text = f"This answer could have {count:,} log probabilities; at most {MAX_LOGPROBS:,} are sent in one answer."
        raise ParameterError(f"{text} Ask for fewer choices, tokens or alternatives.", param="logprobs")


def _sampling(params: Common, tokenizer: ModelTokenizer) -> Sampling:
    """Raises ParameterError for a bias of a token that the model does not have."""
    beyond = [token for token, _ in params.logit_bias if token >= tokenizer.vocab_size]
    if beyond:
        text = f"logit_bias: token {beyond[0]} is outside the model's vocabulary of {tokenizer.vocab_size}."
        raise ParameterError(text, param="logit_bias")
    return Sampling(
        seed=secrets.randbits(64) if params.seed is None else params.seed % 2**64,
        temperature=params.temperature,
        top_p=params.top_p,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        logit_bias=params.logit_bias,
        top_logprobs=params.alternatives,
    )
