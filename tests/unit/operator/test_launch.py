"""What a pool asks of its runners, from the manifest to the flags that they are started with."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.unit.operator.planning import BASE, pool_object, stored
from weft.api.servingpool import Advanced
from weft.domain.routes import PoolSpec
from weft_operator.core import EnsureRunner, PoolObject
from weft_operator.core.pod_template import make_pod_template
from weft_operator.core.registration import ADVANCED
from weft_operator.core.resources import parse_pool
from weft_operator.core.runner_config import make_runner_config
from weft_operator.core.runner_defaults import RunnerDefaults
from weft_operator.core.scaling import group_of
from weft_operator.core.state import RunnerConfig
from weft_operator.local import LocalMachine, runner_program
from weft_runner.settings import parse_settings

ADDRESSES = {"listen": "h:1", "probes": "h:2", "supervisor": "h:3", "depot": "http://h:4", "data-dir": "/var/lib/weft"}


def pool_of(
    parallelism: dict[str, int] | None = None,
    token_time_ms: int = 100,
    groups: Sequence[dict[str, Any]] = (),
    spec: dict[str, Any] | None = None,
    **advanced: int | None,
) -> PoolObject:
    """A pool with these words in its advanced block, as a server holds it."""
    manifest = stored(pool_object(runnerGroups=groups, advanced=advanced))
    manifest["spec"]["parallelism"] |= parallelism or {}
    manifest["spec"] |= spec or {}
    manifest["spec"]["slo"] = {"tokenTimeMs": token_time_ms, "admission": "Queue"}
    return parse_pool(manifest)


def settings_of(wanted: RunnerConfig) -> Any:
    return parse_settings([f"--{name}={value}" for name, value in (ADDRESSES | dict(wanted.flags)).items()])


def test_a_runner_has_flags_for_all_that_the_advanced_block_of_its_pool_says_of_it():
    settings = settings_of(make_runner_config(pool_of(token_time_ms=45, maxSequences=7, maxBatchTokens=99), BASE))
    assert (settings.max_sequences, settings.max_batch_tokens, settings.token_time_ms) == (7, 99, 45)


@pytest.mark.parametrize(
    ("parallelism", "flags"),
    [
        ({"tensor": 1, "pipeline": 1}, {}),
        ({"tensor": 2, "pipeline": 1}, {"tensor-parallel": 2}),
        ({"tensor": 1, "pipeline": 4}, {"pipeline-parallel": 4}),
        ({"tensor": 2, "pipeline": 2}, {"tensor-parallel": 2, "pipeline-parallel": 2}),
    ],
)
def test_a_runner_has_flags_for_how_its_pool_splits_the_model(parallelism: dict[str, int], flags: dict[str, int]):
    wanted = make_runner_config(pool_of(parallelism=parallelism), BASE)
    assert {name: value for name, value in wanted.flags if name.endswith("-parallel")} == flags
    settings = settings_of(wanted)
    assert (settings.tensor_parallel, settings.pipeline_parallel) == tuple(parallelism.values())


def test_a_runner_has_a_flag_for_the_name_that_its_base_is_served_under():
    pool = pool_of()
    settings = settings_of(make_runner_config(pool, BASE))
    assert settings.model_name == pool.model_name
    assert pool.model_name != str(pool.meta.ref)


def test_a_runner_is_started_with_the_phase_of_its_group():
    groups = [{"name": "a", "minRunners": 0, "maxRunners": 2, "phase": "Prompt"}, {"name": "b", "minRunners": 1}]
    pool = pool_of(groups=groups)
    named = [group_of(index, pool.groups) for index in range(4)]
    assert [group.name for group in named] == ["b", "a", "a", "b"], "the next runner of a growing pool is of that group"
    settings = [settings_of(make_runner_config(pool, BASE, group)) for group in named]
    assert [one.role for one in settings] == ["any", "prompt", "prompt", "any"]


def test_another_token_time_is_another_launch():
    """Runners are replaced when it changes: they chunk by it, and have measured their best batch against it."""
    assert make_runner_config(pool_of(token_time_ms=45), BASE) != make_runner_config(pool_of(token_time_ms=46), BASE)


@pytest.mark.parametrize(
    ("fraction", "pages", "in_a_pod", "on_this_machine"),
    [(None, None, (0, 0.9), (1024, 0.9)), (1, None, (0, 1.0), (0, 1.0)), (0.5, 7, (7, 0.5), (7, 0.5))],
)
def test_a_pool_without_a_number_of_pages_leaves_it_to_its_runner_where_that_has_the_memory_alone(
    fraction: float | None,
    pages: int | None,
    in_a_pod: tuple[int, float],
    on_this_machine: tuple[int, float],
    tmp_path: Path,
):
    memory = {} if fraction is None else {"fraction": fraction}
    wanted = make_runner_config(pool_of(spec={"memory": memory}, kvPages=pages), BASE)
    pod = settings_of(wanted)
    assert (pod.kv_pages, pod.kv_memory_fraction) == in_a_pod
    machine = LocalMachine(tmp_path, "127.0.0.1:3", "http://127.0.0.1:4")
    program = runner_program(EnsureRunner(wanted.pool, 0, wanted), machine, (1, 2, 3))
    own = parse_settings(list(program.argv[program.argv.index("--name") :]))
    assert (own.kv_pages, own.kv_memory_fraction) == on_this_machine


GIB = 1 << 30
CACHES: list[tuple[dict[str, Any] | None, dict[str, Any] | None, dict[str, Any], str | None]] = [
    (None, None, {"emptyDir": {}}, None),
    ({"emptyDir": {}}, None, {"emptyDir": {}}, None),
    ({"emptyDir": {"sizeLimit": "20Gi"}}, None, {"emptyDir": {"sizeLimit": str(20 * GIB)}}, None),
    ({"hostPath": {"path": "/srv/weft"}}, {"hostPath": {"path": "/srv/weft", "type": "Directory"}}, {"emptyDir": {}},
     "/srv/weft"),
    ({"persistentVolumeClaim": {"claimName": "models"}}, {"persistentVolumeClaim": {"claimName": "models"}},
     {"emptyDir": {}}, None),
]  # fmt: skip


def template_of(pool: PoolObject, **defaults: Any) -> dict[str, Any]:
    return make_pod_template(
        pool.groups[0], make_runner_config(pool, BASE), RunnerDefaults("image", "s:1", "http://d:2", **defaults),
        labels={}, account="runners", drain_s=30.0,
    )["spec"]  # fmt: skip


@pytest.mark.parametrize(("cache", "volume", "data", "on_this_machine"), CACHES)
def test_a_pool_says_where_its_runners_keep_blobs(
    cache: dict[str, Any] | None, volume: dict[str, Any] | None, data: dict[str, Any], on_this_machine: str | None,
    tmp_path: Path,
):  # fmt: skip
    pool = pool_of(spec={} if cache is None else {"modelCache": cache})
    spec = template_of(pool)
    container = spec["containers"][0]
    volumes = {one.pop("name"): one for one in spec["volumes"]}
    mounts = {one["name"]: one["mountPath"] for one in container["volumeMounts"]}
    settings = parse_settings(
        [word.replace("$(POD_IP)", "h").replace("$(POD_NAME)", "p") for word in container["args"]]
    )
    assert (volumes["data"], volumes.get("model-cache")) == (data, volume)
    assert mounts.get("model-cache") == (None if volume is None else str(settings.model_cache))
    assert settings.blobs == (Path("/var/lib/weft/blobs") if volume is None else settings.model_cache)
    wanted = make_runner_config(pool, BASE)
    machine = LocalMachine(tmp_path, "127.0.0.1:3", "http://127.0.0.1:4")
    argv = runner_program(EnsureRunner(wanted.pool, 0, wanted), machine, (1, 2, 3)).argv
    own = parse_settings(list(argv[argv.index("--name") :]))
    assert own.model_cache == (None if on_this_machine is None else Path(on_this_machine))


def test_pods_ask_for_the_disk_that_their_folders_may_hold_unless_their_resources_do():
    cache = {"modelCache": {"emptyDir": {"sizeLimit": "20Gi"}}}
    offload = {"deviceBytes": "4Gi", "diskBytes": "10Gi", "diskPath": "/mnt/weft", "weights": "bf16", "kv": "bf16"}
    limits = {"limits": {"memory": "8Gi"}}

    def resources(template: dict[str, Any], defaults: dict[str, Any] | None = None, **spec: Any) -> Any:
        return template_of(pool_of(spec={"template": template, **spec}), **(defaults or {}))["containers"][0][
            "resources"
        ]

    assert resources({"resources": limits}, **cache) == {
        "requests": {"ephemeral-storage": str(20 * GIB)},
        "limits": {"memory": "8Gi", "ephemeral-storage": str(21 * GIB)},
    }
    assert resources({}, **cache, memory={"offload": offload})["requests"] == {"ephemeral-storage": str(30 * GIB)}
    assert resources({"resources": limits}) == limits, "without a size nothing is known"
    for own in ({"limits": {"ephemeral-storage": "5Gi"}}, {"requests": {"ephemeral-storage": 0}}):
        assert resources({"resources": own}, **cache) == own
    elsewhere = {"volumes": [{"name": "data", "hostPath": {"path": "/srv"}}], "resources": limits}
    assert resources({}, elsewhere, **cache) == limits, "the platform's own volume is no disk of the pod"


def test_drafts_are_off_where_the_pool_says_so():
    found = [settings_of(make_runner_config(parse_pool(stored(pool_object(advanced=advanced))), BASE)).speculation
             for advanced in ({}, {"speculation": "Off"})]  # fmt: skip
    assert found == ["suffix", "off"]


def test_a_pool_that_offloads_starts_its_runners_with_the_budgets_and_a_volume_of_their_size():
    budgets = {"deviceBytes": "4Gi", "hostBytes": "1Gi", "diskBytes": "20Gi", "diskPath": "/mnt/weft"}
    offload, parallelism = budgets | {"weights": "int4", "kv": "int4"}, {"tensor": 1, "pipeline": 2, "podsPerRunner": 1}
    sparse = {"sparseAttention": "TopK"}
    manifest = stored(pool_object(memory={"offload": offload}, parallelism=parallelism, advanced=sparse))
    wanted = make_runner_config(parse_pool(manifest), BASE)
    settings = settings_of(wanted)
    assert (settings.offload.device_bytes, settings.offload.disk_bytes) == (4 << 30, 20 << 30)
    assert settings.offload.host_bytes == 1 << 30
    assert (str(settings.offload.path), settings.dtype, settings.kv_dtype) == ("/mnt/weft", "int4", "int4")
    limits = {name: manifest["spec"]["advanced"].pop(name) for name in ("kvPages", "maxSequences", "maxBatchTokens")}
    found = settings_of(make_runner_config(parse_pool(manifest), BASE))
    assert (found.finds_policy, found.kv_pages, found.max_sequences, found.max_batch_tokens) == (True, 0, 0, 0)
    manifest["spec"]["advanced"] |= limits
    assert (settings.kv_pages, settings.max_sequences, settings.max_batch_tokens) == (1024, 32, 512)
    assert settings.sparse_attention == 0.1
    pod = make_pod_template(
        parse_pool(manifest).groups[0],
        wanted,
        RunnerDefaults("image", "s:1", "http://d"),
        labels={},
        account="a",
        drain_s=1.0,
        ranks_per_pod=2,
    )["spec"]
    assert {"name": "offload", "emptyDir": {"sizeLimit": str(40 << 30)}} in pod["volumes"]
    assert {"name": "offload", "mountPath": "/mnt/weft"} in pod["containers"][0]["volumeMounts"]
    off = pool_object()
    off["metadata"] |= manifest["metadata"]
    assert "dtype" not in dict(make_runner_config(parse_pool(off), BASE).flags)


def test_a_scheduler_that_is_not_told_a_choice_has_the_apis_default():
    """What it takes of `advanced` has its name there, and the value that an absent field has."""
    assert ADVANCED == ["consolidation", "kv_across_classes", "max_queue", "queue", "reservation"]
    told, chosen = PoolSpec(""), Advanced()
    assert [getattr(told, name) for name in ADVANCED] == [getattr(chosen, name) for name in ADVANCED]
