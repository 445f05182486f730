"""The numbers under one term, each given once."""

from weft.domain.ids import Epoch


class Numbers:
    """Counters of one scheduler. `counter`: of the epochs under the term."""

    def __init__(self, term: int) -> None:
        self.term, self.counter = term, 0
        self._tickets = self._versions = 0

    def begin(self, term: int) -> None:
        """Give epochs under another term."""
        self.term, self.counter = term, 0

    def next_epoch(self) -> Epoch:
        """Return an epoch above every one that this machine has given or received."""
        self.counter += 1
        return Epoch(self.term, self.counter)

    def version(self) -> int:
        """Return a number that grows with each call, and across restarts: the term is its upper half."""
        self._versions += 1
        return (self.term << 32) | self._versions

    def ticket(self) -> int:
        """Return the next number in order of arrival."""
        self._tickets += 1
        return self._tickets
