"""The families that are served as a table: `weft families`, and docs/reference/models.md.

python -m weft.domain.model.family_table --write docs/reference/models.md
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from weft.domain.model.families import BIASED, FAMILIES, Family, HeadNorms, Norms, Windows

HEADERS = ("FAMILY", "MODELS", "ADAPTERS ON", "SIZES TRIED")
MORE_HEADERS = ("ARCHITECTURES", "ROPE", "BESIDE LLAMA'S ARITHMETIC")
EXACT = (
    "Logits of the reference and the cpu executor in fp32 are at most twice as far from transformers + peft in fp64 as "
    "those of transformers + peft in fp32; those of the cuda executor, in fp32 under Triton's interpreter, are within "
    "5e-4 of transformers + peft. The same holds for bases without a head, which embed."
)
_HEAD = """# Models that are served

The table is that of `weft families -o wide`, made from the data by which configurations are read (`make models`).
Weights are float32, float16 or bfloat16 safetensors. *Sizes tried*: shapes that ran whole, with random weights but for
the quickstart's; small random models of every family are compared with transformers + peft in the tests.
What else a base model's folder may hold: [artifacts](artifacts.md). Errors by family: [numerics](../numerics.md).
"""
_TAIL = """
## What is refused

A `config.json` that transformers would build another model from than Weft computes is refused by name
(`UnsupportedModel`), with what it would need. Among them: rope of the type `dynamic`; quantised checkpoints; attention
to all of a text (`use_bidirectional_attention`); other activations than `silu` and `gelu_pytorch_tanh`; mixtures of
experts; recurrent layers (Granite 4 with Mamba layers); Gemma 3n and Gemma 4.

Of `Gemma3ForConditionalGeneration`, and of `Mistral3ForConditionalGeneration` with the text part of Ministral 3, that
text part is served: what reads images is left out, and an adapter that changes it is refused (`UnsupportedAdapter`).
Code that comes with a model (`auto_map`) is not run: its `model_type` says what is computed, as in transformers.
Tensor ranks do not share OLMo's heads, which are normed together: a pipeline serves it on several devices.

## LongRoPE

Phi-3's and Phi-4-mini's long variants have two sets of factors: for texts of up to
`original_max_position_embeddings` tokens, and for longer ones. A request has one set for its whole life, by its prompt
and its `max_tokens` together (not by what it has come to): its keys stay valid as it grows and moves, and texts of the
two kinds share no prefix. So a request that leaves `max_tokens` out is a long text, as it may become one: say
`max_tokens` where short answers matter.
"""
_MODELS = {
    "llama": ("Llama 2, 3; SmolLM2", "135M, 1.2B, 8B (GPU)"),
    "mistral": ("Mistral 7B, Nemo; Ministral 8B", ""),
    "ministral3": ("Ministral 3 (text)", ""),
    "qwen2": ("Qwen2, Qwen2.5", ""),
    "qwen3": ("Qwen3 (dense)", ""),
    "granite": ("Granite 3 (dense)", ""),
    "smollm3": ("SmolLM3", ""),
    "olmo2": ("OLMo 2", ""),
    "olmo3": ("OLMo 3", ""),
    "gemma2": ("Gemma 2", ""),
    "gemma3_text": ("Gemma 3 (text)", "1B"),
    "phi3": ("Phi-3, 3.5, Phi-4, 4-mini", "3.8B, 16 of its 32 layers"),
    "starcoder2": ("StarCoder2", ""),
    "granitemoehybrid": ("Granite 4 (dense)", ""),
}


def rows(*, wide: bool) -> list[tuple[str, ...]]:
    """Give the cells of each family under HEADERS, with `wide` also MORE_HEADERS."""
    found = list[tuple[str, ...]]()
    for family in FAMILIES:
        models, tried = _MODELS[family.model_type]
        modules = ", ".join(name.partition(".")[2] for name in family.modules)
        more = (
            ", ".join(family.architectures),
            ", ".join(family.rope_kinds),
            "; ".join(_differences(family)) or "none",
        )
        found.append((family.model_type, models, modules, tried or "small random ones", *(more if wide else ())))
    return found


def page() -> str:
    """Write the page, in Markdown."""
    lines = [(*HEADERS, *MORE_HEADERS), ("---",) * (len(HEADERS) + len(MORE_HEADERS)), *rows(wide=True)]
    table = "\n".join(
        f"| {' | '.join(cell.lower() if i == 0 else cell for cell in line)} |" for i, line in enumerate(lines)
    )
    return f"{_HEAD}\n{table}\n\n{EXACT}\n{_TAIL}"


def _differences(family: Family) -> Iterator[str]:
    """Name what a family computes otherwise than Llama."""
    match family.windows:
        case Windows.ALL:
            yield "a window in every layer, where one is set"
        case Windows.BY_LAYER:
            yield "windows in some layers, where they are used"
        case Windows.INTERVAL:
            yield f"windows except in the last of {family.full_interval[0]} layers"
        case Windows.NONE:
            pass
    if family.layer_norm:
        yield "LayerNorm"
    match family.norms:
        case Norms.POST:
            yield "post-norms alone"
        case Norms.BOTH:
            yield "pre- and post-norms"
        case Norms.PRE:
            pass
    if family.norm_offset:
        yield "norms of 1 + w"
    match family.head_norms:
        case HeadNorms.EACH:
            yield "q and k normed by head"
        case HeadNorms.ALL:
            yield "q and k normed, all heads together"
        case HeadNorms.NONE:
            pass
    if family.biases == BIASED:
        yield "biases of q, k and v"
    if family.sliding_theta:
        yield "two rotations"
    if family.nope_interval or family.rotates_where[0]:
        yield "layers that rotate nothing"
    if family.grows:
        yield "queries that grow with their positions"
    if family.partial:
        yield "a part of each head rotated"
    if family.factors:
        yield f"factors ({', '.join(field for field, _ in family.factors.values())})"
    if family.caps:
        yield f"soft caps ({', '.join(family.caps.values())})"
    if not family.gated:
        yield "an MLP without a gate"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="weft.domain.model.family_table", description="Writes the page of models.")
    parser.add_argument("--write", metavar="FILE", type=Path, required=True, help="where the page goes")
    target: Path = parser.parse_args(argv).write
    target.write_text(page())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
