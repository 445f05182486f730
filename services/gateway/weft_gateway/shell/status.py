"""The status page's values: totals for every caller, pools and models for those who may use them."""

from collections import Counter
from typing import Any

import orjson

from weft.domain.request import Priority
from weft_gateway.core.routes import Principal
from weft_gateway.errors import ServiceUnavailable, Unauthorized
from weft_gateway.openai.http_requests import in_turns
from weft_gateway.shell.app_state import AppState
from weft_gateway.shell.auth import authenticate


async def status_of(state: AppState, authorization: str | None) -> dict[str, Any]:
    """Totals, then the caller's pools and models. With keys on and none given: totals only."""
    machine = state.machine
    totals: dict[str, Any] = {
        "ready": machine.admission.not_ready_reason() or "ok",
        "in_flight": machine.admission.in_flight,
        "held": machine.n_held,
        "scheduler": machine.scheduler_up,
        "version": machine.routes.version,
        "key_needed": False,
        "pools": [],
        "models": [],
    }
    if not machine.routes.is_known:
        return totals
    principal = _principal_of(state, authorization)
    return totals | (await _visible(state, principal) if principal else {"key_needed": True})


async def metrics_of(state: AppState, authorization: str | None) -> bytes:
    """Return metrics, limited to the caller's models and pools; all metrics without keys or for a platform key."""
    principal = _principal_of(state, authorization)
    if principal and principal.namespace is None:
        return state.manager.metrics.exposition(None)
    visible = in_turns(state.machine.routes.visible(principal) if principal else ())
    shown = frozenset([name async for route, pool in visible for name in (route.model_name, pool.name)])
    return state.manager.metrics.exposition(shown)


def _principal_of(state: AppState, authorization: str | None) -> Principal | None:
    try:
        return authenticate(authorization, state.machine.routes, auth=state.settings.auth, tokens=state.tokens)
    except (Unauthorized, ServiceUnavailable):
        return None


async def _visible(state: AppState, principal: Principal) -> dict[str, Any]:
    requests = state.machine.requests.values()
    running = Counter(active.request.route.model_name for active in requests)
    waiting = [active for active in requests if not active.running]
    unplaced = Counter(active.pool for active in waiting)
    lines = Counter(active.pool for active in waiting if active.priority is Priority.BATCH)
    pools: dict[str, dict[str, Any]] = {}
    models: list[orjson.Fragment] = []
    async for route, row in in_turns(state.machine.routes.visible(principal)):
        name = row.name
        base = {"name": name, "base": row.base_model_name, "ready_runners": row.ready_runners, "in_flight": 0}
        base |= {"held": unplaced[name], "held_lines": lines[name]}
        pools.setdefault(name, base)["in_flight"] += running[route.model_name]
        parent = row.base_model_name if route.digest else None
        shown = {"id": route.model_name, "parent": parent, "pool": name, "in_flight": running[route.model_name]}
        models.append(orjson.Fragment(orjson.dumps(shown | {"digest": route.digest})))
    return {"pools": list(pools.values()), "models": models}
