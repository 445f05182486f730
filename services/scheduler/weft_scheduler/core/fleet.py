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
    """Answer a gateway's query. Its page expects one answer to each question."""
    state.send(gateway.peer, fleet_of(state))


def fleet_of(state: State) -> FleetReport:
    """Return every reported runner, by pool and name."""
    listed = [(runner, runner.spec) for runner in state.runners.values() if runner.spec is not None]
    listed.sort(key=lambda pair: (pair[1].pool, pair[0].name))
    shown = listed[:MAX_LISTED_RUNNERS]
    max_adapters = max(MIN_LISTED, MAX_LISTED_ADAPTERS // max(1, len(shown)))
    return FleetReport(tuple([_row(runner, spec, max_adapters) for runner, spec in shown]), len(listed) - len(shown))


def _row(runner: RunnerAccount, spec: RunnerSpec, max_adapters: int) -> FleetRunner:
    figures = runner.report.figures
    listed = nsmallest(max_adapters, runner.report.adapters.values(), key=_order)
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
        adapters=tuple(
            [FleetAdapter(state.digest, state.tier, state.running, state.loading, state.error) for state in listed]
        ),
        adapters_left_out=len(runner.report.adapters) - len(listed),
    )


def _order(adapter: AdapterState) -> tuple[int, bool, int, str]:
    """Return a sort key: adapters in use first, then what is wrong or on its way, then the nearest."""
    return -adapter.running, not (adapter.error or adapter.loading), -adapter.tier, adapter.digest
