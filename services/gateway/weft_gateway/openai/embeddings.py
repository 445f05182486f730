"""`POST /v1/embeddings`, `/rerank` and `/score`: what a model makes of a text, as a vector or as likeness.

An embedding is the hidden state of a text's last token behind the final norm, of length 1 unless the request wants it
as it is. Relevance and scores are cosines of embeddings, as vLLM has them for embedding models.
"""

import base64
from array import array
from collections.abc import Sequence
from math import hypot
from operator import mul
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

import orjson
from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError
from starlette.requests import Request
from starlette.responses import Response

from weft_gateway.errors import ParameterError
from weft_gateway.openai.completions import prompts_of
from weft_gateway.openai.fields import MAX_INT32, Prompts, Whole
from weft_gateway.openai.http_requests import completion
from weft_gateway.openai.response_format import CompletionEncoder, EndedChoice
from weft_gateway.openai.schema import MAX_CALLER_ID, CompletionRequest, Strict, parse
from weft_gateway.openai.validation import ModelEndpoint
from weft_gateway.shell.app_state import AppState
from weft_gateway.shell.request_ids import MAX_PROMPTS

Vector: TypeAlias = "array[float]"


def _texts(value: Any) -> list[str]:
    """A text, or texts; of Cohere's and Jina's form too: {"text": ...}."""
    several = value if isinstance(value, list) else [value]
    texts: list[Any] = [one.get("text") if isinstance(one, dict) else one for one in several]
    if not 0 < len(texts) < MAX_PROMPTS or not all(isinstance(text, str) and text for text in texts):
        raise PydanticCustomError("texts", "must be a text or a list of less than {count}", {"count": MAX_PROMPTS})
    return texts


Texts = Annotated[list[str], BeforeValidator(_texts)]


class _Pooled(Strict):
    """What embeddings, rerank and score share."""

    model: str = Field(min_length=1, max_length=512, description="an adapter or a base model, as in GET /v1/models")
    truncate_prompt_tokens: Whole | None = Field(
        None, ge=-1, le=MAX_INT32, description="the last tokens of a text that are kept; -1: as many as fit"
    )
    priority: Whole = Field(0, ge=0, le=MAX_INT32, description="above 0: may wait for interactive requests, as batches")
    user: str = Field("", max_length=MAX_CALLER_ID, description="whom the caller asks for; logged hashed")


class EmbeddingsRequest(_Pooled):
    """`POST /v1/embeddings`."""

    input: Prompts = Field(description="a text, token ids, or a list of either")
    encoding_format: Literal["float", "base64"] = Field("float", description="base64: of little-endian fp32")
    dimensions: Whole | None = Field(
        None, ge=1, le=MAX_INT32, description="the first so many numbers, for models trained so (Matryoshka)"
    )
    normalize: bool = Field(True, description="of length 1")
    add_special_tokens: bool = Field(True, description="what the tokenizer puts around a text")


class RerankRequest(_Pooled):
    """`POST /rerank`, as Jina and Cohere have it."""

    query: str = Field(min_length=1)
    documents: Texts = Field(description="texts, or objects with a text")
    top_n: Whole = Field(0, ge=0, le=MAX_INT32, description="the most relevant that are returned; 0: all")
    return_documents: bool = Field(True, description="each result has its text")


class ScoreRequest(_Pooled):
    """`POST /score`, as vLLM has it: one text_1 with each text_2, or pairs."""

    text_1: Texts
    text_2: Texts

    def check_together(self) -> None:
        if len(self.text_1) not in (1, len(self.text_2)):
            text = f"text_1 has {len(self.text_1)} texts, text_2 {len(self.text_2)}: as many, or one text_1."
            raise ParameterError(text, param="text_1")


class PooledRequest(CompletionRequest):
    """Prompts whose hidden states are asked for. `asked`: the client's request."""

    prompt_name: ClassVar[str] = "input"

    asked: Any = None

    @property
    def pools(self) -> bool:
        return True


class RerankedRequest(PooledRequest):
    prompt_name: ClassVar[str] = "documents"


class ScoredRequest(PooledRequest):
    prompt_name: ClassVar[str] = "text_2"


def _pooled(
    form: type[PooledRequest], asked: _Pooled, prompts: Sequence[str | list[int]], **more: Any
) -> PooledRequest:
    common = {"truncate_prompt_tokens": asked.truncate_prompt_tokens, "priority": asked.priority, "user": asked.user}
    return form.model_construct(model=asked.model, prompt=tuple(prompts), max_tokens=0, asked=asked, **common, **more)


