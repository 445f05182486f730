"""GPUs and models that are only described: step times and memory from byte and operation counts (a roofline).

A step reads the weights and the keys and values that its rows attend to, and computes two operations for each weight
and token. Reading weights and multiplying by them overlap, attention comes after both. Nothing is fitted: launches,
copies and kernels that miss the roofline are left out, for every policy alike.
"""

from dataclasses import dataclass, replace
from math import ceil

from weft_sim.deployment import Deployment
from weft_sim.executor_model import StepTimes
from weft_sim.simulate import PoolDescription, deployment_of

FP16_BYTES = 2
PAGE_TOKENS = 16
USABLE = 0.95  # of a GPU's memory: activations and the framework take the rest
CURVE_TOKENS = 1 << 16


@dataclass(frozen=True, slots=True)
class Gpu:
    """What it is sold as."""

    name: str
    bytes_per_s: float
    flops_per_s: float
    memory_bytes: float


@dataclass(frozen=True, slots=True)
class Model:
    """fp16. `kv_width`: of the keys of a token and layer; 0: as wide as the hidden state."""

    name: str
    parameters: float
    layers: int
    hidden: int
    kv_width: int = 0

    @property
    def weight_bytes(self) -> float:
        return FP16_BYTES * self.parameters

    @property
    def token_bytes(self) -> float:
        """Keys and values of a token (S3, section 2: 4 * l * d_h)."""
        return 2 * FP16_BYTES * self.layers * (self.kv_width or self.hidden)


A100 = Gpu("A100 80GB", 2_039e9, 312e12, 80 * 2**30)
GPT_J = Model("GPT-J 6B", 6.05e9, 28, 4_096)
LLAMA_7B = Model("LLaMA 7B", 6.74e9, 32, 4_096)
LLAMA_13B = Model("LLaMA 13B", 13.0e9, 40, 5_120)
NEOX = Model("GPT-NeoX 20B", 20.6e9, 44, 6_144)
LLAMA_33B = Model("LLaMA 33B", 32.5e9, 60, 6_656)
LLAMA2_70B = Model("Llama-2 70B", 69.0e9, 80, 8_192, 1_024)
GPT_3 = Model("GPT-3 175B", 174.6e9, 96, 12_288)


@dataclass(frozen=True, slots=True)
class Machine:
    """A model on GPUs: pipeline stages, each of `tensor` GPUs that split every layer.

    `lora_bytes`: of an adapter that a step's rows use; each costs its reading.
    """

    model: Model
    gpu: Gpu = A100
    stages: int = 1
    tensor: int = 1
    lora_bytes: float = 0.0

    @property
    def kv_pages(self) -> int:
        """What the weights leave."""
        memory = self.stages * self.tensor * USABLE * self.gpu.memory_bytes - self.model.weight_bytes
        return int(memory / (PAGE_TOKENS * self.model.token_bytes))

    @property
    def times(self) -> StepTimes:
        """Return the times of a whole step: through all stages."""
        read_ms = 1e3 / (self.tensor * self.gpu.bytes_per_s)
        weights_ms = self.model.weight_bytes * read_ms
        token_ms = 2e3 * self.model.parameters / (self.tensor * self.gpu.flops_per_s)
        knee = weights_ms / token_ms
        return StepTimes(
            weights_ms, 0.0, token_ms, self.model.token_bytes * read_ms, self.lora_bytes * read_ms,
            ((1.0, weights_ms), (knee, weights_ms), (knee + CURVE_TOKENS, weights_ms + CURVE_TOKENS * token_ms)),
        )  # fmt: skip

    def batch_within(self, seconds: float, context_tokens: float) -> int:
        """Return the most rows with `context_tokens` each whose token takes at most `seconds`; at least 1."""
        rows = ceil(seconds * 1e3 / self.times.key_ms / context_tokens)
        while rows > 1 and self.token_s(rows, context_tokens) > seconds:
            rows -= max(1, rows // 50)
        return rows

    def token_s(self, rows: int, context_tokens: float) -> float:
        """Return the time between two tokens of a sequence, where the rows are spread over a batch for each stage."""
        part = ceil(rows / self.stages)
        return self.times.seconds(part, 0, round(part * context_tokens))

    def deployment(self, pool: PoolDescription) -> Deployment:
        """Return one runner with these step times; as many batches in flight as there are stages."""
        deployment = deployment_of(pool)
        runners = tuple(
            replace(plan, times=self.times, stages=self.stages, depth=self.stages) for plan in deployment.runners
        )
        return replace(deployment, runners=runners)
