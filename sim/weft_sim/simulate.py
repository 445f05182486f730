"""`weft sim`: a trace on a described pool."""

import tomllib
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import islice
from pathlib import Path
from typing import Any

from weft.domain.ids import RunnerId
from weft.domain.routes import AdapterSpec, PoolSpec
from weft.domain.runner import RunnerSpec
from weft_gateway.core import GatewayConfig
from weft_runner.core import MAX_SLOTS, Batching
from weft_scheduler.core import POLICIES, SchedulerConfig
from weft_sim.clock import Rank, random_of
from weft_sim.deployment import Deployment, RunnerPlan
from weft_sim.executor_model import VOCABULARY, seed_of
from weft_sim.hosts import MEASURED, Costs
from weft_sim.laws import ClientRequest
from weft_sim.report import Figures, served
from weft_sim.shells import RunnerShell
from weft_sim.stack import World
from weft_sim.timeline import Timeline
from weft_sim.traces import TraceArrival, adapter_draw

POOL = "default/pool"
WARM_S = 3.0
DRAIN_S = 3600.0  # after the last arrival


class BadPool(Exception):
    """A pool's description that cannot be used; the text says why."""


@dataclass(frozen=True, slots=True)
class PoolDescription:
    """A pool, as runners of it report themselves at start (`weft get runners -o yaml` has the figures)."""

    runners: int = 1
    page_tokens: int = 16  # of a KV page
    total_pages: int = 4096
    max_sequences: int = 64
    max_batch_tokens: int = 512
    max_prefills: int = 1
    drafts: bool = False  # tokens are drafted, each at a row's time, and right as often as in the quickstart's tasks
    token_time_ms: float = 60_000.0  # within it rows that run should get their next token: prompts wait
    batching: str = "mixed"  # or continuous, request: what an iteration runs (for comparison)
    max_context_tokens: int = 0  # 0: what the pages hold
    best_batch: int = 16  # beyond it more sequences gain little
    step_ms_1: float = 20.0  # an iteration of one sequence
    step_ms_best: float = 30.0  # an iteration of best_batch sequences
    prefill_tokens_per_s: float = 2000.0
    adapters: int = 8
    slots: int = 0  # adapters on a device at a time; 0: as many as its pages hold
    page_kib: float = 0.0  # of a KV page, for KV and adapters alike; 0: adapters have memory of their own
    adapter_mib: float = 1.0
    rank: int = 16
    swaps: bool = False  # KV of preempted sequences goes to host memory, page_kib of a page; else it is computed again
    load_ms: float = 50.0  # an adapter from disk to the device
    fetch_ms: float = 50.0  # an adapter from the depot to disk, alone; several at a time share the runner's link
    popularity: str = "skewed"  # of adapters, where the trace names none: identical, distinct, uniform, skewed
    gateways: int = 1
    cores: int = 4  # of the host of gateways, scheduler and supervisor
    runner_cores: int = 1  # of the host of each runner
    threads: int = 0  # of its host's cores that a step takes; 0: it runs on a device
    one_host: bool = False  # runners share the cores of the control plane, as on a laptop
    delay_ms: float = 0.2  # of a message between two processes
    max_queue: int = 100_000
    queue: str = "fcfs"  # or s3, shortest: the order in which requests wait
    reservation: str = "calibrated"  # or pooled, s3, constant, max, paged: memory set aside for an answer
    consolidation: str = "never"  # or always: a lightly loaded runner is emptied by migration
    consolidation_s: float = 10.0  # at most one in this time
    phases: str = "unified"  # or split: prompts on some runners, the tokens after the first one on others
    kv_gib_per_s: float = 1.0  # of a runner's link to the others; a page of KV has page_kib
    layer_by_layer_tokens: int = 512  # of a batch whose KV leaves while it is computed
    cpu: bool = True  # charge the machines' measured CPU seconds

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int | float) and value < 0:
                raise BadPool(f"{field.name} is {value}")
        for name in ("queue", "reservation", "consolidation", "phases", "batching"):
            names = POLICIES.get(name, [batching.value for batching in Batching])
            if (value := getattr(self, name)) not in names:
                raise BadPool(f"{name} {value!r} is none of {', '.join(names)}")


