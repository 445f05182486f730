"""Embeddings by the official client, rerank and score over HTTP; the model is played."""

import base64
from array import array
from typing import Any

import httpx2
import openai
import pytest

from .conftest import PATIENCE_S, World, until

VECTORS = {"north": [0.0, 2.0], "south": [0.0, -3.0], "east": [4.0, 0.0], "north-east": [3.0, 3.0]}


@pytest.fixture
def vectors(world: World) -> World:
    def state(start: Any) -> bytes:
        return array("f", VECTORS[world.tokenizer.decode(start.prompt)]).tobytes()

    world.runner.state = state
    return world


async def test_texts_and_tokens_have_vectors_of_length_one(vectors: World) -> None:
    client = vectors.client()
    texts: Any = ["north", "north-east"]
    found = await client.embeddings.create(model="tiny", input=texts)  # as base64: the client's default
    assert [one.embedding for one in found.data] == [[0.0, 1.0], pytest.approx([0.5**0.5] * 2)]
    assert [one.index for one in found.data] == [0, 1]
    starts = [await vectors.runner.next("start") for _ in texts]
    assert {(start.max_tokens, start.sampling.pooling) for start in starts} == {(0, True)}
    tokens = sum(len(start.prompt) for start in starts)
    assert (found.usage.prompt_tokens, found.usage.total_tokens) == (tokens, tokens)
    as_tokens = await client.embeddings.create(model="tiny", input=vectors.tokens("east"), encoding_format="float")
    assert as_tokens.data[0].embedding == [1.0, 0.0]
    first = await client.embeddings.create(model="tiny", input="north-east", encoding_format="float", dimensions=1)
    assert first.data[0].embedding == [1.0]
    raw = await client.embeddings.create(model="tiny", input="north-east", extra_body={"use_activation": False})
    assert raw.data[0].embedding == [3.0, 3.0]


async def test_a_model_without_a_head_embeds_and_generates_nothing(vectors: World) -> None:
    routes = vectors.routes(version=2)
    routes.pools[0].embeds_only = True
    vectors.scheduler.send_routes(routes)
    await until(lambda: vectors.gateway.machine.routes.version == 2)
    client = vectors.client()
    assert (await client.embeddings.create(model="tiny", input="north")).data[0].embedding == [0.0, 1.0]
    with pytest.raises(openai.BadRequestError, match="has no head"):
        await client.completions.create(model="tiny", prompt="north")


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        *((path, {"input": "north"}) for path in ("/v1/embeddings", "/pooling", "/v1/responses/input_tokens")),
        ("/rerank", {"query": "north", "documents": ["east"]}),
        ("/score", {"text_1": "north", "text_2": "east"}),
        ("/tokenize", {"prompt": "north"}),
        ("/detokenize", {"tokens": [1]}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "north"}]}),
    ],
)
async def test_answers_of_one_piece_name_what_was_ignored(vectors: World, path: str, asked: dict[str, Any]) -> None:
    async with httpx2.AsyncClient(base_url=vectors.url, timeout=PATIENCE_S) as http:
        answer = await http.post(path, json=asked | {"model": "tiny", "request_id": "mine"})
    assert (answer.status_code, answer.headers["weft-ignored"]) == (200, "request_id")


async def test_a_vector_in_base64_is_fp32(vectors: World) -> None:
    async with httpx2.AsyncClient(base_url=vectors.url, timeout=PATIENCE_S) as http:
        body = {"model": "tiny", "input": "north", "encoding_format": "base64"}
        answer = await http.post("/v1/embeddings", json=body)
    assert array("f", base64.b64decode(answer.json()["data"][0]["embedding"])).tolist() == [0.0, 1.0]


async def test_documents_come_in_the_order_of_their_cosines(vectors: World) -> None:
    documents = ["south", {"text": "east"}, "north-east", "north"]
    body = {"model": "tiny", "query": "north", "documents": documents, "top_n": 3}
    async with httpx2.AsyncClient(base_url=vectors.url, timeout=PATIENCE_S) as http:
        for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
            results = (await http.post(path, json=body)).json()["results"]
            assert [one["index"] for one in results] == [3, 2, 1]
            assert [one["relevance_score"] for one in results] == pytest.approx([1.0, 0.5**0.5, 0.0])
            assert [one["document"]["text"] for one in results] == ["north", "north-east", "east"]
        for path in ("/score", "/v1/score"):
            body = {"model": "tiny", "text_1": "north", "text_2": ["north", "south"]}
            data = (await http.post(path, json=body)).json()["data"]
            assert [one["score"] for one in data] == pytest.approx([1.0, -1.0])
        pairs = {"model": "tiny", "text_1": ["east", "south"], "text_2": ["east", "north"]}
        data = (await http.post("/score", json=pairs)).json()["data"]
        assert [one["score"] for one in data] == pytest.approx([1.0, -1.0])


HELLO = {"role": "user", "content": "hello"}
BAD = [
    ("/v1/embeddings", {"input": "north", "dimensions": 3}, "dimensions"),
    ("/v1/embeddings", {"input": []}, "input"),
    ("/v1/embeddings", {"input": "north", "encoding_format": "int8"}, "encoding_format"),
    ("/v1/embeddings", {"input": "north", "task": "x"}, "task"),
    ("/v1/embeddings", {"input": "north", "normalize": False}, "normalize"),
    ("/rerank", {"query": "north", "documents": []}, "documents"),
    ("/rerank", {"query": "north", "documents": [{"image": "x"}]}, "documents"),
    ("/score", {"text_1": ["north", "east", "south"], "text_2": ["north", "east"]}, "text_1"),
    ("/v1/embeddings", {"input": ["north", "x" * 9000]}, "input[1]"),
    ("/rerank", {"query": "north", "documents": ["east", "x" * 9000]}, "documents[1]"),
    ("/rerank", {"query": "x" * 9000, "documents": ["east"]}, "query"),
    ("/score", {"text_1": ["north"], "text_2": ["north", "x" * 9000]}, "text_2[1]"),
    ("/v1/chat/completions/batch", {"messages": [[HELLO], [HELLO | {"content": "x" * 9000}]]}, "messages[1]"),
    ("/v1/chat/completions/batch", {"messages": [[HELLO], [HELLO | {"role": 1}]]}, "messages[1][0].role"),
]


async def test_what_cannot_be_embedded_is_refused_by_name(vectors: World) -> None:
    async with httpx2.AsyncClient(base_url=vectors.url, timeout=PATIENCE_S) as http:
        for path, body, param in BAD:
            answer = await http.post(path, json={"model": "tiny", **body})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
