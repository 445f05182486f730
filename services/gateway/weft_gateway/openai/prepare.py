"""From a body to a request that is valid, tokenised and allowed: what can be refused beforehand is refused here.

Requests of clients and lines of batches take this one way.
"""

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Generic, TypeVar

import orjson

from weft.artifacts.errors import ArtifactError, Refused, UnknownDigest
from weft.domain.request import Priority, Sampling, SamplingDefaults
from weft.domain.routes import PoolRoute, Route
from weft_gateway.core.events import BytesOf, PreparedRequest
from weft_gateway.core.routes import Principal, route_of_draw
from weft_gateway.errors import (
    ApiError,
    BadRequest,
    Internal,
    ParameterError,
    ServiceUnavailable,
    TooLarge,
)
from weft_gateway.forms.answer_form import AnswerForm, choose_form
from weft_gateway.forms.marks import showing
from weft_gateway.openai.answer import Answer, BeforeEnd
from weft_gateway.openai.fields import MAX_INT32
from weft_gateway.openai.response_format import AnswerContext, AnswerHead, EncoderOf, PromptPart
from weft_gateway.openai.schema import ChatPrompt, Common, naming
from weft_gateway.openai.spans import RequestTrace
from weft_gateway.shell.app_state import AppState
from weft_gateway.shell.rate_limits import AdmittedCall
from weft_gateway.shell.request_ids import Ids, id_of_prompt
from weft_gateway.shell.tokenizer import (
    UNKNOWN_CONTEXT_TOKENS,
    BadTemplate,
    ModelTokenizer,
    NotEncodable,
    TokenizerPanic,
    TooLong,
)

THREAD_BYTES = 20_000  # a body this long is parsed in a thread: the loop goes on streaming
MAX_ASKED_CHARS = 256  # of a model that a refused request names
MAX_PROMPT_CHARS = 4096  # of a prompt that the predictor gets
UNASKED_TOKENS = 1024  # that an answer is charged with whose length nobody asked for
MAX_LOGPROBS = 1 << 19  # of one answer: some 60 MB while it is held
SAME_NAMED = tuple([field.name for field in fields(Sampling) if field.name in Common.model_fields])
T = TypeVar("T", bound=Common)


@dataclass(slots=True)
class Call:
    """A request on its way: its ids, who asks, since when."""

    ids: Ids
    principal: Principal
    arrived_unix_ms: int
    priority: Priority = Priority.INTERACTIVE
    model: str | None = None  # once it is found
    named_model: str | None = None  # the model that a refused request names, for the log
    is_line: bool = False  # of a batch
    trace: RequestTrace | None = None  # of a request that is sampled


@dataclass(frozen=True, slots=True)
class ParsedRequest(Generic[T]):
    """A typed request and the model that it names, for a caller that may use it."""

    params: T
    route: Route
    pool: PoolRoute
    tokenizer: ModelTokenizer