def pool_of(path: Path | None, changes: Sequence[str] = ()) -> PoolDescription:
    """The description in a TOML file, with `name=value` changes. Raises BadPool."""
    field_names = {field.name: field for field in fields(PoolDescription)}
    values: dict[str, Any] = {}
    try:
        if path is not None:
            values = tomllib.loads(path.read_text())
        values |= tomllib.loads("\n".join(changes)) if changes else {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise BadPool(str(error)) from error
    for name, value in values.items():
        if name not in field_names:
            raise BadPool(f"{name!r} is unknown; there are: {', '.join(field_names)}")
        default = field_names[name].default
        if isinstance(value, bool) != isinstance(default, bool) or not isinstance(value, int | float | str):
            raise BadPool(f"{name} cannot be {value!r}")
        if isinstance(default, str) != isinstance(value, str) or (isinstance(default, int) and value != int(value)):
            raise BadPool(f"{name} cannot be {value!r}")
    return PoolDescription(**values)


def example() -> str:
    """A description with every default."""
    return "\n".join(f"{f.name} = {_toml(f.default)}" for f in fields(PoolDescription))


def _toml(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else str(value)


def deployment_of(pool: PoolDescription) -> Deployment:
    context = pool.max_context_tokens or pool.page_tokens * pool.total_pages
    slots = pool.slots or min(pool.total_pages, MAX_SLOTS)
    runners = tuple(
        RunnerPlan(
            RunnerSpec(
                RunnerId(f"default.{number:04}", ""), f"runner-{number}", POOL, pool.page_tokens, pool.total_pages,
                pool.max_sequences, slots, max(pool.rank, 1), context, name=f"runner-{number}",
                numerics_class="simulated", best_batch=pool.best_batch, step_ms_1=pool.step_ms_1,
                step_ms_best=pool.step_ms_best, prefill_tokens_per_s=pool.prefill_tokens_per_s,
                page_bytes=int(pool.page_kib * 1024), kv_address=f"runner-{number}", kv_layout="pages",
            ),
            "control" if pool.one_host else f"host-{number}",
            pool.max_batch_tokens,
            pool.max_prefills,
            swap_page_bytes=int(pool.page_kib * 1024) if pool.swaps else 0,
            threads=pool.threads,
            drafts=pool.drafts,
            token_time_ms=pool.token_time_ms,
            batching=Batching(pool.batching),
            kv_bytes_per_s=pool.kv_gib_per_s * (1 << 30),
            layer_by_layer_tokens=pool.layer_by_layer_tokens,
        )
        for number in range(pool.runners)
    )  # fmt: skip
    return Deployment(
        runners=runners,
        pools=(
            PoolSpec(
                POOL,
                "base",
                "base",
                max_queue=pool.max_queue,
                min_runners=pool.runners,
                max_runners=pool.runners,
                queue=pool.queue,
                reservation=pool.reservation,
                consolidation=pool.consolidation,
                shared_all=True,
                phases=pool.phases,
            ),
        ),
        adapters=tuple(
            AdapterSpec(
                f"default/a{i}",
                "default",
                POOL,
                f"sha256:{i}",
                pool.rank,
                f"uid-{i}",
                bytes=int(pool.adapter_mib * (1 << 20)),
            )
            for i in range(pool.adapters)
        ),
        gateways=pool.gateways,
        hosts={plan.host: pool.runner_cores for plan in runners} | {"control": pool.cores},
        costs=MEASURED if pool.cpu else Costs(),
        delay_s=pool.delay_ms / 1e3,
        load_s=pool.load_ms / 1e3,
        fetch_s=pool.fetch_ms / 1e3,
        scheduler=SchedulerConfig(consolidation_s=pool.consolidation_s),
        gateway=GatewayConfig(max_in_flight=1_000_000, hold_s=DRAIN_S),
    )


@dataclass(frozen=True)
class Result:
    """`figures` of a run, and how large it was."""

    figures: Figures
    events: int
    messages: int


def simulate(
    pool: PoolDescription,
    arrivals: Sequence[TraceArrival],
    seed: int = 0,
    *,
    check: bool = False,
    timeline: Timeline | None = None,
    deployment: Deployment | None = None,
    attach: Callable[[World], None] | None = None,
    tbt: bool = False,
) -> Result:
    """Every arrival of the trace, to the last answer. `tbt`: the time of each token is kept.

    `deployment`: what is described beyond the pool; None: the pool's. `attach` is given the world before it starts.

    On one core of an Intel Xeon 40 runners that step every iteration with 32 sequences serve some 150 requests of 128
    tokens a second (`check` False): about 27 Python functions a token, three quarters of them the shipped machines'.
    """
    deployment = deployment or deployment_of(pool)
    if any(arrival.predicted is not None for arrival in arrivals):
        deployment = replace(deployment, replayed_lengths=True)
    world = World(deployment, seed, check=check, watch=check, timeline=timeline)
    world.gaps_s = array("d") if tbt else None
    if attach is not None:
        attach(world)
    world.start()
    clock = world.clock
    clock.run(end_s=clock.now + WARM_S)
    begin = clock.now
    drawn = adapter_draw(pool.popularity, pool.adapters, random_of(seed, "adapters"))
    adapters = islice(drawn, len(arrivals))
    for number, (arrival, adapter) in enumerate(zip(arrivals, adapters, strict=True)):
        clock.at(begin + arrival.at_s, Rank.ARRIVAL, _arrive, world, pool, number, arrival, adapter)
    left = {str(number) for number in range(len(arrivals))}

    def ended(request: ClientRequest) -> None:
        left.discard(request.id)
        if not left:
            clock.stop()

    world.on_end = ended
    last = arrivals[-1].at_s if arrivals else 0.0
    if arrivals:
        clock.run(end_s=begin + last + DRAIN_S)
    seconds = clock.now - begin
    failures = Counter(request.error or request.finish for request in world.clients.values() if request.error)
    shells = [(name, p.shell) for name, p in world.runners.items() if isinstance(p.shell, RunnerShell)]
    steps = sum(shell.steps for _, shell in shells)
    figures = Figures(
        served(world.clients.values()),
        dict(failures),
        seconds,
        {name: shell.busy_s / seconds if seconds else 0.0 for name, shell in shells},
        sum(shell.rows for _, shell in shells) / steps if steps else 0.0,
        world.gaps_s or (),
        {name: [(max(0.0, at - begin), role) for at, role in shell.roles] for name, shell in shells},
    )
    return Result(figures, clock.events, world.network.messages)


def _arrive(world: World, pool: PoolDescription, number: int, arrival: TraceArrival, drawn: int) -> None:
    """Prompts differ from their first token on: no two share pages."""
    adapter = arrival.adapter % pool.adapters if arrival.adapter >= 0 and pool.adapters else drawn
    first = (1 + number % VOCABULARY, 1 + number // VOCABULARY % VOCABULARY)
    prompt = (*first, *(3,) * (arrival.prompt_tokens - 2))[: arrival.prompt_tokens]
    digest = f"sha256:{adapter}" if adapter >= 0 else ""
    tokens = arrival.output_tokens
    if arrival.stops or arrival.max_tokens > tokens:
        max_tokens, seed = max(tokens + 1, arrival.max_tokens), seed_of(number, len(prompt), tokens)
    else:
        max_tokens, seed = tokens, number << 40
    request = ClientRequest(
        f"{number}", f"{number}", f"gateway-{number % pool.gateways}", arrival.tenant,
        f"default/a{adapter}" if digest else "base", prompt, max_tokens, seed,
    )  # fmt: skip
    world.submit(request.id, [request], arrival.predicted)
