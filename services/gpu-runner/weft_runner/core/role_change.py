"""How soon a runner works in a role that it was ordered to take (Splitwise, section 4.2: roles change under load)."""

from weft.domain.runner import RunnerRole
from weft_runner.core.batch import Batch


class RoleChanges:
    """Changes of role that add a phase, and the iterations until the first token of that phase was computed.

    A change that only takes a phase away, and one that is followed by another before a token of its phase, do not
    count.
    """

    def __init__(self) -> None:
        self.count = self.iterations = 0  # since start
        self._added: tuple[RunnerRole, int] | None = None  # and the iteration of the order

    def ordered(self, before: RunnerRole, after: RunnerRole, iteration: int) -> None:
        """After so many iterations the role became another one."""
        added = {RunnerRole.TOKEN: RunnerRole.PROMPT, RunnerRole.PROMPT: RunnerRole.TOKEN}.get(before)
        self._added = (added, iteration) if added is not None and after is not before else None

    def ran(self, batch: Batch, iteration: int) -> None:
        """That batch has run, as the iteration of that number."""
        if self._added is None:
            return
        added, since = self._added
        if batch.n_prefills if added is RunnerRole.PROMPT else len(batch.rows) > batch.n_prefills:
            self.count += 1
            self.iterations += iteration - since
            self._added = None
