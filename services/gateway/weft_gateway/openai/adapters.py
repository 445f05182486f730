"""`PUT /v1/adapters`: an adapter's files straight into the depot; the bytes stream through.

The answer names the content; a LoRAAdapter whose source is that URI publishes it (`weft push` does both).
"""

from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx2
from starlette.requests import Request
from starlette.responses import Response

from weft_gateway.errors import BadRequest, ParameterError, ServiceUnavailable, UnsupportedMediaType
from weft_gateway.openai.files import UPLOAD_SECONDS, body_pieces
from weft_gateway.openai.http_requests import json_response, no_foreign_page, receiving, tenant_of
from weft_gateway.shell.app_state import AppState
from weft_gateway.shell.depot_client import DepotRefused, upload_adapter


async def put_adapter(state: AppState, request: Request) -> Response:
    """Send an adapter's files as a form; they belong to the caller's namespace.

    `adapter_config.json` and `adapter_model.safetensors`, and the tokenizer's `tokenizer_config.json` and
    `special_tokens_map.json` where training wrote them.
    """
    tenant, named = await tenant_of(state, request), request.query_params.get("namespace")
    if tenant and named not in (None, tenant):
        raise ParameterError(f"namespace: this key is of the namespace {tenant!r}.", param="namespace")
    no_foreign_page(request)
    content_type = request.headers.get("content-type", "")
    if not content_type.lower().startswith("multipart/form-data"):
        raise UnsupportedMediaType(f"The body is declared as {content_type[:128] or 'nothing'!r}; send it as a form.")
    stored = await store_adapter(state, tenant or named or "default", content_type, body_pieces(request))
    uri = {"uri": stored["uri"]}
    content = {"id": stored["digest"], "object": "adapter.content", "bytes": stored["sizeBytes"], "source": uri}
    return json_response(content)


async def store_adapter(
    state: AppState, namespace: str, content_type: str, form: AsyncIterator[bytes]
) -> Mapping[str, Any]:
    """Send a form of an adapter's files to the depot; returns its digest, uri and sizeBytes. Raises ApiError."""
    try:
        async with receiving(UPLOAD_SECONDS, f"The adapter did not arrive within {UPLOAD_SECONDS:g} s."):
            return await upload_adapter(state.depot, namespace, content_type, form)
    except DepotRefused as error:
        raise BadRequest(f"The adapter is refused: {error}", code=error.code, status=error.status) from error
    except httpx2.HTTPError as error:
        text = f"The depot does not answer: {type(error).__name__}."
        raise ServiceUnavailable(text, code="depot_unavailable", retry_after_ms=1000) from error
