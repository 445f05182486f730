"""Room on runners that is assigned to interactive requests that wait; `README.md` in this folder has the rules."""

from collections.abc import Mapping
from typing import NamedTuple


class Claim(NamedTuple):
    """Room for a request on a runner. `tokens`: with the tokens of its adapter, if the adapter is not in use there."""

    uuid: str
    adapter: str
    tokens: int


class Claims:
    """The claims of a pool's waiting requests."""

    def __init__(self) -> None:
        self.by_request: Mapping[str, Claim] = {}
        self._by_runner: dict[str, list[Claim]] | None = None  # cache
        self._released: set[str] = set()

    def __bool__(self) -> bool:
        """Return whether there are claims, or were until now."""
        return bool(self.by_request or self._released)

    def by_runner(self) -> Mapping[str, list[Claim]]:
        """Return the claims by runner uuid, without runners that have no claim."""
        if self._by_runner is None:
            self._by_runner = {}
            for claim in self.by_request.values():
                self._by_runner.setdefault(claim.uuid, []).append(claim)
        return self._by_runner

    def assign(self, claims: Mapping[str, Claim]) -> None:
        """Replace all claims by these claims, by request. Changed claims are released."""
        old_claims, self.by_request, self._by_runner = self.by_request, claims, None
        self._released.update(claim.uuid for name, claim in old_claims.items() if claims.get(name) != claim)

    def forget(self, request_id: str) -> None:
        """Release the claim of a request that left the queue."""
        if request_id in self.by_request:
            self.assign({name: claim for name, claim in self.by_request.items() if name != request_id})

    def take_released(self) -> set[str]:
        """Return the uuids of the runners of claims that were released since the last call."""
        released, self._released = self._released, set()
        return released
