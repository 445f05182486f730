"""`POST /v1/embeddings`, `/pooling`, `/rerank` and `/score`: what a model makes of a text, as a vector or as likeness.

An embedding is the hidden state of a text's last token behind the final norm, of length 1 unless the request wants it
as it is. Relevance and scores are cosines of embeddings, as vLLM has them for embedding models.
"""

import base64
import struct
from array import array
from bisect import bisect_left
from collections.abc import Sequence, Sized
from math import hypot
from operator import mul
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

import orjson
from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from weft_gateway.core.events import Emit, End
from weft_gateway.errors import ParameterError
from weft_gateway.openai.call import Call, Prompt
from weft_gateway.openai.chat import prompt_of
from weft_gateway.openai.completions import CompletionEndpoint
from weft_gateway.openai.fields import MAX_INT32, Prompts, Whole
from weft_gateway.openai.response_format import CompletionEncoder
from weft_gateway.openai.schema import MAX_CALLER_ID, ChatPrompt, CompletionRequest, Strict, checked, object_of, parse
from weft_gateway.openai.usage import CallUsage
from weft_gateway.shell.request_ids import MAX_PROMPTS
from weft_gateway.shell.tokenizer import ModelTokenizer

Vector: TypeAlias = "array[float]"


def _texts(value: Any) -> list[str]:
    """A text, or texts; of Cohere's and Jina's form too: {"text": ...}."""
    several = value if isinstance(value, list) else [value]
    texts: list[Any] = [part.get("text") if isinstance(part, dict) else part for part in several]
    if not 0 < len(texts) < MAX_PROMPTS or not all(isinstance(text, str) and text for text in texts):
        raise PydanticCustomError("texts", "must be a text or a list of less than {count}", {"count": MAX_PROMPTS})
    return texts


Texts = Annotated[list[str], BeforeValidator(_texts)]


class _Pooled(Strict):
    """The common parameters of embeddings, rerank and score."""

    model: str = Field(min_length=1, max_length=512, description="an adapter or a base model, as in GET /v1/models")
    truncate_prompt_tokens: Whole | None = Field(
        None, ge=-1, le=MAX_INT32, description="the tokens of a text that are kept; -1: as many as fit"
    )
    truncation_side: Literal["left", "right"] = Field("left", description="where a text is cut; left: its last stay")
    cache_salt: str | None = Field(
        None, min_length=1, max_length=256, description="texts are reused inside one salt (and namespace) only"
    )
    priority: Whole = Field(0, ge=0, le=MAX_INT32, description="above 0: may wait for interactive requests, as batches")
    user: str = Field("", max_length=MAX_CALLER_ID, description="whom the caller asks for; logged hashed")


class _VectorForm(_Pooled):
    """How vectors are written."""

    encoding_format: Literal["float", "base64", "bytes", "bytes_only"] = Field(
        "float", description="base64: of bytes; bytes: no JSON, with a header `metadata`; bytes_only: without it"
    )
    embed_dtype: Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"] = Field(
        "float32", description="of bytes"
    )
    endianness: Literal["native", "little", "big"] = Field("native", description="of bytes; native: little")
    dimensions: Whole | None = Field(
        None, ge=1, le=MAX_INT32, description="numbers that are kept of a vector, for models trained so (Matryoshka)"
    )
    use_activation: bool = Field(True, description="of length 1")


class EmbeddingsRequest(_VectorForm):
    """`POST /v1/embeddings`."""

    input: Prompts = Field(description="a text, token ids, or a list of either")
    add_special_tokens: bool = Field(True, description="what the tokenizer puts around a text")


class EmbeddedChatRequest(ChatPrompt, _VectorForm):
    """`POST /v1/embeddings` of a chat, as vLLM has it."""


class RerankRequest(_Pooled):
    """`POST /rerank`, as Jina and Cohere have it."""

    query: str = Field(min_length=1)
    documents: Texts = Field(description="texts, or objects with a text")
    top_n: Whole = Field(0, ge=0, le=MAX_INT32, description="the most relevant that are returned; 0: all")
    return_documents: bool = Field(True, description="each result has its text")
    max_tokens_per_doc: Whole = Field(0, ge=0, le=MAX_INT32, description="the first of a document that count; 0: all")