Encode = Callable[[ModelTokenizer, int], list[int]]  # within a context of so many tokens


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of a call. `text`: for the predictor; `echo`: what answers begin with."""

    text: str
    encode: Encode
    echo: str = ""


@dataclass(frozen=True, slots=True)
class ModelEndpoint(Generic[T]):
    """One way to ask a model."""

    path: str
    parse: Callable[[bytes], T]  # raises BadRequest, ParameterError
    prompts_of: Callable[[ParsedRequest[T]], Sequence[Prompt]]
    encoder: EncoderOf
    operation: str = "chat"  # `gen_ai.operation.name` of its spans
    completed: Callable[[AppState, Call, T], Awaitable[T]] | None = None  # with what is not in the body
    before_end: Callable[[AppState, Call, T], BeforeEnd] | None = None


async def submit(state: AppState, endpoint: ModelEndpoint[T], call: Call, body: bytes) -> Answer:
    """Check a request that counts already, whole, and hand it to the scheduler. Raises ApiError."""
    try:
        parsed = await _parse(state, endpoint, call, body)
    except ApiError:
        call.named_model = _named_model(body)
        raise
    with naming(parsed.params.asked_as):
        return await _submitted(state, endpoint, call, parsed)


async def _submitted(state: AppState, endpoint: ModelEndpoint[T], call: Call, parsed: ParsedRequest[T]) -> Answer:
    """Raises ApiError."""
    answers = parsed.params.prompts * parsed.params.drawn
    state.manager.limits.check_requests(call.principal, parsed.route.model_name, answers)
    prompts = endpoint.prompts_of(parsed)
    prepared, forms = await _prepare(state, call, parsed, prompts)
    echoes = [prompt.echo for prompt in prompts]
    parts = [PromptPart(one.prompt, echo, form) for one, echo, form in zip(prepared, echoes, forms, strict=True)]
    digest = parsed.route.digest or parsed.pool.base_digest
    head = AnswerHead(call.ids.request_id, call.arrived_unix_ms // 1000, digest)
    encoder = endpoint.encoder(parsed.params, AnswerContext(head, parsed.tokenizer, parts))
    admitted = _admit(state, call, prepared)
    group = state.manager.submit(prepared)
    before_end = endpoint.before_end and endpoint.before_end(state, call, parsed.params)
    return Answer(
        state.manager, group, parsed.params, encoder, digest=digest, trace=call.trace, admitted=admitted,
        before_end=before_end,
    )  # fmt: skip


def _admit(state: AppState, call: Call, prepared: Sequence[PreparedRequest]) -> AdmittedCall | None:
    """Charge the limits with what the call may use: each answer is a request. Raises LimitReached."""
    answers = sum(one.n for one in prepared)
    tokens = sum(len(one.prompt) + one.n * _charged(one) for one in prepared)
    return state.manager.limits.admit(call.principal, prepared[0].route.model_name, answers, tokens)


def _charged(request: PreparedRequest) -> int:
    """Tokens of one answer: what a client did not ask for keeps no other request of its out."""
    return min(request.max_tokens, UNASKED_TOKENS) if request.open_ended else request.max_tokens


def _named_model(body: bytes) -> str | None:
    """The model that a body names which may be no request. None: it names none, or is too long to be read again."""
    try:
        value: Any = orjson.loads(body) if len(body) <= THREAD_BYTES else None
    except orjson.JSONDecodeError:
        return None
    model = value.get("model") if isinstance(value, dict) else None
    return model[:MAX_ASKED_CHARS] if isinstance(model, str) else None


async def _parse(state: AppState, endpoint: ModelEndpoint[T], call: Call, body: bytes) -> ParsedRequest[T]:
    """Raises ApiError: everything but the prompts is checked."""
    if len(body) > state.settings.max_body_bytes:
        raise TooLarge(f"The body is larger than {state.settings.max_body_bytes} bytes.")
    params = await asyncio.to_thread(endpoint.parse, body) if len(body) > THREAD_BYTES else endpoint.parse(body)
    route, pool = state.model(params.model, call.principal)
    if "@" not in params.model:
        route = route_of_draw(route, params.safety_identifier or params.user or call.ids.request_id)
    call.model = route.model_name
    if endpoint.completed:
        params = await endpoint.completed(state, call, params)
    _check_way(state, call, params)
    if pool.embeds_only and not params.pools:
        text = (
            f"model: {params.model} has no head: it embeds texts (/v1/embeddings, /rerank, /score) and generates none."
        )
        raise ParameterError(text, param="model", code="unsupported_value")
    params = _with_defaults(params, pool.sampling_defaults)
    if params.priority:
        call.priority = Priority.BATCH
    await state.manager.resolve(call.ids.request_id, pool.name, params.prompts * params.drawn, call.priority)
    tokenizer = state.tokenizers.get(pool.base_digest)
    if tokenizer is None:
        text = f"The tokenizer of pool {pool.name} is not available: the pool has changed."
        raise ServiceUnavailable(text, code="model_not_ready", retry_after_ms=1000)
    if isinstance(params, ChatPrompt):
        tokenizer = await chat_tokenizer(state, route, pool, tokenizer)
    return ParsedRequest(params, route, pool, tokenizer)


async def chat_tokenizer(state: AppState, route: Route, pool: PoolRoute, tokenizer: ModelTokenizer) -> ModelTokenizer:
    """The pool's tokenizer, with the chat template that the specs choose: the adapter's spec, else its files, else the
    pool's spec. Raises BadRequest, ServiceUnavailable.
    """
    supplied = route.chat_template or route.chat_template_fault
    counts = route if supplied or route.own_chat_template else pool
    if counts.chat_template_fault:
        text = f"{route.model_name} renders no chats, use /v1/completions: {counts.chat_template_fault}."
        raise BadRequest(text, code=BadTemplate.code)
    own = route.digest if counts is route else ""
    if not own and not counts.chat_template:
        return tokenizer
    try:
        return await state.templates.tokenizer(own, counts.chat_template, pool.base_digest, tokenizer)
    except ArtifactError as error:
        if isinstance(error, Refused) and not isinstance(error, UnknownDigest):
            text = f"The chat template of {route.model_name} cannot be read: {error.message}."
            raise BadRequest(text, code=BadTemplate.code) from error
        text = f"The chat template of {route.model_name} is not here yet: {error.message}."
        raise ServiceUnavailable(text, code="model_not_ready", retry_after_ms=1000) from error


def _with_defaults(params: T, defaults: SamplingDefaults) -> T:
    """What the request does not say is as the base has it; `max_tokens` is left to `_max_tokens`."""
    given = {field.name: getattr(defaults, field.name) for field in fields(defaults) if field.name != "max_tokens"}
    of_model = {name: v for name, v in given.items() if v is not None and name not in params.model_fields_set}
    return params.model_copy(update=of_model) if of_model and not params.pools else params


def _check_way(state: AppState, call: Call, params: Common) -> None:
    """Whether so many answers, and streamed ones, can go this call's way. Raises ParameterError."""
    limit = state.settings.max_in_flight
    if params.prompts * params.drawn > limit:
        name = params.prompt_name if params.prompts > 1 else "n"
        text = f"{name}: this gateway takes {limit} requests at once, and each choice of each prompt is one."
        raise ParameterError(text, param=name)
    if params.stream and call.is_line:
        raise ParameterError("stream: the answer to a line of a batch is written whole; leave it out.", param="stream")


