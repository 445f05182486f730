"""The architectures that are served, as data: a row of FAMILIES for each, beside it no line of any executor.

A row says what transformers' model class of the family computes otherwise than Llama's, what its configuration class
means by a field that config.json leaves out, and what its tensors are called. How much a model of it has of each, its
own config.json says (`weft.domain.model.config`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import NoneType
from typing import Any

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
BIASED = ATTENTION[:3]
MLP = ("gate_proj", "up_proj", "down_proj")
PROJECTIONS = ATTENTION + MLP
BARE = "Model"  # what architectures without a head end with: MistralModel
FULL, SLIDING = "full_attention", "sliding_attention"  # layers, by the names of `layer_types`

_ATTENTION_MODULES = {f"self_attn.{name}": (name,) for name in ATTENTION}
SEPARATE: Mapping[str, tuple[str, ...]] = _ATTENTION_MODULES | {f"mlp.{name}": (name,) for name in MLP}
_FLAGS = {"attention_bias": ATTENTION, "mlp_bias": MLP}
_ATTENTION_FLAG = {"attention_bias": ATTENTION}
_GELU = "gelu_pytorch_tanh"
_GEMMA: dict[str, Any] = {
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "hidden_activation": _GELU,
    "query_pre_attn_scalar": 256, "tie_word_embeddings": True, "vocab_size": 256_000, "hidden_size": 2304,
    "intermediate_size": 9216, "num_hidden_layers": 26,
}  # fmt: skip


class Windows(Enum):
    """The layers of a family that attend to a sliding window only."""

    NONE = "none"
    ALL = "all"  # `sliding_window` counts for every layer (Mistral 7B, arXiv 2310.06825, section 2)
    BY_LAYER = "by layer"  # `layer_types`, or all from layer `max_window_layers` on, where `use_sliding_window` is true
    INTERVAL = "interval"  # `layer_types`, or all but each last of an interval (Gemma 2, arXiv 2408.00118, section 2)


class Norms(Enum):
    """Names of a layer's norms: before attention, behind it, before the MLP, behind it; "": there is none."""

    PRE = ("input_layernorm", "", "post_attention_layernorm", "")
    POST = ("", "post_attention_layernorm", "", "post_feedforward_layernorm")
    BOTH = (
        "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm",
    )  # fmt: skip


