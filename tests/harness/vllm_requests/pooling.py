"""vLLM's tests of embeddings, scores and reranking."""

import base64
import json
import struct
from math import isclose
from typing import Any

from harness.vllm_requests.checks import (
    BASE,
    CONTEXT,
    HIDDEN,
    Check,
    Expected,
    Reply,
    differs,
    message,
    ok,
    post,
    refused,
    some,
)  # fmt: skip

EMBED = "entrypoints/pooling/embed/test_online.py"
SCORE = "entrypoints/pooling/scoring/test_bi_encoder_online.py"
TEXT = "the cat sat on the mat"
IDS = [5, 6, 7, 8]
TALK = [message("The cat sat."), message("A feline.", "assistant"), message("Stars twinkle.")]
QUERY, DOCUMENTS = "the capital of France", ["the capital of Brazil", "the capital of France", "something else"]
CLOSE = 1e-2
TOKEN_TASKS = "A runner keeps the state of a prompt's last token alone."
COARSE = {"fp8_e4m3": 4e-2, "fp8_e5m2": 8e-2}  # of numbers below 1: half a unit of their last bit
FORMATS = ("float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2")


def _embed(test: str, *asserts: Expected, **body: Any) -> Check:
    return post(f"{EMBED}::{test}", "/v1/embeddings", {"model": BASE, "encoding_format": "float", **body}, *asserts)


def _vectors(count: int) -> Expected:
    """Expect `count` vectors, and the tokens of all inputs as `usage`."""

    def are_there(reply: Reply) -> bool:
        data, usage = reply.json["data"], reply.json["usage"]
        sizes = {len(one["embedding"]) for one in data}
        none = usage.get("completion_tokens", 0) == 0
        return (
            len(data) == count
            and sizes == {HIDDEN}
            and none
            and usage["prompt_tokens"] == usage["total_tokens"] > 0
            and reply.json["id"]
        )

    return are_there


def _floats(reply: Reply) -> list[list[float]]:
    return [
        one["embedding"] for one in reply.again(encoding_format="float", embed_dtype=None, endianness=None).json["data"]
    ]


def _near(found: list[list[float]], other: list[list[float]], tolerance: float = CLOSE) -> bool:
    pairs = [(a, b) for one, two in zip(found, other, strict=True) for a, b in zip(one, two, strict=True)]
    return bool(pairs) and all(isclose(a, b, abs_tol=tolerance) for a, b in pairs)


def _fp8(exponent_bits: int, mantissa_bits: int) -> list[float]:
    """What each byte stands for: sign, exponent, mantissa."""
    bias, ones = 2 ** (exponent_bits - 1) - 1, 2**mantissa_bits
    halves = [divmod(bits, ones) for bits in range(128)]
    positive = [(m + ones * (e > 0)) * 2.0 ** (max(e, 1) - bias - mantissa_bits) for e, m in halves]
    return [*positive, *(-x for x in positive)]


def _numbers(packed: bytes, dtype: str, order: str) -> list[float]:
    match dtype:
        case "float32" | "float16":
            return list(struct.unpack(f"{order}{HIDDEN}{'f' if dtype == 'float32' else 'e'}", packed))
        case "bfloat16":  # the upper halves of float32
            halves = struct.unpack(f"{order}{HIDDEN}H", packed)
            return list(struct.unpack(f"<{HIDDEN}f", struct.pack(f"<{HIDDEN}I", *(half << 16 for half in halves))))
        case _:
            values = _fp8(4, 3) if dtype == "fp8_e4m3" else _fp8(5, 2)
            return [values[byte] for byte in packed]


def _are_near(reply: Reply, packed: list[bytes]) -> bool:
    order = ">" if reply.sent.get("endianness") == "big" else "<"
    dtype = reply.sent.get("embed_dtype", "float32")
    return _near([_numbers(one, dtype, order) for one in packed], _floats(reply), COARSE.get(dtype, CLOSE))


def _base64_is_the_same(reply: Reply) -> bool:
    return _are_near(reply, [base64.b64decode(one["embedding"]) for one in reply.json["data"]])


