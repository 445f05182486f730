"""The external metrics API, without its sockets: values, selectors, and who is believed."""

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.domain.routes import PhaseCounts
from weft_operator.kubernetes.external import METRICS, Demand, UnknownMetric, api_resources, quantity, values
from weft_operator.kubernetes.front_proxy import FrontProxy, NoFrontProxy, read_front_proxy, refuse
from weft_operator.kubernetes.selectors import BadSelector, parse_selector

POOLS = [
    ("ml/base", Demand(demand_runners=3, queued=7, running=9, total_pages=1000, reserved_pages=437)),
    ("ml/other", Demand(demand_runners=1, phases=PhaseCounts(1, 0))),
    ("prod/base", Demand(demand_runners=8)),
]
PROXY = FrontProxy("pem", frozenset({"front-proxy-client"}), ("X-Remote-User",))


def named(common_name: str) -> dict[str, Any]:
    return {"subject": ((("organizationName", "x"),), (("commonName", common_name),))}


def answered(metric: str, selector: str = "", namespace: str = "ml") -> dict[str, str]:
    items = values(metric, namespace, selector, POOLS, 0.0)["items"]
    return {item["metricLabels"]["pool"]: item["value"] for item in items}


def test_the_metrics_of_a_pool_in_its_namespace() -> None:
    assert answered("weft_pool_demand_runners") == {"base": "3", "other": "1"}
    assert answered("weft_pool_demand_runners", "pool=base") == {"base": "3"}
    assert answered("weft_pool_queued_requests", "pool=base") == {"base": "7"}
    assert answered("weft_pool_running_requests", "pool in (base)") == {"base": "9"}
    assert answered("weft_pool_reserved_pages_ratio", "pool=base") == {"base": "437m"}
    assert answered("weft_pool_demand_runners", namespace="nowhere") == {}


def test_the_demand_of_each_phase_is_that_of_pools_that_split_them() -> None:
    assert answered("weft_pool_prompt_demand_runners") == {"other": "1"}
    assert answered("weft_pool_token_demand_runners") == {"other": "0"}


def test_a_pool_without_pages_has_none_reserved() -> None:
    assert answered("weft_pool_reserved_pages_ratio", "pool=other") == {"other": "0"}


def test_an_unknown_metric_is_told_with_the_known_ones() -> None:
    with pytest.raises(UnknownMetric, match="weft_pool_demand_runners"):
        answered("weft_pool_mood")


def test_discovery_lists_every_metric() -> None:
    assert [resource["name"] for resource in api_resources()["resources"]] == list(METRICS)


@pytest.mark.parametrize(("value", "text"), [(0, "0"), (3.0, "3"), (0.5, "500m"), (0.4373, "437m"), (1.25, "1250m")])
def test_quantities(value: float, text: str) -> None:
    assert quantity(value) == text


@pytest.mark.parametrize(
    ("selector", "labels", "holds"),
    [
        ("", {}, True),
        ("a=b", {"a": "b"}, True),
        ("a==b", {"a": "c"}, False),
        ("a!=b", {}, True),
        ("a in (b, c),d", {"a": "c", "d": ""}, True),
        ("a notin (b,c)", {"a": "b"}, False),
        ("a notin (b,c)", {}, True),
        ("!a", {}, True),
        ("a,!b", {"a": "", "b": ""}, False),
        ("serving.weft.dev/pool=base", {"serving.weft.dev/pool": "base"}, True),
        ("a=", {"a": ""}, True),
    ],
)
def test_selectors_mean_what_the_api_server_means(selector: str, labels: dict[str, str], holds: bool) -> None:
    assert parse_selector(selector)(labels) is holds


@pytest.mark.parametrize("text", ["a=b=c", "a in b", "a in (b", "=b", "a,,b", "a b", "a in (b),"])
def test_what_is_no_selector_is_refused(text: str) -> None:
    with pytest.raises(BadSelector):
        parse_selector(text)


@given(st.text(max_size=40), st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3))
def test_no_text_breaks_the_parser(text: str, labels: dict[str, str]) -> None:
    with suppress(BadSelector):
        assert parse_selector(text)(labels) in (True, False)


def test_the_front_proxy_is_believed_and_nobody_else() -> None:
    user = {"X-Remote-User": "system:serviceaccount:kube-system:horizontal-pod-autoscaler"}
    assert refuse(PROXY, named("front-proxy-client"), user) is None
    for certificate, headers, code in (
        (None, user, 401),
        ({}, user, 401),
        (named("somebody"), user, 403),
        ({"subject": ()}, user, 403),
        (named("front-proxy-client"), {}, 401),
    ):
        refused = refuse(PROXY, certificate, headers)
        assert refused is not None
        assert refused.code == code


def test_without_allowed_names_every_certificate_of_the_ca_will_do() -> None:
    assert refuse(FrontProxy("pem", frozenset(), ("X-Remote-User",)), named("x"), {"X-Remote-User": "u"}) is None


def test_the_published_configuration_is_read() -> None:
    data = {
        "requestheader-client-ca-file": "pem",
        "requestheader-allowed-names": json.dumps(["front-proxy-client"]),
        "requestheader-username-headers": json.dumps(["X-Remote-User"]),
    }
    assert read_front_proxy({"data": data}) == PROXY


@pytest.mark.parametrize(
    "configmap",
    [None, {}, {"data": {}}, {"data": {"requestheader-client-ca-file": "pem", "requestheader-allowed-names": "["}}],
)
def test_without_a_request_header_ca_nobody_is_believed(configmap: dict[str, Any] | None) -> None:
    with pytest.raises(NoFrontProxy):
        read_front_proxy(configmap)
