"""The ASGI application: routes, OpenAI's error shape on every path, probes, the page."""

import logging
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import cache, partial
from importlib.metadata import version
from typing import Any

import orjson
from fastapi import FastAPI
from fastapi.routing import APIRoute
from fastapi.telemetry import TelemetryConfig
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from weft.hosts import AllowedHosts, HostCheck, refusal
from weft.telemetry.logs import kv
from weft_gateway.core.refusal_pacing import AT_ONCE
from weft_gateway.errors import ApiError, BadRequest, Internal, PermissionDenied
from weft_gateway.hints import HEADER
from weft_gateway.openai import embeddings, messages
from weft_gateway.openai.adapters import put_adapter
from weft_gateway.openai.batches import BatchRequest, cancel_batch, create_batch, list_batches, one_batch
from weft_gateway.openai.call import Call, ModelEndpoint
from weft_gateway.openai.chat import CHAT, CHATS
from weft_gateway.openai.completions import COMPLETIONS
from weft_gateway.openai.files import delete_file, file_content, list_files, one_file, upload_file
from weft_gateway.openai.http_requests import JSON, completion, json_response
from weft_gateway.openai.load_adapters import LoadRequest, UnloadRequest, load_lora_adapter, unload_lora_adapter
from weft_gateway.openai.models import list_models, one_model
from weft_gateway.openai.responses import (
    RESPONSES,
    ResponsesRequest,
    cancel_response,
    count_input_tokens,
    delete_response,
    list_input_items,
    one_response,
)
from weft_gateway.openai.schema import ChatRequest, CompletionRequest
from weft_gateway.openai.tokenize import DetokenizeRequest, TokenizeRequest, detokenize, tokenize, tokenizer_info
from weft_gateway.shell import page
from weft_gateway.shell.app_state import AppState
from weft_gateway.shell.caller_turns import CallerTurns
from weft_gateway.shell.early_refusals import await_turn, log_refusal, refusal_of
from weft_gateway.shell.request_ids import Ids, ResponseHeaders
from weft_gateway.shell.status import metrics_of, status_of

Endpoint = Callable[[AppState, Request], Awaitable[Response]]
log = logging.getLogger(__name__)
EXPOSED = [
    "x-request-id",
    "x-weft-model-digest",
    HEADER,
    "retry-after",
    "retry-after-ms",
    "x-should-retry",
    *(
        f"x-ratelimit-{quantity}-{counted}"
        for counted in ("requests", "tokens")
        for quantity in ("limit", "remaining", "reset")
    ),
]  # to pages of other origins
# What answers may be, for the OpenAPI document.
_STREAMED, _VECTORS = (JSON, "text/event-stream"), (JSON, "application/octet-stream")
_TEXT, _BYTES, _FILES = ("text/plain",), ("application/octet-stream",), ("*/*",)
# Ways to call a model: what stands before its path, the way, its body, the media types of its answers.
_MODEL_ROUTES: Sequence[tuple[str, ModelEndpoint[Any], type[BaseModel] | None, Sequence[str]]] = (
    ("", CHAT, ChatRequest, _STREAMED),
    ("", COMPLETIONS, CompletionRequest, _STREAMED),
    ("", CHATS, None, (JSON,)),
    ("", embeddings.EMBEDDINGS, embeddings.EmbeddingsRequest, _VECTORS),
    ("", embeddings.POOLING, embeddings.EmbeddingsRequest, _VECTORS),
    *((under, embeddings.RERANK, embeddings.RerankRequest, (JSON,)) for under in ("", "/v1", "/v2")),
    *((under, embeddings.SCORE, embeddings.ScoreRequest, (JSON,)) for under in ("", "/v1")),
    ("", RESPONSES, ResponsesRequest, _STREAMED),
    ("", messages.MESSAGES, messages.MessagesRequest, _STREAMED),
)
MODEL_PATHS = tuple(under + endpoint.path for under, endpoint, *_ in _MODEL_ROUTES)
_PARAMETER = re.compile(r"\{(\w+)")
_ERROR = {
    "description": "An error, in OpenAI's shape.",
    "content": {"*/*": {"schema": {"type": "object", "properties": {"error": {"type": "object"}}}}},
}
NO_TELEMETRY: TelemetryConfig = {"tracing": False, "metrics": False, "logs": False}  # Weft has its own
_NAMES = {404: "not_found", 405: "method_not_allowed", 403: "permission_denied"}


