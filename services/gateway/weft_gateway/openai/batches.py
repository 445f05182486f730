"""`/v1/batches`: many requests of a file, answered within a day in room that others leave."""

from functools import partial
from typing import Annotated, Any

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError
from starlette.requests import Request
from starlette.responses import Response

from weft.domain.batch import COMPLETION_WINDOW, ENDPOINTS, BatchError, BatchJob, NewBatch, Page
from weft_gateway.openai.fields import Metadata
from weft_gateway.openai.http_requests import Query, json_body, json_response, listed, principal_of, tenant_of
from weft_gateway.openai.schema import Strict, parse
from weft_gateway.openai.usage import CallUsage
from weft_gateway.shell.app_state import AppState
from weft_gateway.shell.auth import Action
from weft_gateway.shell.rate_limits import check_quota

LIMIT, MAX_LIMIT = 20, 100  # of a list, as OpenAI's
MAX_ID = 128


def _endpoint(value: Any) -> Any:
    if value not in ENDPOINTS:
        raise PydanticCustomError("endpoint", "must be one of {endpoints}", {"endpoints": ", ".join(ENDPOINTS)})
    return value


def _window(value: Any) -> Any:
    if value != COMPLETION_WINDOW:
        raise PydanticCustomError("completion_window", 'must be "{window}"', {"window": COMPLETION_WINDOW})
    return value


class BatchRequest(Strict):
    """`POST /v1/batches`."""

    api = None

    input_file_id: str = Field(min_length=1, max_length=MAX_ID, description="a file of purpose `batch`: JSON lines")
    endpoint: Annotated[str, BeforeValidator(_endpoint)] = Field(description="of every line")
    completion_window: Annotated[str, BeforeValidator(_window)] = Field(description="after it what is left expires")
    metadata: Metadata = Field(
        default_factory=dict[str, str], description="up to 16 texts of up to 512 characters, by names of up to 64"
    )


async def create_batch(state: AppState, request: Request) -> Response:
    """Start a batch: every line of its file is answered once."""
    namespace = await tenant_of(state, request)
    check_quota([rule for rule in principal_of(state, request, Action.WRITE).limits if not rule.model])
    body = await json_body(state, request, namespace)
    params = await state.turns.parse(namespace, partial(parse, BatchRequest), body)
    new = NewBatch(namespace, params.input_file_id, params.endpoint, params.completion_window, params.metadata)
    return json_response(_batch(await state.batch.create(new)))


async def list_batches(state: AppState, request: Request) -> Response:
    """This caller's batches, the newest first."""
    namespace = await tenant_of(state, request)
    query = Query(request, "after", "limit")
    batches, has_more = await state.batch.batches(Page(namespace, query.limit(LIMIT, MAX_LIMIT), query.after_id()))
    return json_response(listed([_batch(batch) for batch in batches], has_more))


async def one_batch(state: AppState, request: Request) -> Response:
    """A batch now: its status, how many of its lines are done, its files."""
    namespace = await tenant_of(state, request)
    return json_response(_batch(await state.batch.batch(namespace, request.path_params["batch_id"])))


async def cancel_batch(state: AppState, request: Request) -> Response:
    """Cancel a batch. Completed lines keep their results."""
    namespace = await tenant_of(state, request)
    return json_response(_batch(await state.batch.cancel(namespace, request.path_params["batch_id"])))


def _batch(batch: BatchJob) -> dict[str, Any]:
    return {
        "id": batch.batch_id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "errors": {"object": "list", "data": list(map(_error, batch.errors))} if batch.errors else None,
        "input_file_id": batch.input_file_id,
        "completion_window": batch.completion_window,
        "status": batch.status.value,
        "output_file_id": batch.output_file_id or None,
        "error_file_id": batch.error_file_id or None,
        "created_at": batch.created_unix_s,
        "in_progress_at": batch.in_progress_unix_s or None,
        "expires_at": batch.expires_unix_s or None,
        "finalizing_at": batch.finalizing_unix_s or None,
        "completed_at": batch.completed_unix_s or None,
        "failed_at": batch.failed_unix_s or None,
        "expired_at": batch.expired_unix_s or None,
        "cancelling_at": batch.cancelling_unix_s or None,
        "cancelled_at": batch.cancelled_unix_s or None,
        "request_counts": {"total": batch.total, "completed": batch.completed, "failed": batch.failed},
        "usage": _usage(batch).of_items(),
        "metadata": dict(batch.metadata) or None,
    }


def _error(error: BatchError) -> dict[str, Any]:
    location = {"line": error.line or None, "param": error.param or None}
    return {"code": error.code, "message": error.message, **location}


def _usage(batch: BatchJob) -> CallUsage:
    return CallUsage(batch.prompt_tokens, batch.completion_tokens, batch.cached_tokens, batch.reasoning_tokens)
