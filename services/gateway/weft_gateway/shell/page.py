"""The page at `/`: its files, and the JSON that it reads. Bounded, and each caller sees its own namespace alone.

What is of all tenants (runners, usage by namespace, errors of unknown callers) is for those who may see everything.
"""

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from importlib.metadata import version
from importlib.resources import files
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from weft.api.reasons import advice
from weft.domain.adapter import Tier
from weft.domain.fleet import FleetAdapter, FleetRunner
from weft.domain.routes import PoolRoute, Route, Unserved
from weft_gateway.core.history import Tally, quantile, summed
from weft_gateway.core.routes import RouteIndex
from weft_gateway.core.standing import standing
from weft_gateway.errors import BadRequest, NotFound
from weft_gateway.openai.http_requests import caller_of
from weft_gateway.shell.app_state import AppState
from weft_gateway.shell.auth import Action
from weft_gateway.shell.fleet_view import FleetNow

TYPES = {"css": "text/css", "html": "text/html", "js": "text/javascript", "svg": "image/svg+xml"}
MAX_PAGE, MAX_SKIP, MAX_SEARCH = 200, 10_000_000, 200
MAX_TENANTS = 100  # of the busiest
SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src 'self'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # each time asked for, and not sent again while its ETag is the same
}


async def page(_state: AppState, request: Request) -> Response:
    """The page."""
    return _file("index.html", request)


async def page_file(_state: AppState, request: Request) -> Response:
    """A script or style sheet of the page."""
    return _file(request.path_params["name"], request)


def _file(name: str, request: Request) -> Response:
    """Raises NotFound."""
    if (found := _files().get(name)) is None:
        raise NotFound(f"There is no file {name[:64]!r} of the page.")
    body, etag = found
    headers = _HEADERS | {"etag": etag}
    if etag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(body, media_type=f"{TYPES[name.rpartition('.')[2]]}; charset=utf-8", headers=headers)


@cache
def _files() -> Mapping[str, tuple[bytes, str]]:
    """Content and ETag by name."""
    bodies = {path.name: path.read_bytes() for path in files("weft_gateway").joinpath("page").iterdir()}
    tags = {name: f'"{hashlib.sha256(body).hexdigest()[:20]}"' for name, body in bodies.items()}
    return {name: (body, tags[name]) for name, body in bodies.items() if name.rpartition(".")[2] in TYPES}


# ---------------------------------------------------------------- JSON


async def overview(state: AppState, request: Request) -> Response:
    """Totals, pools, the queue, latencies and errors of the last hour. Raises ApiError."""
    principal = await caller_of(state, request, Action.METRICS)
    namespace, machine, now = principal.namespace, state.machine, state.manager.clock()
    minutes = state.manager.history.minutes(namespace, now)
    hour = summed(minutes)
    served, unserved = machine.routes.counts(principal)
    active = [one for one in machine.requests.values() if namespace is None or one.request.namespace == namespace]
    in_flight = Counter(one.pool for one in active)
    waiting = Counter(one.pool for one in active if one.running is None)
    pools: dict[str, PoolRoute] = {}
    bases = machine.routes.bases(principal)
    for route, pool in bases:
        pools[route.pool] = pool
    for name in in_flight:  # of adapters whose pool's base the caller may not use
        if name not in pools and (row := machine.routes.pools.get(name)):
            pools[name] = row
    tenants = state.manager.history.by_namespace(now) if namespace is None else {}
    busiest = sorted(tenants, key=lambda name: (-tenants[name].requests, name))
    return _json(
        {
            "namespace": namespace,
            "keys": state.settings.auth,
            "gateway": machine.gateway_id,
            "version": version("weft"),
            "ready": machine.admission.not_ready_reason() or "ok",
            "scheduler": machine.scheduler_up,
            "in_flight": len(active),
            "waiting": waiting.total(),
            "adapters": {"served": served, "unserved": unserved},
            "pools": [
                {
                    "name": name,
                    "base": pool.base_model_name,
                    "ready_runners": pool.ready_runners,
                    "context": pool.max_context_tokens,
                    "in_flight": in_flight[name],
                    "waiting": waiting[name],
                }
                for name, pool in sorted(pools.items())
            ],
            "models": [route.model_name for route, _ in bases],
            "hour": {
                **asdict(hour.usage),
                "latency": {name: _latency(name, hour, minutes) for name in ("ttft", "token", "total")},
                "errors": [
                    {"status": status, "code": code, "count": count}
                    for (status, code), count in hour.errors.most_common(50)
                ],
                "requests_by_minute": [minute.usage.requests for minute in minutes],
                "errors_by_minute": [minute.usage.failed for minute in minutes],
                "tokens_by_minute": [minute.usage.completion_tokens for minute in minutes],
            },
            "tenants": [{"namespace": name, **asdict(tenants[name])} for name in busiest[:MAX_TENANTS]],
            "tenants_left_out": max(0, len(tenants) - MAX_TENANTS),
        }
    )


