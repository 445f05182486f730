"""An encoder as Hugging Face stores it: a folder with config.json, model.safetensors and tokenizer.json.

Everything is read with bounds; a folder contains no pickle and no code. `weft_bucket_tokens` in config.json has the
upper edge of each class; a folder without it has S3's ten equal buckets. calibration.npz holds the learned read-out.
Without it the model answers with a wide margin at first, and learns from outcomes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np

from weft.domain.model.errors import Refused
from weft.domain.model.safetensors import MAX_MODEL_HEADER_BYTES, check_dtype, read_header
from weft.domain.strict_json import JsonError, JsonObject, is_int, parse_object
from weft.files import write_atomically
from weft_predictor.checkpoint import load
from weft_predictor.core.conformal import ConformalCalibrators
from weft_predictor.core.encoder import NAMES, Array, Encoder, EncoderClasses, EncoderShape, tenths
from weft_predictor.core.length_model import TARGET
from weft_predictor.core.offsets import Offsets
from weft_predictor.core.residual_scale import ResidualScale
from weft_predictor.core.ridge_model import COLD_SCALE, RidgeModel
from weft_predictor.errors import CorruptModel

CONFIG, WEIGHTS, TOKENIZER = "config.json", "model.safetensors", "tokenizer.json"
CALIBRATION = "calibration.npz"
BUCKETS_KEY = "weft_bucket_tokens"
MAX_CONTEXT_TOKENS = 2_048  # S3's buckets are tenths of it unless a folder sets them
MAX_PROMPT_TOKENS = 128  # a prompt is cut there: the bound of its cost (99 % of Alpaca's have at most 80)
MAX_CONFIG_BYTES, MAX_TOKENIZER_BYTES, MAX_WEIGHT_BYTES = 1 << 20, 32 << 20, 2 << 30
# The names of the numbers in config.json by architecture, and their largest values.
FIELDS: dict[str, dict[str, tuple[str, int]]] = {
    "distilbert": {"layers": ("n_layers", 48), "heads": ("n_heads", 64), "dim": ("dim", 4_096)}
    | {"hidden": ("hidden_dim", 16_384)},
    "bert": {"layers": ("num_hidden_layers", 48), "heads": ("num_attention_heads", 64), "dim": ("hidden_size", 4_096)}
    | {"hidden": ("intermediate_size", 16_384)},
}
ACTIVATION = {"distilbert": "activation", "bert": "hidden_act"}


@dataclass(frozen=True, slots=True)
class EncoderFiles:
    """The bytes of a folder's three files."""

    config: bytes
    weights: bytes
    tokenizer: bytes

    @property
    def name(self) -> str:
        """Return a name unique to this encoder's files."""
        return f"encoder-{sha256(self.config + self.tokenizer + sha256(self.weights).digest()).hexdigest()[:8]}"


def read_files(folder: Path) -> EncoderFiles:
    """Read a folder's files. Raises CorruptModel for a file beyond its bound, FileNotFoundError."""
    return EncoderFiles(
        _bounded(folder / CONFIG, MAX_CONFIG_BYTES),
        _bounded(folder / WEIGHTS, MAX_WEIGHT_BYTES),
        _bounded(folder / TOKENIZER, MAX_TOKENIZER_BYTES),
    )


