"""`GET /v1/models` and `GET /v1/models/{id}`: what this caller may ask for."""

from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from weft_gateway.core.routes import Pool, Route
from weft_gateway.errors import ModelNotFound
from weft_gateway.openai.validation import table_and_caller
from weft_gateway.shell.app_state import AppState


async def list_models(gateway: AppState, request: Request) -> Response:
    """Bases and adapters, an adapter with its base as `parent`."""
    table, caller = await table_and_caller(gateway, request)
    return _json({"object": "list", "data": [_model(*found) for found in table.visible(caller)]})


async def one_model(gateway: AppState, request: Request) -> Response:
    """One model; its id may hold slashes."""
    table, caller = await table_and_caller(gateway, request)
    name = request.path_params["model"]
    found = table.find(name, caller)
    if found is None:
        raise ModelNotFound(name)
    return _json(_model(*found))


def _model(route: Route, pool: Pool) -> dict[str, Any]:
    return {
        "id": route.model_name,
        "object": "model",
        "created": route.created_unix_s,
        "owned_by": route.namespace,
        "root": pool.base_model_name,
        "parent": None if route.is_base else pool.base_model_name,
        "max_model_len": pool.max_context_tokens or None,
    }


def _json(value: dict[str, Any]) -> Response:
    return Response(orjson.dumps(value), media_type="application/json")
