"""A checkpoint and its adapters as the GGUF files that llama.cpp reads.

    PYTHON llama_files.py FOLDER KIND BASE [ADAPTER ...]

Its Python has gguf and numpy and need not have weft. Writes the files (`file_of`) that are not there yet. KIND (F16,
Q8_0, Q4_0) is that of the base's matrices. Norms stay in float32 and adapters in F16, the only forms in which llama.cpp
computes with them.
"""

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

BYTES = [f"<0x{number:02X}>" for number in range(256)]  # a tokenizer must have them, though nothing is tokenized
UNKNOWN, CONTROL, BYTE, NORMAL = 2, 3, 6, 1
ARCHITECTURES = {"llama": "llama", "gemma3_text": "gemma3", "phi3": "phi3"}  # by `model_type`


def main(folder: Path, kind: str, base: Path, adapters: list[Path]) -> None:
    """Write each missing file beside its place and move it there when it is complete."""
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((base / "config.json").read_text())
    for source in (base, *adapters):
        path = file_of(folder, source, kind if source == base else "")
        if not path.exists():
            half = path.with_suffix(".half")
            write_base(source, half, config, kind) if source == base else write_adapter(source, half, config)
            half.replace(path)


def file_of(folder: Path, source: Path, kind: str = "") -> Path:
    """Return the file of an adapter, or of the base in this kind, by the name of its folder."""
    return folder / f"{source.name}{kind and f'-{kind}'}.gguf"


def write_base(source: Path, target: Path, config: dict[str, Any], kind: str) -> None:
    """Write the base. `kind`: of its matrices."""
    import gguf  # pyright: ignore[reportMissingImports] (of another Python)

    vocab, architecture, head = config["vocab_size"], ARCHITECTURES[config["model_type"]], config["head_dim"]
    writer = gguf.GGUFWriter(target, architecture, use_temp_file=True)
    others = [f"\u2581t{number}" for number in range(3 + len(BYTES), vocab)]
    for name, value in {
        "context_length": config["max_position_embeddings"], "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"], "feed_forward_length": config["intermediate_size"],
        "head_count": config["num_attention_heads"], "head_count_kv": config["num_key_value_heads"],
        "key_length": head, "value_length": head, "layer_norm_rms_eps": config["rms_norm_eps"],
        "rope_dimension_count": int(head * config.get("partial_rotary_factor", 1)),
        "rope_freq_base": config["rope_theta"], "rope_freq_base_swa": config.get("rope_local_base_freq"),
        "sliding_window": config["sliding_window"] or 0 if "sliding_window" in config else None,
        "vocab_size": vocab, "tokenizer_model": "llama", "token_list": ["<unk>", "<s>", "</s>", *BYTES, *others],
        "token_scores": [0.0] * vocab, "bos_token_id": 1, "eos_token_id": 2, "add_bos_token": False,
        "token_types": [UNKNOWN, CONTROL, CONTROL, *[BYTE] * len(BYTES), *[NORMAL] * len(others)],
    }.items():  # fmt: skip
        if value is not None:
            getattr(writer, f"add_{name}")(value)
    if "rope_scaling" in config:
        original, longest = config["original_max_position_embeddings"], config["max_position_embeddings"]
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(longest / original) / math.log(original)))
        for length in ("short", "long"):
            factors = np.array(config["rope_scaling"][f"{length}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{length}.weight", factors)
    for name, weight in tensors(source / "model.safetensors"):
        if architecture == "gemma3" and weight.ndim == 1:
            weight += 1  # what the model adds to a norm's weight is a part of it here
        _add(writer, config, name.removesuffix(".weight"), ".weight", weight, kind if weight.ndim == 2 else "F32")
    _close(writer)


def write_adapter(source: Path, target: Path, config: dict[str, Any]) -> None:
    """Write an adapter."""
    import gguf  # pyright: ignore[reportMissingImports]

    writer = gguf.GGUFWriter(target, ARCHITECTURES[config["model_type"]])
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", json.loads((source / "adapter_config.json").read_text())["lora_alpha"])
    for name, weight in tensors(source / "adapter_model.safetensors"):
        module, side = name.removeprefix("base_model.model.").removesuffix(".weight").rsplit(".", 1)
        _add(writer, config, module, f".weight.{side.lower()}", weight, "F16")
    _close(writer)


def _add(writer: Any, config: dict[str, Any], module: str, ending: str, weight: np.ndarray, kind: str) -> None:
    """Add a module's tensor. llama.cpp rotates a Llama's queries and keys in an order of its own."""
    import gguf  # pyright: ignore[reportMissingImports]

    architecture, stored = ARCHITECTURES[config["model_type"]], gguf.GGMLQuantizationType[kind]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], config["num_hidden_layers"])
    name = names.get_name(module)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    count = heads.get(name.rsplit(".", 1)[-1])
    if count and architecture == "llama" and not ending.endswith("lora_a"):
        weight = neighbours(weight, count)
    writer.add_tensor(name + ending, gguf.quants.quantize(weight, stored), raw_dtype=stored)


def _close(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tensors(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Read name and float32 values of each tensor of a bfloat16 safetensors file."""
    raw = np.memmap(path, np.uint8, "r")
    start = 8 + int.from_bytes(raw[:8].tobytes(), "little")
    for name, entry in json.loads(raw[8:start].tobytes()).items():
        if name != "__metadata__":
            assert entry["dtype"] == "BF16", (name, entry["dtype"])
            begin, end = entry["data_offsets"]
            bits = raw[start + begin : start + end].view(np.uint16)
            yield name, (bits.astype(np.uint32) << 16).view(np.float32).reshape(entry["shape"])


def neighbours(rows: np.ndarray, heads: int) -> np.ndarray:
    """Reorder [heads x d, ...]: rows i and i + d / 2 of a head, a pair that is rotated, become rows 2 i and 2 i + 1."""
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), [Path(each) for each in sys.argv[4:]])
