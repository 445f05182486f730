"""The encoder's loss on labelled prompts and its gradients (reverse mode), and AdamW on them, in numpy.

The forward pass is that of `encoder.py` on padded batches, with dropout where a random source is given. Each operation
returns its result and a function from the result's gradient to its argument's; gradients of weights add up in
`Parameters.gradient`. Checked against slopes of the loss in `tests/unit/predictor/test_gradients.py`.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from scipy.special import erf

from weft_predictor.core.encoder import LAYER_NORM_EPS, NAMES, SQRT_HALF, Array, EncoderShape

Examples = Sequence[tuple[Sequence[int], int]]  # token ids and the class
Back = Callable[[Array], Array]
BETA_1, BETA_2, ADAM_EPS = 0.9, 0.999, 1e-8
MAX_NORM = 1.0  # of the gradient of all weights together
NORMAL = np.float32(1.0 / math.sqrt(2.0 * math.pi))
MASKED = np.float32(-1e9)


class Parameters:
    """The weights by name, their gradients, and AdamW's moments: one vector each, which the names are views of."""

    def __init__(self, weights: Mapping[str, Array]) -> None:
        dims = {name: array.shape for name, array in weights.items()}
        self._flat = np.concatenate([array.ravel() for array in weights.values()]).astype(np.float32)
        self._flat_gradient, self._mean, self._square = (np.zeros_like(self._flat) for _ in range(3))
        self._steps = 0
        self.weights, self.gradient = _views(self._flat, dims), _views(self._flat_gradient, dims)

    def copy(self) -> dict[str, Array]:
        """The weights as they are now."""
        return {name: array.copy() for name, array in self.weights.items()}

    def clear(self) -> None:
        """No gradient."""
        self._flat_gradient[:] = 0

    def step(self, learning_rate: float, weight_decay: float) -> bool:
        """AdamW (Loshchilov and Hutter 2019) on the clipped gradient. A gradient that is not finite changes nothing."""
        g = self._flat_gradient
        norm = math.sqrt(float(g @ g))
        if not math.isfinite(norm):
            return False
        g *= np.float32(min(1.0, MAX_NORM / (norm + 1e-6)))
        self._steps += 1
        self._mean += np.float32(1 - BETA_1) * (g - self._mean)
        self._square += np.float32(1 - BETA_2) * (g * g - self._square)
        scale = np.sqrt(self._square / np.float32(1 - BETA_2**self._steps)) + np.float32(ADAM_EPS)
        self._flat *= np.float32(1 - learning_rate * weight_decay)
        self._flat -= np.float32(learning_rate / (1 - BETA_1**self._steps)) * (self._mean / scale)
        return True


