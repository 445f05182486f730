"""The route table: who sees what; keys; and that a stranger's model looks like none at all."""

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.wire.v1 import scheduler_pb2 as pb
from weft_gateway.core.routes import ANY_NAMESPACE, Principal, table_of
from weft_gateway.errors import Unauthorized, Unavailable
from weft_gateway.shell.auth import authenticate

names = st.sampled_from(["a", "b", "c"])


@st.composite
def tables(draw: st.DrawFn) -> pb.Routes:
    """Pools of every namespace, shared with some or all; adapters of every namespace on them."""
    pools, routes = [], []
    for owner in draw(st.sets(names, min_size=1)):
        shared = draw(st.sets(names))
        pools.append(pb.PoolRoute(pool=f"{owner}/p", shared_all=draw(st.booleans()), shared_namespaces=shared))
        routes.append(pb.Route(model_name=f"base-{owner}", namespace=owner, pool=f"{owner}/p"))
        tenants = draw(st.sets(names))
        routes += [
            pb.Route(model_name=f"{who}/x-{owner}", namespace=who, pool=f"{owner}/p", adapter_digest="d")
            for who in tenants
        ]
    return pb.Routes(version=1, routes=routes, pools=pools)


@given(tables(), names)
def test_a_caller_sees_its_own_adapters_and_the_bases_it_may_use_and_nothing_else(message: pb.Routes, who: str) -> None:
    seen = {route.model_name for route, _ in table_of(message).visible(Principal(who))}
    pools = {pool.pool: pool for pool in message.pools}
    for route in message.routes:
        pool = pools[route.pool]
        owner = route.pool.partition("/")[0]
        shared = pool.shared_all or who == owner or who in pool.shared_namespaces
        assert (route.model_name in seen) == (route.namespace == who if route.adapter_digest else shared)


@given(tables(), names)
def test_what_is_found_is_what_is_listed(message: pb.Routes, who: str) -> None:
    table = table_of(message)
    listed = {route.model_name for route, _ in table.visible(Principal(who))}
    assert {name for name in table.models if table.find(name, Principal(who))} == listed


def test_without_keys_everybody_sees_everything_bases_first() -> None:
    routes = [
        pb.Route(model_name="a/x", namespace="a", pool="z/p", adapter_digest="d"),
        pb.Route(model_name="zbase", namespace="z", pool="z/p"),
    ]
    table = table_of(pb.Routes(routes=routes, pools=[pb.PoolRoute(pool="z/p")]))
    assert [route.model_name for route, _ in table.visible(ANY_NAMESPACE)] == ["zbase", "a/x"]


def test_a_route_without_its_pool_is_not_served() -> None:
    table = table_of(pb.Routes(routes=[pb.Route(model_name="a/x", pool="gone/p")]))
    assert table.find("a/x", ANY_NAMESPACE) is None


def test_a_key_is_looked_up_by_its_hash() -> None:
    key_hash = hashlib.sha256("geheim-ü".encode()).hexdigest()
    table = table_of(pb.Routes(keys=[pb.KeyRoute(key_hash=key_hash, namespace="a", key_id="wk_1")], keys_known=True))
    assert authenticate("Bearer geheim-ü", table, auth=True) == Principal("a", "wk_1")
    assert authenticate(None, table, auth=False) == ANY_NAMESPACE
    with pytest.raises(Unauthorized):
        authenticate(f"Bearer {key_hash}", table, auth=True)


def test_before_the_keys_are_known_nobody_is_refused_for_good() -> None:
    with pytest.raises(Unavailable):
        authenticate("Bearer x", table_of(pb.Routes()), auth=True)
