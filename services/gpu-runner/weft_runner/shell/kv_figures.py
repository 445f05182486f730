"""What streams of KV have moved: bytes and seconds by carrier, transfers by how they ended."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(slots=True)
class KvTransfer:
    """A sequence's KV between its first job, or its acceptance, and its end."""

    began: float
    layer_wise: bool = False


class KvFigures(Protocol):
    """Counters that a stream's threads add to. Any thread."""

    def sent(self, carrier: str, n_bytes: int, seconds: float) -> None: ...

    def received(self, carrier: str, n_bytes: int, seconds: float) -> None: ...

    def ended(self, direction: str, result: str, transfer: KvTransfer, now: float) -> None:
        """`direction`: out, in; `result`: complete, refused, dropped, lost."""
        ...


class NoFigures:
    """Counters of streams that nobody counts."""

    def sent(self, carrier: str, n_bytes: int, seconds: float) -> None: ...

    def received(self, carrier: str, n_bytes: int, seconds: float) -> None: ...

    def ended(self, direction: str, result: str, transfer: KvTransfer, now: float) -> None: ...


NO_FIGURES = NoFigures()
