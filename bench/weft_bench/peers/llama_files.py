"""A checkpoint of ours, and its adapters, as the GGUF files that llama.cpp reads.

    PYTHON llama_files.py FOLDER KIND BASE [ADAPTER ...]

Run by a Python that has gguf and numpy and need not have weft. Writes `FOLDER/base-KIND.gguf` and a file for each
adapter's folder (`file_of`), those that are not there yet. KIND (F16, Q8_0, Q4_0) is of the base's matrices; norms stay
in float32 and adapters in F16, the only forms in which llama.cpp computes with them.
"""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

BYTE_TOKENS = range(3, 259)  # after those of begin, end and unknown: a tokenizer must have them; nothing is tokenized
UNKNOWN, CONTROL, BYTE, NORMAL = 2, 3, 6, 1


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

    heads, vocab, layers = config["num_attention_heads"], config["vocab_size"], config["num_hidden_layers"]
    writer = gguf.GGUFWriter(target, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(layers)
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    writer.add_rope_freq_base(config["rope_theta"])
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
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, layers)
    for name, weight in tensors(source / "model.safetensors"):
        to = names.get_name(name.removesuffix(".weight"))
        stored = gguf.GGMLQuantizationType[kind if weight.ndim == 2 else "F32"]
        writer.add_tensor(
            f"{to}.weight", gguf.quants.quantize(reordered(to, weight, config), stored), raw_dtype=stored
        )  # fmt: skip
    _close(writer)


def write_adapter(source: Path, target: Path, config: dict[str, Any]) -> None:
    import gguf  # pyright: ignore[reportMissingImports]

    half = gguf.GGMLQuantizationType.F16
    writer = gguf.GGUFWriter(target, "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", json.loads((source / "adapter_config.json").read_text())["lora_alpha"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
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
    """Return outputs of queries and keys in the order in which llama.cpp rotates them; all others as they are."""
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    count = heads.get(name.rsplit(".", 1)[-1])
    return rows if count is None else neighbours(rows, count)


def neighbours(rows: np.ndarray, heads: int) -> np.ndarray:
    """Reorder [heads x d, ...]: rows i and i + d / 2 of a head, a pair that is rotated, become rows 2 i and 2 i + 1."""
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), [Path(each) for each in sys.argv[4:]])
