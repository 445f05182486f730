"""One layer (Punica, section 7.1): a decode step of it with adapters on all seven projections, beside torch's.

Contexts are full, every row has KV of its own, and 512 MB are read before each run, as in `cpu_operator`. Torch's
layer has its matrices of a site in one piece, KV in one tensor for all rows and scaled_dot_product_attention; its
adapters are added by a loop or by gathered batched products, in bf16 or fp32: the faster dtype counts.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

import torch
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

from weft.domain.model.spec import ModelSpec
from weft_bench.cpu_context import Context
from weft_bench.cpu_decode import Batch, alternating, base, paired
from weft_bench.cpu_machine import MEMORY_BYTES
from weft_bench.cpu_operator import DTYPES, GATHER, LARGEST_ERROR, LOOP, OURS, Sweep, native_library
from weft_bench.cpu_shapes import BASE, POPULARITIES, RANK
from weft_bench.lora_baselines import Adding, Dense, Weights, gather, loop
from weft_bench.roofline import decode_work
from weft_kernels.cpu.library import Library
from weft_kernels.cpu.threads import cpu_quota
from weft_runner.model import Checkpoint, LayerTensors, open_checkpoint, read_spec
from weft_runner.model.cpu.executor import CpuExecutor
from weft_runner.model.host_tensors import arrays_of, tensor_of
from weft_stage.cpu_models import base_model, files
from weft_stage.errors import WrongAdapter
from weft_stage.gpu_models import PROJECTIONS, Scale, StepOf, peft_tensors, step_of
from weft_stage.lines import Line

SITES = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))
PAGE_TOKENS = 16
TORCH = "torch"
Adapter = Mapping[str, torch.Tensor]
Run = Callable[[], torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class TorchLayer:
    """Layer 0 of a Llama as torch computes it."""

    spec: ModelSpec
    attention_norm: torch.Tensor
    mlp_norm: torch.Tensor
    qkv: torch.Tensor
    o: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor

    @classmethod
    def of(cls, layer: LayerTensors, spec: ModelSpec, dtype: torch.dtype) -> "TorchLayer":
        parts = (torch.cat([tensor_of(layer.projections[name]) for name in site]).to(dtype) for site in SITES)
        norms = (tensor_of(norm).to(dtype) for norm in (layer.attention_norm, layer.mlp_norm) if norm is not None)
        return cls(spec, *norms, *parts)

    def keys_values(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values [KV heads, T, D] of x[T, H] at positions from 0 on."""
        spec = self.spec
        _, k, v = self._heads(linear(self._norm(x, self.attention_norm), self.qkv))
        cosine, sine = _angles(spec, torch.arange(len(x)), x.dtype)
        return _turned(k, cosine, sine).transpose(0, 1), v.transpose(0, 1)

    def step(self, x: torch.Tensor, k: torch.Tensor, v: torch.Tensor, add: Sequence[Adding]) -> torch.Tensor:
        """Return [B, H] of x[B, H], each the last token of k and v[B, KV heads, C, D], where its own are written.

        `add`: what adapters add at each site; empty: nothing.
        """
        spec, position = self.spec, k.shape[2] - 1
        of_site = iter([*add] or [_nothing] * len(SITES))

        def project(weight: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            y = linear(value, weight)
            next(of_site)(y, value)
            return y

        q, new_k, new_v = self._heads(project(self.qkv, self._norm(x, self.attention_norm)))
        cosine, sine = _angles(spec, torch.tensor([position]), x.dtype)
        k[:, :, position], v[:, :, position] = _turned(new_k, cosine, sine), new_v
        seen = scaled_dot_product_attention(_turned(q, cosine, sine)[:, :, None], k, v, enable_gqa=True)
        x = x + project(self.o, seen.reshape(len(x), spec.q_size))
        gate, up = project(self.gate_up, self._norm(x, self.mlp_norm)).chunk(2, 1)
        return x + project(self.down, silu(gate) * up)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, (self.spec.hidden_size,), weight, self.spec.norm_eps)

    def _heads(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        spec = self.spec
        q, k, v = qkv.split([spec.q_size, spec.kv_size, spec.kv_size], 1)
        return (
            q.unflatten(1, (-1, spec.head_dim)),
            k.unflatten(1, (-1, spec.head_dim)),
            v.unflatten(1, (-1, spec.head_dim)),
        )


def layer_case(context: Context) -> Iterator[Line]:
    """Measure every context, batch size and popularity. Raises WrongAdapter."""
    if (library := native_library(context, "layer")) is None:
        return
    amounts, model = context.options.amounts, context.model
    torch.set_num_threads(threads := context.options.threads or cpu_quota())
    folder = base_model(context.options.folder, f"{model.name}-layer", replace(model.shape, layers=2, vocab=64))
    checkpoint = open_checkpoint(files(folder), read_spec(files(folder)["config.json"]))
    sweep = Sweep()
    adapters = [
        peft_tensors(checkpoint.spec, dict.fromkeys(PROJECTIONS, RANK), number, torch.bfloat16)
        for number in range(max(amounts.batches))
    ]
    one = replace(model.shape, layers=1, vocab=0)
    with context.bar(f"{model.name}: layer", len(amounts.contexts) * len(amounts.batches)) as advanced:
        for tokens in amounts.contexts:
            layers = _Layers(library, checkpoint, adapters, tokens, max(amounts.batches), threads)
            for rows in amounts.batches:
                for batch in (
                    base(rows),
                    *(Batch(rows, kind) for kind in POPULARITIES if rows > 1 or kind == POPULARITIES[0]),
                ):
                    times = layers.measured(batch, amounts.repetitions, sweep)
                    case = f"{model.name}{context.options.label}, layer, context {tokens}, {batch.name}"
                    work = decode_work(one, rows, tokens) + batch.adapters_work(one)
                    yield from _lines(context, case, work.bound_s(context.machine.rates(MEMORY_BYTES)), times)
                advanced(1)


class _Layers:
    """Both layers with one context length: native and torch's, with the same weights, KV and adapters."""

    def __init__(
        self,
        library: Library,
        checkpoint: Checkpoint,
        adapters: Sequence[Adapter],
        tokens: int,
        rows: int,
        threads: int,
    ) -> None:
        self._spec, self._tokens, self._adapters = checkpoint.spec, tokens, adapters
        self._pages = math.ceil((tokens + 1) / PAGE_TOKENS)
        self._native = CpuExecutor(
            library, checkpoint, threads=threads, pages=rows * self._pages, page_tokens=PAGE_TOKENS, slots=rows
        )
        for slot, tensors in enumerate(adapters):
            self._native.adapters.put(slot, self._native.adapters.build(arrays_of(tensors), Scale(1.0)))
        self._embedding = tensor_of(checkpoint.embedding)
        self._torch = {dtype: TorchLayer.of(checkpoint.layer(0), checkpoint.spec, dtype) for dtype in DTYPES}
        self._fill(rows)

    def measured(self, batch: Batch, repetitions: int, sweep: Callable[[], object]) -> dict[str, list[float]]:
        """Return the seconds of a step of the layer, in rounds. Raises WrongAdapter."""
        slots = sorted(batch.adapters, key=lambda slot: -1 if slot is None else slot)
        tokens = [(5 + row) % self._spec.vocab_size for row in range(batch.rows)]
        parts = [
            StepOf([token], self._tokens, range(row * self._pages, (row + 1) * self._pages), slot)
            for row, (token, slot) in enumerate(zip(tokens, slots, strict=True))
        ]
        step = step_of(parts, PAGE_TOKENS)
        runs: dict[tuple[str, torch.dtype], Run] = {
            (OURS, torch.float32): lambda: torch.from_numpy(self._native.run(step, first=0, last=1))
        }
        for dtype, layer in self._torch.items():
            x, kv = self._embedding[tokens].to(dtype), [one[: batch.rows].to(dtype) for one in self._kv]
            for name, add in self._added(batch, slots, dtype).items():
                runs[name, dtype] = partial(layer.step, x, *kv, add)
        before = self._embedding[tokens].float()
        expected = (
            next(run() for (name, dtype), run in runs.items() if name != OURS and dtype == torch.float32) - before
        )
        error = float((runs[OURS, torch.float32]() - before - expected).abs().max() / expected.abs().max())
        if not error < LARGEST_ERROR:
            raise WrongAdapter(
                f"a layer, context {self._tokens}, {batch.name}: off by {error:.2g} of the largest value"
            )

        def seconds(of: tuple[str, torch.dtype]) -> float:
            sweep()
            began = time.perf_counter()
            runs[of]()
            return time.perf_counter() - began

        found = alternating(list(runs), repetitions, seconds)
        names = dict.fromkeys(name for name, _ in runs)
        return {name: min((found[key] for key in found if key[0] == name), key=median) for name in names}

    def _added(self, batch: Batch, slots: Sequence[int | None], dtype: torch.dtype) -> dict[str, list[Adding]]:
        if batch.popularity == BASE:
            return {TORCH: []}
        used = max(slot for slot in slots if slot is not None) + 1
        dense = [
            Dense.of(
                [_weights(self._adapters[slot], site, dtype) for slot in range(used)],
                slots,
                1.0,
                self._embedding.device,
            )
            for site in SITES
        ]
        return {LOOP: [*map(loop, dense)], GATHER: [*map(gather, dense)]}

    def _fill(self, rows: int) -> None:
        """Give every row the same context, each in pages of its own."""
        generator = torch.Generator().manual_seed(self._tokens)
        prompt = torch.randint(5, self._spec.vocab_size, (self._tokens,), generator=generator)
        pages, memory = [*range(self._pages)], self._native.kv_memory
        self._native.run(step_of([StepOf(prompt.tolist(), 0, pages, None)], PAGE_TOKENS), first=0, last=1)
        hosts = [memory.host_page() for _ in pages]
        memory.copy_out(pages, hosts, memory.fence())
        for row in range(1, rows):
            memory.copy_in([row * self._pages + page for page in pages], hosts, memory.fence())
        found = self._torch[torch.float32].keys_values(self._embedding[prompt].float())
        room = torch.zeros(self._spec.kv_heads, 1, self._spec.head_dim)
        self._kv = [torch.cat([one, room], 1).bfloat16().expand(rows, -1, -1, -1).contiguous() for one in found]


def _lines(context: Context, case: str, bound_s: float, times: Mapping[str, Sequence[float]]) -> Iterator[Line]:
    seconds, target = median(times[OURS]), ">= 1" if context.options.usual else None
    line = context.origin.line
    yield line(case, "time", seconds * 1e3, "ms", baseline=bound_s * 1e3, bound_fraction=bound_s / seconds)
    for name in times:
        if name != OURS:
            yield line(case, f"{name}'s time / ours", paired(times[name], times[OURS]), "x", target=target)


def _weights(adapter: Adapter, site: Sequence[str], dtype: torch.dtype) -> Weights:
    """Return A and B of an adapter for these projections of layer 0."""
    prefix = "base_model.model.model.layers.0"
    a = [adapter[f"{prefix}.{PROJECTIONS[name]}.{name}.lora_A.weight"] for name in site]
    b = [adapter[f"{prefix}.{PROJECTIONS[name]}.{name}.lora_B.weight"] for name in site]
    return torch.cat(a).to(dtype), [one.t().contiguous().to(dtype) for one in b]


def _angles(spec: ModelSpec, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin [T, 1, D] of plain rotary embeddings."""
    frequencies = spec.ropes[0].theta ** (-torch.arange(0, spec.head_dim, 2) / spec.head_dim)
    angles = (positions[:, None] * frequencies).repeat(1, 2)[:, None]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def _turned(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Return x[T, heads, D] with its halves rotated, as in transformers."""
    first, second = x.chunk(2, -1)
    return x * cosine + torch.cat([-second, first], -1) * sine


def _nothing(y: torch.Tensor, x: torch.Tensor) -> None:
    del y, x
