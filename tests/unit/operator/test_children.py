"""What a pool owns, as manifests."""

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.unit.operator.cluster import SITE
from tests.unit.operator.planning import BASE, pool_object, stored
from weft_operator.core.children import MAX_CHILD_NAME_CHARS, child_name, make_children
from weft_operator.core.resources import parse_pool
from weft_operator.core.runner_defaults import RunnerDefaults
from weft_runner.settings import parse_settings

LABELS = st.from_regex(r"\A[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?\Z")
GROUPS = st.from_regex(r"\A[a-z0-9]([-a-z0-9]{0,30}[a-z0-9])?\Z")


def made(defaults: RunnerDefaults = SITE, **spec: Any) -> dict[str, dict[str, Any]]:
    """Manifests by kind; of Deployments the last one."""
    pool = parse_pool(stored(pool_object(**spec)))
    found = make_children(pool, BASE, defaults, {group.name: 1 for group in pool.groups})
    return {child.kind: child.manifest for child in found}


def pod(defaults: RunnerDefaults = SITE, **spec: Any) -> dict[str, Any]:
    return made(defaults, **spec)["Deployment"]["spec"]["template"]


def container(defaults: RunnerDefaults = SITE, **spec: Any) -> dict[str, Any]:
    return pod(defaults, **spec)["spec"]["containers"][0]


def test_the_arguments_are_what_a_runner_understands() -> None:
    arguments = [word.replace("$(POD_IP)", "10.0.0.7") for word in container()["args"]]
    settings = parse_settings([word.replace("$(POD_NAME)", "base-runners-x") for word in arguments])
    assert (settings.listen, settings.advertise) == ("0.0.0.0:7400", "10.0.0.7:7400")
    assert (settings.pool, settings.base_digest, settings.name) == ("default/base", BASE, "base-runners-x")
    assert (settings.kv_pages, settings.max_adapters, settings.max_rank) == (1024, 8, 64)


def test_the_pod_keeps_to_the_restricted_profile() -> None:
    spec = pod()["spec"]
    assert spec["securityContext"]["runAsNonRoot"]
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container()["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert not container()["securityContext"]["allowPrivilegeEscalation"]
    assert container()["securityContext"]["readOnlyRootFilesystem"]
    assert not spec["automountServiceAccountToken"]
    assert not made()["ServiceAccount"]["automountServiceAccountToken"]
    assert all({"emptyDir", "secret"} & volume.keys() for volume in spec["volumes"])


def test_whatever_is_mounted_has_a_volume_and_what_a_runner_writes_to_is_one() -> None:
    defaults = RunnerDefaults(
        "i", "s:1", "http://d", tls_secret="tls", volumes=({"name": "code", "hostPath": {"path": "/x"}},)
    )
    names = {volume["name"] for volume in pod(defaults)["spec"]["volumes"]}
    mounts = {mount["mountPath"]: mount["name"] for mount in container(defaults)["volumeMounts"]}
    assert names == {*mounts.values(), "code"}
    arguments = container(defaults)["args"]
    for flag, mode in (("--data-dir", False), ("--tls-dir", True)):
        path = arguments[arguments.index(flag) + 1]
        assert path in mounts
        mount = next(m for m in container(defaults)["volumeMounts"] if m["mountPath"] == path)
        assert mount.get("readOnly", False) is mode
    assert {"/tmp", "/dev/shm"} <= mounts.keys()


def test_without_a_tls_secret_nothing_of_tls_is_asked_for() -> None:
    assert "--tls-dir" not in container()["args"]
    assert "tls" not in {volume["name"] for volume in pod()["spec"]["volumes"]}


def test_the_pods_grace_is_longer_than_the_drain() -> None:
    assert pod(drainSeconds=300)["spec"]["terminationGracePeriodSeconds"] > 300


def test_one_runner_goes_before_one_comes_and_a_drained_node_takes_one_at_a_time() -> None:
    strategy = made()["Deployment"]["spec"]["strategy"]
    assert strategy == {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}}
    assert made()["PodDisruptionBudget"]["spec"]["maxUnavailable"] == 1


