"""A transformer encoder that classifies a prompt by the length of its answer (S3, section 3), in numpy.

DistilBERT and BERT sequence classifiers as Hugging Face stores them. Prompts are computed singly: a prediction does not
depend on its batch, and nothing is padded. Each of 16 prompts at once takes 0.6 to 1.1 of the time of a single prompt.

`EncoderClasses` gives the probabilities of the classes to the ridge of `ridge_model.py`, which computes a centre. So
quantiles, offsets and calibration are the same as for hashed grams, and the read-out learns online as well. S3 itself
would reserve the upper edge of the likeliest class.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weft_predictor.core.features import MAX_CHARS, FeatureRows
from weft_predictor.core.ridge import RIDGE, Ridge
from weft_predictor.errors import CorruptModel

Array = NDArray[np.float32]
SQRT_HALF = np.float32(math.sqrt(0.5))
LAYER_NORM_EPS = np.float32(1e-12)
MAX_LOGIT = 1e4
MIN_LOG_PROBABILITY = -10.0  # log probabilities are cut there, and divided by it: all features are within 0 and 1
# Ours -> Hugging Face's, of each architecture; `embed`: summed at each position, `layer`: once a layer.
NAMES: dict[str, dict[str, str]] = {
    "distilbert": {
        "words": "distilbert.embeddings.word_embeddings.weight",
        "positions": "distilbert.embeddings.position_embeddings.weight",
        "embed_norm": "distilbert.embeddings.LayerNorm",
        "layer": "distilbert.transformer.layer",
        "query": "attention.q_lin",
        "key": "attention.k_lin",
        "value": "attention.v_lin",
        "out": "attention.out_lin",
        "attention_norm": "sa_layer_norm",
        "up": "ffn.lin1",
        "down": "ffn.lin2",
        "output_norm": "output_layer_norm",
        "pool": "pre_classifier",
    },
    "bert": {
        "words": "bert.embeddings.word_embeddings.weight",
        "positions": "bert.embeddings.position_embeddings.weight",
        "types": "bert.embeddings.token_type_embeddings.weight",
        "embed_norm": "bert.embeddings.LayerNorm",
        "layer": "bert.encoder.layer",
        "query": "attention.self.query",
        "key": "attention.self.key",
        "value": "attention.self.value",
        "out": "attention.output.dense",
        "attention_norm": "attention.output.LayerNorm",
        "up": "intermediate.dense",
        "down": "output.dense",
        "output_norm": "output.LayerNorm",
        "pool": "bert.pooler.dense",
    },
}


@dataclass(frozen=True, slots=True)
class EncoderShape:
    """The sizes of an encoder. `kind`: a key of NAMES. `edges`: the upper edge of each class in tokens, rising."""

    kind: str
    vocab: int
    positions: int
    layers: int
    heads: int
    dim: int
    hidden: int
    edges: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Dense:
    """The layer y = x W + b."""

    weight: Array  # [in, out]
    bias: Array

    def __call__(self, x: Array) -> Array:
        return x @ self.weight + self.bias


@dataclass(frozen=True, slots=True)
class _Norm:
    gain: Array
    bias: Array

    def __call__(self, x: Array) -> Array:
        x = x - x.mean(-1, keepdims=True)
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + LAYER_NORM_EPS) * self.gain + self.bias


@dataclass(frozen=True, slots=True)
class _Layer:
    query: _Dense
    key_value: _Dense  # [dim, 2 dim]
    out: _Dense
    attention_norm: _Norm
    up: _Dense
    down: _Dense
    output_norm: _Norm


class Encoder:
    """The network. Raises CorruptModel for weights of a wrong shape, for non-finite weights, and without scipy."""

    def __init__(self, shape: EncoderShape, weights: Mapping[str, Array]) -> None:
        try:
            from scipy.special import erf  # here: a predictor with a ridge serves without scipy
        except ImportError as error:
            raise CorruptModel(f"an encoder needs the scipy package: pip install 'weft[encoder]' ({error})") from error

        self.shape, self._erf = shape, erf
        names, d = NAMES[shape.kind], shape.dim

        def tensor(name: str, *dims: int) -> Array:
            weight = weights.get(name)
            if weight is None or weight.shape != dims or not np.isfinite(weight).all():
                raise CorruptModel(f"{name} is not {'x'.join(map(str, dims))} finite numbers")
            return weight

        def dense(name: str, fan_in: int, fan_out: int) -> _Dense:
            weight = np.ascontiguousarray(tensor(f"{name}.weight", fan_out, fan_in).T)
            return _Dense(weight, tensor(f"{name}.bias", fan_out))

        def norm(name: str) -> _Norm:
            return _Norm(tensor(f"{name}.weight", d), tensor(f"{name}.bias", d))

        def layer(i: int) -> _Layer:
            at = f"{names['layer']}.{i}."
            key, value = (dense(at + names[part], d, d) for part in ("key", "value"))
            return _Layer(
                dense(at + names["query"], d, d),
                _Dense(np.hstack([key.weight, value.weight]), np.concatenate([key.bias, value.bias])),
                dense(at + names["out"], d, d),
                norm(at + names["attention_norm"]),
                dense(at + names["up"], d, shape.hidden),
                dense(at + names["down"], shape.hidden, d),
                norm(at + names["output_norm"]),
            )

        self._words = tensor(names["words"], shape.vocab, d)
        self._positions = tensor(names["positions"], shape.positions, d)
        if "types" in names:
            self._positions = self._positions + tensor(names["types"], 2, d)[0]
        self._embed_norm = norm(names["embed_norm"])
        self._layers = [layer(i) for i in range(shape.layers)]
        self._pool = dense(names["pool"], d, d)
        self._classify = dense("classifier", d, len(shape.edges))

    def logits(self, ids: Sequence[int]) -> Array:
        """Score each class [classes] for a tokenised prompt [s], [CLS] and [SEP] included; cut at the positions."""
        ids = ids[: self.shape.positions]
        x = self._embed_norm(self._words[np.asarray(ids)] + self._positions[: len(ids)])
        for layer in self._layers:
            rows = x[:1] if layer is self._layers[-1] else x  # the last layer pools only the first position
            x = layer.attention_norm(rows + layer.out(self._attend(layer.query(rows), layer.key_value(x))))
            x = layer.output_norm(x + layer.down(self._gelu(layer.up(x))))
        pooled = self._pool(x[0])
        pooled = np.tanh(pooled) if self.shape.kind == "bert" else np.maximum(pooled, 0)
        return self._classify(pooled)

    def _attend(self, query: Array, key_value: Array) -> Array:
        heads, d = self.shape.heads, self.shape.dim
        q = query.reshape(len(query), heads, d // heads).transpose(1, 0, 2)  # [heads, rows, d_h]
        k, v = key_value.reshape(len(key_value), 2, heads, d // heads).transpose(1, 2, 0, 3)  # each [heads, s, d_h]
        scores = q @ k.transpose(0, 2, 1) * np.float32((d // heads) ** -0.5)
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        return (scores / scores.sum(-1, keepdims=True) @ v).transpose(1, 0, 2).reshape(len(query), d)

    def _gelu(self, x: Array) -> Array:
        return np.float32(0.5) * x * (1 + self._erf(x * SQRT_HALF))


class EncoderClasses:
    """A Featurizer: the constant, the probability of each class, and its logarithm. `name` identifies the network."""

    def __init__(self, encoder: Encoder, tokenize: Callable[[str], Sequence[int]], name: str) -> None:
        self._encoder, self._tokenize, self.name = encoder, tokenize, name
        self.edges = encoder.shape.edges
        self._classes = len(self.edges)
        self.dim = 1 << (2 * self._classes).bit_length()

    def rows(self, prompts: Sequence[tuple[str, int]]) -> tuple[FeatureRows, Sequence[int]]:
        log_p = self.log_probabilities([text for text, _ in prompts])
        values = np.hstack(
            [np.ones((len(log_p), 1)), np.exp(log_p), np.maximum(log_p, MIN_LOG_PROBABILITY) / MIN_LOG_PROBABILITY]
        )
        rows, columns = values.shape
        index = FeatureRows(np.repeat(np.arange(rows), columns), np.tile(np.arange(columns), rows), values.ravel())
        return index, [self.edges[best] for best in log_p.argmax(1)]

    def log_probabilities(self, texts: Sequence[str]) -> NDArray[np.float64]:
        """Compute the logarithm of each class's probability, [prompts, classes]."""
        logits = np.array([self._encoder.logits(self._tokenize(text[:MAX_CHARS])) for text in texts])
        logits = np.clip(np.nan_to_num(logits, nan=0.0), -MAX_LOGIT, MAX_LOGIT)  # an overflow carries no information
        scores = logits.reshape(len(texts), self._classes).astype(np.float64)
        return scores - np.logaddexp.reduce(scores, axis=1, keepdims=True)

    def uncalibrated(self) -> Ridge:
        """Make the read-out before any outcome: the expected logarithm of the classes' middles."""
        edges = np.array(self.edges, dtype=np.float64)
        middle = (np.concatenate([[0.0], edges[:-1]]) + edges) / 2
        weight = np.zeros(self.dim, dtype=np.float32)
        weight[1 : 1 + self._classes] = np.log(np.maximum(middle, 1.0))
        return Ridge(weight, np.full(self.dim, 1.0 / RIDGE, dtype=np.float32), 0.0)


def class_of(tokens: NDArray[np.int64], edges: Sequence[int]) -> NDArray[np.int64]:
    """Return the first class with room for a length; the last class has no end."""
    return np.searchsorted(np.array(edges[:-1]), tokens, side="left")


def deciles(tokens: NDArray[np.int64]) -> tuple[int, ...]:
    """Return the upper edges of ten classes with about equally many of the given lengths."""
    rising = np.quantile(tokens, np.arange(1, 11) / 10, method="higher")
    edges = list[int]()
    for edge in rising.tolist():
        edges.append(max(int(edge), edges[-1] + 1 if edges else 1))
    return tuple(edges)


def tenths(max_context_tokens: int) -> tuple[int, ...]:
    """Return the upper edges of S3's ten equal buckets."""
    return tuple((i + 1) * max_context_tokens // 10 for i in range(10))
