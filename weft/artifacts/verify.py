"""Verdicts on adapters and base models, and the check for finite weights.

Names and shapes are checked on headers alone, in milliseconds (`weft.domain.model`). Every weight is read once for NaN
and infinity: a single such number can spoil a whole batch. A number is NaN or infinite exactly when all bits of its
exponent are set, so weights are compared as integers. The comparison also covers bfloat16, unknown to numpy. (The
runner checks its mapped weights in `weft_runner.model.arrays`. This module reads a stream.)
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import numpy as np

from weft.artifacts.adapter_config import AdapterConfig
from weft.domain.model.adapter import AdaptedModule
from weft.domain.model.errors import Reason, Refused
from weft.domain.model.safetensors import Header, check_dtype, dtype_name
from weft.domain.model.spec import ModelSpec
from weft.domain.model.tensors import INNER, check_model_tensors, linear_modules, some_of
from weft.domain.request import NO_DEFAULTS, SamplingDefaults
from weft.domain.text import quoted

CHUNK_BYTES = 4 << 20
# safetensors dtype -> (integer of the same width, mask of its exponent)
_EXPONENTS: dict[str, tuple[Any, int]] = {
    "F16": (np.dtype("<u2"), 0x7C00),
    "BF16": (np.dtype("<u2"), 0x7F80),
    "F32": (np.dtype("<u4"), 0x7F80_0000),
}


@dataclass(frozen=True, slots=True)
class AdapterVerdict:
    """The facts of an accepted adapter. `rank` is the largest of any module, `target_modules` the changed projections.

    `eos_token_ids`: the adapter's, in addition to the base's. `warnings`: unused parts of its files, with the reason,
    and differences between its configuration and its tensors. `chat_template`: its owner, and its fault if it has one.
    """

    rank: int
    alpha: float
    target_modules: tuple[str, ...]
    size_bytes: int
    dtype: str
    base_model: str
    eos_token_ids: tuple[int, ...] = ()
    warnings: tuple[str, ...] = ()
    chat_template: dict[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True)
class ModelVerdict:
    """The facts of an accepted base model. `warnings`: unused parts of its files, with the reason."""

    architecture: str
    hidden_size: int
    layers: int
    vocab_size: int
    max_context: int
    size_bytes: int
    dtype: str
    eos_token_ids: tuple[int, ...] = ()
    generation_defaults: SamplingDefaults = NO_DEFAULTS
    warnings: tuple[str, ...] = ()
    chat_template: dict[str, str] = field(default_factory=dict[str, str])


def verdict_of(
    config: AdapterConfig, modules: tuple[AdaptedModule, ...], spec: ModelSpec, size_bytes: int
) -> AdapterVerdict:
    """Return the verdict on a verified adapter. `size_bytes` is the size of all its files."""
    changed = {module.module.rpartition(".")[2] for module in modules}
    return AdapterVerdict(
        rank=max(module.rank for module in modules),
        alpha=config.alpha,
        target_modules=tuple(name for module in spec.family.modules if (name := module.partition(".")[2]) in changed),
        size_bytes=size_bytes,
        dtype=dtype_name({tensor.dtype for module in modules for tensor in (module.a, module.b)}),
        base_model=config.base_model or "",
        warnings=(*config.remarks, *_differences(config, modules, spec)),
    )


def _differences(config: AdapterConfig, modules: tuple[AdaptedModule, ...], spec: ModelSpec) -> Iterator[str]:
    """List statements of the configuration about modules, by their names in training, that contradict the tensors."""
    adapted = {module.trained for module in modules}
    prefix = modules[0].trained.removesuffix(modules[0].module.removeprefix(INNER))
    linear = [(prefix + name.removeprefix(INNER), layer) for name, layer, _ in linear_modules(spec)]
    if config.selects is not None:
        selected = {name for name, layer in linear if config.selects(name, layer)}
        if extra := adapted - selected:
            yield f"the file has {some_of(extra)}, not selected by adapter_config.json: served as in the file"
        if fewer := selected - adapted:
            yield f"the file has nothing for {some_of(fewer)}, selected by adapter_config.json"
    module_names = {name.split(".", at)[at] for name, _ in linear for at in range(name.count(".") + 1)}
    if strange := {quoted(name) for name in config.target_names if name not in module_names}:
        yield f"target_modules has names outside the linear layers adapted here: {some_of(strange)}"
    patterns = [*config.ranks, *config.alphas]
    if unread := [quoted(pattern.key) for pattern in patterns if pattern.matches is None]:
        yield f"keys of rank_pattern are not evaluated here (ranks come from the tensors): {some_of(unread)}"
    if idle := [quoted(entry.key) for entry in patterns if entry.matches and not any(map(entry.matches, adapted))]:
        yield f"keys of rank_pattern or alpha_pattern match no module of the file: {some_of(idle)}"


def verify_model(spec: ModelSpec, headers: dict[str, Header], size_bytes: int) -> ModelVerdict:
    """Check that a base model's weights (file name -> header) match its config exactly.

    Raises Refused: ShapeMismatch, UnknownModule, HeaderInvalid, DtypeNotSupported.
    """
    tensors = check_model_tensors(spec, headers)
    return ModelVerdict(
        architecture=spec.architecture,
        hidden_size=spec.hidden_size,
        layers=spec.layers,
        vocab_size=spec.vocab_size,
        max_context=spec.max_positions,
        size_bytes=size_bytes,
        dtype=dtype_name({tensor.dtype for tensor in tensors.values()}),
    )


def check_base_name(config: AdapterConfig, accepted: Iterable[str]) -> tuple[str, ...]:
    """Check that an adapter was trained on the base, by a name of the base. Return a warning if the names differ in
    form.

    Many models share a shape (a base, its instructed form, a later version), so shapes cannot tell them apart. An
    adapter for a different model would answer wrongly without an error, so a different name is refused. Names are
    compared by their last part, in any case. The name of a quantised form counts as the name of its original weights. A
    folder on the training machine is accepted, unless its name has a model's size or says merged. An adapter without a
    base name is accepted.

    Raises Refused(BaseMismatch).
    """
    names = {last_part(name) for name in accepted if name}
    trained_on = config.base_model or ""
    if not trained_on or not names or last_part(trained_on) in names:
        return ()
    claim = _claimed_model(trained_on)
    if claim is None:
        return (f"trained on {quoted(trained_on)}, a folder without a model's name: taken for the base by its shapes",)
    if _weights_name(claim) in map(_weights_name, names):
        return (f"trained on {quoted(trained_on)}, taken for {' / '.join(sorted(names))}",)
    raise Refused(
        Reason.BASE_MISMATCH,
        f"the adapter was trained on {quoted(trained_on, 200)}, the pool serves {' / '.join(sorted(names))}; "
        "if they are the same model, set spec.baseModel to the pool's model name",
    )


# A copy of a hub's repository in the hub's cache.
_CACHED = re.compile(r"(?:^|/)models--(?:[^/]*--)?([^/]+)")
_FOLDER = re.compile(r"[/.~]|[A-Za-z]:/|[^/]+/[^/]+/")
_MODEL_IN_NAME = re.compile(r"(?<![0-9a-z])[0-9]+(?:\.[0-9]+)?[bm](?![0-9a-z])|merged")
# Suffixes of names of quantised or converted models.
_MADE_OF = re.compile(
    r"(?:[-._](?:unsloth|bnb|dynamic|quantized|awq|gptq|hqq|gguf|nf4|mxfp4|nvfp4|fp8|fp16|bf16|int[48]|[48]-?bits?|w[48]a(?:8|16)))+$"
)


def _claimed_model(trained_on: str) -> str | None:
    """Return the model named by an adapter as its base, or None for a folder without a model's name."""
    path = trained_on.replace("\\", "/")
    if cached := _CACHED.search(path):
        return cached[1]
    last = last_part(path)
    return None if _FOLDER.match(path) and not _MODEL_IN_NAME.search(_weights_name(last)) else last


