"""Installs the hook of mutants, and that of calls, in each Python process that has this folder on its PYTHONPATH.

A name that is no mutant ends the process: one that went on unchanged would pass all tests.
"""

import importlib.util
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).parent


def execute(spec: ModuleSpec | None) -> ModuleType | None:
    """Load a module by its spec; None where there is none."""
    if spec is None or spec.loader is None:
        return None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


execute(PathFinder.find_spec("sitecustomize", [path for path in sys.path if Path(path) != HERE]))  # another one's
for name in ("hook", "calls"):
    module = execute(importlib.util.spec_from_file_location(f"weft_mutants_{name}", HERE.parent / f"{name}.py"))
    assert module is not None, "it is beside this folder"
    try:
        module.install()
    except ImportError as error:
        sys.exit(f"error: {error}")
