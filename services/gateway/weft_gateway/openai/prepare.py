"""A call from its body to its submission: requests of clients and lines of batches take this one way.

What can be refused before it is submitted is refused here.
"""

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import orjson

from weft.artifacts.errors import ArtifactError, Refused, UnknownDigest
from weft.domain.request import Priority, Sampling, SamplingDefaults
from weft.domain.routes import PoolRoute, Route
from weft_gateway.core.events import BytesOf, PreparedRequest
from weft_gateway.core.routes import route_of_draw
from weft_gateway.errors import (
    ApiError,
    BadRequest,
    Internal,
    ParameterError,
    ServiceUnavailable,
    TooLarge,
)
from weft_gateway.forms.answer_form import AnswerForm
from weft_gateway.forms.marks import showing
from weft_gateway.forms.structured_outputs import structured_output, with_tools
from weft_gateway.forms.template_forms import TemplateForms
from weft_gateway.openai.answer import Answer
from weft_gateway.openai.call import Call, ModelEndpoint, Prompt, T
from weft_gateway.openai.fields import MAX_INT32
from weft_gateway.openai.schema import ChatPrompt, ChatRequest, Common, naming
from weft_gateway.shell.app_state import AppState
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
UNASKED_TOKENS = 1024  # that an answer is charged with whose length nobody asked for
MAX_LOGPROBS = 1 << 19  # of one answer: some 60 MB while it is held
SAME_NAMED = tuple([field.name for field in fields(Sampling) if field.name in Common.model_fields])


async def submit(state: AppState, endpoint: ModelEndpoint[T], call: Call, body: bytes) -> Answer:
    """Check a request that counts already, whole, and hand it to the scheduler, in eight steps. Raises ApiError."""
    # 1. JSON to a typed request.
    if len(body) > state.settings.max_body_bytes:
        raise TooLarge(f"The body is larger than {state.settings.max_body_bytes} bytes.")
    try:
        params = await asyncio.to_thread(endpoint.parse, body) if len(body) > THREAD_BYTES else endpoint.parse(body)
        # 2. The model that it names, for this caller; of an adapter with a canary the content that answers.
        route, pool = state.model(params.model, call.principal)
    except ApiError:
        call.named_model = _named_model(body)
        raise
    if "@" not in params.model:
        route = route_of_draw(route, params.safety_identifier or params.user or call.ids.request_id)
    call.route, call.pool, call.model = route, pool, route.model_name
    call.digest = route.digest or pool.base_digest
    # 3. What is not in the body: earlier responses, the base's defaults.
    params = await endpoint.completed(state, call, params)
    with naming(params.asked_as):
        answers, pools = params.prompts * params.drawn, params.pools
        _check_call(state, call, params, answers)
        if pool.embeds_only and not pools:
            text = "has no head: it embeds texts (/v1/embeddings, /rerank, /score) and generates none."
            raise ParameterError(f"model: {params.model} {text}", param="model", code="unsupported_value")
        call.params = params = params if pools else _with_defaults(params, pool.sampling_defaults)
        # 4. Its answers count from here on; the tokenizer with its chat template, which may be waited for.
        call.priority = Priority.BATCH if params.priority else call.priority
        await state.manager.resolve(call.ids.request_id, pool.name, answers, call.priority)
        if (tokenizer := state.tokenizers.get(pool.base_digest)) is None:
            text = f"The tokenizer of pool {pool.name} is not available: the pool has changed."
            raise ServiceUnavailable(text, code="model_not_ready", retry_after_ms=1000)
        is_chat = isinstance(params, ChatPrompt)
        call.tokenizer = await chat_tokenizer(state, route, pool, tokenizer) if is_chat else tokenizer
        # 5. The limits, as far as they do not count tokens: a prompt that is refused need not be tokenised.
        if limits := state.manager.limits if call.principal.limits else None:
            limits.check_requests(call.principal, route.model_name, answers)
        # 6. Each prompt rendered and tokenised, in a thread.
        call.prompts = endpoint.prompts(params, call)
        encoded = await _encoded(call)
        # 7. One request for each prompt: its length, how it is sampled, the form of its answers.
        form, sampling = select_form(params, call.tokenizer.forms, pool.tool_call_parser), _sampling(call)
        prepared = list[PreparedRequest]()
        for index, (prompt, tokens) in enumerate(zip(call.prompts, encoded, strict=True)):
            kept = _truncated(tokens, params, pool.max_context_tokens)
            prompt.tokens, prompt.form = tuple(kept), form.after(kept, call.tokenizer.spelled)
            grammar = await state.grammars.grammar(prompt.form.output) if prompt.form.output else ""
            prepared.append(_request(call, index, prompt, replace(sampling, grammar=grammar) if grammar else sampling))
        _check_logprobs(prepared)
        # 8. The limits charged with what the call may use, and the one event that submits it.
        encoder = endpoint.encoder(params, call)
        charged = sum(len(one.prompt) + one.n * _charged(one) for one in prepared)
        admitted = limits.admit(call.principal, route.model_name, answers, charged) if limits else None
        answer = Answer(state, endpoint, call, prepared, encoder, admitted)
        state.manager.submit(prepared, answer.choices)
        return answer


