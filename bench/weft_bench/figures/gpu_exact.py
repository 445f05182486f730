"""A whole model of random weights beside transformers + PEFT on the same weights: prompts, then captured decode steps.

Both are held against transformers' model in fp32: an error is the largest ||logits - true|| / ||true|| of a row. bf16
rounds both; ours is right when its error is about theirs.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from weft.domain.model.spec import ModelSpec
from weft_bench.cpu_shapes import RANK
from weft_bench.drive.engine import PAGE_TOKENS
from weft_bench.drive.gpu import Bench
from weft_runner.model.cuda.executor import CudaExecutor, Sizes
from weft_runner.model.host_tensors import arrays_of
from weft_runner.model.weights import ModelWeights
from weft_stage.gpu_models import (
    PROJECTIONS,
    Numbers,
    Scale,
    StepOf,
    peft_tensors,
    random_tokens,
    random_weights,
    spec_of,
    step_of,
)
from weft_stage.gpu_placed import Deck
from weft_stage.lines import Line

PAGES = 512
NAMES = ("base", "x", "y", "z")  # the base, and three adapters
Tensors = Mapping[str, torch.Tensor]


def exact(bench: Bench) -> Iterator[Line]:
    """Compare logits of the base and three adapters. Raises ImportError if there is no transformers or no peft."""
    gpu, (prompt, more) = bench.gpu, bench.amounts.exact_tokens
    spec = spec_of(bench.amounts.shape, 2 * (prompt + 7 * len(NAMES) + more))
    weights = random_weights(spec, Numbers(gpu.device, gpu.dtype))
    adapters = {
        name: peft_tensors(spec, dict.fromkeys(PROJECTIONS, RANK), seed, gpu.dtype)
        for seed, name in enumerate(NAMES[1:], 1)
    }
    rng = random.Random(0)
    prompts = {name: random_tokens(rng, prompt + 7 * i, spec.vocab_size) for i, name in enumerate(NAMES)}
    found = ours(spec, weights, adapters, prompts, more)
    gpu.free()
    model = oracle(spec, weights, adapters)
    theirs = {name: answered(model, name, found[name].tokens, prompt) for name, prompt in prompts.items()}
    model = model.float()
    for name, tokens in prompts.items():
        true = answered(model, name, found[name].tokens, tokens)
        error, other = error_of(found[name].logits, true), error_of(theirs[name], true)
        case = f"{bench.amounts.model}, {'base' if name == 'base' else f'adapter {name}'}, beside fp32"
        yield bench.line(case, "largest error of a row", error, "", baseline=other)
        metric = "largest error of a row / transformers + PEFT's in bf16"
        yield bench.line(case, metric, error / other if other else None, "x", target="<= 1.5")
        for whose, logits in (("ours", found[name].logits), ("transformers + PEFT", theirs[name])):
            same = float((logits.argmax(1) == true.argmax(1)).float().mean())
            yield bench.line(case, f"likeliest token is fp32's: {whose}", same, "share")


def error_of(logits: torch.Tensor, true: torch.Tensor) -> float:
    """The largest of a row, relative to the row's length."""
    return float(((logits - true).norm(dim=1) / true.norm(dim=1)).max())


@dataclass(slots=True)
class Answer:
    """A sequence with every token that was fed, and the logits [rows, V] after its prompt and after each token."""

    tokens: list[int]
    logits: torch.Tensor


