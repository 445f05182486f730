"""What vLLM's tests of embeddings, scores and reranking assert of a reply."""

import base64
import json
import struct
from math import isclose

from harness.vllm_requests.checks import BASE, HIDDEN, Reply

CLOSE = 1e-2
COARSE = {"fp8_e4m3": 4e-2, "fp8_e5m2": 8e-2}  # of numbers below 1: half a unit of their last bit


def vectors(reply: Reply, count: int) -> bool:
    """Expect `count` vectors, and the tokens of all inputs as `usage`."""
    found, usage = _embeddings(reply), reply.json["usage"]
    tokens = usage["prompt_tokens"] == usage["total_tokens"] > 0 and usage.get("completion_tokens", 0) == 0
    return len(found) == count and {len(vector) for vector in found} == {HIDDEN} and tokens and reply.json["id"]


def _embeddings(reply: Reply) -> list[list[float]]:
    return [item["embedding"] for item in reply.json["data"]]


def _floats(reply: Reply) -> list[list[float]]:
    return _embeddings(reply.again(encoding_format="float", embed_dtype=None, endianness=None))


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
    return _near([_numbers(vector, dtype, order) for vector in packed], _floats(reply), COARSE.get(dtype, CLOSE))


def base64_is_the_same(reply: Reply) -> bool:
    return _are_near(reply, [base64.b64decode(item["embedding"]) for item in reply.json["data"]])


def bytes_are_the_same(reply: Reply) -> bool:
    body, count = reply.response.content, len(reply.sent["input"])
    if reply.sent["encoding_format"] == "bytes_only":
        size = len(body) // count
        parts = [body[at : at + size] for at in range(0, len(body), size)]
        return "metadata" not in reply.response.headers and _are_near(reply, parts)
    items = json.loads(reply.response.headers["metadata"])["data"]
    return len(items) == count and _are_near(reply, [body[item["start"] : item["end"]] for item in items])


def as_its_text(reply: Reply) -> bool:
    """A chat's vector is that of the prompt that the template makes of it."""
    prompt = reply.server.send("POST", "/tokenize", {"model": BASE, "messages": reply.sent["messages"]}).json["tokens"]
    other = reply.again(messages=None, input=prompt)
    return _near(_embeddings(reply), _embeddings(other)) and other.json["usage"] == reply.json["usage"]


def unlike_length(reply: Reply) -> bool:
    (unit,), (raw,) = _floats(reply), _embeddings(reply.again(use_activation=False))
    length = sum(x * x for x in raw) ** 0.5
    same = _near([unit], [[x / length for x in raw]]) and _near([unit], _embeddings(reply.again(use_activation=True)))
    return same and not _near([unit], [raw])


def scores(reply: Reply, count: int) -> bool:
    items = reply.json["data"]
    return len(items) == count and all(-1.01 <= item["score"] <= 1.01 for item in items) and reply.json["id"]


def most_relevant(reply: Reply) -> bool:
    results = reply.json["results"]
    relevance = [result["relevance_score"] for result in results]
    return results[0]["index"] == 1 and relevance == sorted(relevance, reverse=True) and reply.json["id"]


def fewer_tokens(reply: Reply) -> bool:
    return reply.again(max_tokens_per_doc=10).json["usage"]["prompt_tokens"] < reply.json["usage"]["prompt_tokens"]
