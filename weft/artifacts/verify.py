"""Verdicts on adapters and base models, and the check that each of their weights is a finite number.

Names and shapes are checked on headers alone, in milliseconds (`weft.domain.model`); every weight is read once for NaN
and infinity: one such number in one row can spoil a whole batch. A number is NaN or infinite exactly when all bits of
its exponent are set, so weights are compared as integers; that also covers bfloat16, which numpy does not have. (The
runner checks what it has mapped, `weft_runner.model.arrays`; this reads a stream.)
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
    """What an accepted adapter is. `rank` is the largest of any module, `target_modules` the projections it changes.

    `eos_token_ids`: its own, beside the base's; `warnings`: what of its files is not used, and why; where its
    configuration, a note about the tensors, says something else than they do. `chat_template`: whose it is, and its
    fault if it has one.
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
    """What an accepted base model is. `warnings`: what of its files is not used, and why."""

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
    """Summarise a verified adapter; `size_bytes` is of all its files."""
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
    """List what the configuration says of modules, by their names in training, and the tensors do not bear out."""
    adapted = {module.trained for module in modules}
    prefix = modules[0].trained.removesuffix(modules[0].module.removeprefix(INNER))
    linear = [(prefix + name.removeprefix(INNER), layer) for name, layer, _ in linear_modules(spec)]
    if config.selects is not None:
        selected = {name for name, layer in linear if config.selects(name, layer)}
        if extra := adapted - selected:
            yield f"the file has {some_of(extra)}, which adapter_config.json does not select: served as the file has it"
        if fewer := selected - adapted:
            yield f"the file has nothing for {some_of(fewer)}, which adapter_config.json selects"
    module_names = {name.split(".", at)[at] for name, _ in linear for at in range(name.count(".") + 1)}
    if strange := {quoted(name) for name in config.target_names if name not in module_names}:
        yield f"target_modules has names of no linear layer that is adapted here: {some_of(strange)}"
    patterns = [*config.ranks, *config.alphas]
    if unread := [quoted(pattern.key) for pattern in patterns if pattern.matches is None]:
        yield f"keys of rank_pattern that are not evaluated here (ranks are those of the tensors): {some_of(unread)}"
    if idle := [quoted(entry.key) for entry in patterns if entry.matches and not any(map(entry.matches, adapted))]:
        yield f"keys of rank_pattern or alpha_pattern that no module of the file matches: {some_of(idle)}"


def verify_model(spec: ModelSpec, headers: dict[str, Header], size_bytes: int) -> ModelVerdict:
    """Check that a base model's weights (file name -> header) are exactly what its config asks for.

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
    """What an adapter was trained on is the base, by one of its names; a warning where that is not word for word.

    Models of one shape are many (a base, its instructed form, another version), so shapes cannot tell them apart, and
    an adapter of another one would answer wrongly and without an error: another name is refused. A name claims as much
    as it says: its last part, in any case, of the weights that a quantised form was made of. A folder of the machine
    that trained claims nothing, unless its name says a model's size, or that it was merged; nor does an adapter that
    does not know its base.

    Raises Refused(BaseMismatch).
    """
    names = {last_part(name) for name in accepted if name}
    trained_on = config.base_model or ""
    if not trained_on or not names or last_part(trained_on) in names:
        return ()
    claim = _claimed_model(trained_on)
    if claim is None:
        return (
            f"trained on {quoted(trained_on)}, a folder that says no model: taken for the base, whose shapes it has",
        )
    if _weights_name(claim) in map(_weights_name, names):
        return (f"trained on {quoted(trained_on)}, taken for {' / '.join(sorted(names))}",)
    raise Refused(
        Reason.BASE_MISMATCH,
        f"the adapter was trained on {quoted(trained_on, 200)}, the pool serves {' / '.join(sorted(names))}; "
        "if they are the same model, set spec.baseModel to the pool's model name",
    )


# A copy of a hub's repository in the hub's own cache.
_CACHED = re.compile(r"(?:^|/)models--(?:[^/]*--)?([^/]+)")
_FOLDER = re.compile(r"[/.~]|[A-Za-z]:/|[^/]+/[^/]+/")
_MODEL_IN_NAME = re.compile(r"(?<![0-9a-z])[0-9]+(?:\.[0-9]+)?[bm](?![0-9a-z])|merged")
# How those who quantise or convert a model name what they made of it.
_MADE_OF = re.compile(
    r"(?:[-._](?:unsloth|bnb|dynamic|quantized|awq|gptq|hqq|gguf|nf4|mxfp4|nvfp4|fp8|fp16|bf16|int[48]|[48]-?bits?|w[48]a(?:8|16)))+$"
)


def _claimed_model(trained_on: str) -> str | None:
    """The model that an adapter says it was trained on; None for a folder whose name says none."""
    path = trained_on.replace("\\", "/")
    if cached := _CACHED.search(path):
        return cached[1]
    last = last_part(path)
    return None if _FOLDER.match(path) and not _MODEL_IN_NAME.search(_weights_name(last)) else last


def _weights_name(model: str) -> str:
    """A model's name without what does not tell weights apart: case, `Meta-` (some leave it out), how they are stored.

    ModelScope's cache writes a dot as `___`.
    """
    return _MADE_OF.sub("", model.casefold().replace("___", ".")).removeprefix("meta-")


def last_part(name: str) -> str:
    """The last part of a model's name or path: `org/model` and `/some/where/model/` -> `model`."""
    return name.rstrip("/").rpartition("/")[2].rpartition(":")[2]


def check_finite(
    file: BinaryIO, header: Header, *, chunk_bytes: int = CHUNK_BYTES, tick: Callable[[int], None] = lambda _: None
) -> None:
    """Read every tensor of `file`; `tick` is called with the bytes of each chunk before it, and may raise to stop.

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
