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
        self._added: RunnerRole | None = None
        self._since = 0

    def ordered(self, before: RunnerRole, after: RunnerRole, iteration: int) -> None:
        """After so many iterations the role became another one."""
        added = {RunnerRole.TOKEN: RunnerRole.PROMPT, RunnerRole.PROMPT: RunnerRole.TOKEN}.get(before)
        self._added, self._since = added if after is not before else None, iteration

    def ran(self, batch: Batch, iteration: int) -> None:
        """That batch has run, as the iteration of that number."""
        if self._added is None:
            return
        if batch.n_prefills if self._added is RunnerRole.PROMPT else len(batch.rows) > batch.n_prefills:
            self.count += 1
            self.iterations += iteration - self._since
            self._added = None
