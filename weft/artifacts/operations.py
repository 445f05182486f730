"""What the depot tells of a resolve: the operation of `GET /v1/operations/ID`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

State = Literal["Pending", "Validated", "Fetched", "Failed"]
FINISHED: tuple[State, ...] = ("Fetched", "Failed")
Verdict = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class OperationStatus:
    """The state of one operation at the depot. A Failed one keeps its verdict if it had one."""

    state: State = "Pending"
    digest: str | None = None
    verdict: Verdict | None = None
    reason: str = ""
    message: str = ""
    watch: str | None = None  # while the depot knows it as unchanged, so is this answer
    retry_after_s: float = 0.0  # how long the source's server asks to wait

    @property
    def finished(self) -> bool:
        return self.state in FINISHED