async def _prepare(
    state: AppState, call: Call, parsed: ParsedRequest[T], prompts: Sequence[Prompt]
) -> tuple[list[PreparedRequest], list[AnswerForm]]:
    """Tokenise and check the lengths; the parts of each prompt's answers."""
    params, pool, tokenizer = parsed.params, parsed.pool, parsed.tokenizer
    encoded = await _encoded(params, tokenizer, prompts, pool.max_context_tokens or UNKNOWN_CONTEXT_TOKENS)
    chosen = choose_form(params, tokenizer.forms, pool.tool_call_parser)
    sampling = replace(_sampling(params, tokenizer), eos_token_ids=parsed.route.eos_token_ids)
    prepared, forms = list[PreparedRequest](), list[AnswerForm]()
    for index, (tokens, prompt) in enumerate(zip(encoded, prompts, strict=True)):
        kept = _truncated(tokens, params, pool.max_context_tokens)
        where = params.prompt_at(index)
        form = chosen.after(kept, tokenizer.spelled)
        forms.append(form)
        grammar = await state.grammars.grammar(form.output) if form.output else ""
        limit = _max_tokens(params, where, len(kept), pool)
        request = PreparedRequest(
            request_id=id_of_prompt(call.ids.request_id, index),
            client_request_id=call.ids.client_request_id,
            namespace=call.principal.namespace or "",
            key_id=call.principal.key_id,
            route=parsed.route,
            prompt=tuple(kept),
            prompt_text=prompt.text[-MAX_PROMPT_CHARS:],  # the end holds the question
            max_tokens=limit,
            sampling=replace(sampling, grammar=grammar),
            bytes_of=_bytes_of(params, tokenizer, form),
            arrived_unix_ms=call.arrived_unix_ms,
            stops=params.stop,
            n=params.drawn,
            include_stop=params.include_stop_str_in_output,
            returns_tokens=params.return_token_ids,
            cache_salt=params.cache_salt or "",
            traceparent=call.trace.traceparent if call.trace else "",
            open_ended=params.limit is None and params.unasked_tokens is None,
        )
        prepared.append(request)
    _check_logprobs(prepared)
    return prepared, forms


