"""A request of the engine simulation, and what became of it."""

from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class EngineRequest:
    """`adapter` None: the base; `cached_tokens` of the prompt have their KV already; times are None until they come."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    adapter: int | None = None
    cached_tokens: int = 0
    first_s: float | None = None
    last_s: float | None = None
    made: int = 0  # tokens before its latest stretch of decoding
    to_compute: int = 0  # its prompt, and what it had made when it was preempted
    computed: int = 0  # of these
    since: int = 0  # the iteration that computed the last of these
    held: int = 0  # KV tokens reserved or computed, without those of its latest stretch of decoding

    @property
    def ttft_s(self) -> float:
        """From arrival to the first token; only of a request that has one."""
        assert self.first_s is not None
        return self.first_s - self.arrival_s

    @property
    def e2e_s(self) -> float:
        """From arrival to the last token; only of a request that ended."""
        assert self.last_s is not None
        return self.last_s - self.arrival_s

    @property
    def tpot_s(self) -> float:
        """Between two tokens, on average; 0 of an answer of one token."""
        return (self.e2e_s - self.ttft_s) / max(1, self.output_tokens - 1)
