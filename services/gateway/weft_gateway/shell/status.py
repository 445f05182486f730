"""What the status page shows: totals for everybody, pools and models for those who may use them."""

from collections import Counter
from typing import Any

from weft_gateway.core.routes import Principal
from weft_gateway.errors import Unauthorized, Unavailable
from weft_gateway.shell.app_state import AppState
from weft_gateway.shell.auth import authenticate


def status_of(gateway: AppState, authorization: str | None) -> dict[str, Any]:
    """Totals, then the caller's pools and models. With keys on and none given: totals only."""
    serving, table = gateway.serving, gateway.serving.table
    totals: dict[str, Any] = {
        "ready": gateway.not_ready_reason() or "ok",
        "in_flight": serving.in_flight,
        "held": serving.held,
        "scheduler": serving.scheduler.up,
        "version": table.version if table else 0,
        "key_needed": False,
        "pools": [],
        "models": [],
    }
    if table is None:
        return totals
    try:
        caller = authenticate(authorization, table, auth=gateway.settings.auth)
    except (Unauthorized, Unavailable):
        return totals | {"key_needed": True}
    return totals | _visible(gateway, caller)


def visible_labels(gateway: AppState, authorization: str | None) -> frozenset[str] | None:
    """Names of models and pools that the caller's metrics may hold; None: every one, since no keys are asked for."""
    if not gateway.settings.auth:
        return None
    table = gateway.serving.table
    if table is None:
        return frozenset()
    try:
        caller = authenticate(authorization, table, auth=True)
    except (Unauthorized, Unavailable):
        return frozenset()
    return frozenset(name for route, pool in table.visible(caller) for name in (route.model_name, pool.name))


def _visible(gateway: AppState, caller: Principal) -> dict[str, Any]:
    assert gateway.serving.table
    running = Counter(live.prepared.route.model_name for live in gateway.serving.live.values())
    held = Counter(live.prepared.route.pool for live in gateway.serving.live.values() if not live.stream.running)
    pools: dict[str, dict[str, Any]] = {}
    models: list[dict[str, Any]] = []
    for route, pool in gateway.serving.table.visible(caller):
        base = {"name": pool.name, "base": pool.base_model_name, "ready_runners": pool.ready_runners, "in_flight": 0}
        base["held"] = held[pool.name]
        pools.setdefault(pool.name, base)["in_flight"] += running[route.model_name]
        parent = None if route.is_base else pool.base_model_name
        shown = {"id": route.model_name, "parent": parent, "pool": pool.name, "in_flight": running[route.model_name]}
        models.append(shown | {"digest": route.adapter_digest})
    return {"pools": list(pools.values()), "models": models}
