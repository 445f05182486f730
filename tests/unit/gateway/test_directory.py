"""Pages of names: in order, whatever comes and goes, and each caller's own."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.domain.routes import KeyScope, PoolRoute, Route, Routes, Unserved
from weft_gateway.core import Principal, RouteIndex, directory
from weft_gateway.core.routes import ANY_NAMESPACE

POOL = PoolRoute("acme/p", "sha256:b", "base", ready_runners=1, shared_all=True)
BASE = Route("base", "acme", "acme/p", "")


def route(namespace: str, name: str) -> Route:
    return Route(f"{namespace}/{name}", namespace, "acme/p", f"sha256:{name}", uid=f"uid-{namespace}-{name}")


def broken(namespace: str, name: str) -> Unserved:
    return Unserved(f"uid-{namespace}-{name}", namespace, f"{namespace}/{name}", "acme/p", "NotFinite", "it holds NaN")


def names(index: RouteIndex, principal: Principal, **query: object) -> list[str]:
    asked = {"search": "", "skip": 0, "limit": 1000} | query
    served, _ = index.adapters(principal, **asked)  # pyright: ignore[reportArgumentType]
    return [one.model_name for one in served]


def sees(principal: Principal, one: Route | Unserved) -> bool:
    return principal.namespace in (None, one.namespace) and (not principal.models or one.model_name[-1] in "bde")


CHANGES = st.lists(
    st.tuples(st.sampled_from(["acme", "rival"]), st.sampled_from("abcdef"), st.sampled_from(["route", "break", "go"])),
    max_size=20,
)


@pytest.mark.parametrize("few", [3, directory.FEW])
@given(history=st.lists(CHANGES, max_size=6))
def test_lists_are_those_of_the_table_after_every_change(few: int, history: list[list[tuple[str, str, str]]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(directory, "FEW", few)
        follow(history)


def follow(history: list[list[tuple[str, str, str]]]) -> None:
    index = RouteIndex()
    index.take(Routes(1, full=True, routes=(BASE,), pools=(POOL,)))
    for version, changes in enumerate(history, start=1):
        last = {(namespace, name): what for namespace, name, what in changes}
        routes = tuple(route(*of) for of, what in last.items() if what == "route")
        unserved = tuple(broken(*of) for of, what in last.items() if what == "break")
        gone = tuple("/".join(of) for of, what in last.items() if what != "route")
        better = tuple(f"uid-{of[0]}-{of[1]}" for of, what in last.items() if what != "break")
        index.take(
            Routes(
                version + 1, full=False, base_version=version, routes=routes, removed_models=gone, unserved=unserved,
                removed_unserved=better,
            )
        )  # fmt: skip
        some = Principal("acme", "key", KeyScope.INFERENCE, ("acme/b", "*/[de]"))
        for principal in (ANY_NAMESPACE, Principal("acme"), Principal("nobody"), some):
            own = [r for r in index.routes.values() if r.digest and sees(principal, r)]
            assert names(index, principal) == sorted(one.model_name for one in own)
            bad = [u for u in index.unserved.values() if sees(principal, u)]
            listed, page = index.unserved_adapters(principal, "", 0, 1000)
            assert [one.uid for one in listed] == sorted(one.uid for one in bad)
            assert index.counts(principal) == (len(own), len(bad)) == (len(own), page.total)


def test_a_page_is_a_part_of_what_the_search_finds() -> None:
    index = RouteIndex()
    many = tuple(route("acme", f"a{number:03}") for number in range(300))
    index.take(Routes(1, full=True, routes=(BASE, *many), pools=(POOL,)))
    found, page = index.adapters(ANY_NAMESPACE, "", 100, 50)
    assert [one.model_name for one in found] == [f"acme/a{number:03}" for number in range(100, 150)]
    assert (page.total, page.is_partial) == (300, True)
    assert names(index, ANY_NAMESPACE, search="ACME/A29", skip=5, limit=20) == [
        f"acme/a29{number}" for number in range(5, 10)
    ]
    assert names(index, ANY_NAMESPACE, search="nothing") == []