def _embeddings(body: bytes) -> PooledRequest:
    asked = parse(EmbeddingsRequest, body)
    return _pooled(PooledRequest, asked, asked.input, add_special_tokens=asked.add_special_tokens)


def _rerank(body: bytes) -> PooledRequest:
    asked = parse(RerankRequest, body)
    return _pooled(RerankedRequest, asked, [asked.query, *asked.documents])


def _score(body: bytes) -> PooledRequest:
    asked = parse(ScoreRequest, body)
    if len(asked.text_1) + len(asked.text_2) > MAX_PROMPTS:
        raise ParameterError(f"text_1 and text_2 may have {MAX_PROMPTS} texts together.", param="text_2")
    return _pooled(ScoredRequest, asked, [*asked.text_1, *asked.text_2])


def vector_of(state: bytes) -> Vector:
    """Little-endian fp32, as a runner sends it."""
    return array("f", state)


def normalized(vector: Vector) -> Vector:
    """Of length 1; a vector of zeros stays."""
    length = hypot(*vector)
    return array("f", [x / length for x in vector]) if length else vector


class _VectorEncoder(CompletionEncoder):
    """Vectors are whole: nothing is streamed."""

    _params: PooledRequest

    def body(self, choices: Sequence[EndedChoice], usage: dict[str, int]) -> bytes:
        vectors = [vector_of(choice.emit.state) for choice in choices]
        used = {"prompt_tokens": usage["prompt_tokens"], "total_tokens": usage["total_tokens"]}
        return orjson.dumps({**self._head, **self._found(vectors), "usage": used})

    def _found(self, vectors: Sequence[Vector]) -> dict[str, Any]:
        raise NotImplementedError


class EmbeddingsEncoder(_VectorEncoder):
    id_prefix, kind = "embd", "list"

    def _found(self, vectors: Sequence[Vector]) -> dict[str, Any]:
        data = [{"object": "embedding", "index": i, "embedding": self._form(one)} for i, one in enumerate(vectors)]
        return {"data": data}

    def _form(self, vector: Vector) -> str | list[float]:
        asked: EmbeddingsRequest = self._params.asked
        if asked.dimensions is not None and asked.dimensions > len(vector):
            text = f"dimensions {asked.dimensions} is more than the model's {len(vector)}."
            raise ParameterError(text, param="dimensions")
        vector = vector[: asked.dimensions]
        vector = normalized(vector) if asked.normalize else vector
        if asked.encoding_format == "float":
            return vector.tolist()
        return base64.b64encode(vector.tobytes()).decode()


def _cosines(pairs: Sequence[tuple[Vector, Vector]]) -> list[float]:
    return [sum(map(mul, one, other)) for one, other in pairs]


class RerankEncoder(_VectorEncoder):
    id_prefix, kind = "rerank", "rerank"

    def _found(self, vectors: Sequence[Vector]) -> dict[str, Any]:
        asked: RerankRequest = self._params.asked
        query, *documents = map(normalized, vectors)
        scores = _cosines([(query, document) for document in documents])
        order = sorted(range(len(scores)), key=lambda index: (-scores[index], index))
        results: list[dict[str, Any]] = [{"index": index, "relevance_score": scores[index]} for index in order]
        for result in results if asked.return_documents else ():
            result["document"] = {"text": asked.documents[result["index"]]}
        return {"results": results[: asked.top_n or None]}


class ScoreEncoder(_VectorEncoder):
    id_prefix, kind = "score", "list"

    def _found(self, vectors: Sequence[Vector]) -> dict[str, Any]:
        asked: ScoreRequest = self._params.asked
        texts = [*map(normalized, vectors)]
        first, second = texts[: len(asked.text_1)], texts[len(asked.text_1) :]
        first = first * len(second) if len(first) == 1 else first
        scores = _cosines([*zip(first, second, strict=True)])
        return {"data": [{"object": "score", "index": i, "score": score} for i, score in enumerate(scores)]}


EMBEDDINGS = ModelEndpoint("/v1/embeddings", _embeddings, prompts_of, EmbeddingsEncoder, "embeddings")
RERANK = ModelEndpoint("/rerank", _rerank, prompts_of, RerankEncoder, "rerank")
SCORE = ModelEndpoint("/score", _score, prompts_of, ScoreEncoder, "score")


async def embeddings(state: AppState, request: Request) -> Response:
    """A vector for each text."""
    return await completion(EMBEDDINGS, state, request)


async def rerank(state: AppState, request: Request) -> Response:
    """Documents in the order of their relevance to a query."""
    return await completion(RERANK, state, request)


async def score(state: AppState, request: Request) -> Response:
    """How alike texts are, from -1 to 1."""
    return await completion(SCORE, state, request)
