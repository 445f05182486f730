"""The route table: who may use what; keys; changes; and that another tenant's model is as good as none."""

import hashlib
import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.costs import lines_of
from weft.domain.adapter import AdapterVersion
from weft.domain.routes import KeyRoute, KeyScope, PoolRoute, Route, Routes, RoutesGap
from weft_gateway.core import Principal, RouteIndex
from weft_gateway.core.routes import ANY_NAMESPACE, UnknownVersion, route_of_draw
from weft_gateway.errors import PermissionDenied, ServiceUnavailable, Unauthorized
from weft_gateway.shell import Action, authenticate, check_scope

names = st.sampled_from(["a", "b", "c"])


@st.composite
def tables(draw: st.DrawFn) -> Routes:
    """Pools of every namespace, shared with some or all; adapters of every namespace on them."""
    pools, routes = [], []
    for owner in sorted(draw(st.sets(names, min_size=1))):
        shared = tuple(sorted(draw(st.sets(names))))
        ready = draw(st.integers(0, 1))
        pools.append(
            PoolRoute(
                f"{owner}/p", "", "", ready_runners=ready, shared_all=draw(st.booleans()), shared_namespaces=shared
            )
        )
        routes.append(Route(f"base-{owner}", owner, f"{owner}/p", ""))
        routes += [Route(f"{who}/x-{owner}", who, f"{owner}/p", "d") for who in sorted(draw(st.sets(names)))]
    return Routes(version=1, full=True, routes=tuple(routes), pools=tuple(pools))


def table_of(change: Routes) -> RouteIndex:
    table = RouteIndex()
    table.take(change)
    return table


def listing(table: RouteIndex, who: str | None) -> list[tuple[Route, PoolRoute]]:
    return list(table.visible(Principal(who)))


@given(tables(), names)
def test_a_caller_sees_its_own_adapters_and_the_bases_it_may_use_and_nothing_else(full: Routes, who: str) -> None:
    table = table_of(full)
    seen = {route.model_name for route, _ in listing(table, who)}
    pools = {pool.name: pool for pool in full.pools}
    for route in full.routes:
        pool = pools[route.pool]
        owner = route.pool.partition("/")[0]
        shared = pool.shared_all or who == owner or who in pool.shared_namespaces
        assert (route.model_name in seen) == (route.namespace == who if route.digest else shared)
        assert (route.model_name in seen) == (table.find(route.model_name, Principal(who)) is not None)


@given(tables(), tables(), names)
def test_changes_lead_to_the_table_that_a_full_one_gives_and_name_the_pools_that_changed(
    before: Routes, after: Routes, who: str
) -> None:
    table, whole = table_of(before), table_of(after)
    old, new = set(before.routes), set(after.routes)
    delta = Routes(
        version=2,
        full=False,
        base_version=1,
        routes=tuple(sorted(new - old, key=lambda route: route.model_name)),
        removed_models=tuple(sorted({one.model_name for one in old} - {one.model_name for one in new})),
        pools=tuple(pool for pool in after.pools if pool not in before.pools),
        removed_pools=tuple(sorted({one.name for one in before.pools} - {one.name for one in after.pools})),
    )
    changed = table.take(delta)
    for caller in (who, None):
        assert listing(table, caller) == listing(whole, caller)
    rows = {pool.name: pool for pool in before.pools}, {pool.name: pool for pool in after.pools}
    assert changed == sorted(name for name in rows[0] | rows[1] if rows[0].get(name) != rows[1].get(name))
    assert table_of(before).take(after) == changed, "a full table names them, too"


def test_a_change_that_does_not_follow_leaves_the_table_as_it_was() -> None:
    table = table_of(Routes(4, True, routes=(Route("m", "n", "n/p", ""),), pools=(PoolRoute("n/p", "", ""),)))
    with pytest.raises(RoutesGap):
        table.take(Routes(6, False, base_version=5, removed_models=("m",)))
    assert (table.version, table.find("m", ANY_NAMESPACE) is None) == (4, False)


def test_without_keys_every_caller_sees_everything_bases_first() -> None:
    routes = (Route("a/x", "a", "z/p", "d"), Route("zbase", "z", "z/p", ""))
    table = table_of(Routes(1, True, routes=routes, pools=(PoolRoute("z/p", "", ""),)))
    assert [route.model_name for route, _ in table.visible(ANY_NAMESPACE)] == ["zbase", "a/x"]
    assert (table.name_of("d"), table.name_of("")) == ("a/x", None)


DIGESTS = ["sha256:" + letters * 32 for letters in ("aa", "ab", "ac")]


