"""Objects of earlier forms of v1alpha1: each field is in its place of today, or named as one without successor."""

from collections.abc import Iterator
from typing import Any

import pytest

from harness.bad_manifests import GOOD, adapter, pool
from weft.api.conversion import GONE, PLACES, convert
from weft.api.crd import crds
from weft.api.manifests import parse_object

EARLIER: dict[str, Any] = {
    "model": {"uri": "file:model"},
    "chatTemplate": {"from": "ConfigMap", "configMapRef": {"name": "chat", "key": "template"}},
    "generationDefaults": "Ignore",
    "maxOutputTokens": 99,
    "kvCache": {"pages": 7, "pageTokens": 32},
    "lora": {"maxAdapters": 3, "maxRank": 8},
    "offload": {
        "mode": "Auto", "deviceBytes": "1Gi", "hostBytes": "2Gi", "diskBytes": "3Gi", "diskPath": "/d",
        "weights": "int8", "kv": "int4", "sparseAttention": "TopK", "cpuAttention": "Off",
    },
    "phases": {"mode": "Split", "kvAcrossClasses": True, "minPrompt": 1},
    "autoscaling": {"maxReplicas": 4, "wakeSeconds": 30},
    "scheduler": {
        "queue": "s3", "reservation": "paged", "consolidation": "always", "maxQueue": 5, "maxSequences": 6,
        "maxBatchTokens": 8, "maxPrefills": 1, "fairness": {"mode": "Tenant", "weights": {"acme": 2}},
        "tokenTimeMs": 187, "maxMoves": 3,
    },
    "allowedNamespaces": {"from": "List", "names": ["acme"]},
}  # fmt: skip
TODAY: dict[str, Any] = {
    "model": {
        "uri": "file:model", "generationDefaults": "Ignore", "maxOutputTokens": 99,
        "chatTemplate": {"from": "ConfigMap", "configMapRef": {"name": "chat"}},
    },
    "autoscaling": {"maxReplicas": 4},
    "lora": {"maxRank": 8},
    "slo": {"tokenTimeMs": 187},
    "fairness": {"weights": {"acme": 2}},
    "phases": {"mode": "Split"},
    "memory": {
        "offload": {
            "deviceBytes": "1Gi", "hostBytes": "2Gi", "diskBytes": "3Gi", "diskPath": "/d", "weights": "int8",
            "kv": "int4",
        }
    },
    "allowedNamespaces": ["acme"],
    "advanced": {
        "queue": "s3", "reservation": "paged", "consolidation": "always", "maxQueue": 5, "maxSequences": 6,
        "maxBatchTokens": 8, "maxAdapters": 3, "kvPages": 7, "kvAcrossClasses": True, "sparseAttention": "TopK",
    },
}  # fmt: skip


def test_each_field_of_an_earlier_pool_is_where_it_is_now_or_named_as_lost() -> None:
    found, lost = convert(pool() | {"spec": EARLIER})
    assert found["spec"] == TODAY
    parse_object(found)
    assert [sentence.partition(" has no")[0] for sentence in lost] == [
        "spec.autoscaling.wakeSeconds: 30", "spec.chatTemplate.configMapRef.key: 'template'",
        "spec.kvCache.pageTokens: 32", "spec.scheduler.maxMoves: 3",
        "spec.scheduler.maxPrefills: 1",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("earlier", "today"),
    [
        ({"offload": {"mode": "Off", "weights": "int8"}}, {}),
        ({"kvCache": {}, "phases": {"kvAcrossClasses": False}}, {"advanced": {"kvAcrossClasses": False}}),
        ({"scheduler": {"tokenTimeMs": 100}}, {}),
        ({"scheduler": {"queue": "s3"}, "advanced": {"queue": "fcfs"}}, {"advanced": {"queue": "fcfs"}}),
        ({"allowedNamespaces": {"from": "All"}}, {"allowedNamespaces": ["*"]}),
        ({"allowedNamespaces": {"from": "Same"}}, {"allowedNamespaces": []}),
    ],
)
def test_a_default_that_was_written_out_is_no_choice(earlier: dict[str, Any], today: dict[str, Any]) -> None:
    model = {"model": {"uri": "file:model"}}
    assert convert(pool() | {"spec": model | earlier}) == (pool() | {"spec": model | today}, ())


def test_an_adapter_loses_what_went_and_keeps_its_own_template() -> None:
    given = {"from": "ConfigMap", "configMapRef": {"name": "chat", "key": "template"}}
    found, lost = convert(adapter(chatTemplate=given))
    assert found["spec"]["chatTemplate"] == {"from": "ConfigMap", "configMapRef": {"name": "chat"}}
    assert lost == (
        "spec.chatTemplate.configMapRef.key: 'template' has no successor: "
        "the ConfigMap's entry has to be chat_template.jinja",
    )


@pytest.mark.parametrize("name", GOOD)
def test_an_object_of_today_stays_as_it_is(name: str) -> None:
    assert convert(GOOD[name]) == (GOOD[name], ())


def leaves(schema: dict[str, Any], path: str = "") -> Iterator[str]:
    yield path
    for name, field in schema.get("properties", {}).items():
        yield from leaves(field, f"{path}.{name}".removeprefix("."))


def test_places_of_today_are_fields_and_earlier_ones_are_not() -> None:
    pools, adapters = (
        set(leaves(crds()[f"{plural}.serving.weft.dev.yaml"]["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
            ["properties"]["spec"]))
        for plural in ("servingpools", "loraadapters")
    )  # fmt: skip
    assert set(PLACES.values()) <= pools
    assert not pools & PLACES.keys()
    assert not (pools | adapters) & GONE.keys()
