"""The cuda executor: the decoder of all torch executors on Triton kernels, steps as captured graphs.

The same code runs on a CPU under Triton's interpreter, without graphs: so it is tested where there is no GPU. Steps of
many tokens run eagerly: their launches hide behind their arithmetic. A row's result depends on its own tokens, pages
and adapter, and on the sizes that launches are made for (parts of a shrink, splits of attention, the library's choice
for a product): the same text wherever the two best logits are farther apart than the documented tolerance.
"""

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from weft.domain.model.spec import ModelSpec, RopeSpec
from weft.domain.request import Sampling
from weft_kernels.triton import attention, fused, int4
from weft_runner.core.sampling import SampledToken, logit_adjustments
from weft_runner.core.token_mask import token_mask
from weft_runner.model.cuda.adapters import PagedAdapterStore
from weft_runner.model.cuda.attention import TritonAttention
from weft_runner.model.cuda.cuda_graphs import CudaGraphs, Outputs, decode_sizes, prompt_sizes, warm_up_steps
from weft_runner.model.cuda.device import on_device
from weft_runner.model.cuda.gpu_sampler import GpuSampler, GpuStepHandle, PromptScores, copy_to_host, upload
from weft_runner.model.cuda.ops import DeviceContext, TritonOps, Widths, interpreted_product
from weft_runner.model.cuda.step import DeviceStep, StepTables, decode_shape, prompt_shape, slots_of
from weft_runner.model.decoder import LayerSource, cos_sin, run_layers
from weft_runner.model.executor import Capabilities, LayerDone
from weft_runner.model.host_tensors import tensor_of
from weft_runner.model.kv_cache import KvCache
from weft_runner.model.kv_memory import KvMemory
from weft_runner.model.partition import Partition
from weft_runner.model.pooling import row_width
from weft_runner.model.rope import inverse_frequencies
from weft_runner.model.sampling import SamplingArgs
from weft_runner.model.step import StepInput
from weft_runner.model.tensor_parallel import ProcessGroup, SingleProcessGroup, TensorParallel
from weft_runner.model.torch_kv_memory import kv_memory

log = logging.getLogger(__name__)

VERSION = "2"
DECODE_CHUNK, PROMPT_CHUNK = 16, 64  # most tokens of a chunk: one tile of tensor cores; enough of them for wgmma
PROMPT_TOKENS = 128  # the least of a step that has the chunks of prompts
INTERPRETED_SMS = 4  # of a device that is not there


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is set aside. `rows`, `tokens`: most sequences and tokens of a step; `context`: tokens of a sequence.

    `graphs`: steps are captured; `beside`: shrinks run on a stream of their own, beside the base's products.
    """

    pages: int
    page_tokens: int
    slots: int
    max_rank: int
    rows: int
    context: int
    graphs: bool
    tokens: int = 512
    beside: bool = True


@dataclass(frozen=True, slots=True)
class Captured:
    """What capturing took: of the device's memory and of time."""

    graphs: int
    n_bytes: int
    seconds: float


class DeviceWeights(LayerSource, Protocol):
    """A model's weights, or a part's, on the device when they are asked for. `embedding`: [0, H] if it is not there."""

    @property
    def embedding(self) -> torch.Tensor: ...
    @property
    def norm(self) -> torch.Tensor: ...
    @property
    def packed(self) -> bool: ...
    @property
    def has_head(self) -> bool: ...

    def head_pieces(self) -> Iterator[torch.Tensor]:
        """Rows of the head, in order; each is there until the next is asked for."""
        ...