def versioned() -> RouteIndex:
    """An adapter `a/x` with two earlier contents, one of them named."""
    first = AdapterVersion(DIGESTS[1], 16, name="step-1", eos_token_ids=(16,), own_chat_template=True)
    earlier = (first, AdapterVersion("sha256:" + "ab" * 31 + "ff", 8))
    routes = (
        Route("a/x", "a", "z/p", DIGESTS[0], 8, version="step-2", versions=earlier, eos_token_ids=(8,)),
        Route("zbase", "z", "z/p", ""),
    )
    return table_of(Routes(1, True, routes=routes, pools=(PoolRoute("z/p", DIGESTS[2], "zbase", shared_all=True),)))


@pytest.mark.parametrize(
    ("pin", "digest", "rank"),
    [
        ("step-1", DIGESTS[1], 16),
        ("step-2", DIGESTS[0], 8),
        (DIGESTS[1], DIGESTS[1], 16),
        (DIGESTS[0][:19], DIGESTS[0], 8),
    ],
)
def test_a_pin_is_a_version_by_name_or_digest(pin: str, digest: str, rank: int) -> None:
    found = versioned().find(f"a/x@{pin}", Principal("a"))
    assert (found[0].model_name, found[0].digest, found[0].rank) == ("a/x", digest, rank)
    assert (found[0].eos_token_ids, found[0].own_chat_template) == ((rank,), rank == 16)


@pytest.mark.parametrize(
    "pin", ["", "step-3", "sha256:", DIGESTS[0][:18], DIGESTS[1][:30], DIGESTS[2], "step-1@step-1"]
)
def test_a_pin_of_no_version_or_of_several_is_refused_with_those_that_are_served(pin: str) -> None:
    with pytest.raises(UnknownVersion, match=f"Served: step-2 \\({DIGESTS[0]}\\), step-1"):
        versioned().find(f"a/x@{pin}", ANY_NAMESPACE)


@pytest.mark.parametrize(("weight", "larger"), [(1, 2), (30, 80), (99, 100)])
def test_a_canary_has_its_share_and_a_larger_weight_takes_nobody_from_it(weight: int, larger: int) -> None:
    """A share is counted over 5,000 keys; the tolerance is five standard deviations of a binomial count."""

    def share(weight: int) -> set[int]:
        canary = AdapterVersion(DIGESTS[1], 16, name="next", weight=weight)
        route = Route("a/x", "a", "z/p", DIGESTS[0], 8, uid="u", versions=(canary, AdapterVersion(DIGESTS[2], 4)))
        drawn = {key: route_of_draw(route, f"request-{key}") for key in range(5_000)}
        assert {(one.digest, one.rank) for one in drawn.values()} <= {(DIGESTS[0], 8), (DIGESTS[1], 16)}
        return {key for key, one in drawn.items() if one.digest == DIGESTS[1]}

    found = share(weight)
    p = weight / 100
    assert abs(len(found) - 5_000 * p) <= 5 * (5_000 * p * (1 - p)) ** 0.5
    assert found <= share(larger)


def test_a_base_is_pinned_by_its_digest() -> None:
    table = versioned()
    assert table.find(f"zbase@{DIGESTS[2]}", ANY_NAMESPACE) == table.find("zbase", ANY_NAMESPACE)
    with pytest.raises(UnknownVersion):
        table.find(f"zbase@{DIGESTS[0]}", ANY_NAMESPACE)


@pytest.mark.parametrize(("count", "end"), [(10, r"v-8 \(d8\)\."), (13, r"v-8 \(d8\) and 3 more\.")])
def test_an_error_names_ten_versions(count: int, end: str) -> None:
    earlier = tuple(AdapterVersion(f"d{i}", 8, name=f"v-{i}") for i in range(count - 1))
    route = Route("a/x", "a", "z/p", DIGESTS[0], versions=earlier)
    table = table_of(Routes(1, True, routes=(route,), pools=(PoolRoute("z/p", "", ""),)))
    with pytest.raises(UnknownVersion, match=f"{end}$"):
        table.find("a/x@none", ANY_NAMESPACE)


def test_a_pin_tells_a_caller_nothing_of_another_tenants_model() -> None:
    assert versioned().find("a/x@nothing", Principal("b")) is None


def test_a_route_without_its_pool_is_not_served() -> None:
    table = table_of(Routes(1, True, routes=(Route("a/x", "a", "gone/p", "d"),)))
    assert table.find("a/x", ANY_NAMESPACE) is None


