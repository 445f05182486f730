"""A request's two phases, as machines queue and batch them."""

from dataclasses import dataclass, field


@dataclass(eq=False, slots=True)
class PlannedRequest:
    """A planned request. `tasks`: its phases on the present machine, next phase first. Unknown times are None."""

    number: int
    arrived: float
    prompt_tokens: int
    output_tokens: int
    adapter: int = -1
    tasks: "list[PhaseTask]" = field(default_factory=list["PhaseTask"])
    kv_bytes: int = 0  # that it has on a machine
    began: float | None = None
    first_at: float | None = None
    resumed: float | None = None  # the token phase began
    ended: float | None = None
    transferred: bool = False
    server_s: float = 0.0  # around the iterations, before the first token
    batched: bool = False  # under request-level batching

    @property
    def ttft_s(self) -> float:
        assert self.first_at is not None
        return self.server_s + self.first_at - self.arrived

    @property
    def e2e_s(self) -> float:
        assert self.ended is not None
        return self.server_s + self.ended - self.arrived

    @property
    def tpot_s(self) -> float:
        """Return the mean time between its tokens; 0 for a single token."""
        return (self.e2e_s - self.ttft_s) / max(1, self.output_tokens - 1)


@dataclass(eq=False, slots=True)
class PhaseTask:
    """One phase of a request. A prompt task has `left` prompt tokens to compute, a token task `left` tokens to decode.

    `tokens`: tokens in the present iteration. `kv_bytes`: reserved at its start, if `is_held`. `passed_over`: number
    of selections without it.
    """

    request: PlannedRequest
    is_prompt: bool
    left: int
    tokens: int
    kv_bytes: int
    is_held: bool = False
    passed_over: int = 0
    last_at: float = 0.0  # when its latest token came