def _weights_name(model: str) -> str:
    """Return a model's name without parts that do not distinguish weights: case, `Meta-` (often left out), storage
    format.

    ModelScope's cache writes a dot as `___`.
    """
    return _MADE_OF.sub("", model.casefold().replace("___", ".")).removeprefix("meta-")


def last_part(name: str) -> str:
    """Return the last part of a model's name or path: `org/model` and `/some/where/model/` -> `model`."""
    return name.rstrip("/").rpartition("/")[2].rpartition(":")[2]


def check_finite(
    file: BinaryIO, header: Header, *, chunk_bytes: int = CHUNK_BYTES, tick: Callable[[int], None] = lambda _: None
) -> None:
    """Check that every tensor of `file` is finite. `tick` is called with the size of each chunk before it is read, and
    may raise to stop.

    Raises Refused: NotFinite (names tensor and index), DtypeNotSupported, OffsetsInvalid when the file ends early.
    """
    step = chunk_bytes // 8 * 8
    for tensor in header.tensors.values():
        check_dtype(tensor)
        dtype, exponent = _EXPONENTS[tensor.dtype]
        file.seek(tensor.begin)
        done = 0
        while done < tensor.size_bytes:
            tick(min(step, tensor.size_bytes - done))
            raw = file.read(min(step, tensor.size_bytes - done))
            if len(raw) % dtype.itemsize or not raw:
                raise Refused(Reason.OFFSETS_INVALID, f"the file ends inside tensor {tensor.name!r}")
            values: Any = np.frombuffer(raw, dtype)
            bad = (values & exponent) == exponent
            if bad.any():
                flat = done // dtype.itemsize + int(bad.argmax())
                index = [int(at) for at in np.unravel_index(flat, tensor.shape)] if tensor.shape else []
                raise Refused(Reason.NOT_FINITE, f"tensor {tensor.name!r} is NaN or infinite at {index}")
            done += len(raw)
