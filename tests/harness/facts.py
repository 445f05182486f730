"""Figures of how often a fact is written, and of what it costs: `python -m harness.facts` prints a table of them."""

import importlib
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from typer.main import get_command

from weft.api.crd import crds
from weft_cli.main import app
from weft_runner.settings import FLAGS

ROOT = Path(__file__).parents[2]
SETTINGS = {
    "gateway": "GatewaySettings", "scheduler": "SchedulerSettings", "predictor": "PredictorSettings",
    "supervisor": "SupervisorSettings", "depot": "DepotSettings", "batch": "BatchSettings",
}  # fmt: skip
INSTALLED = ("weft", "cli", "sim", "operator", "services", "kernels")  # by images
OTHERS = ("bench", "conformance", "devcluster", "hatch_build.py")


def main() -> int:
    """Print the table."""
    for name, figure in figures().items():
        print(f"{figure:>8,}  {name}")
    return 0


def figures() -> Mapping[str, int]:
    """Each figure by what it counts."""
    found = {f"leaves of {kind}'s spec, those of pod templates apart": count for kind, count in _leaves_of_kinds()}
    found["leaves of values.yaml"] = _leaves(yaml.safe_load((ROOT / "charts/weft/values.yaml").read_text()))
    settings = {f"weft_{name}.settings": of for name, of in SETTINGS.items()}
    settings["weft_operator.kubernetes.settings"] = "Settings"
    models = [getattr(importlib.import_module(module), of) for module, of in settings.items()]
    found["settings of services"] = sum(len(model.model_fields) for model in models)
    found["flags of the runner"] = len(FLAGS)
    found["options of the command line"] = sum(_options(get_command(app)))
    found["lines of weft/wire and weft/domain by hand, .proto included"] = _lines("weft/wire", "weft/domain")
    found["lines of source by hand: Python, C++, .proto"] = _lines(
        *INSTALLED, "bench", "conformance", "devcluster", "hatch_build.py"
    )
    found["those of them that images install"] = _lines(*INSTALLED)
    found["lines that are generated and tracked (protobuf, CRDs)"] = _lines("weft/wire/v1", "charts", made=True)
    return found


def _leaves_of_kinds() -> Iterator[tuple[str, int]]:
    for crd in crds().values():
        schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
        yield crd["spec"]["names"]["kind"], _own(schema["properties"]["spec"])


def _own(schema: Any) -> int:
    schema = schema["items"] if schema.get("type") == "array" else schema
    below = schema.get("properties", {})
    return sum(_own(field) for name, field in below.items() if name != "template") if below else 1


def _leaves(value: Any) -> int:
    return sum(map(_leaves, value.values())) if isinstance(value, dict) and value else 1


def _options(command: Any) -> Iterator[int]:
    yield sum(one.param_type_name == "option" for one in command.params)
    for below in getattr(command, "commands", {}).values():
        yield from _options(below)


def _lines(*places: str, made: bool = False) -> int:
    """Lines of tracked files of source; `made`: of those that are generated."""
    listed = subprocess.run(["git", "ls-files", "-z", *places], cwd=ROOT, capture_output=True, text=True, check=True)
    files = [ROOT / name for name in listed.stdout.split("\0") if name]
    return sum(len(path.read_bytes().splitlines()) for path in files if _is_made(path) == made and _is_source(path))


def _is_made(path: Path) -> bool:
    return "_pb2" in path.name or path.parent.name == "crds"


def _is_source(path: Path) -> bool:
    return path.suffix in (".py", ".cpp", ".h", ".proto") or _is_made(path)


if __name__ == "__main__":
    sys.exit(main())
