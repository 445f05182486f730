"""From an HTTP request to a valid, tokenised, allowed one. Everything that can be refused is refused here."""

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from starlette.requests import ClientDisconnect, Request

from weft_gateway.core.routes import Pool, Principal, Route, RouteTable
from weft_gateway.errors import (
    BadRequest,
    BodyTimeout,
    Internal,
    ModelNotFound,
    ParameterError,
    TooLarge,
    UnsupportedMediaType,
)
from weft_gateway.openai.response_format import ResponseMeta
from weft_gateway.openai.schema import Common, parse
from weft_gateway.shell.active_request import MAX_PROMPT_CHARS, Prepared, Sampling
from weft_gateway.shell.app_state import AppState, Preparing
from weft_gateway.shell.auth import authenticate
from weft_gateway.shell.request_ids import ids_of
from weft_gateway.shell.tokenizer import UNKNOWN_CONTEXT_TOKENS, ModelTokenizer, NotEncodable, TokenizerPanic, TooLong

THREAD_BYTES = 20_000  # a body this long is parsed in a thread: the loop goes on streaming
MAX_TOLD = 1 << 19  # log probabilities of one answer: some 60 MB while it is held
JSON = "application/json"
BODY_SECONDS = 30.0  # for a client to send its body
T = TypeVar("T", bound=Common)
Encode = Callable[[ModelTokenizer, int], list[int]]  # within a context of so many tokens


async def table_and_caller(gateway: AppState, request: Request) -> tuple[RouteTable, Principal]:
    """The route table and who asks. Raises Unavailable, Overloaded, Unauthorized."""
    table = await gateway.route_table()
    return table, authenticate(request.headers.get("authorization"), table, auth=gateway.settings.auth)


@dataclass(frozen=True, slots=True)
class Asked(Generic[T]):
    """A typed request and the model it names, for a caller that may use it."""

    params: T
    route: Route
    pool: Pool
    caller: Principal
    arrived: float


async def read(gateway: AppState, request: Request, kind: type[T], preparing: Preparing) -> Asked[T]:
    """Who asks for what. Raises ApiError: everything but the prompt is checked."""
    arrived = gateway.serving.clock()
    table, caller = await table_and_caller(gateway, request)
    gateway.check_admission()
    _check_json(request)
    body = await _body(request, gateway.settings.max_body_bytes)
    params = await asyncio.to_thread(parse, kind, body) if len(body) > THREAD_BYTES else parse(kind, body)
    found = table.find(params.model, caller)
    if found is None:
        raise ModelNotFound(params.model)
    request.state.model = params.model
    preparing.admit(params.n)
    return Asked(params, *found, caller, arrived)


async def prepare(
    gateway: AppState, request: Request, asked: Asked[T], *, encode: Encode, text: str
) -> tuple[Prepared, ...]:
    """Tokenise and check the lengths; one value a choice. `text` is what the predictor sees."""
    params, pool = asked.params, asked.pool
    model = await gateway.tokenizer(pool)
    tokens = await _encoded(model, encode, pool.max_context_tokens or UNKNOWN_CONTEXT_TOKENS)
    sampling = _sampling(params, model)
    limit = _max_tokens(params.limit, len(tokens), pool.max_context_tokens, gateway.settings.default_max_tokens)
    _check_told(params, limit)
    ids = ids_of(request.scope)
    first = Prepared(
        request_id=ids.choice(0, params.n),
        client_request_id=ids.client_request_id,
        namespace=asked.caller.namespace or "",
        route=asked.route,
        prompt_tokens=tokens,
        prompt_text=text[-MAX_PROMPT_CHARS:],  # the end holds the question
        max_tokens=limit,
        stops=params.stop,
        sampling=sampling,
        model_text=model,
        arrived=asked.arrived,
    )
    others = range(1, params.n)
    return first, *(
        replace(first, request_id=ids.choice(index, params.n), sampling=replace(sampling, choice=index))
        for index in others
    )


def response_meta(request: Request, asked: Asked[T], prepared: Sequence[Prepared]) -> ResponseMeta:
    """What every chunk of the answer says."""
    return ResponseMeta(
        request_id=ids_of(request.scope).request_id,
        model=asked.params.model,
        created=int(time.time()),
        n=len(prepared),
        include_usage=asked.params.include_usage,
        alternatives=asked.params.alternatives,
        words=prepared[0].model_text,
    )


async def _encoded(model: ModelTokenizer, encode: Encode, context_tokens: int) -> list[int]:
    """In a thread: the tokenizer lets go of the interpreter and the template is foreign code."""
    try:
        tokens = await asyncio.to_thread(encode, model, context_tokens)
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
    """The answer's bound. A context of 0 is not known yet: no runner has told; the scheduler decides then."""
    room = context_tokens - prompt_tokens if context_tokens else asked or default
    limit = min(default, room) if asked is None else asked
    if limit < 1 or limit > room:
        wanted = f"{prompt_tokens} tokens of prompt" + (f" and max_tokens {asked}" if asked else "")
        raise ParameterError(
            f"This model's context is {context_tokens} tokens; the request has {wanted}.",
            param="max_tokens" if asked and room > 0 else None,
            code="context_length_exceeded",
        )
    return limit


def _check_told(params: Common, max_tokens: int) -> None:
    """An answer is held until it is told: what one of them may hold is bounded. Raises ParameterError."""
    told = 0 if params.alternatives is None else params.n * max_tokens * (1 + params.alternatives)
    if told > MAX_TOLD:
        text = f"This answer could have {told:,} log probabilities; at most {MAX_TOLD:,} are told in one answer."
        raise ParameterError(f"{text} Ask for fewer choices, tokens or alternatives.", param="logprobs")


def _sampling(params: Common, model: ModelTokenizer) -> Sampling:
    """Raises ParameterError for a bias of a token that the model does not have."""
    beyond = [token for token, _ in params.logit_bias if token >= model.vocab_size]
    if beyond:
        text = f"logit_bias: token {beyond[0]} is outside the model's vocabulary of {model.vocab_size}."
        raise ParameterError(text, param="logit_bias")
    return Sampling(
        seed=_seed(params.seed),
        temperature=params.temperature,
        top_p=params.top_p,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        logit_bias=params.logit_bias,
        top_logprobs=params.alternatives,
    )


def _seed(asked: int | None) -> int:
    """64 bits: the client's, or drawn."""
    return secrets.randbits(64) if asked is None else asked % 2**64


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