class HeadNorms(Enum):
    """What of q and k is normed before it is rotated."""

    NONE = "none"
    EACH = "each"  # head by head
    ALL = "all"  # all of a token's heads as one row (OLMo 2, arXiv 2501.00656, section 2)


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture; `bare` is the same without its head, `multimodal` one that has it as its text part.

    `model_type`, `multimodal_type`: what transformers finds their configuration classes by.

    `fields`: names that config.json has for Llama's fields; `defaults`: what a field that is not there means.
    `modules`: names within a layer -> the projections that each holds, under each other; a family without `gate_proj`
    has an MLP without a gate. `biases`: of projections that always have one; `bias_flags`: of those that a field gives
    them to. `norm_offset`: what is added to a norm's stored weight; `layer_norm`: LayerNorm with biases, not RMS.
    `factors`: of ModelSpec, each a field raised to a power; `caps`: of ModelSpec, each a field.
    `full_interval`: of `Windows.INTERVAL`, and the field that may say another; `nope_interval`: without a list in
    config.json, each last layer of so long an interval rotates nothing. `sliding_theta`: layers with windows have a
    rotation of their own, and this base, or that of a field. `partial`: a part of each head may be rotated alone.
    `only`: the one value of a field that is served, and what others would need. `rotates_where`: layers rotate where a
    field has a value. `recurrent`: layers attend where `layer_types` says so, and only there. `nulls`: fields that may
    be null, which then follow from others. `divides`: heads share the hidden size out, whatever size they have.
    `unused`: fields of which transformers checks the type alone. `grows`: queries do, with `llama_4_scaling_beta`.
    `text_is_named`: a model that reads images has text parts of several families, and names its own.
    """

    architecture: str
    model_type: str
    defaults: Mapping[str, Any] = field(default_factory=dict[str, Any])
    fields: Mapping[str, str] = field(default_factory=dict[str, str])
    bare: str = ""
    multimodal: str = ""
    multimodal_type: str = ""
    windows: Windows = Windows.NONE
    full_interval: tuple[int, str] = (0, "")
    nope_interval: int = 0
    norms: Norms = Norms.PRE
    norm_offset: float = 0.0
    layer_norm: bool = False
    head_norms: HeadNorms = HeadNorms.NONE
    biases: tuple[str, ...] = ()
    bias_flags: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    modules: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: SEPARATE)
    factors: Mapping[str, tuple[str, float]] = field(default_factory=dict[str, tuple[str, float]])
    caps: Mapping[str, str] = field(default_factory=dict[str, str])
    rope_theta: float = 10_000.0
    sliding_theta: tuple[float, str] | None = None
    rope_kinds: tuple[str, ...] = ("default", "linear", "llama3", "yarn")
    partial: bool = False
    only: Mapping[str, tuple[object, str]] = field(default_factory=dict[str, tuple[object, str]])
    rotates_where: tuple[str, str] = ("", "")
    recurrent: bool = False
    nulls: tuple[str, ...] = ("num_key_value_heads",)
    divides: bool = False
    unused: Mapping[str, tuple[type, ...]] = field(default_factory=dict[str, tuple[type, ...]])
    grows: bool = False
    text_is_named: bool = False

    @property
    def architectures(self) -> tuple[str, ...]:
        """Every name that config.json may have for it, its own first."""
        whole = (self.architecture, *([self.multimodal] if self.multimodal else []))
        return (*whole, self.bare or self.architecture.replace("ForCausalLM", BARE))

    @property
    def projections(self) -> tuple[str, ...]:
        """The projections of a layer, in the order of PROJECTIONS."""
        return tuple(name for name in PROJECTIONS if any(name in held for held in self.modules.values()))

    @property
    def gated(self) -> bool:
        """Say whether the MLP multiplies what it activates by a second product."""
        return "gate_proj" in self.projections


_GRANITE_FACTORS = {
    "embedding_scale": ("embedding_multiplier", 1.0), "residual_scale": ("residual_multiplier", 1.0),
    "attention_scale": ("attention_multiplier", 1.0), "logit_divisor": ("logits_scaling", 1.0),
}  # fmt: skip
_GRANITE: dict[str, Any] = dict.fromkeys(
    ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"), 1.0
)
_GEMMA_FACTORS = {"embedding_scale": ("hidden_size", 0.5), "attention_scale": ("query_pre_attn_scalar", -0.5)}

FAMILIES = (
    Family(
        "LlamaForCausalLM", "llama", bias_flags=_FLAGS, nulls=("num_key_value_heads", "head_dim"), divides=True,
    ),
    Family(
        "MistralForCausalLM", "mistral", {"num_key_value_heads": 8, "sliding_window": 4096}, windows=Windows.ALL,
        nulls=("head_dim",),
    ),
    Family(
        "Ministral3ForCausalLM", "ministral3",
        {"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5,
         "rope_parameters": {"type": "yarn", "rope_theta": 1e6, "factor": 16.0, "mscale": 1.0, "mscale_all_dim": 1.0,
                             "original_max_position_embeddings": 16384, "llama_4_scaling_beta": 0.1}},
        multimodal="Mistral3ForConditionalGeneration", multimodal_type="mistral3", windows=Windows.ALL, nulls=(),
        grows=True, text_is_named=True,
    ),
    Family(
        "Qwen2ForCausalLM", "qwen2", {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28},
        windows=Windows.BY_LAYER, biases=BIASED,
    ),
    Family(
        "Qwen3ForCausalLM", "qwen3",
        {"num_key_value_heads": 32, "head_dim": 128, "sliding_window": 4096, "max_window_layers": 28},
        windows=Windows.BY_LAYER, head_norms=HeadNorms.EACH, bias_flags=_ATTENTION_FLAG,
    ),
    Family("GraniteForCausalLM", "granite", _GRANITE, factors=_GRANITE_FACTORS, bias_flags=_FLAGS),
    Family(
        "SmolLM3ForCausalLM", "smollm3", {"num_key_value_heads": 4, "tie_word_embeddings": True}, rope_theta=2e6,
        nope_interval=4, bias_flags=_FLAGS,
    ),
    Family(
        "Olmo2ForCausalLM", "olmo2", {"rms_norm_eps": 1e-5}, norms=Norms.POST, head_norms=HeadNorms.ALL,
        bias_flags=_ATTENTION_FLAG,
    ),
    Family(
        "Olmo3ForCausalLM", "olmo3", {"rms_norm_eps": 1e-5, "sliding_window": 4096}, norms=Norms.POST,
        head_norms=HeadNorms.ALL, bias_flags=_ATTENTION_FLAG, windows=Windows.INTERVAL, full_interval=(4, ""),
        rope_theta=5e5, sliding_theta=(5e5, ""),
    ),
    Family(
        "Gemma2ForCausalLM", "gemma2",
        _GEMMA | {"sliding_window": 4096, "max_position_embeddings": 8192, "final_logit_softcapping": 30.0,
                  "attn_logit_softcapping": 50.0},
        {"hidden_act": "hidden_activation"}, norms=Norms.BOTH, norm_offset=1.0, bias_flags=_ATTENTION_FLAG,
        windows=Windows.INTERVAL, full_interval=(2, ""), factors=_GEMMA_FACTORS,
        caps={"score_cap": "attn_logit_softcapping", "logit_cap": "final_logit_softcapping"}, nulls=(), divides=True,
    ),
    Family(
        "Gemma3ForCausalLM", "gemma3_text",
        _GEMMA | {"vocab_size": 262_208, "sliding_window": 4096, "max_position_embeddings": 131_072},
        {"hidden_act": "hidden_activation"}, "Gemma3TextModel", "Gemma3ForConditionalGeneration", "gemma3",
        norms=Norms.BOTH, norm_offset=1.0, head_norms=HeadNorms.EACH, bias_flags=_ATTENTION_FLAG,
        windows=Windows.INTERVAL, full_interval=(6, "sliding_window_pattern"), factors=_GEMMA_FACTORS,
        caps={"logit_cap": "final_logit_softcapping"}, rope_theta=1e6, sliding_theta=(1e4, "rope_local_base_freq"),
        unused={"attn_logit_softcapping": (float, NoneType)}, nulls=(), divides=True,
    ),
    Family(
        "Phi3ForCausalLM", "phi3",
        {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "original_max_position_embeddings": 4096},
        windows=Windows.ALL, partial=True, rope_kinds=("default", "longrope"),
        modules={"self_attn.qkv_proj": BIASED, "self_attn.o_proj": ("o_proj",),
                 "mlp.gate_up_proj": MLP[:2], "mlp.down_proj": ("down_proj",)},
    ),
    Family(
        "Starcoder2ForCausalLM", "starcoder2",
        {"norm_epsilon": 1e-5, "num_key_value_heads": 2, "hidden_act": _GELU, "use_bias": True,
         "tie_word_embeddings": True},
        {"rms_norm_eps": "norm_epsilon"}, windows=Windows.ALL, layer_norm=True, nulls=("head_dim",),
        bias_flags={"use_bias": (*ATTENTION, *MLP[1:])},
        modules=_ATTENTION_MODULES | {"mlp.c_fc": ("up_proj",), "mlp.c_proj": ("down_proj",)},
    ),
    Family(
        "GraniteMoeHybridForCausalLM", "granitemoehybrid",
        _GRANITE | {"shared_intermediate_size": 1024, "num_local_experts": 8},
        {"intermediate_size": "shared_intermediate_size"}, factors=_GRANITE_FACTORS, bias_flags=_ATTENTION_FLAG,
        only={"num_local_experts": (0, "mixtures of experts")}, rotates_where=("position_embedding_type", "rope"),
        recurrent=True, unused={"intermediate_size": (int,)},
        modules=_ATTENTION_MODULES | {"shared_mlp.input_linear": MLP[:2], "shared_mlp.output_linear": ("down_proj",)},
    ),
)  # fmt: skip
# What others would need, by a part of their names in small letters; the first that fits.
NEEDED: Mapping[str, str] = {
    "gemma3n": "embeddings of their own in each layer, and layers that share keys and values",
    "gemma4": "heads of two sizes, embeddings of their own in each layer, and layers that share keys and values",
    **dict.fromkeys(
        ("moe", "mixtral", "gptoss", "gpt_oss", "deepseek", "llama4", "dbrx"), "mixtures of experts"
    ),
    **dict.fromkeys(
        ("mamba", "jamba", "bamba", "zamba", "qwen3next", "qwen3_next", "falconh1", "nemotronh", "recurrent", "lfm2",
         "rwkv"), "recurrent layers",
    ),
    "phi3small": "blocksparse attention",
    **dict.fromkeys(("bert", "mpnet", "electra"), "attention to the text behind a token, as encoders have it"),
    **dict.fromkeys(("t5", "bart"), "an encoder beside the decoder"),
}  # fmt: skip
_BY_ARCHITECTURE = {name: family for family in FAMILIES for name in family.architectures}


def family_of(architecture: str) -> Family:
    """Find the family of an architecture that is served, with or without its head. Raises KeyError."""
    return _BY_ARCHITECTURE[architecture]


def needed_by(name: str) -> str:
    """Say what an architecture that is not served would need; "": that is not known."""
    return next((needed for part, needed in NEEDED.items() if part in name.casefold()), "")
