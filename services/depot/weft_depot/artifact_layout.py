"""The files of an artifact of each kind, and checks of their consistency.

The checks read through `Files`. So the same code validates the source before the copy (headers: seconds), the copy
itself (the served bytes are the checked bytes), and earlier blobs.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from pydantic.alias_generators import to_camel

from weft.artifacts.adapter_config import MAX_CONFIG_BYTES as MAX_ADAPTER_CONFIG_BYTES
from weft.artifacts.adapter_config import MAX_CONFIG_RANK, parse_adapter_config
from weft.artifacts.digest import Kind
from weft.artifacts.errors import Reason, Refused
from weft.artifacts.verify import AdapterVerdict, ModelVerdict, check_base_name, check_finite, verdict_of, verify_model
from weft.chat_template import (
    NAMED_FILE,
    TEMPLATE_FILE,
    TEMPLATE_FILES,
    ChatTemplate,
    TemplateFault,
    adapter_template,
    template_of,
)
from weft.domain.adapter import FILES
from weft.domain.model.adapter import check_adapter
from weft.domain.model.config import MAX_CONFIG_BYTES as MAX_MODEL_CONFIG_BYTES
from weft.domain.model.config import parse_model_config
from weft.domain.model.generation import (
    TOKENIZER,
    TOKENIZER_CONFIG,
    Read,
    adapter_eos,
    sampling_defaults,
    strange_tokens,
    tokenizer_eos,
)
from weft.domain.model.safetensors import MAX_ADAPTER_HEADER_BYTES, MAX_MODEL_HEADER_BYTES, Header, read_header
from weft.domain.model.spec import ModelSpec
from weft.domain.model.tensors import some_of
from weft.domain.strict_json import JsonError, parse_object
from weft.domain.text import quoted
from weft_depot.files import FileFilter, Files

ADAPTER_CONFIG, ADAPTER_WEIGHTS = FILES
MODEL_CONFIG, MODEL_INDEX = "config.json", "model.safetensors.index.json"
GENERATION_CONFIG = "generation_config.json"
ADAPTER_FILES = (*FILES, *TEMPLATE_FILES)
_MODEL_FILES = frozenset((MODEL_CONFIG, MODEL_INDEX, TOKENIZER, GENERATION_CONFIG, *TEMPLATE_FILES))
SINGLE = "model.safetensors"
NAMED_FILES = frozenset(ADAPTER_FILES) | _MODEL_FILES | {SINGLE}  # all but the shards: the index has their names
_SECOND_COPY = "consolidated"  # Mistral publishes a second copy of the weights, in one file with different names
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
_TRAINER_STATE = re.compile(r"training_args\.bin|(optimizer|scheduler|scaler|rng_state)(_[0-9]+)?\.(bin|pt|pth)")
_HELP = {
    ADAPTER_CONFIG: "; adapters in subfolders, for example checkpoint-500, need a separate URI each",
    ADAPTER_WEIGHTS: "; save shards and adapters of mlx-lm as PEFT does",
}
MAX_TEXT_BYTES = 128 << 20  # a tokenizer of 256,000 tokens is about 35 MB
MAX_WEIGHT_FILES = 1024
MAX_FAULT_CHARS = 512  # of a chat template
MAX_NAMED_FILES = 10  # named files in an error


@dataclass(frozen=True, slots=True)
class BaseModel:
    """The base model of an adapter, its names, and the id of a text among its tokens."""

    shape: ModelSpec
    names: tuple[str, ...]
    token_of: Callable[[str], int | None]


@dataclass(frozen=True, slots=True)
class ArtifactLimits:
    """The maximum bytes of all files of an artifact: a wrong URI must not fill the volume."""

    adapter_bytes: int = 4 << 30  # rank 128 on all matrices of a 70B model is 3.3 GB in 16 bits
    model_bytes: int = 1 << 40  # 405B parameters in 16 bits are 0.8 TB


def file_filter(kind: Kind) -> FileFilter:
    """Return a filter for the relevant names of a source: files to copy, and pickles, which are only reported."""

    def matters(name: str) -> bool:
        if name.endswith(_PICKLES):
            return not _TRAINER_STATE.fullmatch(name)
        return name in ADAPTER_FILES if kind == "adapter" else name in _MODEL_FILES or name.endswith(".safetensors")

    return matters


def select_files(kind: Kind, files: Files, limits: ArtifactLimits) -> tuple[str, ...]:
    """List the names to copy. Raises Refused: MissingFile, UnsafeFormat, TooLarge."""
    names = [name for name in files.sizes if not name.endswith(_PICKLES)]
    pickles = files.sizes.keys() - set(names)
    if MODEL_INDEX in names or SINGLE in names:
        names = [name for name in names if not name.startswith(_SECOND_COPY)]
    weights = [name for name in names if name.endswith(".safetensors")]
    if pickles and not weights:
        reason = f"{min(pickles)} is a pickle and can run code when opened; save the weights as safetensors"
        raise Refused(Reason.UNSAFE_FORMAT, reason)
    required = FILES if kind == "adapter" else (MODEL_CONFIG, TOKENIZER)
    for name in required:
        if name not in names:
            available = ", ".join(sorted(names)[:MAX_NAMED_FILES]) + (", ..." if len(names) > MAX_NAMED_FILES else "")
            raise Refused(
                Reason.MISSING_FILE, f"{name} is not there; found: {available or 'no files'}{_HELP.get(name, '')}"
            )
    if not weights:
        raise Refused(Reason.MISSING_FILE, "no *.safetensors file found")
    for name in names:
        if name not in weights and files.sizes[name] > MAX_TEXT_BYTES:
            raise Refused(Reason.TOO_LARGE, f"{name} has {files.sizes[name]} bytes, the limit is {MAX_TEXT_BYTES}")
    total = sum(files.sizes[name] for name in names)
    max_bytes = limits.adapter_bytes if kind == "adapter" else limits.model_bytes
    if total > max_bytes or len(weights) > MAX_WEIGHT_FILES:
        raise Refused(Reason.TOO_LARGE, f"{len(names)} files of {total} bytes, the limit is {max_bytes} bytes")
    return tuple(sorted(names))


def validate(kind: Kind, files: Files, *, base: BaseModel | None, max_rank: int | None) -> dict[str, Any]:
    """Check headers and configs. Return the verdict in the form of the API. Raises Refused."""
    return _check_adapter(files, base, max_rank or MAX_CONFIG_RANK) if kind == "adapter" else _check_model(files)


def check_weights_finite(files: Files, names: Iterable[str], step: Callable[[int], None]) -> None:
    """Check that every weight of the files is finite. `step` is called with the size of each chunk.

    Raises Refused(NotFinite).
    """
    for name in names:
        if name.endswith(".safetensors"):
            header = _header(files, name, MAX_MODEL_HEADER_BYTES)
            with files.open(name) as file:
                check_finite(file, header, tick=step)


def read_shape(files: Files) -> ModelSpec:
    """Read the shape of a base model. Raises Refused: ConfigInvalid, UnsupportedModel."""
    generation = GENERATION_CONFIG in files.sizes
    return parse_model_config(
        _text(files, MODEL_CONFIG, MAX_MODEL_CONFIG_BYTES),
        _text(files, GENERATION_CONFIG, MAX_MODEL_CONFIG_BYTES) if generation else None,
    )


def template_fault(text: bytes, base: Files) -> str:
    """Return the fault of a chat template that replaces the templates of a base, or ""."""
    files = {name: raw for name, raw in _template_files(base).items() if name != NAMED_FILE}
    verdict = _template_verdict(lambda: template_of({**files, TEMPLATE_FILE: text}), "", "")
    return verdict.get("fault", "")


def check_upload(files: Files) -> None:
    """Check an adapter as far as possible without its base: both files, a configuration, a header. Raises Refused."""
    for name in FILES:
        if name not in files.sizes:
            raise Refused(Reason.MISSING_FILE, f"the form has no file {name}")
    parse_adapter_config(_text(files, ADAPTER_CONFIG, MAX_ADAPTER_CONFIG_BYTES))
    _header(files, ADAPTER_WEIGHTS, MAX_ADAPTER_HEADER_BYTES)


def _check_adapter(files: Files, base: BaseModel | None, max_rank: int) -> dict[str, Any]:
    spec = parse_adapter_config(_text(files, ADAPTER_CONFIG, MAX_ADAPTER_CONFIG_BYTES))
    header = _header(files, ADAPTER_WEIGHTS, MAX_ADAPTER_HEADER_BYTES)
    if base is None:
        raise Refused(Reason.BASE_MISMATCH, "an adapter is only taken against a base; the request names none")
    renamed = check_base_name(spec, base.names)
    pairs = check_adapter(spec, header, base.shape, max_rank=max_rank)
    verdict = verdict_of(spec, pairs, base.shape, sum(files.sizes.values()))
    eos, warnings = adapter_eos(reader(files), base.token_of, base.shape.vocab_size)
    strange: list[str] = []

    def own() -> ChatTemplate | None:
        template, strange_texts = adapter_template(_template_files(files), {}, base.token_of)
        strange.extend(strange_texts)
        return template

    template = _template_verdict(own, "Adapter", "Base")
    written = "".join(strange)  # mentions tokens written by its template
    tokens = [quoted(text) for text in strange_tokens(reader(files), base.token_of) if repr(text)[1:60] not in written]
    if tokens:
        text = f"the base has no such tokens, or with different ids: {some_of(tokens)}; prompts get plain text"
        strange.append(f"{TOKENIZER_CONFIG}: {text}")
    warnings = (*renamed, *verdict.warnings, *warnings, *strange)
    return _to_json(replace(verdict, eos_token_ids=eos, warnings=warnings, chat_template=template))


def _check_model(files: Files) -> dict[str, Any]:
    shape = read_shape(files)
    weights = [name for name in files.sizes if name.endswith(".safetensors")]
    headers = {name: _header(files, name, MAX_MODEL_HEADER_BYTES) for name in weights}
    if MODEL_INDEX in files.sizes:
        _check_index(files, headers)
    for name in files.sizes:
        if name.endswith(".json"):
            _json(files, name, MAX_TEXT_BYTES)
    generation = GENERATION_CONFIG in files.sizes
    defaults, warnings = sampling_defaults(_json(files, GENERATION_CONFIG, MAX_TEXT_BYTES) if generation else {})
    verdict = verify_model(shape, headers, sum(files.sizes.values()))
    ends = shape.eos | tokenizer_eos(reader(files), shape.vocab_size)
    template = _template_verdict(lambda: template_of(_template_files(files)), "Base", "None")
    verdict = replace(verdict, generation_defaults=defaults, warnings=warnings, chat_template=template)
    return _to_json(replace(verdict, eos_token_ids=tuple(sorted(ends))))


def _template_files(files: Files) -> dict[str, bytes]:
    """Read the files of chat templates. Raises Refused(TooLarge)."""
    return {name: _text(files, name, MAX_TEXT_BYTES) for name in TEMPLATE_FILES if name in files.sizes}


def _template_verdict(read: Callable[[], ChatTemplate | None], owner: str, default_owner: str) -> dict[str, str]:
    """Return the owner of the chat template in use, and its fault if it does not compile or fails on the smallest
    conversation."""
    try:
        if (template := read()) is None:
            return {"from": default_owner}
        template.check()
    except TemplateFault as error:
        return {"from": owner, "fault": str(error)[:MAX_FAULT_CHARS]}
    return {"from": owner}


def reader(files: Files) -> Read:
    """Return a function that reads files by name. It raises Refused(TooLarge)."""
    return lambda name: _text(files, name, MAX_TEXT_BYTES) if name in files.sizes else None


def _to_json(verdict: AdapterVerdict | ModelVerdict) -> dict[str, Any]:
    """Return the verdict as JSON types, without unknown fields."""
    return _camel(asdict(verdict))


def _camel(fields: Mapping[str, Any]) -> dict[str, Any]:
    camel = {
        to_camel(name): _camel(v) if isinstance(v, dict) else list(v) if isinstance(v, tuple) else v
        for name, v in fields.items()
    }
    return {name: v for name, v in camel.items() if v not in (None, [], {})}


def _check_index(files: Files, headers: dict[str, Header]) -> None:
    """Check that the index and the shards list the same tensors."""
    weight_map = _json(files, MODEL_INDEX, MAX_TEXT_BYTES).get("weight_map")
    if not isinstance(weight_map, dict):
        raise Refused(Reason.CONFIG_INVALID, f"{MODEL_INDEX}: weight_map is not an object")
    if missing := sorted({str(shard) for shard in weight_map.values()} - headers.keys()):
        raise Refused(Reason.MISSING_FILE, f"{quoted(missing[0], 200)} is not there; {MODEL_INDEX} names it")
    actual = {tensor: name for name, header in headers.items() for tensor in header.tensors}
    if actual != weight_map:
        wrong = min(str(tensor) for tensor, _ in actual.items() ^ weight_map.items())
        raise Refused(Reason.CONFIG_INVALID, f"{MODEL_INDEX}: {wrong[:200]!r} is not in the shard named for it")


def _header(files: Files, name: str, max_bytes: int) -> Header:
    with files.open(name) as file:
        try:
            return read_header(file, files.sizes[name], max_bytes=max_bytes)
        except Refused as error:
            raise Refused(error.reason, f"{name}: {error.message}") from error


def _json(files: Files, name: str, max_bytes: int) -> dict[str, Any]:
    try:
        return parse_object(_text(files, name, max_bytes), max_bytes=max_bytes)
    except JsonError as error:
        raise Refused(Reason.CONFIG_INVALID, f"{name}: {error}") from error


def _text(files: Files, name: str, max_bytes: int) -> bytes:
    with files.open(name) as file:
        raw = file.read(max_bytes + 1)
    if len(raw) > max_bytes:
        raise Refused(Reason.TOO_LARGE, f"{name} has more than {max_bytes} bytes")
    return raw
