"""Files that use much CPU begin first, so that no worker ends long after the others.

It changes no result, only the length of a run: a file that is not in the budget begins later.
"""

import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


@cache
def budgeted_cpu_s() -> Mapping[str, float]:
    """CPU seconds of the files of `make test` that use some, by path in the checkout (`harness.budget`)."""
    suites = {name: of for name, of in tomllib.loads((TESTS / "budget.toml").read_text()).items() if name != "machine"}
    return {f"tests/{suite}/{file}": cpu_s for suite, files in suites.items() for file, cpu_s in files.items()}


def long_first(items: list[pytest.Item]) -> None:
    """Sort the tests by their files; those of one file stay in their order."""
    cpu_s = budgeted_cpu_s()
    items.sort(key=lambda item: -cpu_s.get(item.nodeid.partition("::")[0], 0.0))