def write_files(folder: Path, files: EncoderFiles) -> None:
    """Write each file atomically. A folder half replaced by a crash has another calibration's name, and is refused."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in ((CONFIG, files.config), (TOKENIZER, files.tokenizer), (WEIGHTS, files.weights)):
        write_atomically(folder / name, data)


def encoder_of(files: EncoderFiles) -> EncoderClasses:
    """Make the network, ready to classify. Raises CorruptModel with the file and its fault."""
    shape, weights = parse(files)
    return EncoderClasses(Encoder(shape, weights), tokenize_with(files.tokenizer, shape), files.name)


def parse(files: EncoderFiles) -> tuple[EncoderShape, dict[str, Array]]:
    """Read the shape, and the tensors in 32-bit floating point. Raises CorruptModel."""
    try:
        return read_shape(parse_object(files.config, max_bytes=MAX_CONFIG_BYTES)), _read_weights(files.weights)
    except JsonError as error:
        raise CorruptModel(f"{CONFIG}: {error}") from error
    except Refused as error:
        raise CorruptModel(f"{WEIGHTS}: {error}") from error


def read_model(path: Path) -> RidgeModel:
    """Read a ridge's file, or an encoder's folder. Raises FileNotFoundError, CorruptModel."""
    if not path.is_dir():
        return load(path, RidgeModel.load)
    features = encoder_of(read_files(path))
    try:
        return load(path / CALIBRATION, partial(RidgeModel.load, featurizer=features))
    except FileNotFoundError:
        scale, calibrators = ResidualScale.cold(COLD_SCALE), ConformalCalibrators(target=TARGET)
        return RidgeModel(features.name, features.uncalibrated(), Offsets(), scale, calibrators, featurizer=features)


def read_shape(config: JsonObject) -> EncoderShape:
    """Read the shape from config.json. Raises CorruptModel."""
    kind = config.get("model_type")
    if kind not in NAMES:
        raise CorruptModel(f"model_type is {kind!r}, not {' or '.join(NAMES)}")

    def number(field: str, maximum: int) -> int:
        value: Any = config.get(field)
        if not is_int(value) or not 1 <= value <= maximum:
            raise CorruptModel(f"{field} is {value!r}, not within 1..{maximum}")
        return value

    if (activation := config.get(ACTIVATION[kind], "gelu")) != "gelu":
        raise CorruptModel(f"{ACTIVATION[kind]} is {activation!r}; only gelu is computed here")
    numbers = {name: number(*bounds) for name, bounds in FIELDS[kind].items()}
    if numbers["dim"] % numbers["heads"]:
        raise CorruptModel(f"{numbers['dim']} channels cannot be shared by {numbers['heads']} heads")
    edges: Any = config.get(BUCKETS_KEY, list(tenths(MAX_CONTEXT_TOKENS)))
    if not isinstance(edges, list) or not all(map(is_int, cast("list[object]", edges))):
        raise CorruptModel(f"{BUCKETS_KEY} is not a list of integers")
    if len(edges) != 10 or not all(0 < a < b < 1 << 24 for a, b in pairwise(edges)):  # pyright: ignore[reportUnknownArgumentType]
        raise CorruptModel(f"{BUCKETS_KEY} is not 10 rising numbers of tokens")
    vocab, positions = number("vocab_size", 1 << 20), number("max_position_embeddings", 1 << 14)
    return EncoderShape(kind, vocab, positions, edges=tuple(edges), **numbers)


def tokenize_with(raw: bytes, shape: EncoderShape) -> Callable[[str], Sequence[int]]:
    """Make a tokenizer, text to ids, of tokenizer.json. Raises CorruptModel."""
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise CorruptModel(f"an encoder needs the tokenizers package: pip install 'weft[encoder]' ({error})") from error
    try:
        tokenizer = Tokenizer.from_buffer(raw)
        tokenizer.enable_truncation(min(shape.positions, MAX_PROMPT_TOKENS))
        tokenizer.no_padding()
    except Exception as error:
        raise CorruptModel(f"{TOKENIZER}: {error}") from error
    if (size := tokenizer.get_vocab_size()) > shape.vocab or not tokenizer.encode("").ids:
        raise CorruptModel(
            f"{TOKENIZER}: {size} tokens for a network with {shape.vocab}, or no special tokens around a text"
        )
    return lambda text: tokenizer.encode(text).ids


def _read_weights(raw: bytes) -> dict[str, Array]:
    header = read_header(BytesIO(raw), len(raw), max_bytes=MAX_MODEL_HEADER_BYTES)
    weights: dict[str, Array] = {}
    for tensor in header.tensors.values():
        if tensor.dtype == "I64":  # older BERT files keep position_ids
            continue
        check_dtype(tensor)
        data = memoryview(raw)[tensor.begin : tensor.end]
        if tensor.dtype == "BF16":
            values = (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
        else:
            values = np.frombuffer(data, "<f2" if tensor.dtype == "F16" else "<f4").astype(np.float32)
        weights[tensor.name] = values.reshape(tensor.shape)
    return weights


def _bounded(path: Path, max_bytes: int) -> bytes:
    if (size := path.stat().st_size) > max_bytes:
        raise CorruptModel(f"{path}: {size} bytes, the limit is {max_bytes}")
    return path.read_bytes()
