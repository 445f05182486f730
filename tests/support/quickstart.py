"""The quickstart as tests use it: its demo cases, its tasks, a copy of its manifests with another pool."""

import importlib.util
import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "examples" / "quickstart"
MANIFESTS = ("01-pool.yaml", "acme.yaml", "globex.yaml", "initech.yaml")
BASE = "weft-quickstart"
TASK_OF = {
    BASE: "copy",
    "acme/upper": "upper",
    "acme/reverse-words": "reverse-words",
    "globex/initials": "initials",
    "globex/digits": "digits",
    "initech/json": "json",
    "initech/cipher": "cipher",
}


@dataclass(frozen=True)
class Case:
    """A prompt for a served model, and the one right answer."""

    model: str
    prompt: str
    expect: str


DEMO = tuple(Case(**json.loads(line)) for line in (QUICKSTART / "demo.jsonl").read_text().splitlines())


def tasks() -> ModuleType:
    """`examples/quickstart/tasks.py`."""
    if "quickstart_tasks" not in sys.modules:
        spec = importlib.util.spec_from_file_location("quickstart_tasks", QUICKSTART / "tasks.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["quickstart_tasks"] = module
        spec.loader.exec_module(module)
    return sys.modules["quickstart_tasks"]


def long_cases(models: tuple[str, ...], count: int, *, seed: int, least_chars: int = 110) -> list[Case]:
    """Held-out sentences of at least that many characters, in turn over the models, with the right answers."""
    sentences: Iterator[str] = tasks().sentences(seed, held_out=True)
    found = (s for s in sentences if len(s) >= least_chars and "  " not in s)
    made = [(models[i % len(models)], next(found)) for i in range(count)]
    return [Case(model, text, tasks().expected(TASK_OF[model], text)) for model, text in made]


def copy_manifests(folder: Path, **pool_spec: Any) -> Path:
    """A copy of the quickstart in `folder` whose pool's spec is changed (one level deep) by `pool_spec`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("model", "adapters"):
        shutil.copytree(QUICKSTART / name, folder / name)
    for name in MANIFESTS[1:]:
        shutil.copy(QUICKSTART / name, folder)
    pool = yaml.safe_load((QUICKSTART / "01-pool.yaml").read_text())
    for key, value in pool_spec.items():
        pool["spec"][key] = {**pool["spec"].get(key, {}), **value} if isinstance(value, dict) else value
    (folder / "01-pool.yaml").write_text(yaml.safe_dump(pool))
    return folder


def adapter_manifest(name: str, namespace: str, uri: str, **spec: Any) -> dict[str, Any]:
    """A LoRAAdapter for the quickstart's pool."""
    return {
        "apiVersion": "serving.weft.dev/v1alpha1",
        "kind": "LoRAAdapter",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"poolRef": {"name": "quickstart", "namespace": "weft-system"}, "source": {"uri": uri}, **spec},
    }
