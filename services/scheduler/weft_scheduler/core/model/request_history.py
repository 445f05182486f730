"""What has happened to a request: moves, failures, and the numerics class that computed its tokens."""

from weft.domain.ids import RunnerId
from weft.domain.request import FailReason
from weft_scheduler.core.model.gateway import Avoidance


class RequestHistory:
    """Moves and failures of one request. `admitted`: it was accepted once, and is never answered QUEUE_FULL."""

    __slots__ = (
        "admitted", "avoidance", "capacity_refusals", "consolidations", "kv_migrations", "load_failures", "migrations",
        "one_runner",
    )  # fmt: skip

    def __init__(self, migrations: int = 0, *, admitted: bool = False) -> None:
        self.admitted = admitted
        self.migrations = migrations
        self.consolidations = 0  # migrations that consolidation ordered: they count for no failure
        self.kv_migrations = 0  # those that took the KV along: neither do they
        self.capacity_refusals = 0  # NoCapacity answers in a row
        self.load_failures: dict[RunnerId, str] = {}
        self.one_runner = False  # its KV was lost on its way between two: both of its phases run on one from now on
        self.avoidance = Avoidance()

    def migrate(self) -> None:
        """Count one more of its bounded migrations."""
        self.migrations += 1

    def migrate_with_kv(self) -> None:
        """Count one more of its bounded migrations with its KV."""
        self.kv_migrations += 1

    def consolidate(self) -> None:
        """Count one more of its bounded migrations by consolidation."""
        self.consolidations += 1

    def run(self) -> None:
        """Note that a runner has it: what was refused in a row is over."""
        self.capacity_refusals = 0

    def fail_on(self, runners: tuple[RunnerId, ...], reason: FailReason, detail: str) -> None:
        """Note that its epoch failed there."""
        self.capacity_refusals = self.capacity_refusals + 1 if reason is FailReason.NO_CAPACITY else 0
        self.one_runner |= reason is FailReason.KV_LOST
        if reason is FailReason.LOAD_FAILED:
            self.load_failures |= dict.fromkeys(runners, detail)


class NumericsClass:
    """The class in which a request's tokens were computed, and for how long it waits for that class."""

    __slots__ = ("assigned", "awaited_until", "latest")

    def __init__(self, latest: str = "") -> None:
        self.latest = latest  # of the runner that computed its latest tokens; none before the first
        self.assigned = ""  # of the runner of its present epoch
        self.awaited_until = 0.0  # from then on any class will do; 0: it has not waited since it ran

    def await_until(self, now: float, same_class_s: float) -> str:
        """Let a request with tokens wait for its class for so long, once. Returns the class that it waits for."""
        if self.latest and not self.awaited_until:
            self.awaited_until = now + same_class_s
        return self.latest if now < self.awaited_until else ""

    def assign(self, numerics_class: str) -> None:
        """Note the class of the runner of its present epoch."""
        self.assigned = numerics_class

    def run(self) -> None:
        """Note that a runner has it: it may wait again."""
        self.awaited_until = 0.0

    def keep(self) -> None:
        """Note that its latest tokens are of the class of the runner that it leaves."""
        self.latest = self.assigned or self.latest
