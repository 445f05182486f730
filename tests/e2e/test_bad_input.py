"""Every bad input gets its named error, while streams of others run undisturbed beside it."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file, save_file

from harness.crowd import assert_undisturbed, crowd
from harness.quickstart import adapter_manifest, copy_manifests, sure_cases
from harness.waiting import eventually
from weft_stage.stack import Stack

pytestmark = pytest.mark.slow

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def change_tensors(folder: Path, change: Callable[[np.ndarray], np.ndarray]) -> None:
    """Change the first A matrix."""
    tensors = load_file(folder / WEIGHTS)
    name = next(name for name in tensors if "lora_A" in name)
    save_file(tensors | {name: change(tensors[name])}, folder / WEIGHTS)


def not_a_number(a: np.ndarray) -> np.ndarray:
    a = a.copy()
    a[0, 0] = np.nan
    return a


# What else can be wrong is in unit/depot/test_resolve.py: here is one that headers show, and one that the numbers do.
BROKEN: dict[str, tuple[str, Callable[[Path], object]]] = {
    "wrong-shape": ("ShapeMismatch", lambda folder: change_tensors(folder, lambda a: a[:, :-1].copy())),
    "nan": ("NotFinite", lambda folder: change_tensors(folder, not_a_number)),
}


@pytest.fixture(scope="module")
def manifests(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = copy_manifests(tmp_path_factory.mktemp("m"))
    for name, (_, spoil) in BROKEN.items():
        shutil.copytree(folder / "adapters" / "upper", folder / "adapters" / name)
        spoil(folder / "adapters" / name)
    return folder


@pytest.fixture(scope="module")
def stack(manifests: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(manifests, tmp_path_factory.mktemp("w")) as made:
        made.wait_for_models()
        yield made


def reasons(stack: Stack, namespace: str) -> dict[str, set[str]]:
    """Reasons of the conditions that are False, by adapter."""
    listed, _ = stack.controller.list("loraadapters", namespace)
    return {
        item["metadata"]["name"]: {
            c["reason"] for c in item.get("status", {}).get("conditions", []) if c["status"] == "False"
        }
        for item in listed
    }


async def test_bad_adapters_are_named_and_disturb_nobody(stack: Stack, tmp_path: Path) -> None:
    adapters = [adapter_manifest(name, "bad", f"file:adapters/{name}") for name in BROKEN]
    adapters += [
        adapter_manifest("nowhere", "bad", "file:adapters/nowhere"),
        adapter_manifest("pool", "bad", "file:adapters/upper", poolRef={"name": "missing"}),
    ]
    expected = {name: reason for name, (reason, _) in BROKEN.items()}
    expected |= {"nowhere": "SourceNotFound", "pool": "PoolNotFound"}
    (tmp_path / "bad.yaml").write_text(yaml.safe_dump_all(adapters))
    async with crowd(stack.url, sure_cases(("acme/upper", "weft-quickstart"), 12, seed=9), "beside") as made:
        await made.until(lambda: any(w.text for w in made.streams))
        stack.cli("apply", "-f", str(tmp_path / "bad.yaml"))

        async def named() -> bool:
            shown = reasons(stack, "bad")
            return all(expected[name] in shown.get(name, set()) for name in expected)

        try:
            await eventually(named)
        except TimeoutError:
            shown = reasons(stack, "bad")
            pytest.fail(
                str({name: shown.get(name) for name in expected if expected[name] not in shown.get(name, set())})
            )
    assert_undisturbed(list(made.streams))


def test_what_would_break_others_is_refused_at_the_edge_and_the_rest_of_the_file_is_applied(
    stack: Stack, tmp_path: Path
) -> None:
    wrong = adapter_manifest("one", "bad", "file:adapters/upper", modelName="acme/upper")
    right = adapter_manifest("beside", "bad", "file:adapters/upper")
    (tmp_path / "both.yaml").write_text(yaml.safe_dump_all([wrong, right]))
    done = stack.cli("apply", "-f", str(tmp_path / "both.yaml"), check=False)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "spec.modelName: NameConflict: the name 'acme/upper' belongs to an adapter of another" in done.stderr
    assert "beside" in done.stdout
    listed = json.loads(stack.cli("get", "lora", "-n", "bad", "-o", "json").stdout)["items"]
    assert "one" not in {item["metadata"]["name"] for item in listed}


@pytest.mark.parametrize(
    ("change", "needle"),
    [
        ({"spec": {"poolRef": {"name": "quickstart"}, "source": {"uri": "file:a"}, "replcas": 3}}, "replcas"),
        ({"metadata": {"name": "Upper_Case", "namespace": "bad"}}, "name"),
        ({"kind": "LoraAdapter"}, "LoRAAdapter"),
    ],
)
def test_bad_manifests_are_refused_at_the_edge(
    stack: Stack, tmp_path: Path, change: dict[str, object], needle: str
) -> None:
    manifest = adapter_manifest("one", "bad", "file:adapters/upper") | change
    (tmp_path / "bad.yaml").write_text(yaml.safe_dump(manifest))
    done = stack.cli("apply", "-f", str(tmp_path / "bad.yaml"), check=False)
    assert done.returncode == 2, done.stdout + done.stderr
    assert needle in done.stderr
    assert "Traceback" not in done.stderr


async def test_a_pool_whose_model_is_not_there_is_named(stack: Stack, tmp_path: Path) -> None:
    pool = {
        "apiVersion": "serving.weft.dev/v1alpha1",
        "kind": "ServingPool",
        "metadata": {"name": "ghost", "namespace": "bad"},
        "spec": {"model": {"uri": "file:nowhere"}},
    }
    (tmp_path / "pool.yaml").write_text(yaml.safe_dump(pool))
    stack.cli("apply", "-f", str(tmp_path / "pool.yaml"))

    async def named() -> bool:
        return "SourceNotFound" in stack.cli("describe", "spool", "ghost", "-n", "bad").stdout

    await eventually(named)
