"""A call from its body to its submission: requests of clients and lines of batches take this one way.

What can be refused before it is submitted is refused here.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import orjson

from weft.artifacts.errors import ArtifactError, Refused, UnknownDigest
from weft.domain.request import Priority, Sampling
from weft.domain.routes import PoolRoute, Route
from weft_gateway.core.events import PreparedRequest
from weft_gateway.core.routes import route_of_draw
from weft_gateway.errors import ApiError, BadRequest, Internal, ParameterError, ServiceUnavailable, TooLarge
from weft_gateway.forms.answer_form import AnswerForm
from weft_gateway.forms.structured_outputs import structured_output, with_tools
from weft_gateway.forms.template_forms import TemplateForms
from weft_gateway.openai.answer import Answer
from weft_gateway.openai.call import Call, ModelEndpoint, Prompt, T
from weft_gateway.openai.schema import MAX_LOGPROBS, ChatPrompt, ChatRequest, Common, naming
from weft_gateway.shell.app_state import AppState
from weft_gateway.shell.tokenizer import (
    UNKNOWN_CONTEXT_TOKENS,
    BadTemplate,
    ModelTokenizer,
    NotEncodable,
    TokenizerPanic,
    TooLong,
)
from weft_gateway.shell.turnstile import THREAD_BYTES

# A text this long is encoded in a thread: 0.5 us a character, where the way to a thread and back takes 120 us.
THREAD_CHARS = 1_000
MAX_ASKED_CHARS = 256  # of a model that a refused request names
UNASKED_TOKENS = 1024  # that an answer is charged with whose length nobody asked for


async def submit(state: AppState, endpoint: ModelEndpoint[T], call: Call, body: bytes) -> Answer:
    """Check a request that counts already, whole, and hand it to the scheduler, in eight steps. Raises ApiError."""
    tenant = call.principal.tenant
    # 1. JSON to a typed request, at its tenant's turn.
    if len(body) > state.settings.max_body_bytes:
        raise TooLarge(f"The body is larger than {state.settings.max_body_bytes} bytes.")
    try:
        params = await state.turns.parse(tenant, endpoint.parse, body)
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
    if endpoint.completed:
        params = await endpoint.completed(state, call, params)
    with naming(params.asked_as):
        answers, pools = params.prompts * params.drawn, params.pools
        params.check_answers(state.settings.max_in_flight, is_line=call.is_line)
        if pool.embeds_only and not pools:
            text = "has no head: it embeds texts (/v1/embeddings, /rerank, /score) and generates none."
            raise ParameterError(f"model: {params.model} {text}", param="model", code="unsupported_value")
        if params.expected is not None and not pool.checks_drafts:
            text = f"prediction: the runners of {params.model} check no drafts: it would have no effect. Leave it out."
            raise ParameterError(text, param="prediction", code="unsupported_value")
        call.params = params = params if pools else params.with_defaults(pool.sampling_defaults)
        # 4. Its answers count from here on; the tokenizer with its chat template, which may be waited for.
        call.priority = Priority.BATCH if params.priority else call.priority
        await state.manager.resolve(call.ids.request_id, pool.name, answers, call.priority)
        is_chat = isinstance(params, ChatPrompt)
        call.tokenizer = await tokenizer_of(state, route, pool, ": the pool has changed", for_chats=is_chat)
        # 5. The limits, as far as they do not count tokens: a prompt that is refused need not be tokenised.
        if limits := state.manager.limits if call.principal.limits else None:
            limits.check_requests(call.principal, route.model_name, answers)
        # 6. Each prompt rendered and tokenised at its tenant's turn, what is long in a thread.
        call.prompts = endpoint.prompts(params, call)
        encoded = await _encoded(state, call)
        # 7. One request for each prompt: its length, how it is sampled, the form of its answers.
        form = select_form(params, call.tokenizer.forms, pool.tool_call_parser)
        sampling = params.sampling(call.tokenizer, route.eos_token_ids)
        prepared = list[PreparedRequest]()
        for index, (prompt, tokens) in enumerate(zip(call.prompts, encoded, strict=True)):
            tokens_kept = params.truncated(tokens, pool.max_context_tokens)
            prompt.tokens, prompt.form = tuple(tokens_kept), form.completed_by(tokens_kept, call.tokenizer.spelled)
            grammar = await state.grammars.grammar(tenant, prompt.form.output) if prompt.form.output else ""
            answers_sampling = replace(sampling, grammar=grammar) if grammar else sampling
            prepared.append(_request(state, call, index, prompt, answers_sampling))
        _check_logprobs(prepared)
        # 8. The limits charged with what the call may use, and the one event that submits it.
        encoder = endpoint.encoder(params, call)
        admitted = None
        if limits:
            charged = sum(len(request.prompt) + request.n * _charged(request) for request in prepared)
            admitted = limits.admit(call.principal, route.model_name, answers, charged)
        answer = Answer(state, endpoint, call, prepared, encoder, admitted)
        state.manager.submit(prepared, answer.choices)
        return answer


def _request(state: AppState, call: Call, index: int, prompt: Prompt, sampling: Sampling) -> PreparedRequest:
    """Return the request of a prompt. Each prompt of a call has a request id. Raises ParameterError."""
    params, request_id = call.params, call.ids.request_id
    return PreparedRequest(
        request_id=f"{request_id}.{index}" if index else request_id,
        client_request_id=call.ids.client_request_id,
        namespace=call.principal.namespace or "",
        key_id=call.principal.key_id,
        route=call.route,
        prompt=prompt.tokens,
        prompt_text=prompt.text,
        max_tokens=params.bound(index, len(prompt.tokens), call.pool),
        sampling=sampling,
        arrived_unix_ms=call.arrived_unix_ms,
        stops=params.stop,
        n=params.drawn,
        include_stop=params.include_stop_str_in_output,
        returns_tokens=params.return_token_ids or params.return_weight_versions,
        cache_salt=params.cache_salt or ("" if call.principal.namespace or state.settings.prefix_sharing else None),
        traceparent=call.trace.traceparent if call.trace else "",
        may_reason=prompt.form.reasoning is not None,
        open_ended=params.limit is None and params.unasked_tokens is None,
        bytes_of=prompt.form.readable(call.tokenizer.bytes_of, call.tokenizer.spelled_bytes_of),
        draft=call.draft,
    )


def _charged(request: PreparedRequest) -> int:
    """Return the number of tokens to charge for an answer. Without a requested length, a bound keeps room for further
    requests.
    """
    return min(request.max_tokens, UNASKED_TOKENS) if request.open_ended else request.max_tokens


def _named_model(body: bytes) -> str | None:
    """Return the model that a refused body names; None: it names none, or is too long to be read again."""
    try:
        value: Any = orjson.loads(body) if len(body) <= THREAD_BYTES else None
    except orjson.JSONDecodeError:
        return None
    model = value.get("model") if isinstance(value, dict) else None
    return model[:MAX_ASKED_CHARS] if isinstance(model, str) else None


async def tokenizer_of(
    state: AppState, route: Route, pool: PoolRoute, reason: str, *, for_chats: bool
) -> ModelTokenizer:
    """Return the pool's tokenizer, for chats with the template of the adapter's spec, its files, or the pool.

    `reason` there may be none. Raises BadRequest, ServiceUnavailable.
    """
    if (tokenizer := state.tokenizers.get(pool.base_digest)) is None:
        text = f"The tokenizer of pool {pool.name} is not available{reason}."
        raise ServiceUnavailable(text, code="model_not_ready", retry_after_ms=1000)
    if not for_chats:
        return tokenizer
    supplied = route.chat_template or route.chat_template_fault
    counts = route if supplied or route.own_chat_template else pool
    if counts.chat_template_fault:
        text = f"{route.model_name} renders no chats, use /v1/completions: {counts.chat_template_fault}."
        raise BadRequest(text, code=BadTemplate.code)
    digest = route.digest if counts is route else ""
    if not digest and not counts.chat_template:
        return tokenizer
    try:
        return await state.templates.tokenizer(digest, counts.chat_template, pool.base_digest, tokenizer)
    except ArtifactError as error:
        if isinstance(error, Refused) and not isinstance(error, UnknownDigest):
            text = f"The chat template of {route.model_name} cannot be read: {error.message}."
            raise BadRequest(text, code=BadTemplate.code) from error
        text = f"The chat template of {route.model_name} is not here yet: {error.message}."
        raise ServiceUnavailable(text, code="model_not_ready", retry_after_ms=1000) from error


def select_form(params: Common, template: TemplateForms, parser: str) -> AnswerForm:
    """Choose the form of a request's answers. `parser`: of calls, that the pool names. Raises ParameterError."""
    forms = params.response_format, params.structured_outputs
    output = None if forms == (None, None) else structured_output(*forms)
    if not isinstance(params, ChatRequest):
        return AnswerForm(output, spells_marks=not params.skip_special_tokens)
    tools, required, is_named = params.callable_tools, params.required_tools, isinstance(params.tool_choice, dict)
    written = template.tool_format(parser) if tools else None
    if written is not None:
        if is_named and output is not None and not output.param.startswith("response_format"):
            text = f"{output.param} cannot stand beside a tool_choice that names the call: the answer is its arguments."
            raise ParameterError(text, param=output.param)
        is_free = not required and not output and any(tool["function"].get("strict") for tool in tools)
        if required or output or is_free:
            several, output_alone = params.parallel_tool_calls and not is_named, None if required else output
            function_name = required[0]["function"]["name"] if is_named else None
            output = with_tools(
                tools, written, output_alone, several=several, is_free=is_free, function_name=function_name
            )
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


