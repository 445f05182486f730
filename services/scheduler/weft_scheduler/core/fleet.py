"""The runners as they reported last, for a gateway's page. It costs what it lists, and only while somebody looks."""

from heapq import nsmallest

from weft.domain.adapter import AdapterState
from weft.domain.fleet import (
    MAX_LISTED_ADAPTERS,
    MAX_LISTED_RUNNERS,
    MIN_LISTED,
    FleetAdapter,
    FleetQuery,
    FleetReport,
    FleetRunner,
)
from weft.domain.runner import RunnerSpec
from weft_scheduler.core.model.gateway import GatewayStream
from weft_scheduler.core.model.runner import RunnerAccount
from weft_scheduler.core.state import State


def on_fleet_query(state: State, gateway: GatewayStream, _: FleetQuery) -> None:
    """Answer a gateway's query; its page counts on one answer to each question."""
    state.send(gateway.peer, fleet_of(state))


def fleet_of(state: State) -> FleetReport:
    """Return every runner that has reported, by pool and name."""
    known = [(runner, runner.spec) for runner in state.runners.values() if runner.spec is not None]
    known.sort(key=lambda pair: (pair[1].pool, pair[0].name))
    shown = known[:MAX_LISTED_RUNNERS]
    most = max(MIN_LISTED, MAX_LISTED_ADAPTERS // max(1, len(shown)))
    return FleetReport(tuple([_row(runner, spec, most) for runner, spec in shown]), len(known) - len(shown))


def _row(runner: RunnerAccount, spec: RunnerSpec, most: int) -> FleetRunner:
    figures = runner.report.figures
    listed = nsmallest(most, runner.report.adapters.values(), key=_order)
    return FleetRunner(
        name=runner.name,
        pool=spec.pool,
        incarnation=spec.runner.incarnation,
        ready=figures.ready and bool(runner.contact),
        draining=figures.draining,
        role=figures.role,
        sequences=len(runner.report.sequences),
        max_sequences=spec.max_sequences,
        best_batch=spec.best_batch,
        used_pages=figures.used_pages,
        free_pages=figures.free_pages,
        adapter_pages=figures.adapter_pages,
        total_pages=spec.total_pages,
        page_tokens=spec.page_tokens,
        tokens=figures.tokens,
        pending_prompt_tokens=figures.pending_prompt_tokens,
        adapters=tuple([FleetAdapter(one.digest, one.tier, one.running, one.loading, one.error) for one in listed]),
        adapters_left_out=len(runner.report.adapters) - len(listed),
    )


def _order(one: AdapterState) -> tuple[int, bool, int, str]:
    """Return a sort key: adapters in use first, then what is wrong or on its way, then the nearest."""
    return -one.running, not (one.error or one.loading), -one.tier, one.digest
