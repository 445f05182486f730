"""`weft serve`: from its command line to manifests, without starting anything."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from weft.api.meta import API_VERSION
from weft_cli.errors import BadInput
from weft_cli.objects import load_manifests
from weft_cli.serve import ServeRequest, manifests, parse, print_manifests
from weft_operator.local import ObjectAdmission, ObjectStore
from weft_runner.memory_estimate import MemoryLimit

QUICKSTART = Path(__file__).parents[3] / "examples" / "quickstart"
MODEL, ADAPTERS = QUICKSTART / "model", QUICKSTART / "adapters"
ROOMY = MemoryLimit(1 << 36, "this machine")


def request(model: object = MODEL, *adapters: str, folders: tuple[Path, ...] = (), **more: Any) -> ServeRequest:
    return ServeRequest(str(model), folders, adapters, **more)


def pool_in(folder: Path, adapters: str = "", **spec: Any) -> Path:
    """The file of a pool that serves the quickstart's model, and of these adapters."""
    model = {"uri": f"file:{str(MODEL)[1:]}", **spec.pop("model", {})}
    pool: dict[str, Any] = {"apiVersion": API_VERSION, "kind": "ServingPool", "metadata": {"name": "mine"}}
    (file := folder / "pool.yaml").write_text(yaml.safe_dump(pool | {"spec": {"model": model, **spec}}) + adapters)
    return file


def from_file(file: Path, *adapters: str, **more: Any) -> ServeRequest:
    return ServeRequest(None, more.pop("folders", ()), adapters, file=file, **more)


def objects_of(asked: ServeRequest, memory: MemoryLimit = ROOMY, gpus: list[int] | None = None) -> list[Any]:
    """Admitted as a stack does: what is printed can be applied. `gpus`: the memory of each that computes."""
    objects = manifests(parse(asked), lambda: memory, lambda: gpus or [], gpu=gpus is not None)
    store = ObjectStore(lambda: 0.0)
    for obj in objects:
        store.apply(ObjectAdmission(store)(obj, store.find))
    return objects


def model_names(objects: list[Any]) -> list[str]:
    return [obj["spec"].get("modelName") or obj["spec"]["model"]["name"] for obj in objects]


def adapter_in(folder: Path, **config: Any) -> Path:
    folder.mkdir(parents=True)
    whole = json.loads((ADAPTERS / "upper" / "adapter_config.json").read_text()) | config
    (folder / "adapter_config.json").write_text(json.dumps(whole))
    return folder


def test_a_folder_and_the_adapters_below_another_are_served_by_their_names(capfd: pytest.CaptureFixture[str]) -> None:
    objects = objects_of(request(folders=(ADAPTERS,)))
    assert model_names(objects) == ["model", "cipher", "digits", "initials", "json", "reverse-words", "upper"]
    assert {obj["spec"]["baseModel"] for obj in objects[1:]} == {"model"}
    assert objects[0]["spec"]["model"]["uri"] == f"file:{str(MODEL)[1:]}"
    print_manifests(objects)
    assert list(yaml.safe_load_all(capfd.readouterr().out)) == objects