def ours(
    spec: ModelSpec, weights: ModelWeights, adapters: Mapping[str, Tensors], prompts: Mapping[str, Sequence[int]],
    more: int,
) -> dict[str, Answer]:  # fmt: skip
    """All prompts in one step, then greedy decode steps of all sequences, all from captured graphs."""
    together = sum(map(len, prompts.values()))
    sizes = Sizes(
        PAGES, PAGE_TOKENS, len(adapters), RANK, len(prompts), spec.max_positions, graphs=True, tokens=together
    )
    executor, deck = CudaExecutor(spec, weights, sizes), Deck(PAGES)
    store, slots = executor.adapters, dict[str, int]()
    for slot, (name, tensors) in enumerate(adapters.items()):
        arrays, scales = arrays_of(tensors), Scale(1.0)
        pages = deck.deal(-(-store.device_bytes(arrays, scales) // store.page_bytes))
        executor.allocate_adapter_pages(pages)
        store.put(slot, store.build(arrays, scales, pages))
        slots[name] = slot
    fed = {name: list(prompt) for name, prompt in prompts.items()}
    pages_of = {name: deck.deal(-(-(len(prompt) + more) // PAGE_TOKENS)) for name, prompt in prompts.items()}
    parts = [StepOf(prompt, 0, pages_of[name], slots.get(name)) for name, prompt in prompts.items()]
    rows = [executor.run(step_of(parts, PAGE_TOKENS)).clone()]
    for _ in range(more):
        for tokens, likeliest in zip(fed.values(), rows[-1].argmax(1).tolist(), strict=True):
            tokens.append(likeliest)
        parts = [StepOf(fed[n][-1:], len(fed[n]) - 1, pages_of[n], slots.get(n)) for n in prompts]
        rows.append(executor.run(step_of(parts, PAGE_TOKENS)).clone())
    logits = torch.stack(rows).float().cpu()
    return {name: Answer(fed[name], logits[:, row]) for row, name in enumerate(prompts)}


def oracle(spec: ModelSpec, weights: ModelWeights, adapters: Mapping[str, Tensors]) -> Any:
    """transformers' Llama and PEFT's adapters with these very tensors, where these are."""
    import peft
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=spec.hidden_size, num_hidden_layers=spec.layers, num_attention_heads=spec.heads,
        num_key_value_heads=spec.kv_heads, head_dim=spec.head_dim, intermediate_size=spec.intermediate_size,
        vocab_size=spec.vocab_size, max_position_embeddings=spec.max_positions, rms_norm_eps=spec.norm_eps,
        tie_word_embeddings=False, rope_parameters={"rope_type": "default", "rope_theta": spec.ropes[0].theta},
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    with torch.device("meta"):
        model: Any = transformers.LlamaForCausalLM(config)
    dtype, device = weights.embedding.dtype, weights.embedding.device
    rotary = type(model.model.rotary_emb)
    model.load_state_dict({k: v.to(dtype) for k, v in _named(spec, weights).items()}, assign=True)
    model.model.rotary_emb = rotary(config)
    lora = peft.LoraConfig(task_type="CAUSAL_LM", r=RANK, lora_alpha=RANK, target_modules=list(PROJECTIONS))
    first, *others = adapters
    model = peft.get_peft_model(model, lora, adapter_name=first, autocast_adapter_dtype=False)
    for name in others:
        model.add_adapter(name, lora, autocast_adapter_dtype=False)
    for name, tensors in adapters.items():
        peft.set_peft_model_state_dict(model, dict(tensors), adapter_name=name)
    model = model.to(device, dtype).eval()
    # That rounded rope's frequencies, which a loaded checkpoint has in fp32: an 8B's logits then change by a fifth.
    model.get_base_model().model.rotary_emb = rotary(config).to(device)
    return model


@torch.inference_mode()
def answered(model: Any, name: str, tokens: Sequence[int], prompt: Sequence[int]) -> torch.Tensor:
    """Logits of the model with this adapter after the prompt and after each later token, in one forward pass."""
    ids = torch.tensor([tokens], device=model.device)
    if name == "base":
        with model.disable_adapter():
            logits = model(input_ids=ids).logits[0]
    else:
        model.set_adapter(name)
        logits = model(input_ids=ids).logits[0]
    return logits[len(prompt) - 1 :].float().cpu()


def _named(spec: ModelSpec, weights: ModelWeights) -> dict[str, torch.Tensor]:
    """The weights under transformers' names."""
    named = {
        "model.embed_tokens.weight": weights.embedding, "model.norm.weight": weights.norm,
        "lm_head.weight": weights.head,
    }  # fmt: skip
    q, kv, inner = spec.q_size, spec.kv_size, spec.intermediate_size
    for i, layer in enumerate(weights.layers):
        parts = {
            "self_attn.q_proj": layer.qkv[:q], "self_attn.k_proj": layer.qkv[q : q + kv],
            "self_attn.v_proj": layer.qkv[q + kv :], "self_attn.o_proj": layer.o,
            "mlp.gate_proj": layer.gate_up[:inner], "mlp.up_proj": layer.gate_up[inner:], "mlp.down_proj": layer.down,
            "input_layernorm": layer.attention_norm, "post_attention_layernorm": layer.mlp_norm,
        }  # fmt: skip
        named |= {f"model.layers.{i}.{name}.weight": part for name, part in parts.items() if part is not None}
    return named
