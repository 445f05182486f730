"""weft_cpu.h in ctypes: the same structs, fields and order. `tests/kernels/cpu` compares every size and offset.

Pointers are plain addresses; the caller keeps their memory alive for as long as a call may read it.
"""

import ctypes
from ctypes import POINTER, Structure, c_float, c_int32, c_int64, c_void_p

ABI = 2
BF16, FP32, INT8 = 0, 1, 2
CODES = {-1: "this level is not usable here", -2: "a size is not supported", -3: "the workspace is too small"}
LayerDone = ctypes.CFUNCTYPE(None, c_int32)


class Matrix(Structure):
    """`weft_matrix`: y[n_out] = W[n_out, n_in] x[n_in] (* scale) (+ bias)."""

    _fields_ = [
        ("data", c_void_p),
        ("scale", c_void_p),
        ("bias", c_void_p),
        ("n_in", c_int32),
        ("n_out", c_int32),
        ("kind", c_int32),
        ("reserved", c_int32),
    ]


class Layer(Structure):
    """`weft_layer`."""

    _fields_ = [
        ("attention_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("qkv", Matrix),
        ("o", Matrix),
        ("gate_up", Matrix),
        ("down", Matrix),
        ("window", c_int32),
        ("reserved", c_int32),
    ]


class ModelStruct(Structure):
    """`weft_model`."""

    _fields_ = [
        ("layers", c_int32),
        ("hidden", c_int32),
        ("inner", c_int32),
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("head_dim", c_int32),
        ("vocab", c_int32),
        ("kind", c_int32),
        ("eps", c_float),
        ("reserved", c_float),
        ("layer", POINTER(Layer)),
        ("embedding", c_void_p),
        ("norm", c_void_p),
        ("head", Matrix),
        ("inverse_frequency", c_void_p),
        ("kv", c_void_p),
        ("embedding_kind", c_int32),
        ("page_tokens", c_int32),
        ("rope_scale", c_float),
        ("reserved2", c_float),
    ]


class LoraSliceStruct(Structure):
    """`weft_lora_slice`: one projection inside a site."""

    _fields_ = [
        ("b", c_void_p),
        ("rank_start", c_int32),
        ("rank", c_int32),
        ("out_start", c_int32),
        ("n_out", c_int32),
        ("scale", c_float),
        ("reserved", c_int32),
    ]


class LoraSiteStruct(Structure):
    """`weft_lora_site`: one adapter's weights at qkv, o, gate_up or down of a layer."""

    _fields_ = [("a", c_void_p), ("rank", c_int32), ("n_slices", c_int32), ("slice", LoraSliceStruct * 3)]


class RowStruct(Structure):
    """`weft_row`: the tokens of one sequence in a step."""

    _fields_ = [("start", c_int32), ("end", c_int32), ("position", c_int32), ("page_offset", c_int32)]


class SegmentStruct(Structure):
    """`weft_segment`: tokens [start, end) use the adapter of `slot`."""

    _fields_ = [("start", c_int32), ("end", c_int32), ("slot", c_int32)]


class StepStruct(Structure):
    """`weft_step`. `slots`: an array of addresses of [layers][4] sites."""

    _fields_ = [
        ("n_tokens", c_int32),
        ("n_rows", c_int32),
        ("n_segments", c_int32),
        ("n_sampled", c_int32),
        ("first", c_int32),
        ("last", c_int32),
        ("tokens", c_void_p),
        ("rows", c_void_p),
        ("page_table", c_void_p),
        ("segments", c_void_p),
        ("sampled", c_void_p),
        ("slots", c_void_p),
        ("hidden", c_void_p),
        ("logits", c_void_p),
        ("layer_done", LayerDone),
        ("workspace", c_void_p),
        ("workspace_bytes", c_int64),
    ]


MIRRORS: dict[str, type[Structure]] = {
    "weft_matrix": Matrix,
    "weft_layer": Layer,
    "weft_model": ModelStruct,
    "weft_lora_slice": LoraSliceStruct,
    "weft_lora_site": LoraSiteStruct,
    "weft_row": RowStruct,
    "weft_segment": SegmentStruct,
    "weft_step": StepStruct,
}