def _bytes_are_the_same(reply: Reply) -> bool:
    body, count = reply.response.content, len(reply.sent["input"])
    if reply.sent["encoding_format"] == "bytes_only":
        size = len(body) // count
        return "metadata" not in reply.response.headers and _are_near(
            reply, [body[at : at + size] for at in range(0, len(body), size)]
        )
    items = json.loads(reply.response.headers["metadata"])["data"]
    return len(items) == count and _are_near(reply, [body[one["start"] : one["end"]] for one in items])


def _as_its_text(reply: Reply) -> bool:
    """A chat's vector is that of the prompt that the template makes of it."""
    prompt = reply.server.send("POST", "/tokenize", {"model": BASE, "messages": reply.sent["messages"]}).json["tokens"]
    other = reply.again(messages=None, input=prompt).json
    found = [one["embedding"] for one in reply.json["data"]]
    return _near(found, [one["embedding"] for one in other["data"]]) and other["usage"] == reply.json["usage"]


def _unlike_length(reply: Reply) -> bool:
    (whole,), (raw,) = _floats(reply), [one["embedding"] for one in reply.again(use_activation=False).json["data"]]
    length = sum(x * x for x in raw) ** 0.5
    return _near([whole], [[x / length for x in raw]]) and not _near([whole], [raw]) and _near([whole], [
        one["embedding"] for one in reply.again(use_activation=True).json["data"]])  # fmt: skip


def _scores(count: int) -> Expected:
    return lambda reply: (
        len(reply.json["data"]) == count
        and all(-1.01 <= one["score"] <= 1.01 for one in reply.json["data"])
        and reply.json["id"]
    )


def _most_relevant(reply: Reply) -> bool:
    results = reply.json["results"]
    scores = [one["relevance_score"] for one in results]
    return results[0]["index"] == 1 and scores == sorted(scores, reverse=True) and reply.json["id"]


def _fewer_tokens(reply: Reply) -> bool:
    return reply.again(max_tokens_per_doc=10).json["usage"]["prompt_tokens"] < reply.json["usage"]["prompt_tokens"]


def _score(test: str, *asserts: Expected, **body: Any) -> Check:
    return post(f"{SCORE}::{test}", "/score", {"model": BASE, **body}, *asserts)


def _rerank(test: str, *asserts: Expected, **body: Any) -> Check:
    return post(
        f"{SCORE}::{test}", "/rerank", {"model": BASE, "query": QUERY, "documents": DOCUMENTS, **body}, *asserts
    )


def _pooling(test: str, *asserts: Expected, **body: Any) -> Check:
    return post(
        f"{EMBED}::{test}", "/pooling", {"model": BASE, "input": TEXT, "encoding_format": "float", **body}, *asserts
    )


