"""From an HTTP request to one that is valid, tokenised and allowed: what can be refused beforehand is refused here."""

import asyncio
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from starlette.requests import ClientDisconnect, Request

from weft.domain.request import Sampling
from weft.domain.routes import PoolRoute, Route
from weft_gateway.core.events import ModelResolved, PreparedRequest
from weft_gateway.core.routes import Principal
from weft_gateway.errors import (
    BadRequest,
    BodyTimeout,
    Internal,
    ModelNotFound,
    ParameterError,
    ServiceUnavailable,
    TooLarge,
    UnsupportedMediaType,
    from_failure,
)
from weft_gateway.openai.schema import Common, parse
from weft_gateway.shell.app_state import AppState
from weft_gateway.shell.auth import authenticate
from weft_gateway.shell.request_ids import ids_of
from weft_gateway.shell.response_group import ResponseGroup
from weft_gateway.shell.tokenizer import UNKNOWN_CONTEXT_TOKENS, ModelTokenizer, NotEncodable, TokenizerPanic, TooLong

THREAD_BYTES = 20_000  # a body this long is parsed in a thread: the loop goes on streaming
MAX_PROMPT_CHARS = 4096  # of a prompt that the predictor gets
MAX_LOGPROBS = 1 << 19  # of one answer: some 60 MB while it is held
JSON = "application/json"
BODY_SECONDS = 30.0  # for a client to send its body
T = TypeVar("T", bound=Common)
Encode = Callable[[ModelTokenizer, int], list[int]]  # within a context of so many tokens


async def submit(
    state: AppState, request: Request, kind: type[T], prompt_of: "Callable[[ParsedRequest[T]], tuple[str, Encode]]"
) -> "tuple[ParsedRequest[T], ResponseGroup]":
    """Hold the request while there is no route table, check it, and hand it to the scheduler. Raises ApiError.

    `prompt_of` gives the prompt's text, for the predictor, and what tokenises it.
    """
    async with state.manager.arriving(ids_of(request.scope).request_id):
        parsed = await _parse(state, request, kind)
        text, encode = prompt_of(parsed)
        return parsed, state.manager.submit(await _prepare(state, request, parsed, encode, text))


async def wait_for_routes(state: AppState, request: Request) -> None:
    """A process that has just started holds its first requests. Raises ServiceUnavailable, Overloaded."""
    if not state.machine.routes.known:
        request_id = ids_of(request.scope).request_id
        async with state.manager.arriving(request_id):
            state.manager.client_gone(request_id)  # it needs nothing more


def principal_of(state: AppState, request: Request) -> Principal:
    """Raises Unauthorized, ServiceUnavailable."""
    return authenticate(request.headers.get("authorization"), state.machine.routes, auth=state.settings.auth)


@dataclass(frozen=True, slots=True)
class ParsedRequest(Generic[T]):
    """A typed request and the model that it names, for a caller that may use it."""

    params: T
    route: Route
    pool: PoolRoute
    tokenizer: ModelTokenizer
    principal: Principal
    arrived_unix_ms: int


async def _parse(state: AppState, request: Request, kind: type[T]) -> ParsedRequest[T]:
    """Authenticate, read and parse. Raises ApiError: everything but the prompt is checked."""
    arrived_unix_ms = time.time_ns() // 1_000_000
    principal = principal_of(state, request)
    if failure := state.machine.admission.refusal():
        raise from_failure(failure)
    _check_json(request)
    body = await _body(request, state.settings.max_body_bytes)
    params = await asyncio.to_thread(parse, kind, body) if len(body) > THREAD_BYTES else parse(kind, body)
    found = state.machine.routes.find(params.model, principal)
    if found is None:
        raise ModelNotFound(params.model)
    request.state.model = params.model
    limit = state.settings.max_in_flight
    if params.n > limit:
        raise ParameterError(f"n: this gateway takes {limit} requests at once, and each choice is one.", param="n")
    route, pool = found
    await state.manager.step(ModelResolved(ids_of(request.scope).request_id, pool.pool, params.n))
    tokenizer = state.tokenizers.get(pool.base_digest)
    if tokenizer is None:
        text = f"The tokenizer of pool {pool.pool} is not available: the pool has changed."
        raise ServiceUnavailable(text, code="model_not_ready", retry_after_ms=1000)
    return ParsedRequest(params, route, pool, tokenizer, principal, arrived_unix_ms)


async def _prepare(
    state: AppState, request: Request, parsed: ParsedRequest[T], encode: Encode, text: str
) -> PreparedRequest:
    """Tokenise and check the lengths."""
    params, pool = parsed.params, parsed.pool
    tokens = await _encoded(parsed.tokenizer, encode, pool.max_context_tokens or UNKNOWN_CONTEXT_TOKENS)
    sampling = _sampling(params, parsed.tokenizer)
    limit = _max_tokens(params.limit, len(tokens), pool.max_context_tokens, state.settings.default_max_tokens)
    _check_logprobs(params, limit)
    ids = ids_of(request.scope)
    return PreparedRequest(
        request_id=ids.request_id,
        client_request_id=ids.client_request_id,
        namespace=parsed.principal.namespace or "",
        route=parsed.route,
        prompt=tuple(tokens),
        prompt_text=text[-MAX_PROMPT_CHARS:],  # the end holds the question
        max_tokens=limit,
        sampling=sampling,
        bytes_of=parsed.tokenizer.bytes_of,
        arrived_unix_ms=parsed.arrived_unix_ms,
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


def _check_json(request: Request) -> None:
    """A foreign page's form or plain text is sent without asking first; JSON makes its browser ask. Raises 415."""
    given = request.headers.get("content-type", "")
    if given.partition(";")[0].strip().lower() != JSON:
        raise UnsupportedMediaType(
            f"The body is declared as {given[:128] or 'nothing'!r}; send it with the header `Content-Type: {JSON}`."
        )


async def _body(request: Request, limit: int) -> bytes:
    """The whole body within bounds of size and time. Raises TooLarge, BodyTimeout, BadRequest."""
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise TooLarge(f"The body is larger than {limit} bytes.")
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for chunk in request.stream():
                body += chunk
                if len(body) > limit:
                    raise TooLarge(f"The body is larger than {limit} bytes.")
    except TimeoutError as error:
        raise BodyTimeout(f"The body did not arrive within {BODY_SECONDS:g} s.") from error
    except ClientDisconnect as error:
        raise BadRequest("The client went away.", code="client_gone", status=499) from error
    return bytes(body)
