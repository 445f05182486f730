"""Hosts: cores that machines and models compete for, and what each event costs.

A machine is served by one thread: its events queue behind each other, and behind those of other machines while all
cores are busy. A model step has the cores of its runner to itself: steps and control-plane events of one host do not
slow each other.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from weft.domain.machine import Kind

FREE: Mapping[tuple[Kind, str], float] = {}  # every event costs nothing: for checks of behaviour


@dataclass(frozen=True, slots=True)
class Costs:
    """CPU seconds of an event, by the kind of the machine and the class of the message or event.

    `per_item`: for each sequence of a Step. `default`: for what is not listed.
    """

    events: Mapping[tuple[Kind, str], float] = field(default_factory=dict[tuple[Kind, str], float])
    per_item: Mapping[tuple[Kind, str], float] = field(default_factory=dict[tuple[Kind, str], float])
    default: float = 0.0

    @property
    def free(self) -> bool:
        return not (self.events or self.per_item or self.default)

    def of(self, kind: Kind, event: str, items: int = 0) -> float:
        cost = self.events.get((kind, event), self.default)
        return cost + items * self.per_item.get((kind, event), 0.0)


GRPC_S = 0.000_09  # CPU of grpc.aio for a message of a stream, however small
# By request: the live quickstart stack, 1,000 requests of a few tokens, 16 at once, CPU of each process by /proc:
# gateway 4.0 ms, runner 2.5, scheduler 2.1, predictor 2.0, supervisor (with its SQLite commit) 5.5: 16 ms in all.
# By step and report: `python -m weft_sim costs` on two cores of an Intel Xeon, and GRPC_S. A sequence's part of a Step
# is its SSE chunk.
MEASURED = Costs(
    events={
        (Kind.GATEWAY, "RequestArrived"): 0.004,
        (Kind.RUNNER, "Start"): 0.002_5,
        (Kind.SCHEDULER, "Submit"): 0.002_1,
        (Kind.PREDICTOR, "PredictItem"): 0.002,
        (Kind.SUPERVISOR, "OutcomeReport"): 0.005_5,
        (Kind.GATEWAY, "Step"): GRPC_S,
        (Kind.RUNNER, "StepDone"): GRPC_S + 0.000_15,
        (Kind.SUPERVISOR, "RunnerReport"): GRPC_S + 0.000_053,
        (Kind.SCHEDULER, "ClusterReport"): GRPC_S + 0.000_08,
    },
    per_item={(Kind.GATEWAY, "Step"): 0.000_05},
    default=0.000_02,
)


class Host:
    """A machine with cores. Bookings are made in the order of time and never overlap on a core."""

    def __init__(self, name: str, cores: int = 1) -> None:
        self.name, self.cores = name, cores
        self.busy_s = 0.0  # of all cores, for machines' events
        self.model_s = 0.0  # of one core, for model steps
        self._free_at = [0.0] * cores

    def book(self, ready: float, seconds: float) -> float:
        """The time at which `seconds` of work that is ready at `ready` are done, on the core that is free first."""
        core = min(range(self.cores), key=self._free_at.__getitem__)
        end = max(ready, self._free_at[core]) + seconds
        self._free_at[core] = end
        self.busy_s += seconds
        return end