def _bytes_of(params: Common, tokenizer: ModelTokenizer, form: AnswerForm) -> BytesOf:
    """What clients, and the readers of an answer's parts, get of a token."""
    if not params.skip_special_tokens:
        return tokenizer.spelled_bytes_of
    return tokenizer.bytes_of if form.is_plain else showing(tokenizer.bytes_of, form.marks)


async def _encoded(
    params: Common, tokenizer: ModelTokenizer, prompts: Sequence[Prompt], context_tokens: int
) -> list[list[int]]:
    """In a thread: the tokenizer releases the interpreter and the template is foreign code. Raises ApiError."""

    encoded: list[list[int]] = []

    def encode() -> None:
        encoded.extend(prompt.encode(tokenizer, context_tokens) for prompt in prompts)

    try:
        await asyncio.to_thread(encode)
    except TooLong as error:
        where = params.prompt_at(len(encoded))
        text = f"{error}{_in(params, where)}." + (
            " Please reduce the length of the input prompt." if params.pools else ""
        )
        raise ParameterError(text, param=where, code="context_length_exceeded") from error
    except TokenizerPanic as error:
        raise Internal(f"{error}. Other requests are not affected; a shorter or plainer prompt may pass.") from error
    except NotEncodable as error:
        where = params.prompt_at(len(encoded))
        text = f"The prompt cannot be encoded{_in(params, where)}: {error}."
        raise ParameterError(text, param=where, code=error.code) from error
    if (empty := next((index for index, tokens in enumerate(encoded) if not tokens), None)) is not None:
        where = params.prompt_at(empty)
        raise ParameterError(f"The prompt is empty{_in(params, where)}: it has no token.", param=where)
    return encoded


def _in(params: Common, where: str) -> str:
    """Name the one that is meant, of several prompts."""
    return f" ({where})" if params.prompts > 1 else ""


def _truncated(tokens: list[int], params: Common, context_tokens: int) -> list[int]:
    """The last tokens of a prompt, or its first; -1: as many as leave room for the answer. Raises ParameterError."""
    keep = params.truncate_prompt_tokens
    if keep == 0:
        text = "truncate_prompt_tokens 0 leaves nothing of the prompt; -1 keeps as much as fits."
        raise ParameterError(text, param="truncate_prompt_tokens")
    if keep is not None and 0 < context_tokens < keep:
        text = f"truncate_prompt_tokens {keep} is more than this model's context of {context_tokens} tokens."
        raise ParameterError(f"{text} Please request a smaller truncation size.", param="truncate_prompt_tokens")
    if keep == -1:
        keep = max(1, context_tokens - (params.limit or params.unasked_tokens or 1)) if context_tokens else None
    if keep is None or keep >= len(tokens):
        return tokens
    return tokens[:keep] if params.truncation_side == "right" else tokens[-keep:]


