"""The runners that are known, by uuid: of each the present incarnation."""

from weft.domain.ids import RunnerId
from weft.domain.lru import LruDict
from weft_scheduler.core.model.runner import RunnerAccount

MAX_REPLACED = 20_000  # replaced incarnations remembered, twice the fleet that this is made for


class Runners(dict[str, RunnerAccount]):
    """Present incarnations, and the uuids of those that they have replaced."""

    def __init__(self) -> None:
        super().__init__()
        self._arrivals = 0
        self._replaced = LruDict[str, str](MAX_REPLACED)  # uuid -> the incarnation that a newer one has replaced

    def present(self, runner_id: RunnerId | None) -> RunnerAccount | None:
        """Return that incarnation, if it is the present one."""
        runner = self.get(runner_id.uuid) if runner_id else None
        return runner if runner is not None and runner.id == runner_id else None

    def begin(self, runner_id: RunnerId) -> RunnerAccount:
        """Return a new record, of an incarnation that was not known."""
        self._arrivals += 1
        runner = self[runner_id.uuid] = RunnerAccount(runner_id, self._arrivals)
        return runner

    def replace(self, runner_id: RunnerId) -> None:
        """Remember an incarnation that a newer one has replaced: reports of it are stale."""
        self._replaced[runner_id.uuid] = runner_id.incarnation

    def was_replaced(self, runner_id: RunnerId) -> bool:
        """True where reports of that incarnation are stale."""
        return self._replaced.get(runner_id.uuid) == runner_id.incarnation
