"""What each kind of key may do with each endpoint and each kind of stored data: the table of routes by the keys."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute

from weft.wire.v1 import batch_pb2, supervisor_pb2

from .conftest import World, key_route
from .test_gateway_batches import BATCH_ID, FILE, FORM, PURPOSE, Batched, batched, form, job

OPEN, INFER, LIST, METRICS, PUBLISH = "open", "infer", "list", "metrics", "publish"
WRITE, ABOUT, CONTENT, CONVERSE = "write", "about files and batches", "content", "converse"
EVERY = frozenset((INFER, LIST, METRICS, WRITE, ABOUT, CONTENT, CONVERSE))
MODEL, LIMITED_MODEL = "acme/upper", "acme/lower"
SECRETS = "the-prompt", "the-answer", "the-line"  # of the response and the file that `acme` has stored


@dataclass(frozen=True)
class Kind:
    """A key. `may`: what it may do; `finds`: whether data of `acme` are its own."""

    may: frozenset[str]
    finds: bool = True


KINDS = {
    "": Kind(frozenset()),
    "junk": Kind(frozenset()),
    "metrics": Kind(frozenset((METRICS,))),
    "read-only": Kind(frozenset((METRICS, LIST, ABOUT))),
    "platform": Kind(frozenset((METRICS, LIST, PUBLISH))),
    "limited": Kind(frozenset((METRICS, LIST, INFER, CONVERSE)), finds=False),
    "rival": Kind(EVERY, finds=False),
    "acme": Kind(EVERY),
}
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
TEXT: dict[str, Any] = {"model": MODEL, "prompt": "hi", "max_tokens": 4}
RANKED, SCORED = {"model": MODEL, "query": "hi", "documents": ["hi"]}, {"model": MODEL, "text_1": "hi", "text_2": "hi"}
RESPONSE: dict[str, Any] = {"model": MODEL, "input": "hi"}
BATCH = {"input_file_id": "{file_id}", "endpoint": "/v1/completions", "completion_window": "24h"}
UPLOAD = {"content": form(PURPOSE, FILE), "headers": {"content-type": FORM}}
REFERENCE = [{"type": "item_reference", "id": "{item_id}"}]
# By method and path: what it is, and the body of a request; a path with a name in it is of stored data.
ROUTES: dict[tuple[str, str], tuple[str, Any]] = {
    ("POST", "/v1/chat/completions"): (INFER, CHAT),
    ("POST", "/v1/chat/completions/batch"): (INFER, CHAT | {"messages": [CHAT["messages"]]}),
    ("POST", "/v1/completions"): (INFER, TEXT),
    ("POST", "/v1/embeddings"): (INFER, {"model": MODEL, "input": "hi"}),
    ("POST", "/pooling"): (INFER, {"model": MODEL, "input": "hi"}),
    ("POST", "/rerank"): (INFER, RANKED),
    ("POST", "/v1/rerank"): (INFER, RANKED),
    ("POST", "/v2/rerank"): (INFER, RANKED),
    ("POST", "/score"): (INFER, SCORED),
    ("POST", "/v1/score"): (INFER, SCORED),
    ("POST", "/v1/messages"): (INFER, CHAT),
    ("POST", "/v1/messages/count_tokens"): (INFER, {"model": MODEL, "messages": CHAT["messages"]}),
    ("POST", "/tokenize"): (INFER, {"model": MODEL, "prompt": "hi"}),
    ("POST", "/detokenize"): (INFER, {"model": MODEL, "tokens": [1]}),
    ("GET", "/tokenizer_info"): (INFER, None),
    ("POST", "/v1/responses"): (INFER, RESPONSE),
    ("POST", "/v1/responses/input_tokens"): (INFER, RESPONSE),
    ("GET", "/v1/responses/{response_id:path}"): (CONVERSE, None),
    ("GET", "/v1/responses/{response_id:path}/input_items"): (CONVERSE, None),
    ("POST", "/v1/responses/{response_id}/cancel"): (CONVERSE, None),
    ("DELETE", "/v1/responses/{response_id:path}"): (CONVERSE, None),
    ("GET", "/v1/models"): (LIST, None),
    ("GET", "/v1/models/{model:path}"): (LIST, None),
    ("PUT", "/v1/adapters"): (WRITE, {}),
    ("POST", "/v1/load_lora_adapter"): (PUBLISH, {"lora_name": "x", "lora_path": "y"}),
    ("POST", "/v1/unload_lora_adapter"): (PUBLISH, {"lora_name": "x"}),
    ("POST", "/v1/files"): (WRITE, UPLOAD),
    ("GET", "/v1/files"): (ABOUT, None),
    ("GET", "/v1/files/{file_id}"): (ABOUT, None),
    ("GET", "/v1/files/{file_id}/content"): (CONTENT, None),
    ("DELETE", "/v1/files/{file_id}"): (WRITE, None),
    ("POST", "/v1/batches"): (WRITE, BATCH),
    ("GET", "/v1/batches"): (ABOUT, None),
    ("GET", "/v1/batches/{batch_id}"): (ABOUT, None),
    ("POST", "/v1/batches/{batch_id}/cancel"): (WRITE, None),
    ("GET", "/ui/overview"): (METRICS, None),
    ("GET", "/ui/runners"): (METRICS, None),
    ("GET", "/ui/adapters"): (METRICS, None),
    **{("GET", path): (OPEN, None) for path in ("/", "/ui/{name}", "/status", "/metrics", "/load", "/version")},
    **{("GET", path): (OPEN, None) for path in ("/health", "/healthz", "/readyz", "/ping")},
    ("POST", "/ping"): (OPEN, None),
}
# Requests that name stored data elsewhere than in their path.
NAMING: Sequence[tuple[str, str, Any]] = (
    ("/v1/responses", INFER, RESPONSE | {"previous_response_id": "{response_id}"}),
    ("/v1/responses", INFER, RESPONSE | {"input": REFERENCE}),
    ("/v1/responses/input_tokens", INFER, RESPONSE | {"previous_response_id": "{response_id}"}),
    ("/v1/responses/input_tokens", INFER, RESPONSE | {"input": REFERENCE}),
    ("/v1/batches", WRITE, BATCH),
)


def filled(value: Any, names: dict[str, str]) -> Any:
    """Put the ids of stored data where a request names them."""
    if isinstance(value, str):
        for name, found in names.items():
            value = value.replace(f"{{{name}}}", found).replace(f"{{{name}:path}}", found)
        return value
    if isinstance(value, list):
        return [filled(item, names) for item in value]
    return {name: filled(item, names) for name, item in value.items()} if isinstance(value, dict) else value


@dataclass
class Asked:
    """A gateway with keys and stored data, asked by each of them."""

    made: Batched
    http: httpx2.AsyncClient
    names: dict[str, str]

    async def ask(self, key: str, method: str, path: str, body: Any) -> httpx2.Response:
        given = filled(body, self.names)
        more = given if body is UPLOAD else {} if given is None else {"json": given}
        headers = {"authorization": f"Bearer {key}"} | more.pop("headers", {})
        path = filled(path, self.names)
        return await self.http.request(method, path, headers=headers if key else {}, **more)


@pytest.fixture
async def asked(parts: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("weft_gateway.core.refusal_pacing.QUICK_BURST", 1e9)
    scopes = {
        "metrics": supervisor_pb2.KEY_SCOPE_METRICS,
        "read-only": supervisor_pb2.KEY_SCOPE_READ_ONLY,
        "platform": supervisor_pb2.KEY_SCOPE_PLATFORM,
    }
    keys = [key_route(name, "" if name == "platform" else "acme", scope=scope) for name, scope in scopes.items()]
    keys += [key_route("acme", "acme"), key_route("rival", "rival"), key_route("limited", "acme", models=["*/lower"])]
    routes = parts.routes(keys=keys)
    routes.routes.add(model_name=LIMITED_MODEL, namespace="acme", pool="team/base", digest="sha256:" + "c" * 64, rank=1)
    parts.scheduler.routes = routes
    async with batched(parts, tmp_path, auth=True) as made, parts.http() as http:
        made.batch.job, made.batch.job_owner = job(status=batch_pb2.BATCH_STATUS_VALIDATING), "acme"
        parts.runner.state = lambda _: np.ones(4, np.float32).tobytes()
        acme = parts.client(api_key="acme")
        parts.runner.answer = lambda _: parts.tokens("the-answer")
        response = await acme.responses.create(model=MODEL, input="the-prompt")
        file = await acme.files.create(file=("in", b'{"a": "the-line"}'), purpose="batch")
        parts.runner.answer = lambda _: parts.tokens("plain")
        names = {"response_id": response.id, "item_id": response.output[0].id or "", "file_id": file.id}
        yield Asked(made, http, names | {"batch_id": BATCH_ID, "model": MODEL, "name": "main.js"})


def test_every_route_is_in_the_table(world: World) -> None:
    app: Any = world.server.config.app
    assert isinstance(app, FastAPI)
    served = {(method, route.path) for route in app.routes if isinstance(route, APIRoute) for method in route.methods}
    assert served == ROUTES.keys()


async def test_no_key_is_answered_beyond_its_scope(asked: Asked) -> None:
    """What may not be answered is a 401 or 403, or a 404 where the key may ask and the data are not its own."""
    requests = [(*route, what, body, "_id" in route[1]) for route, (what, body) in ROUTES.items()]
    requests += [("POST", path, what, body, True) for path, what, body in NAMING]
    requests.sort(key=lambda request: request[0] == "DELETE")  # what is stored is there for everybody else
    wrong = list[str]()
    for key, kind in KINDS.items():
        for method, path, what, body, names_data in requests:
            answer = await asked.ask(key, method, path, body)
            asks = what == OPEN or what in kind.may
            may = asks and (kind.finds or not names_data)
            refused = answer.status_code in ((404,) if asks and not may else (401, 403))
            shows = any(secret in answer.text for secret in SECRETS) and not (may and what in (CONVERSE, CONTENT))
            absent = may and names_data and answer.status_code not in (200, 400 if "/responses/" in path else 200)
            if refused == may or shows or absent:
                wrong.append(
                    f"{key or 'no key'}: {method} {path} {body or ''}: {answer.status_code} {answer.text[:200]}"
                )
    assert wrong == []


async def test_a_key_for_some_models_has_the_responses_that_it_made_and_no_others(asked: Asked) -> None:
    stored = [request for request in NAMING if request[1] == INFER]
    stored = [("POST", path, body | {"model": LIMITED_MODEL}) for path, _, body in stored]
    stored += [(*route, body) for route, (what, body) in ROUTES.items() if what == CONVERSE]
    answers = [await asked.ask("limited", *request) for request in stored]
    assert [answer.status_code for answer in answers] == [404] * len(stored), "made by another key"
    asked.made.batch.responses.update(
        {
            key: batch_pb2.KeepResponseRequest(body=value.body.replace(b'"key_id":"acme",', b""))
            for key, value in asked.made.batch.responses.items()
        }
    )
    answers = [await asked.ask("limited", *request) for request in stored]
    assert [answer.status_code for answer in answers] == [404] * len(stored), "nobody knows who made it"
    first = (await asked.ask("limited", "POST", "/v1/responses", RESPONSE | {"model": LIMITED_MODEL})).json()
    asked.names |= {"response_id": first["id"], "item_id": first["output"][0]["id"]}
    answers = [await asked.ask("limited", *request) for request in stored]
    assert [answer.status_code for answer in answers] == [200] * 6 + [400, 200], "its own: one cannot be cancelled"
    assert answers[4].json()["output"] == first["output"]
