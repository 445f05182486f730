"""A plugin of pytest: of tests that name an instruction level, those of $WEFT_CPU_LEVEL alone (`harness.sanitize`)."""

import os

import pytest

from weft_kernels.cpu import LEVEL_VARIABLE, LEVELS


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    others = set(LEVELS) - {os.environ[LEVEL_VARIABLE]}
    left_out = [item for item in items if others & set(map(str, _arguments(item)))]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


def _arguments(item: pytest.Item) -> list[object]:
    return (
        list(item.callspec.params.values()) if isinstance(item, pytest.Function) and hasattr(item, "callspec") else []
    )
