"""Compile a GPU's kernels if absent: images carry them, so that no runner compiles at its first start.

    python -m weft_runner.compile_kernels [CONFIG ...] [--capability 80 90] [--max-rank 16 64]

CONFIG: a model's config.json; without any, sizes that many models have. What is compiled, in bf16, is what an executor
launches as it starts: captured steps of up to `--rows` rows and eager ones of up to `--tokens` tokens. A runner that
needs others compiles them, as always. The machine code goes where Triton looks for it (`weft_kernels.triton.ahead`).
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)  # it has no compiler

import torch

from weft.domain.model.config import parse_model_config
from weft.domain.model.spec import LayerSpec, ModelSpec, RopeSpec
from weft_kernels.triton import ahead
from weft_runner.model.cuda.absent import AbsentExecutor
from weft_runner.model.cuda.executor import Sizes

SMS = {80: 108, 90: 132}  # of an A100; of an H100 and an H200
PAGES, PAGE_TOKENS, SLOTS = 2048, 16, 64
CONTEXT = 8192  # at most: longer ones launch the same kernels


def _llama(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocab: int, dim: int = 128) -> ModelSpec:
    return ModelSpec(
        "LlamaForCausalLM", vocab, hidden, inner, heads, kv_heads, dim, 1e-5, CONTEXT, tied_embeddings=False,
        ropes=(RopeSpec(500_000.0),), by_layer=(LayerSpec(),) * layers,
    )  # fmt: skip


USUAL = {
    "Llama 3.1 8B": _llama(4096, 14336, 32, 32, 8, 128256),
    "Llama 3.2 1B": _llama(2048, 8192, 16, 32, 8, 128256, dim=64),
    "Llama 3.2 3B": _llama(3072, 8192, 28, 24, 8, 128256),
}


@dataclass(frozen=True, slots=True)
class Target:
    """A model on one kind of GPU, to compile kernels for."""

    name: str
    spec: ModelSpec
    capability: int
    max_rank: int
    rows: int
    tokens: int


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code. Raises what Triton's compiler raises, and Refused for a model that is not served."""
    values = _parser().parse_args(argv)
    models = {str(path): parse_model_config(path.read_bytes()) for path in values.configs} or USUAL
    targets = [
        Target(name, spec, capability, max_rank, values.rows, values.tokens)
        for name, spec in models.items()
        for capability in values.capability
        for max_rank in values.max_rank
    ]
    began = time.perf_counter()
    workers = min(len(targets), len(os.sched_getaffinity(0)))
    with ProcessPoolExecutor(workers, get_context("spawn"), ahead.carry, (values.out,)) as pool:
        for target, seconds in zip(targets, pool.map(compile_for, targets), strict=True):
            report(f"{target.name}, sm_{target.capability}, ranks to {target.max_rank}: {seconds:.0f} s")
    sizes = [path.stat().st_size for path in values.out.rglob("*.cubin")]
    report(f"{len(sizes)} kernels, {sum(sizes) >> 10} KiB, in {time.perf_counter() - began:.0f} s: {values.out}")
    return 0


def report(line: str) -> None:
    """Print at once: a build takes minutes."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def compile_for(target: Target) -> float:
    """Compile what is launched at a start; seconds."""
    began, context = time.perf_counter(), min(target.spec.max_positions, CONTEXT)
    sizes = Sizes(PAGES, PAGE_TOKENS, SLOTS, target.max_rank, target.rows, context, graphs=True, tokens=target.tokens)
    with ahead.compiling(target.capability), torch.inference_mode():
        executor = AbsentExecutor(target.spec, sizes, SMS[target.capability])
        for _, forward in executor.forwards():
            forward()
        executor.warm_up(target.tokens)
    return time.perf_counter() - began


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m weft_runner.compile_kernels", description=(__doc__ or "").partition("\n")[0], allow_abbrev=False
    )
    add = parser.add_argument
    add("configs", nargs="*", type=Path, metavar="CONFIG", help=f"a model's config.json ({', '.join(USUAL)})")
    add("--capability", nargs="+", type=int, choices=SMS, default=[*SMS], help="of the GPUs, 90 for 9.0 (80 90)")
    add("--max-rank", nargs="+", type=int, default=[16, 64], metavar="R", help="a pool's lora.maxRank (16 64)")
    add("--rows", type=int, default=1024, metavar="N", help="most sequences of a runner (1024)")
    add("--tokens", type=int, default=8192, metavar="N", help="most tokens of a step (8192)")
    add("--out", type=Path, default=ahead.CARRIED, metavar="DIR", help=f"where they are kept ({ahead.CARRIED})")
    return parser


if __name__ == "__main__":
    sys.exit(main())