@pytest.mark.parametrize(
    ("folder", "name", "said"),
    [
        ("my adapter", "my-adapter", "is served as my-adapter"),
        ("a@b", "a-b", "is served as a-b"),
        ("über", "uber", "is served as uber"),
        ("-dash", "dash", "is served as dash"),
        ("v1_", "v1", "is served as v1"),
        ("tab\tin it", None, "spec.source.uri: write file:PATH"),
        ("日本", None, "nothing of its name"),
        ("up per", None, "another model is called up-per"),
        ("model", None, "another model is called model"),
        ("named", None, "another model is called named"),
        ("a" * 254, None, "at most 253"),
        (os.fsdecode(b"caf\xe9"), None, "spec.source.uri"),
        (".ipynb_checkpoints", None, None),
    ],
)
def test_a_folder_whose_name_is_no_models_is_named_and_the_others_are_served(
    folder: str, name: str | None, said: str | None, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    adapter_in(tmp_path / "up-per")
    adapter_in(tmp_path / folder)
    (tmp_path / ".git").mkdir()
    (tmp_path / "file").touch()
    asked = request(MODEL, f"named={ADAPTERS / 'upper'}", folders=(tmp_path,))
    print_manifests(manifests(parse(asked), lambda: ROOMY))
    (printed := tmp_path / "printed.yaml").write_text(capfd.readouterr().out)
    assert model_names(load_manifests([printed])) == ["model", "up-per", *([name] if name else []), "named"]
    assert [line for line in parse(asked).notes if said and said in line] == list(parse(asked).notes)


def test_repositories_and_uris_are_named_as_they_are() -> None:
    objects = objects_of(request("Qwen/Qwen3-0.6B@v1", "a=hf:acme/lora@main", "acme/other", "s3://bucket/loras/third"))
    assert model_names(objects) == ["Qwen/Qwen3-0.6B", "a", "other", "third"]
    assert objects[0]["spec"]["model"] == {"name": "Qwen/Qwen3-0.6B", "uri": "hf:Qwen/Qwen3-0.6B", "revision": "v1"}
    assert objects[1]["spec"]["source"] == {"uri": "hf:acme/lora", "revision": "main"}
    assert objects[3]["spec"]["source"] == {"uri": "s3://bucket/loras/third"}


def test_objects_of_names_that_are_alike_have_names_of_their_own(tmp_path: Path) -> None:
    one, other = adapter_in(tmp_path / "My_Lora"), adapter_in(tmp_path / "my.lora")
    objects = objects_of(request(MODEL, str(one), str(other), f"MY-LORA={one}"))
    assert [obj["metadata"]["name"] for obj in objects] == ["model", "my-lora", "my-lora-2", "my-lora-3"]


def test_the_largest_rank_of_any_adapter_is_the_pools(tmp_path: Path) -> None:
    assert objects_of(request(folders=(ADAPTERS,)))[0]["spec"]["lora"] == {"maxRank": 64}
    large = adapter_in(tmp_path / "large", r=8, rank_pattern={"q_proj": 96})
    (broken := tmp_path / "broken").mkdir()
    assert objects_of(request(MODEL, str(large), str(broken)))[0]["spec"]["lora"] == {"maxRank": 96}


def test_pages_are_those_of_a_full_batch_else_half_of_what_the_weights_leave() -> None:
    positions = json.loads((MODEL / "config.json").read_text())["max_position_embeddings"]
    assert objects_of(request())[0]["spec"]["advanced"] == {"kvPages": 32 * positions // 16}
    some = objects_of(request(), MemoryLimit((1 << 30) + (64 << 20), "this machine"))[0]["spec"]["advanced"]["kvPages"]
    assert 0 < some < 32 * positions // 16
    with pytest.raises(BadInput, match=r"take 0\.0 GiB.* this container has 1\.0 GiB"):
        objects_of(request(), MemoryLimit(1 << 30, "this container"))


def test_a_runner_on_a_gpu_finds_its_pages_and_the_memory_of_the_machine_is_not_asked() -> None:
    small = MemoryLimit(1, "this machine")
    assert objects_of(request(), small, [])[0]["spec"]["memory"] == {"fraction": 0.9}
    assert objects_of(request("org/model"), small, [])[0]["spec"]["memory"] == {"fraction": 0.9}


def test_a_runner_that_offloads_on_gpus_has_the_memory_of_the_smallest_and_some_of_the_machine_beside_it() -> None:
    asked, machine = request("org/model", offload=Path("/nvme/weft")), MemoryLimit(5 << 30, "this machine")
    spec = objects_of(asked, machine, [80 << 30, 20 << 30])[0]["spec"]
    assert spec["memory"] == {"offload": {"deviceBytes": "18432Mi", "hostBytes": "2048Mi", "diskPath": "/nvme/weft"}}
    with pytest.raises(BadInput, match="does not say here how much memory"):
        objects_of(asked, machine, [])


def test_a_model_larger_than_memory_offloads_to_the_folder_that_is_named() -> None:
    spec = objects_of(request(offload=Path("/nvme/weft")), MemoryLimit(5 << 30, "this machine"))[0]["spec"]
    assert spec["memory"] == {"offload": {"deviceBytes": "3072Mi", "diskPath": "/nvme/weft"}}
    assert "advanced" not in spec


def test_a_pools_file_is_served_as_it_is_and_what_it_leaves_open_is_chosen(tmp_path: Path) -> None:
    adapters = yaml.safe_dump_all(objects_of(request(folders=(ADAPTERS,)))[1:3], explicit_start=True)
    model, said = {"toolCallParser": "hermes"}, {"slo": {"ttftMs": 9}, "advanced": {"queue": "s3", "kvPages": 7}}
    objects = objects_of(from_file(pool_in(tmp_path, adapters, model=model, **said), f"json={ADAPTERS / 'json'}"))
    assert model_names(objects) == ["mine", "cipher", "digits", "json"]
    spec = objects[0]["spec"]
    assert spec["model"] == {"name": "mine", "uri": f"file:{str(MODEL)[1:]}", **model}
    assert {name: spec[name] for name in said} == said
    assert spec["lora"] == {"maxRank": 64}
    assert objects[3]["spec"]["poolRef"] == {"name": "mine"}
    file = pool_in(tmp_path, lora={"maxRank": 8})
    (spec,) = (obj["spec"] for obj in objects_of(from_file(file)))
    assert spec["lora"] == {"maxRank": 8}
    assert spec["advanced"] == objects_of(request())[0]["spec"]["advanced"]
    assert objects_of(from_file(file), gpus=[])[0]["spec"]["memory"] == {"fraction": 0.9}
    on_disk = objects_of(from_file(file, offload=Path("/nvme/weft")))[0]["spec"]
    assert on_disk["memory"]["offload"]["diskPath"] == "/nvme/weft"


def test_paths_of_a_file_are_from_its_folder_on_and_what_is_printed_can_be_served(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model").symlink_to(MODEL)
    found = objects_of(from_file(pool_in(tmp_path, model={"uri": "file:model"})))
    assert found[0]["spec"]["model"]["uri"] == f"file:{str(tmp_path)[1:]}/model"
    printed = objects_of(request(folders=(ADAPTERS,)))
    print_manifests(printed)
    (file := tmp_path / "printed.yaml").write_text(capfd.readouterr().out)
    assert objects_of(from_file(file)) == printed


@pytest.mark.parametrize(
    ("more", "hub"),
    [({}, "org/model"), ({"credentialsRef": {"name": "hf"}}, None), ({"uri": "hf:org/model/folder"}, None)],
)
def test_a_repository_that_needs_nothing_else_is_read_through_the_cache(
    more: dict[str, Any], hub: str | None, tmp_path: Path
) -> None:
    file = pool_in(tmp_path, model={"uri": "hf:org/model", "revision": "v1", **more})
    assert parse(from_file(file)).model.repository == hub


@pytest.mark.parametrize(
    ("spec", "more", "why"),
    [
        ({"advance": {}}, {}, "did you mean 'advanced'"),
        ({"model": {"uri": "file:nowhere"}}, {}, "there is no folder .*/nowhere, nor /nowhere"),
        ({}, {"name": "tiny"}, "--name is for a MODEL"),
        (
            {},
            {"adapters": "---\n{apiVersion: serving.weft.dev/v1alpha1, kind: APIKey, metadata: {name: a}, spec: {}}"},
            "pool.yaml has ServingPool, APIKey",
        ),
    ],
)
def test_what_is_wrong_with_a_file_is_named(
    spec: dict[str, Any], more: dict[str, Any], why: str, tmp_path: Path
) -> None:
    file = pool_in(tmp_path, more.pop("adapters", ""), **spec)
    with pytest.raises(BadInput, match=why):
        objects_of(from_file(file, **more))


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (ServeRequest(None, (), ()), "what is to be served"),
        (request(file=Path("pool.yaml")), "what is to be served"),
        (request("/nowhere"), "there is no folder /nowhere"),
        (request("nonsense"), "there is no folder nonsense"),
        (request(__file__), "is no folder"),
        (request(ADAPTERS / "upper"), "is an adapter, not a base model"),
        (request(ADAPTERS), "has no config.json"),
        (request(MODEL, "x=/nowhere"), "there is no folder /nowhere"),
        (request(MODEL, f"a={ADAPTERS / 'upper'}", f"a={ADAPTERS / 'json'}"), "several models would be called a"),
        (request(folders=(ADAPTERS / "upper",)), "is an adapter itself"),
        (request(folders=(QUICKSTART / "model",)), "no folder in it has an adapter_config.json"),
        (request(MODEL, f"my adapter={ADAPTERS / 'upper'}"), "spec.modelName: only letters"),
        (request(name="my model"), "spec.model.name: only letters"),
        (request("/"), "can be no model's name"),
    ],
)
def test_what_cannot_be_served_is_named(asked: ServeRequest, why: str) -> None:
    with pytest.raises(BadInput, match=why):
        objects_of(asked)