class ScoreRequest(_Pooled):
    """`POST /score`, as in vLLM: a text_1 with each text_2, or pairs. `SCORE_NAMES` are alternative names."""

    text_1: Texts
    text_2: Texts

    def check_together(self) -> None:
        if len(self.text_1) not in (1, len(self.text_2)):
            text = f"text_1 has {len(self.text_1)} texts, text_2 {len(self.text_2)}: as many, or one text_1."
            raise ParameterError(text, param="text_1")


SCORE_NAMES = {"queries": "text_1", "data_1": "text_1", "documents": "text_2", "items": "text_2", "data_2": "text_2"}
TASKS = ("embed",)


class PooledRequest(CompletionRequest):
    """Prompts whose hidden states are asked for. `requested`: the client's request."""

    prompt_name: ClassVar[str] = "input"

    requested: Any = None

    @property
    def pools(self) -> bool:
        return True


class RerankedRequest(PooledRequest):
    prompt_name: ClassVar[str] = "documents"

    def prompt_at(self, index: int) -> str:
        return f"documents[{index - 1}]" if index else "query"


class ScoredRequest(PooledRequest):
    prompt_name: ClassVar[str] = "text_2"

    def prompt_at(self, index: int) -> str:
        first = len(self.requested.text_1)
        return f"text_1[{index}]" if index < first else f"text_2[{index - first}]"


def _pooled(
    form: type[PooledRequest], requested: _Pooled, prompts: Sequence[str | list[int]], **fields: Any
) -> PooledRequest:
    names = ("truncate_prompt_tokens", "truncation_side", "cache_salt", "priority", "user")
    common = {name: getattr(requested, name) for name in names}
    request = form.model_construct(
        model=requested.model, prompt=tuple(prompts), max_tokens=0, requested=requested, **common, **fields
    )
    request.note_ignored(requested.ignored)
    return request


def _embedded(value: dict[str, Any]) -> PooledRequest:
    """Raises ParameterError."""
    if value.get("messages") is not None:
        return _pooled(PooledRequest, checked(EmbeddedChatRequest, value), [""])
    params = checked(EmbeddingsRequest, value)
    return _pooled(PooledRequest, params, params.input, add_special_tokens=params.add_special_tokens)


def _first_tokens(text: str | list[int], count: int, tokenizer: ModelTokenizer) -> str:
    """Cut a text to its first `count` tokens."""
    assert isinstance(text, str)
    max_chars = tokenizer.max_chars(count)
    return tokenizer.decode(tokenizer.encode(text[:max_chars], count, add_special_tokens=False)[:count])


def vector_of(state: bytes) -> Vector:
    """Little-endian fp32, as a runner sends it."""
    return array("f", state)


def normalized(vector: Vector) -> Vector:
    """Scale a vector to length 1; zeros stay."""
    length = hypot(*vector)
    return array("f", [x / length for x in vector]) if length else vector


class _VectorEncoder(CompletionEncoder):
    """Vectors are whole: nothing is streamed."""

    _params: PooledRequest

    def body(self, choices: Sequence[tuple[Emit, End]], usage: CallUsage) -> bytes:
        vectors = [vector_of(emit.state) for emit, _ in choices]
        return orjson.dumps({**self._head, **self._answer_fields(vectors), "usage": usage.of_vectors()})

    def _answer_fields(self, vectors: Sequence[Vector]) -> dict[str, Any]:
        raise NotImplementedError


