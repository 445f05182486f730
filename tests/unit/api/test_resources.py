"""The typed resources: defaults, bounds, names, what is immutable, and a way back to JSON that loses nothing."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kubernetes.utils.quantity import parse_quantity
from pydantic import ValidationError

from harness.bad_manifests import adapter, pool
from weft.api.loraadapter import LoRAAdapter
from weft.api.manifests import ManifestError, parse_object
from weft.api.meta import immutable_changes
from weft.api.servingpool import Autoscaling, ServingPool
from weft.api.template import QUANTITY_PATTERN
from weft_operator.core import AdapterObject, PoolObject, parse

DIGEST = "sha256:" + "0" * 64


def wrong(value: dict[str, Any], path: str) -> str:
    kind = ServingPool if value["kind"] == "ServingPool" else LoRAAdapter
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(value)
    found = {".".join(map(str, item["loc"])): item["msg"] for item in caught.value.errors()}
    assert list(found) == [path], found
    return found[path]


@pytest.mark.parametrize(
    ("value", "path", "says"),
    [
        (pool(lora={"maxrank": 3}), "spec.lora.maxrank", "unknown field 'maxrank'; did you mean 'maxRank'?"),
        (pool(allowedNamespaces={"from": "All"}), "spec.allowedNamespaces", "expected a list; `weft convert -f FILE`"),
        (pool(kvCache={"pages": 3}), "spec.kvCache", "`weft convert -f FILE` rewrites manifests of an earlier form"),
        (pool(replica=3), "spec.replica", "unknown field 'replica'; did you mean 'replicas'?"),
        (
            pool(advanced={"max_queue": 1}),
            "spec.advanced.max_queue",
            "unknown field 'max_queue'; did you mean 'maxQueue'?",
        ),
        (adapter(source={"uri": "file:a", "path": "x"}), "spec.source.path", "there are: uri, revision, digest"),
        ({**pool(), "sepc": {}}, "sepc", "unknown field 'sepc'; did you mean 'spec'?"),
        ({**pool(), "metadata": {"name": "a", "label": {}}}, "metadata.label", "did you mean 'labels'?"),
        (pool(**{"{evil}": 1}), "spec.{evil}", "unknown field '{evil}'"),
    ],
)
def test_an_unknown_field_is_refused_with_the_nearest_name(value: dict[str, Any], path: str, says: str) -> None:
    assert says in wrong(value, path)


@pytest.mark.parametrize("name", ["", "-a", "a-", "A", "a.b", "a_b", "a b", "a" * 64, "ä"])
def test_a_name_is_an_rfc_1123_label(name: str) -> None:
    wrong({**pool(), "metadata": {"name": name}}, "metadata.name")
    wrong({**pool(), "metadata": {"name": "a", "namespace": name}}, "metadata.namespace")


def test_what_a_server_wrote_is_kept() -> None:
    meta = {
        "name": "upper",
        "namespace": "acme",
        "uid": "u-1",
        "generation": 3,
        "resourceVersion": "77",
        "creationTimestamp": "2026-01-02T03:04:05Z",
        "deletionTimestamp": "2026-01-02T03:04:06.500000Z",
        "labels": {"a": "b"},
        "annotations": {"c": "d"},
        "finalizers": ["serving.weft.dev/unload"],
        "ownerReferences": [{"kind": "X"}],
        "deletionGracePeriodSeconds": 0,
    }
    status = {
        "observedGeneration": 3,
        "digest": DIGEST,
        "rank": 8,
        "alpha": 16.0,
        "targetModules": ["q_proj"],
        "sizeBytes": 1,
        "dtype": "float32",
        "modelName": "acme/upper",
        "unavailableRunners": 1,
        "conditions": [
            {
                "type": "Ready", "status": "True", "observedGeneration": 3, "reason": "Published", "message": "",
                "lastTransitionTime": "2026-01-02T03:04:05Z",
            }
        ],
    }  # fmt: skip
    value = {**adapter(), "metadata": {**meta, "managedFields": [{"manager": "kubectl"}]}, "status": status}
    found = LoRAAdapter.model_validate(value).to_dict()
    assert found["metadata"] == meta, "managedFields are the server's own and go"
    assert found["status"] == status
    assert LoRAAdapter.model_validate(found).to_dict() == found


def test_immutable_fields_are_named_with_what_to_do() -> None:
    old, new = ServingPool.model_validate(pool()), ServingPool.model_validate(pool(model={"uri": "file:other"}))
    (message,) = immutable_changes(old, new)
    assert message.startswith("spec.model.uri: cannot change (it is 'file:models/tiny')")
    assert immutable_changes(old, ServingPool.model_validate(pool(replicas=3))) == []


SECRET, AT = {"name": "key"}, "2027-01-01T00:00:00Z"


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"expiresAt": AT, "expiresAfter": "60s"}, "spec.expiresAfter"),
        ({"expiresAfter": "60s", "secretRef": SECRET}, "spec.expiresAfter"),
        ({"expiresAfter": "59s"}, "spec.expiresAfter"),
        ({"secretName": "mine", "secretRef": SECRET}, "spec.secretName"),
        ({"expiresAfter": "60s", "secretName": "mine"}, ""),
        ({"expiresAt": AT, "secretRef": SECRET}, ""),
    ],
)
def test_a_key_expires_one_way_and_is_made_or_brought(spec: dict[str, Any], field: str) -> None:
    value = {"apiVersion": "serving.weft.dev/v1alpha1", "kind": "APIKey", "metadata": {"name": "ci"}, "spec": spec}
    try:
        assert parse_object(value).kind == "APIKey"
        found = ""
    except ManifestError as error:
        (found,) = (problem.field for problem in error.problems)
    assert found == field


QUANTITIES = st.integers(0, 10**9) | st.from_regex(QUANTITY_PATTERN, fullmatch=True).filter(lambda text: len(text) < 16)
TEMPLATES = st.fixed_dictionaries(
    {},
    optional={
        "image": st.just("registry.example.com/weft/runner:1"),
        "resources": st.fixed_dictionaries({"limits": st.dictionaries(st.sampled_from(["cpu", "memory"]), QUANTITIES)}),
        "env": st.just([{"name": "A"}, {"name": "B", "value": "b"}]),
        "labels": st.just({"team": "serving"}),
        "tolerations": st.just([{"key": "gpu", "operator": "Exists"}]),
        "affinity": st.just({"podAntiAffinity": {}}),
        "topologySpreadConstraints": st.just([{"topologyKey": "zone"}]),
    },
)


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "template": TEMPLATES,
            "runnerGroups": st.just([{"name": "a", "maxRunners": 3}, {"name": "b", "template": {}}]),
            "replicas": st.integers(0, 1024),
            "advanced": st.fixed_dictionaries({}, optional={"maxAdapters": st.integers(1, 256)}),
            "parallelism": st.sampled_from([{"tensor": 4}, {"pipeline": 64}, {"tensor": 2, "podsPerRunner": 2}]),
            "drainSeconds": st.integers(1, 3600),
            "allowedNamespaces": st.just(["a", "b"]),
        },
    )
)
def test_json_and_back_loses_nothing(spec: dict[str, Any]) -> None:
    found = ServingPool.model_validate(pool(**spec))
    again = ServingPool.model_validate(found.to_dict())
    assert again == found
    assert again.to_dict() == found.to_dict()


@given(QUANTITIES, QUANTITIES)
def test_requests_above_limits_are_refused_and_others_are_not(request: int | str, limit: int | str) -> None:
    value = pool(template={"resources": {"requests": {"cpu": request}, "limits": {"cpu": limit}}})
    if parse_quantity(request) <= parse_quantity(limit):
        assert ServingPool.model_validate(value)
    else:
        assert wrong(value, "spec.template.resources.requests") == "requests may not be above limits"


def test_a_group_and_an_adapter_are_read_with_what_holds_for_them() -> None:
    spec = {
        "autoscaling": {"minReplicas": 0, "maxReplicas": 3},
        "template": {"image": "runner:1"},
        "runnerGroups": [
            {"name": "a", "minRunners": 1},
            {"name": "b", "template": {"image": "runner:2"}},
            {"name": "c", "template": {}},
        ],
    }
    found = parsed(ServingPool.model_validate(pool(**spec)))
    assert isinstance(found, PoolObject)
    assert found.spec.autoscaling == Autoscaling(minReplicas=0, maxReplicas=3)
    images = [(group.name, group.template.get("image"), group.min, group.max) for group in found.groups]
    assert images == [("a", "runner:1", 1, None), ("b", "runner:2", 0, None), ("c", None, 0, None)]
    source = {"uri": "s3://bucket/upper", "credentialsRef": {"name": "key"}, "endpoint": "http://minio:9000"}
    upper = parsed(LoRAAdapter.model_validate(adapter(namespace="acme", source=source, tier="Host")))
    assert isinstance(upper, AdapterObject)
    assert (str(upper.pool), upper.model_name) == ("acme/tiny", "acme/upper")
    read = upper.spec.source
    assert read.credentials_ref is not None
    assert (read.credentials_ref.name, read.endpoint, upper.spec.tier) == ("key", "http://minio:9000", "Host")


def parsed(resource: ServingPool | LoRAAdapter) -> PoolObject | AdapterObject:
    """Parse a resource as the operator reads the stored object."""
    value = resource.to_dict()
    server = {"uid": "u", "generation": 1, "resourceVersion": "1", "creationTimestamp": "2026-01-02T03:04:05Z"}
    return parse(value | {"metadata": value["metadata"] | server})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)


@given(
    JSON
    | st.fixed_dictionaries({"metadata": JSON, "spec": JSON})
    | st.builds(lambda extra: pool(**extra), st.dictionaries(st.text(max_size=5), JSON))
)
def test_nothing_makes_validation_fail_in_another_way(value: object) -> None:
    try:
        ServingPool.model_validate(value)
    except ValidationError as error:
        assert error.errors()  # noqa: PT017 (either outcome is right)
