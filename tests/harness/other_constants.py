"""Run a process of ours with other constants than it ships: those that a test is not about do not run out on a slow
machine, and those that it waits for are short.
"""

import importlib
import json
import runpy
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

Constants = Mapping[str, Any]  # "MODULE:NAME" -> a value, or fields of the configuration that the module makes by NAME
NO_OTHERS: Constants = {}


def command(module: str, constants: Constants) -> list[str]:
    """What runs `python -m MODULE` with them, before its flags."""
    if not constants:
        return [sys.executable, "-m", module]
    return [sys.executable, "-P", __file__, module, json.dumps(constants)]


def run(module: str, constants: Constants, flags: list[str]) -> None:
    """Replace them, then be that process. AttributeError: there is no such constant."""
    for place, value in constants.items():
        where, _, name = place.partition(":")
        owner = importlib.import_module(where)
        shipped = getattr(owner, name)
        setattr(owner, name, partial(shipped, **value) if isinstance(value, dict) else value)
    sys.argv = [module, *flags]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    run(sys.argv[1], json.loads(sys.argv[2]), sys.argv[3:])
