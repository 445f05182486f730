"""The same work through our engine and through transformers + PEFT, one adapter a row by `adapter_names`, on this GPU.

The whole model on both sides, in bf16, with random weights of the same shape; ours first, then theirs: they need not
be there at once. A round is a run of one token each, then a run of all tokens: the first is prefill, the
difference of the two is decode. By the clock, as whoever asks sees it: PEFT works from Python, launch by launch.
"""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from weft_bench.cpu_shapes import BASE, DISTINCT, IDENTICAL, RANK, adapter_of_row, prompts
from weft_bench.gpu_context import Context
from weft_bench.gpu_engine import DeviceSubject, Sizes
from weft_stage.playing import Ask
from weft_stage.shapes import Shape

KINDS = (BASE, IDENTICAL, DISTINCT)
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

Prompts = Sequence[Sequence[int]]
Run = Callable[[Prompts, int, Sequence[int | None]], float]  # prompts, tokens each, adapter of each row -> seconds


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds: of a prefill, of a decode step, of the whole run."""

    prefill_s: float
    step_s: float
    whole_s: float


def measure(context: Context) -> None:
    """Measure both. Raises ImportError where there is no peft: the rows are then not measured."""
    import peft  # noqa: F401  # pyright: ignore[reportUnusedImport] (before ours runs for nothing)

    ours = _ours(context)
    context.gpu.free()
    theirs = _theirs(context)
    for popularity in KINDS:
        _report(context, popularity, ours[popularity], _measured(context, theirs, popularity))


def _report(context: Context, popularity: str, ours: Measured, theirs: Measured) -> None:
    name, amounts = context.amounts.peer_name(popularity), context.amounts
    tokens = amounts.peer_rows * amounts.peer_tokens[1]
    context.report(name, "prefill", ours.prefill_s * 1e3, "ms", baseline=theirs.prefill_s * 1e3)
    context.report(name, "decode step", ours.step_s * 1e3, "ms", baseline=theirs.step_s * 1e3)
    context.report(name, "whole run", tokens / ours.whole_s, "tokens/s", baseline=tokens / theirs.whole_s)


def _measured(context: Context, run: Run, popularity: str) -> Measured:
    """Run rounds after one that warms up."""
    rng, amounts = random.Random(0), context.amounts
    adapters, first, whole = adapter_of_row(popularity, amounts.peer_rows), list[float](), list[float]()
    tokens = amounts.peer_tokens[1]
    run(_prompts(context, rng), 2, adapters)
    for _ in range(amounts.peer_rounds):
        first.append(run(_prompts(context, rng), 1, adapters))
        whole.append(run(_prompts(context, rng), tokens, adapters))
    steps = [(b - a) / (tokens - 1) for a, b in zip(first, whole, strict=True)]
    return Measured(median(first), median(steps), median(whole))


def _prompts(context: Context, rng: random.Random) -> Prompts:
    return prompts(rng, context.amounts.peer_rows, context.amounts.peer_tokens[0], context.amounts.shape.vocab)


def _ours(context: Context) -> dict[str, Measured]:
    amounts, rows, prompt = context.amounts, context.amounts.peer_rows, context.amounts.peer_tokens[0]
    sizes = Sizes(rows, rows, sum(amounts.peer_tokens), rows * prompt, prefills=rows)
    subject = DeviceSubject(context.gpu, amounts.model, amounts.shape, sizes, context.folder)

    def run(made: Prompts, tokens: int, adapters: Sequence[int | None]) -> float:
        digests = ["" if n is None else subject.alias(f"adapter {n}", n % amounts.folders) for n in adapters]
        return subject.play(
            [Ask(d, p, tokens) for d, p in zip(digests, made, strict=True)], between=context.check_time
        ).wall_s

    with subject:
        return {popularity: _measured(context, run, popularity) for popularity in KINDS}


def _theirs(context: Context) -> Run:
    model = peft_model(context.amounts.shape, context.amounts.peer_rows, context.gpu.device, context.gpu.dtype)

    def run(made: Prompts, tokens: int, adapters: Sequence[int | None]) -> float:
        context.check_time()
        ids = torch.tensor(made, device=context.gpu.device)
        context.gpu.sync()
        started = time.perf_counter()
        out = generated(model, ids, tokens, adapters)
        context.gpu.sync()
        seconds = time.perf_counter() - started
        assert out.shape[1] == ids.shape[1] + tokens, (out.shape, ids.shape, tokens)
        return seconds

    return run


@torch.inference_mode()
def generated(model: Any, ids: torch.Tensor, tokens: int, adapters: Sequence[int | None]) -> torch.Tensor:
    """Decode `tokens` tokens each, greedily; without its adapters where no row has one: what is best for it."""
    options: dict[str, Any] = {
        "input_ids": ids, "attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0,
        "min_new_tokens": tokens, "max_new_tokens": tokens,
    }  # fmt: skip
    if all(number is None for number in adapters):
        with model.disable_adapter():
            return model.generate(**options)
    return model.generate(**options, adapter_names=["__base__" if n is None else name_of(n) for n in adapters])


def name_of(number: int) -> str:
    return f"adapter{number}"


def peft_model(shape: Shape, adapters: int, device: torch.device, dtype: torch.dtype) -> Any:
    """Make a random Llama with `adapters` random adapters on all seven projections, on the device."""
    import peft
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=shape.hidden, num_hidden_layers=shape.layers, num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads, intermediate_size=shape.inner, vocab_size=shape.vocab,
        max_position_embeddings=4096, tie_word_embeddings=False, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    lora = peft.LoraConfig(
        task_type="CAUSAL_LM", r=RANK, lora_alpha=RANK, target_modules=PROJECTIONS, init_lora_weights=False
    )
    with torch.device(device):
        base = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
        model = peft.get_peft_model(base, lora, adapter_name=name_of(0), autocast_adapter_dtype=False)
        for number in range(1, adapters):
            model.add_adapter(name_of(number), lora, autocast_adapter_dtype=False)
    return model.to(dtype).eval()