CHECKS = [
    _embed("test_completion_request [a text]", _vectors(1), input=TEXT),
    _embed("test_completion_request [token ids]", _vectors(1), input=IDS),
    _embed("test_completion_request_batched [texts]", _vectors(10), input=[TEXT] * 10),
    _embed("test_completion_request_batched [token ids]", _vectors(10), input=[IDS] * 10),
    *(_embed(f"test_truncate_prompt_tokens [{kind}]", _vectors(1), {"usage.prompt_tokens": 10}, input=given, truncate_prompt_tokens=10)
        for kind, given in (("a text", [TEXT * 2]), ("token ids", IDS * 5))),
    _embed("test_truncate_prompt_tokens [beyond the context]", refused("truncate_prompt_tokens"), input=[TEXT], truncate_prompt_tokens=8193),
    _embed("test_chat_request [as its text]", _as_its_text, _vectors(1), messages=TALK),
    _embed("test_chat_request [add_generation_prompt]", _vectors(1), {"object": "list"}, messages=TALK, add_generation_prompt=True),
    _embed("test_chat_request [continue_final_message]", _vectors(1), {"object": "list"}, messages=TALK, continue_final_message=True),
    _embed("test_chat_request [add_special_tokens]", _vectors(1), {"object": "list"}, messages=TALK, add_special_tokens=True),
    _embed("test_chat_request [both]", refused("continue_final_message", "add_generation_prompt"), messages=TALK, continue_final_message=True,
        add_generation_prompt=True),
    _embed("test_base64_embedding", _base64_is_the_same, input=["Hello my name is", TEXT], encoding_format="base64"),
    *(_embed(f"test_base64_embed_dtype_and_endianness [{dtype}, {order}]", _base64_is_the_same, input=[TEXT] * 3, encoding_format="base64",
        embed_dtype=dtype, endianness=order) for dtype in FORMATS for order in ("native", "little", "big")),
    *(_embed(f"test_bytes_embed_dtype_and_endianness [{dtype}, {order}]", _bytes_are_the_same, input=[TEXT] * 3, encoding_format="bytes",
        embed_dtype=dtype, endianness=order) for dtype in FORMATS for order in ("native", "little", "big")),
    *(_embed(f"test_bytes_only_embed_dtype_and_endianness [{dtype}, {order}]", _bytes_are_the_same, input=[TEXT] * 2, encoding_format="bytes_only",
        embed_dtype=dtype, endianness=order) for dtype in FORMATS for order in ("native", "little", "big")),
    *(_embed(f"test_params_not_supported [{name}]", refused(name), input=TEXT, **{"encoding_format": "base64", name: f"bad_{name}"})
        for name in ("encoding_format", "embed_dtype", "endianness")),
    _embed("test_use_activation", _unlike_length, input=TEXT),
    _pooling("test_pooling_embed", {"#data": 1, "#data.0.data": HIDDEN}, task="embed"),
    differs(TOKEN_TASKS, _pooling("test_pooling_token_embed", {"#data": 1, "data.0.data": some}, task="token_embed"), refused("token_embed")),
    *(_pooling(f"test_pooling_not_supported [{task}]", refused(task), task=task) for task in ("classify", "token_classify", "plugin")),
    _score("test_score_api_queries_str_1_documents_str_1", _scores(1), queries=QUERY, documents=DOCUMENTS[0]),
    _score("test_score_api_queries_str_1_documents_str_n", _scores(2), queries=QUERY, documents=DOCUMENTS[:2]),
    _score("test_score_api_queries_str_n_documents_str_n", _scores(2), queries=[QUERY, TEXT], documents=DOCUMENTS[:2]),
    _score("test_score_api_queries_vs_items", _scores(2), queries=[QUERY, TEXT], items=DOCUMENTS[:2]),
    _score("test_score_api_text_1_vs_text_2", _scores(2), text_1=[QUERY, TEXT], text_2=DOCUMENTS[:2]),
    _score("test_score_api_data_1_vs_data_2", _scores(2), data_1=[QUERY, TEXT], data_2=DOCUMENTS[:2]),
    _rerank("test_rerank_api_texts", {"#results": 3}, _most_relevant),
    _rerank("test_rerank_api_top_n", {"#results": 2}, _most_relevant, top_n=2),
    _rerank("test_rerank_api_max_model_len", refused("Please reduce the length of the input prompt"), query=QUERY * 100),
    _score("test_score_api_max_model_len [too long]", refused("Please reduce the length of the input prompt"), queries=QUERY * 100, documents=DOCUMENTS),
    _score("test_score_api_max_model_len [truncation]", refused("truncate_prompt_tokens"), queries=QUERY, documents=DOCUMENTS,
        truncate_prompt_tokens=CONTEXT + 1),
    post("entrypoints/pooling/scoring/test_cross_encoder_online.py::test_rerank_max_tokens_per_doc", "/rerank",
        {"model": BASE, "query": QUERY, "documents": [DOCUMENTS[0] * 20, TEXT], "max_tokens_per_doc": 10}, {"#results": 2, "usage.prompt_tokens": some}),
    post("entrypoints/pooling/scoring/test_cross_encoder_online.py::test_rerank_max_tokens_per_doc_reduces_tokens", "/rerank",
        {"model": BASE, "query": QUERY, "documents": [DOCUMENTS[0] * 10]}, _fewer_tokens),
    post("entrypoints/pooling/test_cache_salt_validation.py::test_pooling_rejects_empty_cache_salt", "/v1/embeddings",
        {"model": BASE, "input": TEXT, "cache_salt": ""}, refused("cache_salt")),
    post("entrypoints/pooling/test_cache_salt_validation.py::test_pooling_accepts_a_real_cache_salt", "/v1/embeddings",
        {"model": BASE, "input": TEXT, "cache_salt": "tenant-a"}, ok),
    post("entrypoints/pooling/test_cache_salt_validation.py::test_pooling_allows_cache_salt_to_be_omitted", "/v1/embeddings", {"model": BASE, "input": TEXT}, ok),
]  # fmt: skip
