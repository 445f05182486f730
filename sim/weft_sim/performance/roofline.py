"""The seconds of an iteration: rooflines of its operations with fitted efficiencies.

Each matrix product reads its weights and computes; the two overlap, so its time is their p-norm (`BLEND`). Attention of
decode rows reads keys and values; that of prompts computes, at a rate that grows with the length attended to. Tensor
parallel ranks sum two activations a layer. Adapters add products of low rank, and grids over every slot. Layers, steps
and rows cost fixed times. All terms are arithmetic on amounts: floats and arrays of them alike.

The seconds of a step grow with each of its amounts, and are zero for a step without any.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from weft_sim.performance.accelerator import Accelerator
from weft_sim.performance.architecture import DTYPE_BYTES, Architecture
from weft_sim.performance.step import StepShape

# Fitted on 35,742 products of an H200 (`h200_vllm024_gemm_bf16`), median error 7 %, at commit 90d2784c.
BLEND = 3.0
TILE = 128  # rows and columns that one processor computes at a time
# What penalties of repetition make a sampler move for each row and entry of the vocabulary, in bytes: counts of prompt
# and answer (64 bits) are zeroed and compared, masks joined, penalties chosen, multiplied, and two more subtracted,
# each by a kernel of its own on logits of 32 bits (vLLM 0.8.5).
PENALTY_BYTES = 129.0
# Blocks of vLLM's grids for adapters: tokens and rank of the one that shrinks, into how many parts it cuts the inputs,
# tokens of the one that expands (`Architecture.lora_tiles` are its columns).
SHRINK_TOKENS, SHRINK_RANK, SHRINK_PARTS, EXPAND_TOKENS = 32, 16, 8, 64
PROJECTIONS = 7
US, NS = 1e-6, 1e-9


@dataclass(frozen=True, slots=True)
class Efficiency:
    """An engine's share of the data sheet, and its additional time (microseconds).

    `layer_us`: launches of a layer that nothing hides; `step_us`, `row_us`: scheduling, sampling, detokenizing of an
    iteration and of each of its sequences; `prompt_us`: of each prompt. `tile_waves`: waves of tiles that a product
    seems to have beside its own. `short_tokens`: attention of prompts reaches half of its rate at this length.
    """

    weights_bandwidth: float
    kv_bandwidth: float
    bf16_compute: float
    fp8_compute: float
    attention_compute: float
    short_tokens: float
    tile_waves: float
    layer_us: float
    step_us: float
    row_us: float
    prompt_us: float
    reduce_us: float
    reduce_bandwidth: float
    activation_passes: float  # how often a layer reads or writes an activation of the model's width
    request_ms: float  # of the server before the first iteration and after it: in TTFT only
    memory: float = 0.9  # share of the device that weights, activations and KV may take
    prompt_token_us: float = 0.0  # beside what its products take
    reserved_bytes: float = 1.6e9  # of it, for activations and graphs


@dataclass(frozen=True, slots=True)
class AdapterCosts:
    """What adapters of low rank add to a layer, when `slots` of `max_rank` are reserved, in microseconds.

    Grids have blocks for the whole batch for every slot, whether an adapter is in it or not: `block_ns` each, of all
    processors together. Each adapter of the batch is read (`adapter_bandwidth`: share of the device's). The step stands
    still while an adapter comes from host memory to a slot, and while the scheduler passes over waiting requests whose
    adapters find none. For each adapter of the batch the host lists all that are `registered` in its memory. `slots`,
    `max_rank` and `registered` may be arrays, as amounts of steps may.
    """

    slots: Any
    max_rank: Any
    registered: Any
    present_us: float  # of a batch with any adapter
    block_ns: float  # each block of a grid
    prompt_us: float  # each prompt token of a batch with any adapter
    adapter_us: float  # each adapter of the batch
    adapter_bandwidth: float
    load_us: float  # each adapter that is brought to a slot
    passed_us: float  # each waiting request that is passed over
    listed_us: float  # each registered adapter, for each of the batch


@dataclass(frozen=True, slots=True)
class Roofline:
    """A model on `tensor_parallel` devices with an engine. `dtype`: of the layers' weights and products.

    `penalty_us`, unless None: repetition is penalised. Beside PENALTY_BYTES, the host writes the tokens of each row
    into padded matrices when the batch changes.
    """

    accelerator: Accelerator
    architecture: Architecture
    efficiency: Efficiency
    tensor_parallel: int = 1
    dtype: str = "bf16"
    kv_dtype: str = "bf16"
    adapters: AdapterCosts | None = None
    penalty_us: float | None = None

    def seconds(self, step: StepShape) -> float:
        """Seconds of one iteration."""
        if not step.prompt_tokens and not step.decode_rows:
            return 0.0
        return float(
            self.seconds_of(
                step.prompts,
                step.prompt_tokens,
                step.prompt_pairs,
                step.decode_rows,
                step.context_tokens,
                step.adapters,
                step.loads,
                step.passed_over,
            )
        )

    def seconds_of(
        self, prompts: Any, prompt_tokens: Any, prompt_pairs: Any, rows: Any, context: Any, adapters: Any = 0,
        loads: Any = 0, passed_over: Any = 0,
    ) -> Any:  # fmt: skip
        """Seconds of iterations with these amounts, numbers or arrays; none of them may be without tokens."""
        a, e, c = self.architecture, self.efficiency, self.adapters
        tokens = prompt_tokens + rows
        layer = (
            self.products(tokens)
            + self.attention(prompt_tokens, prompt_pairs, context)
            + self.reductions(tokens)
            + tokens * e.activation_passes * 2 * a.hidden / self.accelerator.bytes_per_s
            + e.layer_us * US
        )
        head = self.product(prompts + rows, a.vocab / self.tensor_parallel, a.hidden, "bf16")
        head += self.penalties(prompts, rows)
        fixed = (e.step_us + e.row_us * rows + e.prompt_us * prompts + e.prompt_token_us * prompt_tokens) * US
        if c is None:
            return a.layers * layer + head + fixed
        still = (c.load_us * loads + c.passed_us * passed_over + c.listed_us * c.registered * adapters) * US
        return a.layers * (layer + self.lora(c, prompt_tokens, rows, adapters)) + head + fixed + still

    def penalties(self, prompts: Any, rows: Any) -> Any:
        """Return the time that the sampler adds for repetition penalties."""
        if self.penalty_us is None:
            return 0.0
        n_bytes = (prompts + rows) * self.architecture.vocab * PENALTY_BYTES
        changed = np.minimum(prompts, 1)
        return n_bytes / (self.accelerator.bytes_per_s * self.efficiency.kv_bandwidth) + (
            changed * rows * self.penalty_us * US
        )

    def products(self, tokens: Any) -> Any:
        """Return the matrices of a layer on a rank: q, k, v together; o; gate and up together; down."""
        a, ranks = self.architecture, self.tensor_parallel
        attended, inner = a.heads * a.head_size / ranks, a.inner / ranks
        dense = self.product(tokens, attended + 2 * max(a.kv_width / ranks, a.head_size), a.hidden, self.dtype)
        dense += self.product(tokens, a.hidden, attended, self.dtype)
        if a.experts == 1:
            return (
                dense
                + self.product(tokens, 2 * inner, a.hidden, self.dtype)
                + self.product(tokens, a.hidden, inner, self.dtype)
            )
        touched = a.experts * (1 - (1 - a.active_experts / a.experts) ** tokens)  # experts that any token passes
        tokens_each = tokens * a.active_experts / touched
        return dense + touched * (
            self.product(tokens_each, 2 * inner, a.hidden, self.dtype, touched)
            + self.product(tokens_each, a.hidden, inner, self.dtype, touched)
        )

    def product(self, m: Any, n: float, k: float, dtype: str, at_once: Any = 1) -> Any:
        """Return the seconds of [m, k] times weights [k, n]; with `at_once` products sharing the processors."""
        e, tiles = self.efficiency, self.accelerator.processors * TILE * TILE
        share = e.fp8_compute if dtype == "fp8" else e.bf16_compute
        read = n * k * DTYPE_BYTES[dtype] / (self.accelerator.bytes_per_s * e.weights_bandwidth)
        computed = 2 * k * (m * n + e.tile_waves * tiles / at_once) / (self.accelerator.flops(dtype) * share)
        return (read**BLEND + (computed * m / (m + 1.0)) ** BLEND) ** (1 / BLEND)

    def attention(self, prompt_tokens: Any, prompt_pairs: Any, context: Any) -> Any:
        """One layer: keys and values of decode rows are read; prompts' pairs are computed."""
        a, e, ranks = self.architecture, self.efficiency, self.tensor_parallel
        width = max(a.kv_width / ranks, a.head_size)
        read = 2 * context * width * DTYPE_BYTES[self.kv_dtype] / (self.accelerator.bytes_per_s * e.kv_bandwidth)
        pairs = prompt_pairs + prompt_tokens * e.short_tokens / 2
        computed = (
            4 * pairs * a.heads * a.head_size / ranks / (self.accelerator.flops(self.kv_dtype) * e.attention_compute)
        )
        return read + computed

    def reductions(self, tokens: Any) -> Any:
        """The two sums of a layer over the tensor parallel ranks."""
        e, ranks = self.efficiency, self.tensor_parallel
        if ranks == 1:
            return 0.0
        n_bytes = 2 * tokens * self.architecture.hidden * 2 * (ranks - 1) / ranks
        return 2 * (e.reduce_us * US + n_bytes / (self.accelerator.link_bytes_per_s * e.reduce_bandwidth))

    def lora(self, c: AdapterCosts, prompt_tokens: Any, rows: Any, adapters: Any) -> Any:
        """Return the time that a step's adapters add to one layer."""
        n_bytes = adapters * c.max_rank * 2 * self.architecture.lora_width / self.tensor_parallel
        tokens = prompt_tokens + rows
        expanding = self.architecture.lora_tiles / self.tensor_parallel * (tokens / EXPAND_TOKENS + 0.5)
        shrinking = PROJECTIONS * SHRINK_PARTS * -(-c.max_rank // SHRINK_RANK) * (tokens / SHRINK_TOKENS + 0.5)
        grids = c.slots * (expanding + shrinking) * c.block_ns * NS / US
        present = adapters / (adapters + 1e-9)
        added = present * (c.present_us + grids + c.prompt_us * prompt_tokens) + c.adapter_us * adapters
        return added * US + n_bytes / (self.accelerator.bytes_per_s * c.adapter_bandwidth)