class EncoderLoss:
    """The mean cross entropy of the classes of a batch. `dropout` needs `rng`."""

    def __init__(
        self, shape: EncoderShape, parameters: Parameters, rng: np.random.Generator | None = None, dropout: float = 0.0
    ) -> None:
        self._shape, self._names, self._rng, self._dropout = shape, NAMES[shape.kind], rng, dropout
        self._w, self._g = parameters.weights, parameters.gradient

    def forward(self, examples: Examples) -> tuple[float, Callable[[], None]]:
        """The loss, and what adds its gradients to the parameters'."""
        longest = max(len(ids) for ids, _ in examples)
        ids = np.array([[*ids, *[0] * (longest - len(ids))] for ids, _ in examples])  # [b, s]
        padding = np.where(np.arange(longest) < np.array([[len(ids)] for ids, _ in examples]), np.float32(0), MASKED)
        backs: list[Back] = []

        def apply(result: tuple[Array, Back]) -> Array:
            backs.append(result[1])
            return result[0]

        x, embedded = self._embed(ids)
        x = apply(self._norm(self._names["embed_norm"], x))
        x = apply(self._drop(x))
        for i in range(self._shape.layers):
            x = apply(self._layer(f"{self._names['layer']}.{i}.", x, padding, last=i == self._shape.layers - 1))
        x = apply((x[:, 0], lambda d: d[:, None]))
        x = apply(self._dense(self._names["pool"], x))
        x = apply(_tanh(x) if self._shape.kind == "bert" else _relu(x))
        x = apply(self._drop(x))
        logits = apply(self._dense("classifier", x))
        loss, d_logits = _cross_entropy(logits, np.array([label for _, label in examples]))

        def backward() -> None:
            d = d_logits
            for back in reversed(backs):
                d = back(d)
            embedded(d)

        return loss, backward

    def _embed(self, ids: NDArray[np.int64]) -> tuple[Array, Callable[[Array], None]]:
        names, (b, s) = self._names, ids.shape
        x = self._w[names["words"]][ids] + self._w[names["positions"]][:s]
        if "types" in names:
            x = x + self._w[names["types"]][0]

        def back(d: Array) -> None:
            words = self._g[names["words"]]
            places = (np.ones(b * s, np.float32), (ids.ravel(), np.arange(b * s)))
            words += sparse.csr_matrix(places, shape=(len(words), b * s)) @ d.reshape(b * s, self._shape.dim)
            self._g[names["positions"]][:s] += d.sum(0)
            if "types" in names:
                self._g[names["types"]][0] += d.sum((0, 1))

        return x, back

    def _layer(self, at: str, x: Array, padding: Array, *, last: bool) -> tuple[Array, Back]:
        """x [b, s, dim] -> the same; of the `last` layer the first position alone, [b, 1, dim]."""
        names, rows = self._names, x[:, :1] if last else x
        mixed, back_attend = self._attend(at, rows, x, padding)
        mixed, back_drop = self._drop(mixed)
        x1, back_norm = self._norm(at + names["attention_norm"], rows + mixed)
        up, back_up = self._dense(at + names["up"], x1)
        bent, back_gelu = _gelu(up)
        down, back_down = self._dense(at + names["down"], bent)
        down, back_drop_down = self._drop(down)
        x2, back_norm_down = self._norm(at + names["output_norm"], x1 + down)

        def back(d: Array) -> Array:
            d = back_norm_down(d)
            d = back_norm(d + back_up(back_gelu(back_down(back_drop_down(d)))))
            d_x = back_attend(back_drop(d))
            d_x[:, : d.shape[1]] += d
            return d_x

        return x2, back

    def _attend(self, at: str, rows: Array, x: Array, padding: Array) -> tuple[Array, Back]:
        """Each of `rows` [b, r, dim] attends to all of `x` [b, s, dim], whose first ones they are."""
        names, heads = self._names, self._shape.heads
        scale = np.float32((self._shape.dim // heads) ** -0.5)
        (q, back_q), (k, back_k), (v, back_v) = (
            self._dense(at + names[part], of) for part, of in (("query", rows), ("key", x), ("value", x))
        )
        q, k, v = _split(q, heads), _split(k, heads), _split(v, heads)  # [b, heads, r or s, d_h]
        scores = q @ k.swapaxes(2, 3) * scale + padding[:, None, None]
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        p = scores / scores.sum(-1, keepdims=True)
        kept, back_drop = self._drop(p)
        mixed, back_out = self._dense(at + names["out"], _join(kept @ v))

        def back(d: Array) -> Array:
            d = _split(back_out(d), heads)
            d_v = kept.swapaxes(2, 3) @ d
            d_p = back_drop(d @ v.swapaxes(2, 3))
            d_scores = p * (d_p - (d_p * p).sum(-1, keepdims=True)) * scale
            d_q, d_k = d_scores @ k, d_scores.swapaxes(2, 3) @ q
            d_x = back_k(_join(d_k)) + back_v(_join(d_v))
            d_x[:, : d_q.shape[2]] += back_q(_join(d_q))
            return d_x

        return mixed, back

    def _dense(self, name: str, x: Array) -> tuple[Array, Back]:
        weight, d_weight, d_bias = self._w[f"{name}.weight"], self._g[f"{name}.weight"], self._g[f"{name}.bias"]
        rows = math.prod(x.shape[:-1])
        flat = x.reshape(rows, x.shape[-1])

        def back(d: Array) -> Array:
            d_flat = d.reshape(rows, d.shape[-1])
            d_weight.__iadd__(d_flat.T @ flat)
            d_bias.__iadd__(d_flat.sum(0))
            return (d_flat @ weight).reshape(x.shape)

        return (flat @ weight.T + self._w[f"{name}.bias"]).reshape(*x.shape[:-1], len(weight)), back

    def _norm(self, name: str, x: Array) -> tuple[Array, Back]:
        gain, d_gain, d_bias = self._w[f"{name}.weight"], self._g[f"{name}.weight"], self._g[f"{name}.bias"]
        x = x - x.mean(-1, keepdims=True)
        scale = 1 / np.sqrt((x * x).mean(-1, keepdims=True) + LAYER_NORM_EPS)
        x = x * scale

        def back(d: Array) -> Array:
            d_gain.__iadd__((d * x).sum((0, 1)))
            d_bias.__iadd__(d.sum((0, 1)))
            d = d * gain
            return (d - d.mean(-1, keepdims=True) - x * (d * x).mean(-1, keepdims=True)) * scale

        return x * gain + self._w[f"{name}.bias"], back

    def _drop(self, x: Array) -> tuple[Array, Back]:
        if self._rng is None or not self._dropout:
            return x, lambda d: d
        kept = (self._rng.random(x.shape, dtype=np.float32) >= self._dropout) * np.float32(1 / (1 - self._dropout))
        return x * kept, lambda d: d * kept


def _views(flat: Array, dims: Mapping[str, tuple[int, ...]]) -> dict[str, Array]:
    views, begin = dict[str, Array](), 0
    for name, shape in dims.items():
        views[name] = flat[begin : (begin := begin + math.prod(shape))].reshape(shape)
    return views


def _split(x: Array, heads: int) -> Array:
    b, s, d = x.shape
    return x.reshape(b, s, heads, d // heads).transpose(0, 2, 1, 3)


def _join(x: Array) -> Array:
    b, heads, s, d_h = x.shape
    return x.transpose(0, 2, 1, 3).reshape(b, s, heads * d_h)


def _gelu(x: Array) -> tuple[Array, Back]:
    below = np.float32(0.5) * (1 + erf(x * SQRT_HALF))
    return x * below, lambda d: d * (below + x * NORMAL * np.exp(np.float32(-0.5) * x * x))


def _tanh(x: Array) -> tuple[Array, Back]:
    y = np.tanh(x)
    return y, lambda d: d * (1 - y * y)


def _relu(x: Array) -> tuple[Array, Back]:
    return np.maximum(x, 0), lambda d: d * (x > 0)


def _cross_entropy(logits: Array, labels: NDArray[np.int64]) -> tuple[float, Array]:
    shifted = logits - logits.max(-1, keepdims=True)
    log_p = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    rows = np.arange(len(labels))
    d = np.exp(log_p)
    d[rows, labels] -= 1
    return float(-log_p[rows, labels].mean()), d / np.float32(len(labels))