def _request(call: Call, index: int, prompt: Prompt, sampling: Sampling) -> PreparedRequest:
    """Return the request of one prompt, with an id of its own. Raises ParameterError."""
    params, request_id = call.params, call.ids.request_id
    where, n, asked, alternatives = params.prompt_at(index), params.drawn, params.limit, params.alternatives
    return PreparedRequest(
        request_id=f"{request_id}.{index}" if index else request_id,
        client_request_id=call.ids.client_request_id,
        namespace=call.principal.namespace or "",
        key_id=call.principal.key_id,
        route=call.route,
        prompt=prompt.tokens,
        prompt_text=prompt.text,
        max_tokens=_max_tokens(call, where, len(prompt.tokens), asked, alternatives),
        sampling=sampling,
        bytes_of=_bytes_of(params, call.tokenizer, prompt.form),
        arrived_unix_ms=call.arrived_unix_ms,
        stops=params.stop,
        n=n,
        include_stop=params.include_stop_str_in_output,
        returns_tokens=params.return_token_ids,
        cache_salt=params.cache_salt or "",
        traceparent=call.trace.traceparent if call.trace else "",
        open_ended=asked is None and params.unasked_tokens is None,
    )


def _charged(request: PreparedRequest) -> int:
    """Return the tokens of one answer: what a client did not ask for keeps no other request of its out."""
    return min(request.max_tokens, UNASKED_TOKENS) if request.open_ended else request.max_tokens


def _named_model(body: bytes) -> str | None:
    """Return the model that a refused body names; None: it names none, or is too long to be read again."""
    try:
        value: Any = orjson.loads(body) if len(body) <= THREAD_BYTES else None
    except orjson.JSONDecodeError:
        return None
    model = value.get("model") if isinstance(value, dict) else None
    return model[:MAX_ASKED_CHARS] if isinstance(model, str) else None


async def chat_tokenizer(state: AppState, route: Route, pool: PoolRoute, tokenizer: ModelTokenizer) -> ModelTokenizer:
    """Return the pool's tokenizer with the chat template of the adapter's spec, else of its files, else of the pool.

    Raises BadRequest, ServiceUnavailable.
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
    """Set what the request does not say as the base has it; `max_tokens` is left to `_max_tokens`."""
    given = {field.name: getattr(defaults, field.name) for field in fields(defaults) if field.name != "max_tokens"}
    of_model = {name: v for name, v in given.items() if v is not None and name not in params.model_fields_set}
    return params.model_copy(update=of_model) if of_model else params


def _check_call(state: AppState, call: Call, params: Common, answers: int) -> None:
    """Refuse more answers than the gateway takes at once, and a stream to a line of a batch. Raises ParameterError."""
    limit = state.settings.max_in_flight
    if answers > limit:
        name = params.prompt_name if params.prompts > 1 else "n"
        text = f"{name}: this gateway takes {limit} requests at once, and each choice of each prompt is one."
        raise ParameterError(text, param=name)
    if params.stream and call.is_line:
        raise ParameterError("stream: the answer to a line of a batch is written whole; leave it out.", param="stream")


def select_form(params: Common, template: TemplateForms, parser: str) -> AnswerForm:
    """Choose the form of a request's answers. `parser`: of calls, that the pool names. Raises ParameterError."""
    asked = params.response_format, params.structured_outputs
    output = None if asked == (None, None) else structured_output(*asked)
    if not isinstance(params, ChatRequest):
        return AnswerForm(output)
    tools, required, is_named = params.callable_tools, params.required_tools, isinstance(params.tool_choice, dict)
    written = template.tool_format(parser) if tools else None
    if written is not None:
        if is_named and output is not None and not output.param.startswith("response_format"):
            text = f"{output.param} cannot stand beside a tool_choice that names the call: the answer is its arguments."
            raise ParameterError(text, param=output.param)
        if required or output:
            several = params.parallel_tool_calls and not is_named
            output = with_tools(required or tools, written, None if required else output, several=several)
    return AnswerForm(
        output=output,
        template=template,
        tools=written,
        continues=params.messages[-1].content if params.continue_final_message else None,
        shows_reasoning=params.include_reasoning,
        spells_marks=not params.skip_special_tokens,
        calls_are_asked=is_named,
        calls_alone=bool(required),
        one_call=not params.parallel_tool_calls,
    )


