"""The cuda executor of a GPU that is not here: on meta tensors, which have shapes and no numbers.

It launches as always; what a launch does is the business of whoever asks (`compiling` compiles). A step that read
anything back from the device would raise.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from weft.domain.model.packed import stacked_shapes
from weft.domain.model.spec import ModelSpec
from weft.domain.model.tensors import head_norms
from weft_runner.core.sampling import SampledToken
from weft_runner.model.cuda.cuda_graphs import Outputs
from weft_runner.model.cuda.executor import CudaExecutor, Sizes
from weft_runner.model.cuda.gpu_sampler import GpuStepHandle
from weft_runner.model.kv_cache import KvCache
from weft_runner.model.kv_memory import KvMemory
from weft_runner.model.sampling import SamplingArgs
from weft_runner.model.weights import LayerWeights, ModelWeights


class AbsentExecutor(CudaExecutor):
    """One model of weights that nobody has. `sms`: the multiprocessors that launches are made for."""

    def __init__(self, spec: ModelSpec, sizes: Sizes, sms: int, dtype: torch.dtype = torch.bfloat16) -> None:
        self._sms = sms
        super().__init__(spec, meta_weights(spec, dtype), sizes)

    def forwards(self) -> Iterator[tuple[str, Callable[[], Outputs]]]:
        """Each captured forward by a name, the smallest of its kind first."""
        assert self._graphs is not None
        for one in self._graphs.captured:
            for replay, kind in zip(one.replays, ("base", "adapters"), strict=True):
                shape = one.here.shape
                yield f"{'prompts' if shape.tiles else 'decode'} of {shape.tokens} tokens, {kind}", replay

    def _processors(self) -> int:
        return self._sms

    def _memory_of(self, kv: KvCache) -> KvMemory | None:
        del kv
        return None

    def draw(self, logits: torch.Tensor, draws: Sequence[SamplingArgs]) -> GpuStepHandle:
        made = super().draw(logits, draws)
        return _Nothing(made.tokens, made.landed, made.draws, made.read, made.scores)


class _Nothing(GpuStepHandle):
    """Tokens that are not there."""

    def result(self) -> list[SampledToken | None]:
        return []


def meta_weights(spec: ModelSpec, dtype: torch.dtype) -> ModelWeights:
    """Weights of a whole model."""

    def new(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    hidden, qkv = spec.hidden_size, spec.q_size + 2 * spec.kv_size
    norm = partial(new, *([2, hidden] if spec.family.layer_norm else [hidden]), dtype=torch.float32)

    def bias(name: str, size: int) -> torch.Tensor | None:
        return new(size) if name in spec.biases else None

    shapes = stacked_shapes(spec)
    before, behind, mlp_before, mlp_behind = (norm() if name else None for name in spec.family.norms.value)
    heads = {name: new(size, dtype=torch.float32) for name, size in head_norms(spec)}
    layers = tuple(
        LayerWeights(
            new(*shapes[0]), new(*shapes[1]), new(*shapes[2]), new(*shapes[3]), before, behind, mlp_before, mlp_behind,
            bias("q_proj", qkv), bias("o_proj", hidden), bias("up_proj", spec.mlp_size), bias("down_proj", hidden),
            heads.get("q_norm"), heads.get("k_norm"), layer,
        )
        for layer in spec.by_layer
    )  # fmt: skip
    return ModelWeights(new(spec.vocab_size, hidden), layers, norm(), new(spec.vocab_size, hidden))
