"""Wish and live object: never a difference where the API server only wrote it its own way, always one elsewhere."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.operator.cluster import SITE, served
from tests.unit.operator.planning import BASE, pool_object, stored
from weft_operator.core.children import make_children, template_hash
from weft_operator.core.drift import matches, spec_hash, with_spec_hash
from weft_operator.core.pod_template import TEMPLATE_HASH
from weft_operator.core.resources import parse_pool
from weft_operator.core.runner_defaults import RunnerDefaults
from weft_operator.core.state import Child

QUANTITIES = st.sampled_from([1, "1", "500m", "0.5", "1000m", "1Gi", "1024Mi", "2e3", ".5"])
RESOURCES = st.fixed_dictionaries(
    {},
    optional={
        "limits": st.dictionaries(st.sampled_from(["cpu", "memory", "nvidia.com/gpu"]), QUANTITIES, max_size=3),
        "requests": st.dictionaries(st.sampled_from(["ephemeral-storage", "hugepages-2Mi"]), QUANTITIES, max_size=2),
    },
)  # requests of what has no limit: they may not be above one
TEMPLATES = st.fixed_dictionaries(
    {},
    optional={
        "image": st.just("registry.example/own:2"),
        "resources": RESOURCES,
        "env": st.lists(
            st.fixed_dictionaries({"name": st.sampled_from(["A", "B"]), "value": st.sampled_from(["", "x"])}),
            unique_by=lambda item: item["name"],
        ),
        "labels": st.just({"team": "red"}),
        "nodeSelector": st.sampled_from([{}, {"gpu": "yes"}]),
        "tolerations": st.lists(
            st.fixed_dictionaries({"key": st.just("gpu"), "operator": st.just("Exists")}), max_size=2
        ),
        "topologySpreadConstraints": st.just(
            [{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}]
        ),
        "priorityClassName": st.sampled_from(["low", "high"]),
    },
)
SITES = st.builds(
    RunnerDefaults,
    image=st.just("registry.example/runner@sha256:0"),
    supervisor=st.just("s:1"),
    depot=st.just("http://d:1"),
    tls_secret=st.sampled_from(["", "runner-tls"]),
    image_pull_secrets=st.sampled_from([(), ("regcred",)]),
    image_pull_policy=st.sampled_from(["", "Never"]),
    volumes=st.sampled_from([(), ({"name": "code", "hostPath": {"path": "/code", "type": ""}},)]),
    volume_mounts=st.sampled_from([(), ({"name": "code", "mountPath": "/code", "readOnly": False},)]),
    resources=RESOURCES,
)


def wishes(template: dict[str, Any], defaults: RunnerDefaults = SITE, size: int = 2) -> list[Child]:
    return make_children(parse_pool(stored(pool_object(template=template))), BASE, defaults, {"runners": size})


def deployment(template: dict[str, Any] | None = None, size: int = 2) -> dict[str, Any]:
    return next(child.manifest for child in wishes(template or {}, size=size) if child.kind == "Deployment")


@given(TEMPLATES, SITES, st.integers(0, 3))
def test_what_servers_make_of_a_manifest_fits_it(template: dict[str, Any], defaults: RunnerDefaults, size: int) -> None:
    for child in wishes(template, defaults, size):
        live = served(child.manifest)
        assert matches(live, child.manifest)
        assert spec_hash(live) == spec_hash(child.manifest) != ""


@given(TEMPLATES, SITES, st.data())
def test_another_value_is_different(template: dict[str, Any], defaults: RunnerDefaults, data: st.DataObject) -> None:
    child = data.draw(st.sampled_from(wishes(template, defaults)))
    live = served(child.manifest)
    path = data.draw(st.sampled_from(sorted(leaves(live, child.manifest), key=str)))
    broken = copy.deepcopy(live)
    parent, field = _at(broken, path[:-1]), path[-1]
    if data.draw(st.booleans()) or isinstance(parent, list):
        parent[field] = other_than(parent[field])
    else:
        del parent[field]
    assert not matches(broken, child.manifest)


@given(TEMPLATES, TEMPLATES)
def test_two_manifests_have_one_intent_only_when_they_are_the_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    first, second = deployment(one), deployment(other)
    assert (spec_hash(first) == spec_hash(second)) == (first == second)


def test_a_field_that_the_manifest_no_longer_names_is_found_by_the_intent() -> None:
    before, after = deployment({"nodeSelector": {"gpu": "yes"}}), deployment()
    live = served(before)
    assert not matches(live, after)
    live["metadata"]["annotations"] = dict(after["metadata"]["annotations"])
    live["spec"]["template"]["metadata"]["annotations"][TEMPLATE_HASH] = template_hash(after)
    assert matches(live, after)  # nothing else tells


def test_the_intent_of_a_pod_template_is_not_in_it() -> None:
    """Else another number of replicas would restart every runner."""
    small, large = (deployment(size=size) for size in (1, 5))
    assert spec_hash(small) != spec_hash(large)
    assert small["spec"]["template"] == large["spec"]["template"]


@pytest.mark.parametrize(
    ("live", "wish", "same"),
    [
        ({"limits": {"cpu": "1"}}, {"limits": {"cpu": 1}}, True),
        ({"limits": {"cpu": "1500m"}}, {"limits": {"cpu": "1.5"}}, True),
        ({"limits": {"memory": "1Gi"}}, {"limits": {"memory": "1024Mi"}}, True),
        ({"limits": {"cpu": "2"}}, {"limits": {"cpu": 1}}, False),
        ({"env": [{"name": "A", "value": "1000m"}]}, {"env": [{"name": "A", "value": "1"}]}, False),
        ({"env": [{"name": "A"}]}, {"env": [{"name": "A", "value": ""}]}, True),
        ({"env": [{"name": "B"}, {"name": "A", "value": "x"}]}, {"env": [{"name": "A", "value": "x"}]}, True),
        ({"args": ["a", "b", "c"]}, {"args": ["a", "b"]}, False),
        ({"tolerations": [{"key": "a"}, {"key": "b"}]}, {"tolerations": [{"key": "a"}]}, False),
        ({}, {"replicas": 0}, False),
        ({}, {"automountServiceAccountToken": False}, False),
        ({}, {"readOnly": False}, True),
        ({}, {"emptyDir": {}}, False),
        ({"replicas": 1}, {"replicas": True}, False),
        ({"ports": [{"port": 1}]}, {"ports": [{"port": 1, "protocol": "TCP"}]}, False),
    ],
)
def test_single_fields(live: dict[str, Any], wish: dict[str, Any], same: bool) -> None:
    assert matches(live, wish) is same


def test_signing_does_not_change_what_is_signed() -> None:
    manifest = {"kind": "Service", "metadata": {"name": "x", "annotations": {"own": "1"}}}
    before = copy.deepcopy(manifest)
    made = with_spec_hash(manifest)
    assert manifest == before
    assert made["metadata"]["annotations"]["own"] == "1"


def leaves(live: Any, wish: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of the single values that a wish names, as far as the live object has them at the same place."""
    if isinstance(wish, dict) and wish:
        for name, value in wish.items():
            if name in live:
                yield from leaves(live[name], value, (*path, name))
    elif isinstance(wish, list) and wish:
        for index, value in enumerate(wish):
            yield from leaves(live[index], value, (*path, index))
    elif wish not in ("", [], False):
        yield path


def other_than(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, int) else "77"


def _at(obj: Any, path: tuple[Any, ...]) -> Any:
    for step in path:
        obj = obj[step]
    return obj
