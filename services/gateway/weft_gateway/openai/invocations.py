"""`POST /invocations`: SageMaker's one path for every request of a model, as vLLM has it. Its fields say its kind."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from weft_gateway.errors import ParameterError
from weft_gateway.openai.chat import CHAT
from weft_gateway.openai.completions import COMPLETIONS
from weft_gateway.openai.embeddings import EMBEDDINGS, RERANK, SCORE, PooledRequest, RerankedRequest, ScoredRequest
from weft_gateway.openai.http_requests import completion
from weft_gateway.openai.schema import ChatRequest, Common, CompletionRequest, object_of
from weft_gateway.openai.validation import ModelEndpoint
from weft_gateway.shell.app_state import AppState

# In this order: an embedding may be of messages, too, which without a form of vectors are a chat's.
_KINDS: dict[str, ModelEndpoint[Any]] = {
    "encoding_format": EMBEDDINGS,
    "messages": CHAT,
    "prompt": COMPLETIONS,
    "input": EMBEDDINGS,
    "query": RERANK,
    "text_1": SCORE,
    "queries": SCORE,
    "data_1": SCORE,
}
_OF: dict[type[Common], ModelEndpoint[Any]] = {
    ChatRequest: CHAT,
    CompletionRequest: COMPLETIONS,
    PooledRequest: EMBEDDINGS,
    RerankedRequest: RERANK,
    ScoredRequest: SCORE,
}


def _parse(body: bytes) -> Common:
    """Raises BadRequest, ParameterError."""
    value = object_of(body)
    endpoint = next((endpoint for name, endpoint in _KINDS.items() if name in value), None)
    if endpoint is None:
        raise ParameterError(f"One of {', '.join(_KINDS)} is required: it says what is asked.", param="messages")
    return endpoint.parse(body)


INVOCATIONS: ModelEndpoint[Any] = ModelEndpoint(
    "/invocations",
    _parse,
    lambda parsed: _OF[type(parsed.params)].prompts_of(parsed),
    lambda params, context: _OF[type(params)].encoder(params, context),
    form_of=lambda parsed, end: _OF[type(parsed.params)].form_of(parsed, end),
)


async def invocations(state: AppState, request: Request) -> Response:
    """A chat, a completion, an embedding, a ranking or a score."""
    return await completion(INVOCATIONS, state, request)