class CudaExecutor:
    """One model on one device."""

    def __init__(
        self,
        whole: ModelSpec,
        weights: DeviceWeights,
        sizes: Sizes,
        group: ProcessGroup | None = None,
        part: Partition | None = None,
    ) -> None:
        """Compute with `weights` of this rank's part, on the device already, in the dtype of its arithmetic or packed.

        `part`: a stage's layers (`model.partition`); None: as the group divides it. A stage captures no graphs.
        """
        group = group or SingleProcessGroup()
        part, self._tensor = part or Partition(whole, group.rank, group.size), TensorParallel(group)
        self.spec = spec = part.local
        self._weights = weights
        self.at, self._dtype = weights.embedding.device, weights.embedding.dtype
        kv = self._cache(sizes)
        self.page_bytes, self.torch_threads = kv.page_bytes, 1
        self.kv_memory = self._memory_of(kv)
        self.adapters = PagedAdapterStore(part, kv, sizes.slots, sizes.max_rank, self._frames_of)
        self._prompt_tile = attention.prefill_block(spec.heads, spec.kv_heads, spec.head_dim, self._dtype)
        positions = torch.arange(max(sizes.context, sizes.tokens))  # also of warm-up steps
        rotary = tuple(rotary_table(rope, spec.head_dim, positions).to(self.at) for rope in spec.ropes)
        self._device = DeviceContext(
            spec, part, self._tensor, kv, self.adapters.tables, rotary, self._processors(),
            torch.cuda.Stream(self.at) if sizes.beside and self.at.type == "cuda" else None,
        )  # fmt: skip
        self._token_sampler = GpuSampler(sizes.rows, spec.vocab_size, self.at)
        self._samples = group.rank == 0  # the others have a part of the logits
        self._outputs: Outputs | None = None  # of the graph that ran last
        width = spec.vocab_size if self._samples else part.head_rows
        self._shared = Outputs(  # what graphs write to
            self._device.new(sizes.rows if sizes.graphs else 0, width, dtype=torch.float32),
            torch.zeros(sizes.rows, dtype=torch.int32, device=self.at),
        )
        self._tokens: torch.Tensor | None = None  # sampled last
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False  # sums of products are fp32
        self.captured: Captured | None = None
        self._graphs = self._record(sizes) if sizes.graphs and part.begins and part.ends else None
        if self.at.type == "cuda":
            self.warm_up(sizes.tokens)

    @property
    def can(self) -> Capabilities:
        return Capabilities(follows=self)

    @property
    def numerics_class(self) -> str:
        """The name of what computes alike up to the last bits: captured and eager steps differ in those already."""
        dtype = "int4" if self._weights.packed else "bf16" if self._dtype == torch.bfloat16 else "fp32"
        return f"cuda/{VERSION}/{dtype}/tp{self._tensor.size}"

    @on_device
    def run(
        self, step: StepInput, *, first: int = 0, last: int | None = None, hidden: torch.Tensor | None = None,
        layer_done: LayerDone | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Run layers of a step (`Executor.run`). What it returns is on the device, and valid until the next call."""
        self._outputs = None
        last = self.spec.layers if last is None else last
        whole = first == 0 and last == self.spec.layers and layer_done is None
        if whole and self._graphs is not None and (placed := self._graphs.place(step, None, self._tokens)) is not None:
            self.adapters.wait(slots_of(step), last - 1)
            self._outputs = placed.replay(step)
            return self._outputs.logits[: len(step.arrays.sampled)]
        return self._eager(step, first, last, hidden, layer_done)

    @on_device
    def sample(self, logits: torch.Tensor, draws: Sequence[SamplingArgs]) -> list[SampledToken | None]:
        if not draws:
            return []
        return self.draw(logits, draws).result()

    # ---- steps that run while the host does something else, see `model.executor.AsyncExecutor`

    @property
    def keeps_tokens(self) -> bool:
        """Say whether steps are captured; others are larger than what is gained."""
        return self._graphs is not None

    def can_follow(self, step: StepInput) -> bool:
        """Say whether a step is a captured one of decode rows."""
        return self._graphs is not None and self._graphs.find_decode(step) is not None

    @on_device
    def follow(self, step: StepInput) -> torch.Tensor:
        assert self._graphs is not None
        assert self._tokens is not None, "nothing was launched before"
        placed = self._graphs.place(step, self._tokens)
        assert placed is not None, len(step.rows)
        self._outputs = placed.replay(step)
        return self._outputs.logits[: len(step.rows)]

    @on_device
    def draw(self, logits: torch.Tensor, draws: Sequence[SamplingArgs]) -> GpuStepHandle:
        rows, logits = logits, logits[:, : self.spec.vocab_size].contiguous()
        scores = None
        if any(draw.given is not None for draw in draws):
            scores = self._score(logits, draws)
            self._tokens = scores.tokens
        else:
            likeliest = None if self._outputs is None else self._outputs.tokens
            self._tokens = self._token_sampler.tokens(logits, draws, likeliest)
        read = {row: logits[row] for row, draw in enumerate(draws) if draw.given is None and draw.n_top is not None}
        read.update((row, rows[row, : self.spec.hidden_size]) for row, draw in enumerate(draws) if draw.pools)
        return copy_to_host(self._tokens, draws, read, scores)

    def _score(self, logits: torch.Tensor, draws: Sequence[SamplingArgs]) -> PromptScores:
        """Return the log probabilities of given tokens, and the tokens of all rows: those that the others draw, too."""
        drawn = [row for row, draw in enumerate(draws) if draw.given is None]
        given = [row for row, draw in enumerate(draws) if draw.given is not None]
        scores = PromptScores(logits, draws, given)
        if drawn:
            rows = upload(drawn, np.int64, self.at)
            scores.tokens[rows] = self._token_sampler.tokens(logits[rows], [draws[row] for row in drawn])
        return scores

    def clear_pages(self, pages: list[int]) -> None:
        """Do nothing: the kernels load no key beyond a context, so they read only what a page's present owner wrote."""

    def allocate_adapter_pages(self, pages: list[int]) -> None:
        """Allocate pages to adapters, which are copied into them beside the steps that follow."""
        if pages:
            self.adapters.on_pages_allocated()

    # ---- where KV and adapters are

    def _cache(self, sizes: Sizes) -> KvCache:
        """Make the cache of all pages, on the device."""
        return KvCache(self.spec, sizes.pages, sizes.page_tokens, self._dtype, self.at)

    def _memory_of(self, kv: KvCache) -> KvMemory | None:
        """Make what copies pages to host memory and other runners; None: they are not copied."""
        return kv_memory(kv)

    def _processors(self) -> int:
        return processors(self.at)

    def _frames_of(self, pages: Sequence[int]) -> Sequence[int]:
        """Find where in the cache pages of adapters are."""
        return pages

    # ---- how

    @on_device
    def warm_up(self, tokens: int) -> None:
        """Compile what eager steps of up to `tokens` tokens and draws use, before a request waits for it."""
        self._warm_up(tokens, self._weights, self.spec.layers)

    def _warm_up(self, tokens: int, weights: DeviceWeights, layers: int) -> None:
        """Run steps of `layers` layers: one for each size of chunks, with adapters one for each bucket of their number.

        Kernels are compiled for them. What these steps compute is not read; their keys and values go to page 0, which
        its first owner overwrites.
        """
        logits = torch.zeros(1, self.spec.vocab_size, device=self.at)  # of another stage
        for step in warm_up_steps(tokens, chunk_tokens, self._device.kv.page_tokens):
            for widths in (None, self._most_ranks):
                ops, here = self._warm_operators(step, widths)
                x = run_layers(ops, weights, 0, layers, None)
                if weights.has_head:
                    logits = self._logits(x[here.sampled])
        if self._samples:
            biased = Sampling(temperature=1.0, top_p=0.5, logit_bias=((0, 0.0),))
            masked = token_mask((0,), None, self.spec.vocab_size)
            self.draw(logits, [SamplingArgs(biased, 0, logit_adjustments(biased, ()), masked)]).result()

    def _eager(
        self, step: StepInput, first: int, last: int, hidden: torch.Tensor | None, layer_done: LayerDone | None
    ) -> torch.Tensor:
        here = self._written(step)
        residual = self._embedded(here) if hidden is None else hidden.to(self.at, torch.float32, copy=True)
        ops = TritonOps(self._device, here, self._triton(here), residual, self._widths_of(step))
        x = run_layers(ops, self._weights, first, last, layer_done)
        ends = last == self.spec.layers and self._weights.has_head
        return self._logits(x[here.sampled], step) if ends else x

    def _widths_of(self, step: StepInput) -> Widths | None:
        """Return the widths of a step's adapters, each of which is there when asked for. None: no token has one."""
        slots = slots_of(step)
        if not slots:
            return None
        widths = self.adapters.widths(slots)

        def width(layer: int, site: int) -> int:
            self.adapters.wait(slots, layer)
            return widths[layer][site]

        return width

    def _warm_operators(self, step: StepInput, widths: Widths | None) -> tuple[TritonOps, DeviceStep]:
        """Make the operators of an eager step that warms up."""
        here = self._written(step)
        return TritonOps(self._device, here, self._triton(here), self._begun(here), widths), here

    def _written(self, step: StepInput) -> DeviceStep:
        """Write an eager step to the device, into a buffer of its own."""
        tables = StepTables.of(step, chunk_tokens(len(step.tokens)), self._prompt_tile)
        here = DeviceStep(tables.shape, self.at)
        here.write(tables, self._tokens)
        return here

    def _triton(self, here: DeviceStep) -> TritonAttention:
        return self._triton_of(self._device.kv.tensor, here)

    def _triton_of(self, kv: torch.Tensor, here: DeviceStep) -> TritonAttention:
        """Make the kernels' attention over a cache `kv`."""
        spec = self.spec
        return TritonAttention(kv, here, self._device.sms, self._prompt_tile, spec.query_scale, spec.score_cap)

    @on_device
    def _record(self, sizes: Sizes) -> CudaGraphs:
        row_pages = -(-sizes.context // sizes.page_tokens)
        decodes = [decode_shape(rows, row_pages, DECODE_CHUNK) for rows in decode_sizes(sizes.rows)]
        prompts = [
            prompt_shape(tokens, sizes.rows, row_pages, chunk_tokens(tokens), self._prompt_tile)
            for tokens in prompt_sizes(sizes.tokens)
        ]
        began, free = time.perf_counter(), self._free()
        graphs = CudaGraphs(self._whole, self.at, decodes, prompts, self._prompt_tile)
        count = 2 * (len(decodes) + len(prompts))
        self.captured = made = Captured(count, free - self._free(), time.perf_counter() - began)
        log.info("captured %d graphs in %.1f s and %d MiB", made.graphs, made.seconds, made.n_bytes >> 20)
        return graphs

    def _free(self) -> int:
        """Return the bytes of the device that nobody has; 0 if there is none."""
        return torch.cuda.mem_get_info(self.at)[0] if self.at.type == "cuda" else 0

    def _whole(self, step: DeviceStep, with_lora: bool) -> Outputs:
        """Compute what a graph holds. All graphs write to the same outputs: one runs at a time."""
        widths = self._most_ranks if with_lora else None
        ops = TritonOps(self._device, step, self._triton(step), self._embedded(step), widths)
        hidden = run_layers(ops, self._weights, 0, self.spec.layers, None)
        rows = hidden[step.sampled] if len(step.tiles) else hidden  # all of them in decode
        outputs = Outputs(self._shared.logits[: len(rows)], self._shared.tokens[: len(rows)])
        logits = self._logits(rows, into=outputs.logits)
        if logits is not outputs.logits:
            outputs.logits.copy_(logits)
        if self._samples:
            self._token_sampler.likeliest(outputs.logits, outputs.tokens)
        return outputs

    def _most_ranks(self, layer: int, site: int) -> int:
        """Return the most ranks at a site: a graph serves whichever adapters come."""
        del layer
        return self.adapters.tables.layout.most_ranks(site)

    def _begun(self, step: DeviceStep) -> torch.Tensor:
        """Return what the first layer here reads; where the model does not begin here, something to compute with."""
        if len(self._weights.embedding):
            return self._embedded(step)
        return torch.zeros(step.shape.tokens, self.spec.hidden_size, device=self.at)

    def _embedded(self, step: DeviceStep) -> torch.Tensor:
        residual = self._device.new(step.shape.tokens, self.spec.hidden_size, dtype=torch.float32)
        fused.embed(residual, step.tokens, self._weights.embedding, self.spec.embedding_scale)
        return residual

    def _logits(self, x: torch.Tensor, step: StepInput | None = None, into: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply hidden [rows, H] to fp32 [rows, V]: bf16 would round the two best logits to one number too often.

        `step`: the one whose rows may pool, see `model.pooling`. `into`: where they are written if a whole head is one
        product of the library; else they are elsewhere.
        """
        if not len(x):  # a chunk of a prompt; no kernel is launched on nothing
            return self._device.new(0, self.spec.vocab_size, dtype=torch.float32)
        normed = self._device.new(*x.shape)
        x, layer_norm = x.contiguous(), self.spec.family.layer_norm
        fused.prepare_norm(x, self.spec.norm_eps, layer_norm=layer_norm)(normed, x, self._weights.norm)
        found, done, rows = list[torch.Tensor](), 0, self._device.part.head_rows
        for piece in self._weights.head_pieces():
            whole = into if len(piece) == rows else None
            found.append(self._times(normed, piece, rows - done, whole))
            done += found[-1].shape[1]
        logits = self._tensor.logits(found[0] if len(found) == 1 else torch.cat(found, dim=1))
        if self.spec.logit_divisor != 1.0:
            logits.div_(self.spec.logit_divisor)
        if self.spec.logit_cap:
            logits.div_(self.spec.logit_cap).tanh_().mul_(self.spec.logit_cap)
        if step is not None and step.pooled:
            logits = torch.nn.functional.pad(logits, (0, row_width(step, self.spec) - logits.shape[1]))
            for row in step.pooled:
                logits[row, : self.spec.hidden_size] = normed[row]
        return logits

    def _times(self, x: torch.Tensor, piece: torch.Tensor, most: int, into: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply by some rows of the head, up to `most` of them: the same numbers that the whole head gives."""
        if self._weights.packed:
            rows, sms = self._device.part.head_rows, self._device.sms
            n_out = min(most, int4.BLOCK_OUT * len(piece))
            return int4.linear(x, piece, n_out, sms=sms, dtype=torch.float32, split_as=rows)
        if not x.is_cuda:
            return interpreted_product(x, piece)
        if self._dtype != torch.float32:
            return torch.mm(x, piece.t(), out_dtype=torch.float32, out=into)
        return torch.mm(x, piece.t(), out=into)


def rotary_table(rope: RopeSpec, head_dim: int, positions: torch.Tensor) -> torch.Tensor:
    """Return lines of cos and sin, fp32 [positions, 2, R / 2]; with LongRoPE two of each position: short, long."""
    lines = list[torch.Tensor]()
    for long in (False, True)[: 2 if rope.long else 1]:
        inverse = tensor_of(inverse_frequencies(rope, head_dim, long=long))
        cos, sin = (of[:, 0, : len(inverse)] for of in cos_sin(positions, inverse, rope.attention_factor))
        lines.append(torch.stack((cos, sin), dim=1))
    return torch.stack(lines, dim=1).flatten(0, 1)


def chunk_tokens(n_tokens: int) -> int:
    """Return the most tokens of a chunk in an eager step of `n_tokens` tokens."""
    return PROMPT_CHUNK if n_tokens >= PROMPT_TOKENS else DECODE_CHUNK


def processors(at: torch.device) -> int:
    """Count the multiprocessors of a device."""
    return torch.cuda.get_device_properties(at).multi_processor_count if at.type == "cuda" else INTERPRETED_SMS
