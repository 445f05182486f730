"""`weft bench fidelity --part vllm`: the engine simulation beside real vLLM 0.19, request by request.

300 ShareGPT turns at 10 sessions a second (LLMServingSim's published runs on RTX 4090 and RTX PRO 6000): the same
requests at the same times. Constants start from those of vLLM on H100 and H200 and are fitted on one run; each run is
then predicted with the constants of each dense one. `value` is the simulated mean, `baseline` vLLM's. LLMServingSim,
profiled on the same GPU, is 0.2 to 4 % off on the dense runs. KV memory is what was recorded, else what a model leaves.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from weft_bench.cpu_context import Bar
from weft_bench.data import table
from weft_bench.engine_request import EngineRequest
from weft_bench.engine_simulation import EngineLimits, EngineSimulation, serve
from weft_bench.fidelity_fit import PRIORS
from weft_bench.fidelity_points import Array
from weft_sim.performance.accelerator import accelerator
from weft_sim.performance.architecture import architecture
from weft_sim.performance.models import efficiency, kv_tokens
from weft_sim.performance.roofline import Efficiency, Roofline
from weft_stage.lines import Line, Origin

FILES = "llmservingsim_vllm_*.csv.gz"
NAME = re.compile(r"llmservingsim_vllm_(?P<device>[a-z0-9]+)_(?P<model>[a-z0-9_]+?)(?:_tp(?P<ranks>\d+))?\.csv")
DEVICES = {"rtx4090": ("RTX-4090", 256), "rtxpro6000": ("RTX-PRO-6000", 128)}  # and its max_num_seqs
MODELS = {"llama31_8b": "meta-llama/Llama-3.1-8B", "qwen3_32b": "Qwen/Qwen3-32B", "qwen3_30b_a3b": "Qwen/Qwen3-30B-A3B"}
RECORDED_KV = {("rtx4090", "llama31_8b"): 41_408.0}
REPLICAS = {"qwen3_30b_a3b": 2}  # data parallel, requests in turn
COLUMNS: Sequence[str] = (
    "queued_s",
    "first_token_s",
    "last_token_s",
    "input_toks",
    "output_toks",
    "shared_prefix_toks",
)
BATCH_TOKENS = 2_048
PAGE = 16
TARGET = 0.05
FREE = (
    "weights_bandwidth", "kv_bandwidth", "bf16_compute", "attention_compute", "tile_waves", "layer_us", "step_us",
    "row_us", "prompt_us", "activation_passes",
)  # fmt: skip
WIDER = {"bf16_compute": 0.15}  # GeForce clocks are above those of its data sheet
PRIOR_WEIGHT = 0.5
MEAN_SCALE, REQUEST_SCALE = 0.02, 2.0
AT_LEAST = np.array([0.01, 0.0])  # seconds of TTFT below which a difference of requests counts little


@dataclass(frozen=True)
class VllmRun:
    """A run: its requests in the order of their arrival, with what vLLM took."""

    device: str
    model: str
    tensor_parallel: int
    requests: Sequence[Mapping[str, str]]

    @property
    def case(self) -> str:
        """E.g. `rtx4090 llama31_8b`."""
        return f"{self.device} {self.model}"

    @property
    def dense(self) -> bool:
        """Is it of a model without experts?"""
        return architecture(MODELS[self.model]).experts == 1

    @cached_property
    def measured(self) -> Array:
        """[requests, 2]: TTFT and TPOT, in seconds."""
        queued, first, last, tokens = (
            np.array([float(row[name]) for row in self.requests])
            for name in ("queued_s", "first_token_s", "last_token_s", "output_toks")
        )
        return np.stack([first - queued, (last - first) / (tokens - 1)], axis=1)

    @cached_property
    def gaps(self) -> Array:
        """[requests]: tokens after the first."""
        return np.array([float(row["output_toks"]) - 1 for row in self.requests])

    def simulated(self, constants: Efficiency) -> Array:
        """[requests, 2]: the same with a model of these constants."""
        device, max_sequences = DEVICES[self.device]
        model = Roofline(accelerator(device), architecture(MODELS[self.model]), constants, self.tensor_parallel)
        kv = RECORDED_KV.get((self.device, self.model), kv_tokens(model))
        replicas = REPLICAS.get(self.model, 1)
        requests = [_request(row) for row in self.requests]
        for number in range(replicas):
            serve(EngineSimulation(model, EngineLimits(kv, max_sequences, BATCH_TOKENS)), requests[number::replicas])
        return np.array([(one.ttft_s, one.tpot_s) for one in requests])


def _request(row: Mapping[str, str]) -> EngineRequest:
    cached = int(row["shared_prefix_toks"]) // PAGE * PAGE
    return EngineRequest(float(row["queued_s"]), int(row["input_toks"]), int(row["output_toks"]), cached_tokens=cached)


def runs(data: Path) -> list[VllmRun]:
    """Every run in the folder whose name gives a known device and model, the dense ones first."""
    found = list[VllmRun]()
    for path in sorted(data.glob(FILES)):
        name = NAME.match(path.name)
        if name and name["device"] in DEVICES and name["model"] in MODELS:
            requests = sorted(table(path, COLUMNS), key=lambda row: float(row["queued_s"]))
            found.append(VllmRun(name["device"], name["model"], int(name["ranks"] or 1), requests))
    return sorted(found, key=lambda run: not run.dense)


def figures(origin: Origin, data: Path, bar: Bar) -> Iterator[Line]:
    """All lines: every run with the constants of every dense one, and with those of H100 and H200."""
    known = runs(data)
    dense = [run for run in known if run.dense]
    with bar("vllm", len(dense)) as advanced:
        for run in known:
            yield from compared(origin, run, run.simulated(efficiency("vllm")), "constants of H100 and H200")
        for fitted_on in dense:
            constants = fit(fitted_on)
            for run in known:
                how = "the same run" if run is fitted_on else fitted_on.case
                yield from compared(origin, run, run.simulated(constants), f"fitted on {how}")
            advanced(1)


def compared(origin: Origin, run: VllmRun, simulated: Array, how: str) -> Iterator[Line]:
    """Simulated beside measured means; the target is that of runs fitted on the same GPU."""
    case = f"vllm {run.case}, {how}"
    target = f"<= {TARGET:g}" if run.dense and how == "fitted on the same run" else None
    found, measured = (
        (*times.mean(axis=0), (times[:, 0] + times[:, 1] * run.gaps).mean()) for times in (simulated, run.measured)
    )
    for name, value, baseline in zip(("TTFT", "TPOT", "end to end"), found, measured, strict=True):
        yield origin.line(case, f"mean {name}", float(value) * 1e3, "ms", baseline=float(baseline) * 1e3)
        yield origin.line(case, f"mean {name} off by", abs(float(value / baseline) - 1), "share", target=target)
    for name, column in (("TTFT", 0), ("TPOT", 1)):
        off = np.abs(simulated[:, column] / run.measured[:, column] - 1)
        yield origin.line(case, f"{name} of a request off by, p50", float(np.median(off)), "share")


def fit(run: VllmRun) -> Efficiency:
    """The constants of this run: the means count most, every request a little, and the engine's own constants."""
    from scipy.optimize import least_squares  # here: half a second, which a fit alone needs

    start = efficiency("vllm")
    spreads = np.array([WIDER.get(name, PRIORS[name].spread) for name in FREE])

    def constants(shifts: Array) -> Efficiency:
        factors = np.exp(shifts * spreads)
        return replace(start, **{n: getattr(start, n) * float(f) for n, f in zip(FREE, factors, strict=True)})

    def residuals(around_one: Array) -> Array:
        shifts = around_one - 1
        simulated, measured = run.simulated(constants(shifts)) + AT_LEAST, run.measured + AT_LEAST
        each = np.log(simulated / measured) / REQUEST_SCALE / np.sqrt(len(measured)) * 2
        means = np.log(simulated.mean(axis=0) / measured.mean(axis=0)) / MEAN_SCALE
        return np.concatenate([each.ravel(), means, shifts * PRIOR_WEIGHT])

    # Steps of differences are relative, and must be wide: a request admitted an iteration later is a jump.
    found = least_squares(residuals, np.ones(len(FREE)), diff_step=0.05, max_nfev=12)
    return constants(found.x - 1)