class DirectRoute(APIRoute):
    """A route whose endpoint takes the request and returns the answer, with nothing of the framework's in between.

    The OpenAPI document knows it as any other.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.app = self._answer

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await self.endpoint(Request(scope, receive, send))
        await response(scope, receive, send)


def build_app(state: AppState) -> FastAPI:
    """Build the application around a gateway's state."""
    app = FastAPI(
        title="Weft", docs_url=None, redoc_url=None, openapi_url=None, description="OpenAI API for LoRA adapters",
        telemetry=NO_TELEMETRY, redirect_slashes=False,
    )  # fmt: skip
    app.router.route_class = DirectRoute
    post, get = ["POST"], ["GET"]
    for under, model_endpoint, body, media in _MODEL_ROUTES:
        _route(
            app, state, under + model_endpoint.path, partial(completion, model_endpoint), post, body, media,
            name=model_endpoint.name, summary=model_endpoint.__doc__,
        )  # fmt: skip
    _route(app, state, "/v1/responses/{response_id:path}/input_items", list_input_items, get)
    _route(app, state, "/v1/responses/input_tokens", count_input_tokens, post, ResponsesRequest)
    _route(app, state, "/v1/responses/{response_id}/cancel", cancel_response, post)
    _route(app, state, "/v1/responses/{response_id:path}", one_response, get)
    _route(app, state, "/v1/responses/{response_id:path}", delete_response, ["DELETE"])
    _route(app, state, f"{messages.PATH}/count_tokens", messages.count_tokens, post, messages.CountRequest)
    _route(app, state, "/v1/models", list_models, get)
    _route(app, state, "/v1/models/{model:path}", one_model, get)
    _route(app, state, "/tokenize", tokenize, post, TokenizeRequest)
    _route(app, state, "/detokenize", detokenize, post, DetokenizeRequest)
    _route(app, state, "/tokenizer_info", tokenizer_info, get)
    _route(app, state, "/v1/adapters", put_adapter, ["PUT"])
    _route(app, state, "/v1/load_lora_adapter", load_lora_adapter, post, LoadRequest, _TEXT)
    _route(app, state, "/v1/unload_lora_adapter", unload_lora_adapter, post, UnloadRequest, _TEXT)
    _route(app, state, "/v1/files", upload_file, post)
    _route(app, state, "/v1/files", list_files, get)
    _route(app, state, "/v1/files/{file_id}", one_file, get)
    _route(app, state, "/v1/files/{file_id}", delete_file, ["DELETE"])
    _route(app, state, "/v1/files/{file_id}/content", file_content, get, media=_BYTES)
    _route(app, state, "/v1/batches", create_batch, post, BatchRequest)
    _route(app, state, "/v1/batches", list_batches, get)
    _route(app, state, "/v1/batches/{batch_id}", one_batch, get)
    _route(app, state, "/v1/batches/{batch_id}/cancel", cancel_batch, post)
    _route(app, state, "/status", _status, get)
    _route(app, state, "/", page.page, get, media=_FILES)
    _route(app, state, "/ui/overview", page.overview, get, media=_FILES)
    _route(app, state, "/ui/runners", page.runners, get, media=_FILES)
    _route(app, state, "/ui/adapters", page.adapters, get, media=_FILES)
    _route(app, state, "/ui/{name}", page.page_file, get, media=_FILES)
    _route(app, state, "/health", _healthz, get, media=_TEXT)
    _route(app, state, "/ping", _healthz, get, media=_TEXT)
    _route(app, state, "/ping", _healthz, post, media=_TEXT)
    _route(app, state, "/version", _version, get)
    _route(app, state, "/load", _load, get)
    _route(app, state, "/healthz", _healthz, get, media=_TEXT)
    _route(app, state, "/readyz", _readyz, get, media=_TEXT)
    _route(app, state, "/metrics", _metrics, get, media=_TEXT)
    document = cache(lambda: orjson.dumps(app.openapi()))
    app.add_route("/openapi.json", lambda _: Response(document(), media_type=JSON), get, include_in_schema=False)
    for kind, handler in ((ApiError, _on_api_error), (HTTPException, _on_http_error), (Exception, _on_bug)):
        app.add_exception_handler(kind, partial(handler, state))
    if origins := state.settings.cors_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"], expose_headers=EXPOSED
        )
    if not state.settings.auth:
        hosts = AllowedHosts(state.settings.allowed_hosts)
        app.add_middleware(HostCheck, hosts=hosts, refuse=partial(_refuse_host, state))
    app.add_middleware(CallerTurns, state=state, model_paths=MODEL_PATHS)
    app.add_middleware(ResponseHeaders, state=state)
    return app


def _route(
    app: FastAPI,
    state: AppState,
    path: str,
    endpoint: Endpoint,
    methods: list[str],
    body: type[BaseModel] | None = None,
    media: Sequence[str] = (JSON,),
    *,
    name: str = "",
    summary: str | None = None,
) -> None:
    """Serve a path. Bodies are read and checked by the endpoints: bounded, and refused in OpenAI's shape."""
    answer = {"description": "What was asked for.", "content": {kind: {} for kind in media}}
    schema: dict[str, Any] = {"responses": {"200": answer, "default": _ERROR}}
    if body:
        schema["requestBody"] = {"content": {JSON: {"schema": _inlined(body)}}, "required": True}
    if names := _PARAMETER.findall(path):
        text = {"type": "string", "minLength": 1}
        schema["parameters"] = [{"name": name, "in": "path", "required": True, "schema": text} for name in names]
    app.add_api_route(
        path, partial(endpoint, state), methods=methods, name=name or endpoint.__name__.strip("_"),
        summary=summary or endpoint.__doc__, openapi_extra=schema, response_class=Response,
    )  # fmt: skip


