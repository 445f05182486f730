"""Kinds of runners with prices: GPUs of a table (`hardware.toml`) by performance models, and measured runners."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from weft_sim.performance.models import DoesNotFit, EnginePerformance, performance_model
from weft_sim.performance.step import StepShape
from weft_sim.planning import splitwise
from weft_sim.planning.cluster import ServedModel
from weft_sim.planning.designs import PricedKind
from weft_sim.planning.machine import MachineKind

Entry = TypeVar("Entry")
TABLE = Path(__file__).with_name("hardware.toml")


class BadHardware(ValueError):
    """A table, or a choice from it, that cannot be used; the text says why."""


@dataclass(frozen=True, slots=True)
class GpuEntry:
    """A GPU. `link_gb_s`: GB/s of one GPU to other machines; `product`: the nodes' label."""

    accelerator: str
    price: float
    watts: float
    link_gb_s: float = 25.0
    product: str = ""


@dataclass(frozen=True, slots=True)
class MeasuredRunner:
    """A runner as it measured itself at start, and its price."""

    price: float
    watts: float
    step_ms_1: float
    best_batch: int
    step_ms_best: float
    prefill_tokens_per_s: float
    total_pages: int
    page_kib: float
    page_tokens: int = 16
    max_sequences: int = 32
    max_batch_tokens: int = 512
    link_gb_s: float = 1.0
    layers: int = 32

    def seconds(self, step: StepShape) -> float:
        """Return the seconds of an iteration: on a line through one row and the best batch, and its prompt tokens."""
        row_ms = max(0.0, (self.step_ms_best - self.step_ms_1) / max(1, self.best_batch - 1))
        base_ms = self.step_ms_1 - row_ms
        return (base_ms + row_ms * step.decode_rows) / 1e3 + step.prompt_tokens / self.prefill_tokens_per_s


@dataclass(frozen=True)
class Limits:
    """Limits of every runner's iterations."""

    max_sequences: int = 256
    max_batch_tokens: int = 2_048


@dataclass(frozen=True, slots=True)
class Hardware:
    """What a plan may use."""

    model: ServedModel
    kinds: tuple[PricedKind, ...]


def hardware(
    table: Path | None, names: Sequence[str], model: str | Mapping[str, Any], gpus: Sequence[int], limits: Limits
) -> Hardware:
    """Return the kinds `names` (default: every GPU of the table) serving `model` on each number of `gpus` a runner.

    Raises BadHardware, and what performance models raise of unknown models and accelerators.
    """
    entries, runners = read_table(table or TABLE)
    unknown = [name for name in names if name not in entries and name not in runners]
    if unknown:
        raise BadHardware(f"{', '.join(unknown)}: the table has {', '.join([*entries, *runners])}")
    if measured := [name for name in names if name in runners]:
        return _measured({name: runners[name] for name in measured}, str(model))
    kinds, served = list[PricedKind](), None
    for name in names or entries:
        for count in gpus:
            try:
                engine = performance_model(entries[name].accelerator, model, count)
            except DoesNotFit:
                continue
            served = served or _served(model, engine)
            kinds.append(_kind(f"{name} x{count}", entries[name], engine, count, limits))
    if served is None:
        raise BadHardware(f"the model fits on none of these with {', '.join(map(str, gpus))} GPUs a runner: give more")
    return Hardware(served, tuple(kinds))


def of_splitwise(table: Path | None, names: Sequence[str], model: str, limits: Limits) -> Hardware:
    """Return A100 and H100 with splitwise-sim's performance model, eight GPUs a runner. Raises BadHardware."""
    models = {each.name: each for each in (splitwise.BLOOM_176B, splitwise.LLAMA2_70B)}
    accelerators = {"a100": splitwise.A100, "h100": splitwise.H100}
    entries, _ = read_table(table or TABLE)
    if model not in models or any(name not in accelerators for name in names):
        query = f"{model} on {', '.join(names)}" if names else model
        raise BadHardware(f"splitwise-sim has {', '.join(models)} on {', '.join(accelerators)}, not {query}")
    kinds = list[PricedKind]()
    for name in names or accelerators:
        kind, entry = splitwise.machine_kind(accelerators[name], models[model]), entries[name]
        kind = replace(kind, name=f"{name} x8", link_bytes_per_s=8e9 * entry.link_gb_s, **_limits(limits))
        kinds.append(PricedKind(kind, 8, 8 * entry.price, 8 * entry.watts, entry.product))
    return Hardware(models[model], tuple(kinds))


def read_table(path: Path) -> tuple[dict[str, GpuEntry], dict[str, MeasuredRunner]]:
    """Read a table of hardware. Raises BadHardware."""
    try:
        table = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise BadHardware(f"{path}: {error}") from error
    gpus = {name: _entry(GpuEntry, path, name, values) for name, values in table.get("gpus", {}).items()}
    runners = {name: _entry(MeasuredRunner, path, name, values) for name, values in table.get("runners", {}).items()}
    return gpus, runners


def _entry(kind: type[Entry], path: Path, name: str, values: Mapping[str, Any]) -> Entry:
    names = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    if unknown := [key for key in values if key not in names]:
        raise BadHardware(f"{path}, {name}: {', '.join(unknown)} is unknown; there are: {', '.join(sorted(names))}")
    try:
        return kind(**values)
    except TypeError as error:
        raise BadHardware(f"{path}, {name}: {error}") from error


def _served(model: str | Mapping[str, Any], engine: EnginePerformance) -> ServedModel:
    name = model if isinstance(model, str) else str(model.get("_name_or_path") or "model")
    layers = engine.roofline.architecture.layers
    return ServedModel(name, layers, int(engine.kv_bytes_per_token), int(engine.weight_bytes))


def _kind(name: str, entry: GpuEntry, engine: EnginePerformance, gpus: int, limits: Limits) -> PricedKind:
    kind = MachineKind(
        name, engine, engine.kv_bytes, link_bytes_per_s=gpus * 1e9 * entry.link_gb_s, request_s=engine.request_s,
        **_limits(limits),
    )  # fmt: skip
    return PricedKind(kind, gpus, gpus * entry.price, gpus * entry.watts, entry.product)


def _limits(limits: Limits) -> dict[str, int]:
    return {"max_sequences": limits.max_sequences, "max_batch_tokens": limits.max_batch_tokens}


def _measured(entries: Mapping[str, MeasuredRunner], model: str) -> Hardware:
    sizes = {int(entry.page_kib * 1024 / entry.page_tokens) for entry in entries.values()}
    if len(sizes) > 1:
        raise BadHardware(f"{', '.join(entries)} have KV of different sizes a token: they serve different models")
    kinds = [
        PricedKind(
            MachineKind(
                name, entry, int(entry.total_pages * entry.page_kib * 1024), entry.max_sequences,
                entry.max_batch_tokens, link_bytes_per_s=1e9 * entry.link_gb_s,
            ),
            0, entry.price, entry.watts,
        )
        for name, entry in entries.items()
    ]  # fmt: skip
    layers = next(iter(entries.values())).layers
    return Hardware(ServedModel(model, layers, sizes.pop(), 0), tuple(kinds))