async def _encoded(state: AppState, call: Call) -> list[list[int]]:
    """Encode a call's prompts, long ones in a thread: the tokenizer releases the interpreter. Raises ApiError."""
    params, context_tokens = call.params, call.pool.max_context_tokens or UNKNOWN_CONTEXT_TOKENS
    encoded: list[list[int]] = []

    def encode() -> None:
        encoded.extend(prompt.encode(call.tokenizer, context_tokens) for prompt in call.prompts)
        call.draft = _draft(call, context_tokens)

    try:
        long = sum([len(prompt.text) for prompt in call.prompts]) > THREAD_CHARS
        if long or any(prompt.rendered for prompt in call.prompts):
            await state.turns.encode(call.principal.tenant, encode, call.is_gone)
        else:
            await state.turns.take(call.principal.tenant, encode)
    except TooLong as error:
        param = params.prompt_at(len(encoded))
        text = f"{error}{params.of_several(param)}." + (
            " Please reduce the length of the input prompt." if params.pools else ""
        )
        raise ParameterError(text, param=param, code="context_length_exceeded") from error
    except TokenizerPanic as error:
        raise Internal(f"{error}. Other requests are not affected; a shorter or plainer prompt may pass.") from error
    except NotEncodable as error:
        param = params.prompt_at(len(encoded))
        text = f"The prompt cannot be encoded{params.of_several(param)}: {error}."
        raise ParameterError(text, param=param, code=error.code) from error
    if (empty := next((index for index, tokens in enumerate(encoded) if not tokens), None)) is not None:
        param = params.prompt_at(empty)
        raise ParameterError(f"The prompt is empty{params.of_several(param)}: it has no token.", param=param)
    return encoded


