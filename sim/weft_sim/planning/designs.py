"""What a cluster may be made of, and what it costs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from weft.domain.runner import RunnerRole
from weft_sim.planning.machine import MachineKind


@dataclass(frozen=True, slots=True)
class PricedKind:
    """A runner of one kind: `price` an hour, `watts` at full load, both with its share of the machine around it.

    `product`: the label nvidia.com/gpu.product of its nodes.
    """

    kind: MachineKind
    gpus: int
    price: float
    watts: float
    product: str = ""

    @property
    def name(self) -> str:
        return self.kind.name


@dataclass(frozen=True, slots=True)
class Combination:
    """Designs of the same kinds. `token` None: every runner computes both phases."""

    prompt: PricedKind
    token: PricedKind | None = None

    @property
    def split(self) -> bool:
        return self.token is not None

    @property
    def name(self) -> str:
        return self.prompt.name if self.token is None else f"{self.prompt.name} + {self.token.name}"


@dataclass(frozen=True, slots=True)
class Design:
    """`prompts` runners for prompts and `tokens` for tokens; of a family that is not split, `prompts` for both."""

    family: Combination
    prompts: int
    tokens: int = 0

    @property
    def runners(self) -> int:
        return self.prompts + self.tokens

    @property
    def name(self) -> str:
        prompt, token = self.family.prompt.name, self.family.token
        if token is None:
            return f"{self.prompts} {prompt}"
        return f"{self.prompts} {prompt} for prompts, {self.tokens} {token.name} for tokens"

    def total(self, measure: Callable[[PricedKind], float]) -> float:
        token = measure(self.family.token) if self.family.token is not None else 0.0
        return self.prompts * measure(self.family.prompt) + self.tokens * token

    def machines(self) -> list[tuple[MachineKind, RunnerRole]]:
        if self.family.token is None:
            return [(self.family.prompt.kind, RunnerRole.MIXED)] * self.prompts
        prompts = [(self.family.prompt.kind, RunnerRole.PROMPT)] * self.prompts
        return prompts + [(self.family.token.kind, RunnerRole.TOKEN)] * self.tokens


Measure = Callable[[PricedKind], float]
MEASURES: Mapping[str, Measure] = {
    "cost": lambda kind: kind.price,
    "power": lambda kind: kind.watts,
    "count": lambda _: 1.0,
}
"""What a plan makes as small as possible."""