def _bytes_of(params: Common, tokenizer: ModelTokenizer, form: AnswerForm) -> BytesOf:
    """What clients, and the readers of an answer's parts, get of a token."""
    if not params.skip_special_tokens:
        return tokenizer.spelled_bytes_of
    return tokenizer.bytes_of if form.is_plain else showing(tokenizer.bytes_of, form.marks)


async def _encoded(call: Call) -> list[list[int]]:
    """Encode in a thread: the tokenizer releases the interpreter and the template is foreign code. Raises ApiError."""
    params, context_tokens = call.params, call.pool.max_context_tokens or UNKNOWN_CONTEXT_TOKENS
    encoded: list[list[int]] = []

    def encode() -> None:
        encoded.extend(prompt.encode(call.tokenizer, context_tokens) for prompt in call.prompts)

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


def _max_tokens(call: Call, where: str, prompt_tokens: int, asked: int | None, alternatives: int | None) -> int:
    """Return the answer's bound.

    A context of 0 is not known yet: no runner has reported it, and the scheduler decides. Raises ParameterError.
    """
    params, pool = call.params, call.pool
    context_tokens, most = pool.max_context_tokens, pool.max_output_tokens
    if asked is not None and 0 < most < asked:
        text = f"{params.limit_name}: {asked} is more than the {most} tokens that an answer of this model may have."
        raise ParameterError(text, param=params.limit_name)
    left = (context_tokens or max(UNKNOWN_CONTEXT_TOKENS, prompt_tokens + (asked or 0))) - prompt_tokens
    usual = max(pool.sampling_defaults.max_tokens or left, params.min_tokens)
    limit = min(left, most or left, usual, _unasked(params, alternatives)) if asked is None else asked
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


def _unasked(params: Common, alternatives: int | None) -> int:
    """Return the most tokens of an answer whose length nobody asked for: of log probabilities those that are sent."""
    reported = MAX_INT32
    if alternatives is not None:
        reported = MAX_LOGPROBS // 2 // (params.prompts * params.drawn * (1 + alternatives))
    return min(reported, MAX_INT32 if params.unasked_tokens is None else max(params.unasked_tokens, params.min_tokens))


def _check_logprobs(prepared: Sequence[PreparedRequest]) -> None:
    """An answer is held until it is sent: its log probabilities are bounded. Raises ParameterError."""
    answers, prompts = prepared[0].sampling.top_logprobs, prepared[0].sampling.prompt_logprobs
    count = 0 if answers is None else sum(one.n * one.max_tokens for one in prepared) * (1 + answers)
    count += 0 if prompts is None else sum(len(one.prompt) for one in prepared) * (1 + prompts)
    if count > MAX_LOGPROBS:
        text = f"This answer could have {count:,} log probabilities; at most {MAX_LOGPROBS:,} are sent in one answer."
        raise ParameterError(f"{text} Ask for fewer choices, tokens or alternatives.", param="logprobs")


def _sampling(call: Call) -> Sampling:
    """Return how the answers are sampled.

    Raises ParameterError for a token that the model does not have, and for what its runners cannot do.
    """
    params, tokenizer = call.params, call.tokenizer
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
        "bad_words": tokenizer.sequences_of(params.bad_words) if params.bad_words else (),
        "top_logprobs": 0 if alternatives is None and selects else alternatives,
        "prompt_logprobs": params.prompt_alternatives,
        "pooling": params.pools,
        "eos_token_ids": call.route.eos_token_ids,
    }
    return Sampling(**{name: getattr(params, name) for name in SAME_NAMED} | others)