def test_a_key_is_looked_up_by_its_hash() -> None:
    key_hash = hashlib.sha256("geheim-ü".encode()).hexdigest()
    table = table_of(Routes(1, True, keys=(KeyRoute(key_hash, "a", "wk_1"),), keys_known=True))
    assert authenticate("Bearer geheim-ü", table, auth=True) == Principal("a", "wk_1")
    assert authenticate(None, table, auth=False) == ANY_NAMESPACE
    for header in (None, "Bearer", "Basic geheim-ü", "geheim-ü", f"Bearer {key_hash}"):
        with pytest.raises(Unauthorized):
            authenticate(header, table, auth=True)
    table.take(replace(Routes(2, False, base_version=1, keys_known=True), removed_keys=(key_hash,)))
    with pytest.raises(Unauthorized):
        authenticate("Bearer geheim-ü", table, auth=True)


def keyed(**fields: Any) -> tuple[RouteIndex, Principal]:
    """A table with two models of a namespace, and the caller of a key with those fields."""
    key_hash = hashlib.sha256(b"k").hexdigest()
    key = replace(KeyRoute(key_hash, "a", "1"), **fields)
    routes = tuple(Route(name, name[0], "a/p", "d") for name in ("a/chat-1", "a/other", "b/chat-1"))
    pools = (PoolRoute("a/p", "", ""),)
    table = table_of(Routes(1, True, routes=routes, pools=pools, keys=(key,), keys_known=True))
    return table, authenticate("Bearer k", table, auth=True)


def test_an_expired_key_is_refused() -> None:
    now_ms = time.time_ns() // 1_000_000
    table, _ = keyed(expires_unix_ms=now_ms + 60_000)
    assert table.principal_of(hashlib.sha256(b"k").hexdigest(), now_ms + 60_000) is None, "to the millisecond"
    with pytest.raises(Unauthorized):
        keyed(expires_unix_ms=now_ms - 1)


def test_a_key_for_some_models_finds_no_others_and_has_no_files_and_batches() -> None:
    table, caller = keyed(models=("a/chat-*",))
    assert [route.model_name for route, _ in table.visible(caller)] == ["a/chat-1"]
    assert table.find("a/other", caller) is None
    assert table.find("b/chat-1", replace(caller, models=("*",))) is None, "a pattern opens no other namespace"
    for action in (Action.INFER, Action.CONVERSE):
        check_scope(caller, action)
    for action in (Action.WRITE, Action.READ, Action.CONTENT):
        with pytest.raises(PermissionDenied):
            check_scope(caller, action)


@pytest.mark.parametrize(
    ("scope", "allowed"),
    [
        (KeyScope.INFERENCE, set(Action) - {Action.PUBLISH}),
        (KeyScope.READ_ONLY, {Action.READ, Action.LIST, Action.METRICS}),
        (KeyScope.METRICS, {Action.METRICS}),
        (KeyScope.PLATFORM, {Action.LIST, Action.METRICS, Action.PUBLISH}),
    ],
)
def test_a_scope_has_its_actions_and_no_others(scope: KeyScope, allowed: set[Action]) -> None:
    table, caller = keyed(scope=scope)
    for action in set(Action) - allowed:
        with pytest.raises(PermissionDenied):
            check_scope(caller, action)
    for action in allowed:
        check_scope(caller, action)
    names = [route.model_name for route, _ in table.visible(caller)]
    assert ("b/chat-1" in names) == (scope is KeyScope.PLATFORM)


def test_before_the_keys_are_known_no_caller_is_refused_for_good() -> None:
    with pytest.raises(ServiceUnavailable) as refused:
        authenticate("Bearer x", RouteIndex(), auth=True)
    assert refused.value.code == "keys_not_known"


@pytest.mark.slow
def test_a_change_and_a_tenants_listing_cost_the_same_beside_any_number_of_others() -> None:
    costs = set[tuple[int, int]]()
    for others in (10, 5_000):
        routes = [Route(f"a/x{i}", "a", "z/p", "d") for i in range(5)]
        routes += [Route(f"t{i}/x", f"t{i}", "z/p", "d") for i in range(others)]
        table = table_of(Routes(1, True, routes=tuple(routes), pools=(PoolRoute("z/p", "", ""),)))
        change = Routes(2, False, 1, routes=(Route("a/new", "a", "z/p", "d"),), removed_models=("a/x0",))
        costs.add((lines_of(lambda t=table, c=change: t.take(c)), lines_of(lambda t=table: listing(t, "a"))))
    assert len(costs) == 1