class EmbeddingsEncoder(_VectorEncoder):
    id_prefix, kind = "embd", "list"
    item, field = "embedding", "embedding"

    def _answer_fields(self, vectors: Sequence[Vector]) -> dict[str, Any]:
        return {"data": [{"object": self.item, "index": i, self.field: self._form(v)} for i, v in enumerate(vectors)]}

    def body(self, choices: Sequence[tuple[Emit, End]], usage: CallUsage) -> bytes:
        form = self._params.requested.encoding_format
        if not form.startswith("bytes"):
            return super().body(choices, usage)
        self.media_type = "application/octet-stream"
        parts = [self._form(vector_of(emit.state)) for emit, _ in choices]
        if form == "bytes":
            self.headers = {"metadata": orjson.dumps(self._metadata(parts, usage)).decode()}
        return b"".join(map(bytes, parts))

    def _metadata(self, parts: Sequence[Sized], usage: CallUsage) -> dict[str, Any]:
        """Say where each vector stands in the body, for vLLM's clients."""
        form: _VectorForm = self._params.requested
        data, start = list[dict[str, Any]](), 0
        for index, part in enumerate(parts):
            about = {"embed_dtype": form.embed_dtype, "endianness": form.endianness, "shape": [self._size]}
            data.append({"index": index, **about, "start": start, "end": start + len(part)})
            start += len(part)
        return {**self._head, "data": data, "usage": usage.of_vectors()}

    def _form(self, vector: Vector) -> Any:
        form: _VectorForm = self._params.requested
        if form.dimensions is not None and form.dimensions > len(vector):
            text = f"dimensions {form.dimensions} is more than the model's {len(vector)}."
            raise ParameterError(text, param="dimensions")
        vector = vector[: form.dimensions]
        self._size = len(vector)
        vector = normalized(vector) if form.use_activation else vector
        if form.encoding_format == "float":
            return vector.tolist()
        packed = vector_bytes(vector, form.embed_dtype, form.endianness)
        return packed if form.encoding_format.startswith("bytes") else base64.b64encode(packed).decode()


def vector_bytes(vector: Vector, dtype: str, endianness: str) -> bytes:
    """The numbers as bytes of a type, rounded to nearest; bfloat16 is the upper half of fp32."""
    if dtype in FP8:
        numbers = FP8[dtype]
        return bytes(_nearest(numbers, abs(x)) | (0x80 if x < 0 else 0) for x in vector)
    order = ">" if endianness == "big" else "<"
    if dtype != "bfloat16":
        return struct.pack(f"{order}{len(vector)}{'f' if dtype == 'float32' else 'e'}", *vector)
    bit_patterns = struct.unpack(f"<{len(vector)}I", struct.pack(f"<{len(vector)}f", *vector))
    return struct.pack(f"{order}{len(vector)}H", *((bits + 0x7FFF + (bits >> 16 & 1)) >> 16 for bits in bit_patterns))


def _fp8(exponent_bits: int, mantissa_bits: int, count: int) -> list[float]:
    """The finite numbers from 0 of an 8-bit float (Micikevicius et al., 2022), each at its bits."""
    bias, n_mantissas = 2 ** (exponent_bits - 1) - 1, 2**mantissa_bits
    parts = (divmod(bits, n_mantissas) for bits in range(count))
    return [
        (mantissa + n_mantissas * (exponent > 0)) * 2.0 ** (max(exponent, 1) - bias - mantissa_bits)
        for exponent, mantissa in parts
    ]


FP8 = {"fp8_e4m3": _fp8(4, 3, 127), "fp8_e5m2": _fp8(5, 2, 124)}


def _nearest(numbers: Sequence[float], x: float) -> int:
    """Return the index of the nearest number; of two, the number with an even last bit."""
    above = min(bisect_left(numbers, x), len(numbers) - 1)
    return min((index for index in (above - 1, above) if index >= 0), key=lambda i: (abs(numbers[i] - x), i & 1))


class PoolingEncoder(EmbeddingsEncoder):
    """vLLM's form: a vector is its prompt's `data`."""

    id_prefix, item, field = "pool", "pooling", "data"


def _cosines(pairs: Sequence[tuple[Vector, Vector]]) -> list[float]:
    return [sum(map(mul, left, right)) for left, right in pairs]


