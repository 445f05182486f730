"""`GET /v1/models` and `GET /v1/models/{id}`: what this caller may ask for."""

from collections.abc import Mapping
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from weft.domain.routes import PoolRoute, Route
from weft_gateway.core.routes import versions_of
from weft_gateway.openai.http_requests import caller_of, in_turns, json_response
from weft_gateway.shell.app_state import AppState, LoadedAdapter
from weft_gateway.shell.auth import Action


async def list_models(state: AppState, request: Request) -> Response:
    """Bases and adapters, an adapter with its base as `parent`; `versions`: what `model@...` may pin.

    The `root` of an adapter is the path that a request loaded it from, else its content's digest.
    """
    visible = state.machine.routes.visible(await caller_of(state, request, Action.LIST))
    models = [orjson.Fragment(orjson.dumps(_model(state.loaded, *model))) async for model in in_turns(visible)]
    return json_response({"object": "list", "data": models})


async def one_model(state: AppState, request: Request) -> Response:
    """Answer with one model. Its id may contain slashes."""
    model = state.model(request.path_params["model"], await caller_of(state, request, Action.LIST))
    return json_response(_model(state.loaded, *model))


def _model(by_request: Mapping[str, LoadedAdapter], route: Route, pool: PoolRoute) -> dict[str, Any]:
    loaded = by_request.get(route.model_name)
    content = loaded.path if loaded and (loaded.uid, loaded.digest) == (route.uid, route.digest) else route.digest
    return {
        "id": route.model_name,
        "object": "model",
        "created": route.created_unix_s,
        "owned_by": route.namespace,
        "root": content or pool.base_model_name,
        "parent": pool.base_model_name if route.digest else None,
        "max_model_len": pool.max_context_tokens or None,
        "versions": [{"digest": v.digest, "name": v.name or None} for v in versions_of(route, pool)],
    }
