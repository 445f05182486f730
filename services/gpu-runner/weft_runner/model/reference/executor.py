"""The reference executor: plain torch in fp32, the oracle of the other executors; it serves where none of them can.

Its layers are `model.decoder`, its operators `model.reference.ops`.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812 (its name everywhere)

from weft.domain.model.spec import ModelSpec
from weft_runner.core.sampling import SampledToken
from weft_runner.model.decoder import run_layers
from weft_runner.model.executor import Capabilities, LayerDone
from weft_runner.model.kv_cache import KvCache
from weft_runner.model.pooling import row_width, with_hidden
from weft_runner.model.reference.adapters import TorchAdapterStore
from weft_runner.model.reference.ops import ReferenceOps, Rotation, StepMaker, capped
from weft_runner.model.sampling import SamplingArgs, sample
from weft_runner.model.step import StepInput
from weft_runner.model.tensor_parallel import ProcessGroup, SingleProcessGroup, TensorParallel
from weft_runner.model.torch_kv_memory import kv_memory
from weft_runner.model.weights import ModelWeights

VERSION = "2"


class ReferenceExecutor:
    """Every family in plain torch, fp32.

    With a group: this rank's part of it. Spec, weights, cache and adapters are then of that part (`model.partition`),
    and logits are whole on rank 0 alone. A part may be a run of layers too: without a head it ends in hidden rows.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: ModelWeights,
        kv: KvCache,
        adapters: TorchAdapterStore,
        group: ProcessGroup | None = None,
    ) -> None:
        self.spec, self.adapters, self._weights, self._kv = spec, adapters, weights, kv
        self._tensor = TensorParallel(group or SingleProcessGroup())
        self._steps = StepMaker(kv, [Rotation.of(rope, spec.head_dim) for rope in spec.ropes], frozenset(spec.windows))
        self.page_bytes, self.torch_threads = kv.page_bytes, torch.get_num_threads()
        self.kv_memory = kv_memory(kv)

    @property
    def can(self) -> Capabilities:
        return Capabilities()

    @property
    def numerics_class(self) -> str:
        return f"reference/{VERSION}/fp32/torch{torch.__version__.partition('+')[0]}/tp{self._tensor.size}"

    def sample(self, logits: torch.Tensor, draws: Sequence[SamplingArgs]) -> list[SampledToken | None]:
        rows = logits.numpy()
        found = sample(rows[:, : self.spec.vocab_size], draws)
        return with_hidden(found, draws, lambda row: rows[row, : self.spec.hidden_size])

    def allocate_adapter_pages(self, pages: list[int]) -> None:
        """Their memory stays with the tensor: this executor is the oracle, not the one that serves a full machine."""

    def clear_pages(self, pages: list[int]) -> None:
        self._kv.clear(pages)

    @torch.inference_mode()
    def run(
        self, step: StepInput, *, first: int = 0, last: int | None = None, hidden: torch.Tensor | None = None,
        layer_done: LayerDone | None = None,
    ) -> torch.Tensor:  # fmt: skip
        last = self.spec.layers if last is None else last
        prepared = self._steps.prepare(step)
        scale = self.spec.embedding_scale
        x = scale * F.embedding(prepared.tokens, self._weights.embedding) if hidden is None else hidden
        ops = ReferenceOps(self.spec, self._kv, self.adapters, self._tensor, prepared, x)
        x = run_layers(ops, self._weights, first, last, layer_done)
        if last < self.spec.layers or not self._weights.has_head:
            return x
        sampled = ops.norm(x[prepared.sampled], self._weights.norm)
        logits = self._tensor.logits(F.linear(sampled, self._weights.head)) / self.spec.logit_divisor
        logits = capped(logits, self.spec.logit_cap)
        if step.pooled:
            logits = F.pad(logits, (0, row_width(step, self.spec) - logits.shape[1]))
            for row in step.pooled:
                logits[row, : self.spec.hidden_size] = sampled[row]
        return logits
