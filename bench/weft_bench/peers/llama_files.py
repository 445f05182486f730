"""A checkpoint of ours, and its adapters, as the GGUF files that llama.cpp reads.

    PYTHON llama_files.py FOLDER KIND BASE [ADAPTER ...]

Run by a Python that has gguf and numpy and need not have weft. Writes `FOLDER/base-KIND.gguf` and a file for each
adapter's folder (`file_of`), those that are not there yet. KIND (F16, Q8_0, Q4_0) is of the base's matrices; norms stay
in float32 and adapters in F16, the only forms in which llama.cpp computes with them.
"""

import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

BYTE_TOKENS = range(3, 259)  # after those of begin, end and unknown: a tokenizer must have them; nothing is tokenized
UNKNOWN, CONTROL, BYTE, NORMAL = 2, 3, 6, 1
ARCHITECTURES = {"llama": "llama", "gemma3_text": "gemma3", "phi3": "phi3"}  # by `model_type`


def main(folder: Path, kind: str, base: Path, adapters: list[Path]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((base / "config.json").read_text())
    _made(base_file(folder, kind), lambda into: write_base(base, into, config, kind))
    for source in adapters:
        _made(file_of(folder, source), lambda into, source=source: write_adapter(source, into, config))


def base_file(folder: Path, kind: str) -> Path:
    return folder / f"base-{kind}.gguf"


def file_of(folder: Path, adapter: Path) -> Path:
    """Return the file of an adapter, by the name of its folder."""
    return folder / f"{adapter.name}.gguf"


def _made(path: Path, write: Callable[[Path], None]) -> None:
    """Write a file beside its place and move it there when it is whole."""
    if not path.exists():
        half = path.with_suffix(".half")
        write(half)
        half.replace(path)


def write_base(source: Path, target: Path, config: dict[str, Any], kind: str) -> None:
    import gguf  # pyright: ignore[reportMissingImports] (of another Python)

    heads, vocab, architecture = config["num_attention_heads"], config["vocab_size"], _architecture(config)
    writer = gguf.GGUFWriter(target, architecture, use_temp_file=True)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(int(config["head_dim"] * config.get("partial_rotary_factor", 1)))
    writer.add_rope_freq_base(config["rope_theta"])
    if "rope_local_base_freq" in config:
        writer.add_rope_freq_base_swa(config["rope_local_base_freq"])
    if "sliding_window" in config:
        writer.add_sliding_window(config["sliding_window"] or 0)
    if "rope_scaling" in config:
        _add_long_rope(writer, config)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(vocab)
    bytes_of = [f"<0x{number - BYTE_TOKENS.start:02X}>" for number in BYTE_TOKENS]
    others = [f"\u2581t{number}" for number in range(BYTE_TOKENS.stop, vocab)]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "<s>", "</s>", *bytes_of, *others])
    writer.add_token_scores([0.0] * vocab)
    writer.add_token_types([UNKNOWN, CONTROL, CONTROL, *[BYTE] * len(bytes_of), *[NORMAL] * len(others)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    names = _names(config)
    for name, weight in tensors(source / "model.safetensors"):
        if architecture == "gemma3" and weight.ndim == 1:
            weight += 1  # what the model adds to a norm's weight is a part of it here
        to = names.get_name(name.removesuffix(".weight"))
        stored = gguf.GGMLQuantizationType[kind if weight.ndim == 2 else "F32"]
        writer.add_tensor(
            f"{to}.weight", gguf.quants.quantize(reordered(to, weight, config), stored), raw_dtype=stored
        )  # fmt: skip
    _close(writer)


def _architecture(config: dict[str, Any]) -> str:
    return ARCHITECTURES[config["model_type"]]


def _names(config: dict[str, Any]) -> Any:
    import gguf  # pyright: ignore[reportMissingImports]

    return gguf.get_tensor_name_map(gguf.MODEL_ARCH[_architecture(config).upper()], config["num_hidden_layers"])


def _add_long_rope(writer: Any, config: dict[str, Any]) -> None:
    original, longest = config["original_max_position_embeddings"], config["max_position_embeddings"]
    writer.add_rope_scaling_orig_ctx_len(original)
    writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(longest / original) / math.log(original)))
    for length in ("short", "long"):
        factors = np.array(config["rope_scaling"][f"{length}_factor"], np.float32)
        writer.add_tensor(f"rope_factors_{length}.weight", factors)


def write_adapter(source: Path, target: Path, config: dict[str, Any]) -> None:
    import gguf  # pyright: ignore[reportMissingImports]

    half = gguf.GGMLQuantizationType.F16
    writer = gguf.GGUFWriter(target, _architecture(config))
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", json.loads((source / "adapter_config.json").read_text())["lora_alpha"])
    names = _names(config)
    for name, weight in tensors(source / "adapter_model.safetensors"):
        module, side = name.removeprefix("base_model.model.").removesuffix(".weight").rsplit(".", 1)
        to = names.get_name(module)
        rows = reordered(to, weight, config) if side == "lora_B" else weight
        writer.add_tensor(f"{to}.weight.{side.lower()}", gguf.quants.quantize(rows, half), raw_dtype=half)
    _close(writer)


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


def reordered(name: str, rows: np.ndarray, config: dict[str, Any]) -> np.ndarray:
    """Return a Llama's queries and keys in the order in which llama.cpp rotates them; all others as they are."""
    if _architecture(config) != "llama":
        return rows
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    count = heads.get(name.rsplit(".", 1)[-1])
    return rows if count is None else neighbours(rows, count)


def neighbours(rows: np.ndarray, heads: int) -> np.ndarray:
    """Reorder [heads x d, ...]: rows i and i + d / 2 of a head, a pair that is rotated, become rows 2 i and 2 i + 1."""
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), [Path(each) for each in sys.argv[4:]])
