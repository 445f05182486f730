"""weft_cpu.h in ctypes: the same structs, fields and order. `tests/kernels/cpu` compares every size and offset.

Pointers are plain addresses; the caller keeps their memory alive for as long as a call may read it.
"""

import ctypes
from ctypes import POINTER, Structure, c_double, c_float, c_int32, c_int64, c_void_p
from typing import Any

ABI = 13
BF16, FP32, INT8, INT4 = range(4)
ACTIVATIONS = {"silu": 0, "gelu": 1}
KINDS = {"bf16": BF16, "fp32": FP32, "int8": INT8, "int4": INT4}  # of weights, by the name of their format
LOST = -4
ATTENTION_BLOCK = 64  # keys that attention reads at a time: kBlock of attention.h
CODES = {
    -1: "this level is not usable here",
    -2: "a size is not supported",
    -3: "the workspace is too small",
    LOST: "another rank is lost",
    -5: "there is no memory",
}
LayerDone = ctypes.CFUNCTYPE(None, c_int32)
Exchange = ctypes.CFUNCTYPE(c_int32, c_void_p, c_int32, c_int64, c_int32)


def _fields(kind: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class Matrix(Structure):
    """`weft_matrix`: y[n_out] = W[n_out, n_in] x[n_in] (* scale) (+ bias)."""

    _fields_ = [*_fields(c_void_p, "data scale bias"), *_fields(c_int32, "n_in n_out kind reserved")]


class Layer(Structure):
    """`weft_layer`."""

    _fields_ = [
        *_fields(c_void_p, "attention_norm attention_post_norm mlp_norm mlp_post_norm q_norm k_norm"),
        *_fields(Matrix, "qkv o gate_up down"),
        *_fields(c_int32, "window rope"),
    ]


class Rope(Structure):
    """`weft_rope`."""

    _fields_ = [
        *_fields(c_void_p, "inverse_frequency long_frequency"),
        *_fields(c_float, "factor"),
        *_fields(c_int32, "size"),
    ]


class RanksStruct(Structure):
    """`weft_ranks`."""

    _fields_ = [
        *_fields(c_int32, "rank size"),
        ("slots", c_void_p),
        ("slot_bytes", c_int64),
        ("meeting", c_void_p),
        ("exchange", Exchange),
        ("context", c_void_p),
        ("patience_s", c_double),
    ]


class ModelStruct(Structure):
    """`weft_model`."""

    _fields_ = [
        *_fields(c_int32, "layers hidden inner heads kv_heads head_dim vocab kind"),
        *_fields(c_float, "eps top_share"),
        *_fields(POINTER(Layer), "layer"),
        *_fields(c_void_p, "embedding norm"),
        *_fields(Matrix, "head"),
        *_fields(POINTER(Rope), "rope"),
        *_fields(c_void_p, "kv"),
        *_fields(c_int32, "embedding_kind page_tokens ropes kv_kind"),
        *_fields(c_float, "embedding_scale residual_scale query_scale score_cap logit_cap query_growth"),
        *_fields(c_int32, "growth_tokens activation gated layer_norm row_norms"),
        ("ranks", POINTER(RanksStruct)),
        ("scores", c_void_p),
        ("score_positions", c_int64),
    ]


class LoraSliceStruct(Structure):
    """`weft_lora_slice`: one projection inside a site."""

    _fields_ = [
        *_fields(c_void_p, "b"),
        *_fields(c_int32, "rank_start rank out_start n_out"),
        *_fields(c_float, "scale"),
        *_fields(c_int32, "reserved"),
    ]


class LoraSiteStruct(Structure):
    """`weft_lora_site`: one adapter's weights at qkv, o, gate_up or down of a layer."""

    _fields_ = [("a", c_void_p), ("rank", c_int32), ("n_slices", c_int32), ("slice", LoraSliceStruct * 3)]


class RowStruct(Structure):
    """`weft_row`: the tokens of one sequence in a step."""

    _fields_ = _fields(c_int32, "start end position page_offset long_text")


class SegmentStruct(Structure):
    """`weft_segment`: tokens [start, end) use the adapter of `slot`."""

    _fields_ = _fields(c_int32, "start end slot")


class StepStruct(Structure):
    """`weft_step`. `slots`: an array of addresses of [layers][4] sites."""

    _fields_ = [
        *_fields(c_int32, "n_tokens n_rows n_segments n_sampled first last"),
        *_fields(c_void_p, "tokens rows page_table segments sampled guesses slots hidden logits"),
        *_fields(LayerDone, "layer_done"),
        *_fields(c_void_p, "layers_done workspace"),
        *_fields(c_int64, "workspace_bytes"),
    ]


class PackJob(Structure):
    """`weft_pack_job`: a matrix to pack, its parts under each other."""

    _fields_ = [
        ("source", c_void_p * 3),
        ("to", c_void_p),
        ("rows", c_int32 * 3),
        *_fields(c_int32, "kind n_in pad_in"),
    ]
