"""A request as queue policies see it, without the rest of the scheduler."""

from dataclasses import dataclass


@dataclass(eq=False)
class WaitingRequest:
    """Requests arrive by name, one `every_s`. `left`: tokens still to compute, once it runs."""

    name: int
    size: int
    tenant: str = ""
    left: int = 0
    awaited_class: str = ""
    every_s: float = 1.0

    @property
    def id(self) -> str:
        return str(self.name)

    @property
    def order(self) -> tuple[float, int]:
        return self.name * self.every_s, self.name

    @property
    def queued_tokens(self) -> int:
        return self.size

    @property
    def expected_work(self) -> float:
        return float(self.size)

    @property
    def queued_work(self) -> int:
        return self.size
