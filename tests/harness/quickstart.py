"""The quickstart as tests use it: its demo cases, cases that are sure, a copy of its manifests with another pool."""

import importlib.util
import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml
from tokenizers import Tokenizer

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "examples" / "quickstart"
SURE_CASES = Path(__file__).parent / "sure_cases.jsonl"
MANIFESTS = ("01-pool.yaml", "acme.yaml", "globex.yaml", "initech.yaml")
BASE = "weft-quickstart"
TASK_OF = {
    BASE: "copy", "acme/upper": "upper", "acme/reverse-words": "reverse-words", "globex/initials": "initials",
    "globex/digits": "digits", "initech/json": "json", "initech/cipher": "cipher",
}  # fmt: skip


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


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(QUICKSTART / "model" / "tokenizer.json"))


def sure_cases(models: tuple[str, ...], count: int, *, seed: int) -> list[Case]:
    """Long cases, in turn over the models, that are fit as baselines: `tests/oracle` holds that no token is near a tie.

    Another seed takes other sentences of SURE_CASES first.
    """
    known = [Case(**json.loads(line)) for line in SURE_CASES.read_text().splitlines()]
    by_model = {model: [case for case in known if case.model == model] for model in models}
    turns = [by_model[models[i % len(models)]] for i in range(count)]
    return [of_model[(seed + i // len(models)) % len(of_model)] for i, of_model in enumerate(turns)]


def long_cases(model: str, *, least_chars: int = 110) -> Iterator[Case]:
    """Held-out sentences of at least that many characters, with the right answers, without end."""
    sentences: Iterator[str] = tasks().sentences(seed=20, held_out=True)
    for text in sentences:
        if len(text) >= least_chars and "  " not in text:
            yield Case(model, text, tasks().expected(TASK_OF[model], text))


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