def _latency(name: str, hour: Tally, minutes: list[Tally]) -> dict[str, Any]:
    """Return milliseconds, or null without a measurement."""
    of_hour = getattr(hour, name)
    shares = {label: _ms(quantile(of_hour, share)) for label, share in SHARES.items()}
    return {**shares, "count": of_hour.total(), "by_minute": [_ms(quantile(getattr(m, name), 0.5)) for m in minutes]}


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else float(f"{1000 * seconds:.3g}")


async def runners(state: AppState, request: Request) -> Response:
    """The runners and their adapters by model name; nothing for a caller who may not see all namespaces."""
    principal = await caller_of(state, request, Action.METRICS)
    if principal.namespace is not None:
        return _json({"runners": [], "left_out": 0, "at_ms": None})
    now = await state.manager.fleet.latest()
    rows = [_runner(runner, state.machine.routes) for runner in now.fleet.runners]
    at_ms = round(1000 * now.at) if rows else None
    return _json({"runners": rows, "left_out": now.fleet.left_out, "at_ms": at_ms})


def _runner(runner: FleetRunner, routes: RouteIndex) -> dict[str, Any]:
    adapters = [
        {**_place(adapter), "model": routes.name_of(adapter.digest), "digest": adapter.digest}
        for adapter in runner.adapters
        if adapter.digest
    ]
    return {**asdict(runner), "role": runner.role.value, "adapters": adapters}


def _place(adapter: FleetAdapter) -> dict[str, Any]:
    return {
        "tier": adapter.tier.name.lower(),
        "running": adapter.running,
        "loading": adapter.loading,
        "error": adapter.error,
    }


async def adapters(state: AppState, request: Request) -> Response:
    """A page of adapters: `state` served or unserved, `q` in their name, `skip`, `limit`. Raises ApiError."""
    principal = await caller_of(state, request, Action.METRICS)
    query, routes = request.query_params, state.machine.routes
    skip, limit = _number(query.get("skip", "0"), MAX_SKIP), _number(query.get("limit", "50"), MAX_PAGE)
    search = query.get("q", "")[:MAX_SEARCH]
    if query.get("state", "served") == "unserved":
        unserved, part = routes.unserved_adapters(principal, search, skip, limit)
        rows = [_unserved(one) for one in unserved]
    else:
        served, part = routes.adapters(principal, search, skip, limit)
        now = await state.manager.fleet.latest()
        running = Counter(one.request.route.model_name for one in state.machine.requests.values())
        rows = [_served(state, route, now, running[route.model_name]) for route in served]
    return _json({"adapters": rows, "total": part.total, "more": part.is_partial, "skip": skip})


def _served(state: AppState, route: Route, now: FleetNow, in_flight: int) -> dict[str, Any]:
    machine, places = state.machine, now.places.get(route.digest, [])
    pool = machine.routes.pools.get(route.pool)
    status = standing(pool, places, machine.config.hold_s, scheduler_up=machine.scheduler_up)
    tiers = Counter(place.tier.name.lower() for place in places if place.tier >= Tier.DISK)
    return {
        "model": route.model_name,
        "namespace": route.namespace,
        "pool": route.pool,
        "digest": route.digest,
        "rank": route.rank,
        "created": route.created_unix_s,
        "in_flight": in_flight,
        "tiers": tiers,
        "loading": sum(place.loading for place in places),
        "state": status.state,
        "why": status.reason,
    }


def _unserved(route: Unserved) -> dict[str, Any]:
    return {
        "model": route.model_name,
        "namespace": route.namespace,
        "pool": route.pool,
        "state": "unserved",
        "reason": route.reason,
        "why": route.message,
        "advice": advice(route.reason, "LoRAAdapter") or "",
    }


def _number(value: str, maximum: int) -> int:
    """Raises BadRequest."""
    if not (value.isascii() and value.isdigit() and len(value) < 12):
        raise BadRequest(f"{value[:32]!r} is not a number.")
    return min(int(value), maximum)


def _json(value: dict[str, Any]) -> Response:
    headers = {"cache-control": "no-store", "x-content-type-options": "nosniff"}
    return Response(orjson.dumps(value), media_type="application/json", headers=headers)