def _draft(call: Call, context_tokens: int) -> tuple[int, ...]:
    """Encode the predicted answer, within the context. Raises ParameterError."""
    if not call.params.expected:
        return ()
    try:
        tokens = call.tokenizer.encode(call.params.expected, context_tokens, add_special_tokens=False)
        if len(tokens) > context_tokens:
            raise TooLong.of_context(context_tokens, f"the prediction has {len(tokens)} tokens")
    except NotEncodable as error:
        code = "context_length_exceeded" if isinstance(error, TooLong) else error.code
        raise ParameterError(f"prediction: {error}.", param="prediction", code=code) from error
    return tuple(tokens)


def _check_logprobs(prepared: Sequence[PreparedRequest]) -> None:
    """An answer is held until it is sent: its log probabilities are bounded. Raises ParameterError."""
    answers, prompts = prepared[0].sampling.top_logprobs, prepared[0].sampling.prompt_logprobs
    count = 0 if answers is None else sum(request.n * request.max_tokens for request in prepared) * (1 + answers)
    count += 0 if prompts is None else sum(len(request.prompt) for request in prepared) * (1 + prompts)
    if count > MAX_LOGPROBS:
        text = f"This answer could have {count:,} log probabilities; at most {MAX_LOGPROBS:,} are sent in one answer."
        raise ParameterError(f"{text} Ask for fewer choices, tokens or alternatives.", param="logprobs")