class RerankEncoder(_VectorEncoder):
    id_prefix, kind = "rerank", "rerank"

    def _answer_fields(self, vectors: Sequence[Vector]) -> dict[str, Any]:
        params: RerankRequest = self._params.requested
        query, *documents = map(normalized, vectors)
        scores = _cosines([(query, document) for document in documents])
        order = sorted(range(len(scores)), key=lambda index: (-scores[index], index))
        results: list[dict[str, Any]] = [{"index": index, "relevance_score": scores[index]} for index in order]
        for result in results if params.return_documents else ():
            result["document"] = {"text": params.documents[result["index"]]}
        return {"results": results[: params.top_n or None]}


class ScoreEncoder(_VectorEncoder):
    id_prefix, kind = "score", "list"

    def _answer_fields(self, vectors: Sequence[Vector]) -> dict[str, Any]:
        params: ScoreRequest = self._params.requested
        texts = [*map(normalized, vectors)]
        first, second = texts[: len(params.text_1)], texts[len(params.text_1) :]
        first = first * len(second) if len(first) == 1 else first
        scores = _cosines([*zip(first, second, strict=True)])
        return {"data": [{"object": "score", "index": i, "score": score} for i, score in enumerate(scores)]}


class EmbeddingsEndpoint(CompletionEndpoint):
    """A vector for each text."""

    name = "embeddings"
    path, operation = "/v1/embeddings", "embeddings"
    encoder = EmbeddingsEncoder

    def parse(self, body: bytes) -> PooledRequest:
        return _embedded(object_of(body))

    def prompts(self, params: CompletionRequest, call: Call) -> list[Prompt]:
        assert isinstance(params, PooledRequest)
        match params.requested:
            case EmbeddedChatRequest() as chat:
                return [prompt_of(chat, call)]
            case RerankRequest(max_tokens_per_doc=count) if count:
                query, *documents = params.prompt
                cut = [_first_tokens(document, count, call.tokenizer) for document in documents]
                return super().prompts(params.model_copy(update={"prompt": (query, *cut)}), call)
            case _:
                return super().prompts(params, call)


class PoolingEndpoint(EmbeddingsEndpoint):
    """A vector for each text, in vLLM's form."""

    name = "pooling"
    path, encoder = "/pooling", PoolingEncoder

    def parse(self, body: bytes) -> PooledRequest:
        value = object_of(body)
        if (task := value.pop("task", None) or "embed") not in TASKS:
            text = f"task: {str(task)[:64]!r} is not served; {', '.join(TASKS)} is."
            raise ParameterError(text, param="task", code="unsupported_value")
        return _embedded(value)


class RerankEndpoint(EmbeddingsEndpoint):
    """Documents in the order of their relevance to a query."""

    name = "rerank"
    path, operation, encoder = "/rerank", "rerank", RerankEncoder

    def parse(self, body: bytes) -> PooledRequest:
        params = parse(RerankRequest, body)
        return _pooled(RerankedRequest, params, [params.query, *params.documents])


class ScoreEndpoint(EmbeddingsEndpoint):
    """How alike texts are, from -1 to 1."""

    name = "score"
    path, operation, encoder = "/score", "score", ScoreEncoder

    def parse(self, body: bytes) -> PooledRequest:
        value = object_of(body)
        texts = dict[str, Any]()
        for name, item in value.items():
            usual_name = SCORE_NAMES.get(name, name)
            if item is not None and usual_name in texts:
                raise ParameterError(f"{name}: expected one name of {usual_name}, got two. Leave it out.", param=name)
            texts |= {} if item is None else {usual_name: item}
        params = checked(ScoreRequest, texts)
        if len(params.text_1) + len(params.text_2) > MAX_PROMPTS:
            raise ParameterError(f"text_1 and text_2 may have {MAX_PROMPTS} texts together.", param="text_2")
        return _pooled(ScoredRequest, params, [*params.text_1, *params.text_2])


EMBEDDINGS, POOLING, RERANK, SCORE = EmbeddingsEndpoint(), PoolingEndpoint(), RerankEndpoint(), ScoreEndpoint()
