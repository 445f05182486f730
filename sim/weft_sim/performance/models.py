"""Named performance models: hardware, model and engine in, seconds and memory out.

The constants of an engine are in `constants.toml`. How they were fitted, and how far such models are from measurements
that they were not fitted to, is in `docs/benchmarks/phases.md`.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from weft_sim.performance.accelerator import accelerator
from weft_sim.performance.architecture import architecture
from weft_sim.performance.roofline import AdapterCosts, Efficiency, Roofline
from weft_sim.performance.step import StepShape

CONSTANTS, ADAPTERS = "constants.toml", "adapters.toml"


class UnknownEngine(ValueError):
    """The engine has no constants. The message lists the engines with constants."""


class DoesNotFit(ValueError):
    """The weights leave no memory for KV on `tensor_parallel` devices."""


@dataclass(frozen=True, slots=True)
class EnginePerformance:
    """An instance of an engine on `tensor_parallel` devices. Bytes are sums over the devices."""

    roofline: Roofline
    kv_tokens: float
    weight_bytes: float
    request_s: float  # of the server around the iterations: part of TTFT only

    def seconds(self, step: StepShape) -> float:
        """Seconds of one iteration."""
        return self.roofline.seconds(step)

    @property
    def kv_bytes(self) -> int:
        """Memory for KV: the rest after the weights."""
        return int(self.kv_tokens * self.kv_bytes_per_token)

    @property
    def kv_bytes_per_token(self) -> float:
        """The KV bytes of a token of context, in memory and in transfer."""
        return self.roofline.architecture.kv_bytes_per_token(self.roofline.kv_dtype)


def performance_model(
    hardware: str,
    model: str | Mapping[str, Any],
    tensor_parallel: int = 1,
    engine: str = "vllm",
    dtype: str = "bf16",
    kv_dtype: str = "bf16",
    slots: int = 0,
    max_rank: int = 0,
) -> EnginePerformance:
    """A model by its name or its `config.json`; `slots` of `max_rank` for adapters, whose memory is not taken off.

    Raises UnknownHardware, BadArchitecture, UnknownEngine, DoesNotFit.
    """
    roofline = Roofline(
        accelerator(hardware),
        architecture(model),
        efficiency(engine),
        tensor_parallel,
        dtype,
        kv_dtype,
        adapter_costs(slots, max_rank) if slots else None,
    )
    tokens = kv_tokens(roofline)
    if tokens < 1:
        raise DoesNotFit(f"the weights leave no room for KV on {tensor_parallel} x {hardware}: use more devices")
    return EnginePerformance(
        roofline, tokens, roofline.architecture.weight_bytes(dtype), roofline.efficiency.request_ms / 1e3
    )


def kv_tokens(model: Roofline) -> float:
    """Return the tokens of KV that fit in addition to the weights; negative if the weights do not fit."""
    e = model.efficiency
    free = model.tensor_parallel * (model.accelerator.memory_bytes * e.memory - e.reserved_bytes)
    free -= model.architecture.weight_bytes(model.dtype)
    ranks = min(model.tensor_parallel, model.architecture.kv_heads)  # more ranks hold copies
    return free * ranks / model.tensor_parallel / model.architecture.kv_bytes_per_token(model.kv_dtype)


def efficiency(engine: str) -> Efficiency:
    """The fitted constants of an engine. Raises UnknownEngine."""
    engines = _read(CONSTANTS)["engines"]
    if engine not in engines:
        raise UnknownEngine(f"engine {engine!r}: choose among {', '.join(engines)}")
    return Efficiency(**engines[engine])


def adapter_costs(slots: int, max_rank: int) -> AdapterCosts:
    """Return the cost of many adapters in vLLM 0.8.5, the only engine with published runs of many adapters."""
    return AdapterCosts(slots, max_rank, slots, **_read(ADAPTERS)["vllm"])


@cache
def _read(name: str) -> dict[str, Any]:
    return tomllib.loads((files("weft_sim.performance") / name).read_text(encoding="utf-8"))