def test_selectors_find_the_pods_and_only_those_of_the_pool() -> None:
    labels = pod()["metadata"]["labels"]
    for selector in (
        made()["Deployment"]["spec"]["selector"]["matchLabels"],
        made()["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
    ):
        assert selector.items() <= labels.items()
        assert selector["serving.weft.dev/pool"] == "base"


def test_a_groups_template_reaches_the_pod_and_cannot_take_the_operators_place() -> None:
    template = {
        "image": "own:2",
        "resources": {"limits": {"nvidia.com/gpu": 1}},
        "env": [{"name": "POD_IP", "value": "6.6.6.6"}, {"name": "THREADS", "value": "2"}],
        "labels": {"team": "red"},
        "nodeSelector": {"gpu": "h100"},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}],
        "priorityClassName": "high",
    }
    defaults = RunnerDefaults(
        "i",
        "s:1",
        "http://d",
        env=({"name": "THREADS", "value": "1"},),
        resources={"limits": {"cpu": 1}},
        pod_labels={"serving.weft.dev/pool": "other"},
    )
    for spec in ({"template": template}, {"runnerGroups": [{"name": "g", "minRunners": 0, "template": template}]}):
        made_pod, made_container = pod(defaults, **spec), container(defaults, **spec)
        assert made_container["image"] == "own:2"
        assert made_container["resources"] == {"limits": {"nvidia.com/gpu": 1}}
        env = {item["name"]: item.get("value") for item in made_container["env"]}
        assert len(env) == len(made_container["env"])
        assert (env["THREADS"], env["POD_IP"]) == ("2", None)
        assert made_pod["metadata"]["labels"]["serving.weft.dev/pool"] == "base"
        assert made_pod["spec"]["nodeSelector"] == {"gpu": "h100"}
        assert made_pod["spec"]["priorityClassName"] == "high"
        (constraint,) = made_pod["spec"]["topologySpreadConstraints"]
        assert constraint["labelSelector"]["matchLabels"].items() <= made_pod["metadata"]["labels"].items()


@pytest.mark.parametrize("field", ["image", "resources", "nodeSelector", "tolerations"])
def test_what_is_not_given_is_the_sites_or_absent(field: str) -> None:
    defaults = RunnerDefaults("site-image", "s:1", "http://d", resources={"requests": {"cpu": "1"}})
    expected = {"image": "site-image", "resources": {"requests": {"cpu": "1"}}}
    assert (container(defaults) | pod(defaults)["spec"]).get(field) == expected.get(field)


def test_a_long_name_is_the_same_in_every_version() -> None:
    """Another one would be another Deployment, and its runners would be replaced."""
    assert child_name("a-b", "c-d") == "a-b-c-d-5aefcd91"
    assert len(child_name("p" * 63, "g" * 32)) == MAX_CHILD_NAME_CHARS


@given(LABELS, GROUPS)
def test_names_are_short_enough_and_begin_as_a_service_has_to(pool: str, part: str) -> None:
    name = child_name(pool, part)
    assert len(name) <= MAX_CHILD_NAME_CHARS
    assert name[0].isalpha()
    assert name[-1].isalnum()
    assert "--" not in name or "--" in f"{pool}-{part}"


@given(st.lists(st.tuples(LABELS, GROUPS), min_size=2, max_size=2, unique=True))
@example([("a-b", "c"), ("a", "b-c")])
def test_two_pools_or_groups_have_two_names(pairs: list[tuple[str, str]]) -> None:
    (one, a), (other, b) = pairs
    assert child_name(one, a) != child_name(other, b)


@given(st.text("ab-", min_size=1, max_size=6), st.integers(1, 5))
def test_where_pool_ends_and_group_begins_is_never_ambiguous(text: str, cut: int) -> None:
    joined = f"x{text}y"
    parts = [index for index, letter in enumerate(joined) if letter == "-" and 0 < index < len(joined) - 1]
    names = [child_name(joined[:index], joined[index + 1 :]) for index in parts if joined[index + 1 :]]
    assert len(set(names)) == len(names)