def _inlined(body: type[BaseModel]) -> dict[str, Any]:
    """A JSON schema without references, as the request body of an OpenAPI document wants it."""
    schema = body.model_json_schema()
    definitions = schema.pop("$defs", {})

    def resolve(value: Any) -> Any:
        if isinstance(value, dict):
            if name := value.get("$ref"):
                return resolve(definitions[name.rpartition("/")[2]])
            return {key: resolve(item) for key, item in value.items()}
        return [resolve(item) for item in value] if isinstance(value, list) else value

    return resolve(schema)


# ---------------------------------------------------------------- errors


async def _on_api_error(state: AppState, request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    call = _call_of(request)
    namespace = call.principal.tenant if call else None
    state.manager.count_answer(call and call.model, namespace, error.status, error.code)
    pace = await await_turn(state, namespace, error)
    if pace is AT_ONCE:
        about = {
            "param": error.param and error.param[:128],
            "model": call and (call.model or call.named_model),
            "namespace": namespace or None,
            "duration_ms": call and max(0, time.time_ns() // 1_000_000 - call.arrived_unix_ms),
        }
        log_refusal(request.state.ids, error, about)
    body, headers = refusal_of(error, request.url.path, pace)
    return Response(body, error.status, headers)


def _refuse_host(state: AppState, scope: Scope, host: str) -> Response:
    """Answer a foreign page with a name that leads here."""
    error = PermissionDenied(refusal(host), code="host_not_allowed")
    state.manager.count_answer(None, None, error.status, error.code)
    log_refusal(scope["state"]["ids"], error, {"host": host[:128]})
    body, headers = refusal_of(error, scope["path"], AT_ONCE)
    return Response(body, error.status, headers)


async def _on_http_error(state: AppState, request: Request, error: Exception) -> Response:
    """Answer refusals of the framework: unknown paths and methods."""
    assert isinstance(error, HTTPException)
    text = f"{request.method} {request.url.path[:256]}: {error.detail}."
    code = _NAMES.get(error.status_code, "invalid_request")
    refused = BadRequest(text, code=code, status=error.status_code)
    response = await _on_api_error(state, request, refused)
    response.headers.update(error.headers or {})
    return response


async def _on_bug(state: AppState, request: Request, error: Exception) -> Response:
    _count(state, request, Internal.status, Internal.code)
    ids: Ids = request.state.ids
    log.error("request failed inside the gateway", exc_info=error, extra=kv(request_id=ids.request_id))
    internal = Internal(f"The gateway failed on this request; its logs name it {ids.request_id}.")
    return Response(internal.body(), internal.status, internal.headers())


def _count(state: AppState, request: Request, status: int, code: str) -> None:
    """A request that was refused; its model and namespace are counted once they are found."""
    call = _call_of(request)
    namespace = call.principal.tenant if call else None
    state.manager.count_answer(call and call.model, namespace, status, code)


def _call_of(request: Request) -> Call | None:
    """None: its caller is not known, or it asks no model."""
    return getattr(request.state, "call", None)


# ---------------------------------------------------------------- health and status


async def _healthz(_state: AppState, _request: Request) -> Response:
    """Answer that the process is alive: the serving loop answers."""
    return Response("ok\n", media_type="text/plain")


async def _version(_state: AppState, _request: Request) -> Response:
    """Answer with the version of this software."""
    return json_response({"version": version("weft")})


async def _load(state: AppState, _request: Request) -> Response:
    """Answer with the present requests of this gateway."""
    return json_response({"server_load": state.machine.admission.in_flight})


async def _readyz(state: AppState, _request: Request) -> Response:
    """Ready: a route table is there, and a tokenizer if one is to come. What is still missing is waited for."""
    reason = state.not_ready_reason()
    return Response(f"{reason or state.manager.shortages.text()}\n", 503 if reason else 200, media_type="text/plain")


async def _metrics(state: AppState, request: Request) -> Response:
    """Answer with Prometheus metrics. Metrics of models and pools are limited to the caller's models."""
    text = await metrics_of(state, request.headers.get("authorization"))
    return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})


async def _status(state: AppState, request: Request) -> Response:
    """Pools, models and requests now, as far as the caller may see them."""
    value = await status_of(state, request.headers.get("authorization"))
    return Response(orjson.dumps(value), media_type="application/json", headers={"cache-control": "no-cache"})
