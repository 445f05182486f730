"""What runs where: values."""

from dataclasses import dataclass, field
from math import inf
from typing import Any

from weft.domain.routes import AdapterSpec, PoolSpec
from weft.domain.runner import RunnerSpec
from weft_gateway.core import GatewayConfig
from weft_runner.core import Batching
from weft_scheduler.core import SchedulerConfig
from weft_sim.executor_model import StepTimes
from weft_sim.hosts import Costs
from weft_supervisor.core import SupervisorConfig


@dataclass(frozen=True, slots=True)
class RunnerPlan:
    """A runner and its host. `spec.runner.incarnation` is replaced at each start."""

    spec: RunnerSpec
    host: str
    max_batch_tokens: int = 512
    max_prefills: int = 1
    depth: int = 1  # steps in flight at a time
    swap_page_bytes: int = 0  # of a page's KV, where it can be swapped to host memory
    host_bytes: int = 1 << 30  # for KV and adapters
    times: StepTimes | None = None  # measured ones; None: what the specification's profile says
    token_time_ms: float = inf
    batching: Batching = Batching.MIXED
    threads: int = 0  # of its host's cores that a step takes; 0: it runs on a device of its own
    kv_bytes_per_s: float = 1e9  # of its link to other runners
    layer_by_layer_tokens: float = inf  # of a batch whose KV is sent while it is computed
    drafts: bool = False  # tokens are drafted, and right as often as measured (`drafts.py`)
    stages: int = 1  # devices that hold a part of the layers each: a step passes them one after the other


@dataclass(frozen=True)
class Deployment:
    """The placement of all processes. `hosts`: cores by name; control-plane processes run on `control`."""

    runners: tuple[RunnerPlan, ...] = ()
    pools: tuple[PoolSpec, ...] = ()
    objects: tuple[dict[str, Any], ...] = ()  # with any the operator plans pools, adapters and runners from them
    template: RunnerPlan | None = None  # of the operator's runners
    adapters: tuple[AdapterSpec, ...] = ()
    gateways: int = 1
    hosts: dict[str, int] = field(default_factory=lambda: {"control": 2})
    control: str = "control"
    costs: Costs = field(default_factory=Costs)
    delay_s: float = 0.0002
    jitter_s: float = 0.0
    load_s: float = 0.05  # of an adapter to a device slot
    fetch_s: float | None = (
        None  # of one from the depot to disk, alone: those of one runner share its link; None: load_s
    )
    replayed_lengths: bool = False  # predictions are those that a request comes with, not those of the shipped model
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    supervisor: SupervisorConfig = field(default_factory=SupervisorConfig)
    gateway: GatewayConfig = field(default_factory=GatewayConfig)
