"""What the runners do now: scheduler -> gateway."""

from weft.domain.adapter import Tier
from weft.domain.fleet import MAX_ADAPTERS, MAX_RUNNERS, MIN_LISTED, FleetAdapter, FleetReport, FleetRunner
from weft.domain.runner import RunnerRole
from weft.wire.codec.values import MAX_DETAIL, named, number, same_named, text
from weft.wire.errors import PeerError
from weft.wire.v1 import scheduler_pb2 as pb
from weft.wire.v1 import supervisor_pb2 as spb

_TIERS = {tier: spb.AdapterState.Tier.ValueType(tier) for tier in Tier}  # the numbers are the contract's


def fill_fleet(fleet: FleetReport, m: pb.Fleet) -> None:
    m.left_out = fleet.left_out
    for runner in fleet.runners:
        row = m.runners.add(role=runner.role.value, **same_named(runner, "role", "adapters"))
        for one in runner.adapters:
            row.adapters.add(tier=_TIERS[one.tier], error=one.error[:MAX_DETAIL], **same_named(one, "tier", "error"))


def fleet(m: pb.Fleet) -> FleetReport:
    """Raises PeerError."""
    number(len(m.runners), "the number of runners", MAX_RUNNERS)
    most = MAX_ADAPTERS + MAX_RUNNERS * MIN_LISTED
    number(sum(len(row.adapters) for row in m.runners), "the number of adapters on runners", most)
    return FleetReport(tuple([_runner(row) for row in m.runners]), m.left_out)


def _runner(m: pb.FleetRunner) -> FleetRunner:
    try:
        role = RunnerRole(m.role)
        adapters = tuple([_adapter(one) for one in m.adapters])
    except ValueError as error:
        raise PeerError(f"a runner's state is none: {error}") from error
    return FleetRunner(
        name=named(m.name, "a runner's name"),
        pool=text(m.pool, "a pool's name"),
        incarnation=text(m.incarnation, "a runner's incarnation"),
        ready=m.ready,
        draining=m.draining,
        role=role,
        sequences=m.sequences,
        max_sequences=m.max_sequences,
        best_batch=m.best_batch,
        used_pages=m.used_pages,
        free_pages=m.free_pages,
        adapter_pages=m.adapter_pages,
        total_pages=m.total_pages,
        page_tokens=m.page_tokens,
        tokens=m.tokens,
        pending_prompt_tokens=m.pending_prompt_tokens,
        adapters=adapters,
        adapters_left_out=m.adapters_left_out,
    )


def _adapter(m: pb.FleetAdapter) -> FleetAdapter:
    return FleetAdapter(
        named(m.digest, "an adapter's digest"), Tier(m.tier), m.running, m.loading, m.error[:MAX_DETAIL]
    )