def _max_tokens(params: Common, where: str, prompt_tokens: int, pool: PoolRoute) -> int:
    """The answer's bound. A context of 0 is not known yet: no runner has reported it; the scheduler decides then."""
    asked, context_tokens, most = params.limit, pool.max_context_tokens, pool.max_output_tokens
    if asked is not None and 0 < most < asked:
        text = f"{params.limit_name}: {asked} is more than the {most} tokens that an answer of this model may have."
        raise ParameterError(text, param=params.limit_name)
    left = (context_tokens or max(UNKNOWN_CONTEXT_TOKENS, prompt_tokens + (asked or 0))) - prompt_tokens
    usual = max(pool.sampling_defaults.max_tokens or left, params.min_tokens)
    limit = min(left, most or left, usual, _unasked(params)) if asked is None else asked
    if limit > left or (limit < 1 and asked is None):
        wanted = f"you requested {prompt_tokens + max(0, asked or 0)} tokens ({prompt_tokens} in the prompt"
        wanted += _in(params, where)
        wanted += f", {asked} in the completion)" if asked else ")"
        raise ParameterError(
            f"This model's maximum context length is {context_tokens} tokens. However, {wanted}. "
            f"Please reduce the length of the {'input prompt' if params.pools else 'prompt or the completion'}.",
            param=params.limit_name if asked and left > 0 else where,
            code="context_length_exceeded",
        )
    return limit


def _unasked(params: Common) -> int:
    """The most tokens of an answer whose length nobody asked for: with log probabilities, as many as are sent."""
    reported = MAX_INT32
    if params.alternatives is not None:
        reported = MAX_LOGPROBS // 2 // (params.prompts * params.drawn * (1 + params.alternatives))
    return min(reported, MAX_INT32 if params.unasked_tokens is None else max(params.unasked_tokens, params.min_tokens))


def _check_logprobs(prepared: Sequence[PreparedRequest]) -> None:
    """An answer is held until it is sent: its log probabilities are bounded. Raises ParameterError."""
    answers, prompts = prepared[0].sampling.top_logprobs, prepared[0].sampling.prompt_logprobs
    count = 0 if answers is None else sum(one.n * one.max_tokens for one in prepared) * (1 + answers)
    count += 0 if prompts is None else sum(len(one.prompt) for one in prepared) * (1 + prompts)
    if count > MAX_LOGPROBS:
        text = f"This answer could have {count:,} log probabilities; at most {MAX_LOGPROBS:,} are sent in one answer."
        raise ParameterError(f"{text} Ask for fewer choices, tokens or alternatives.", param="logprobs")


def _sampling(params: Common, tokenizer: ModelTokenizer) -> Sampling:
    """Raises ParameterError for a token that the model does not have, and for what its runners cannot do."""
    named = {
        "logit_bias": [token for token, _ in params.logit_bias],
        "allowed_token_ids": params.allowed_token_ids,
        "stop_token_ids": params.stop_token_ids,
    }
    for name, tokens in named.items():
        if (beyond := next((token for token in tokens if token >= tokenizer.vocab_size), None)) is not None:
            text = f"{name}: token {beyond} is outside the model's vocabulary of {tokenizer.vocab_size}."
            raise ParameterError(text, param=name)
    if params.thinking_token_budget >= 0 and tokenizer.forms.reasoning:
        text = "thinking_token_budget: max_tokens bounds reasoning and answer of this model together."
        raise ParameterError(text, param="thinking_token_budget", code="unsupported_value")
    alternatives, selects = params.alternatives, params.drawn > params.n
    others: dict[str, Any] = {
        "seed": secrets.randbits(64) if params.seed is None else params.seed % 2**64,
        "top_k": max(0, params.top_k),
        "ignore_eos": params.passes_eos,
        "bad_words": tokenizer.sequences_of(params.bad_words),
        "top_logprobs": 0 if alternatives is None and selects else alternatives,
        "prompt_logprobs": params.prompt_alternatives,
        "pooling": params.pools,
    }
    return Sampling(**{name: getattr(params, name) for name in SAME_NAMED} | others)
