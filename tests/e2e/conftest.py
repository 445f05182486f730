"""Whole stacks as processes, as a user starts them. Nothing is faked here."""

from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from harness.last_words import last_words
from weft_stage.stack import Stack, quickstart


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show with a failure what each component of its stacks said last: a stack's folder is gone by the next run."""
    report = yield
    if report.failed and isinstance(item, pytest.Function):
        stacks = {name: one for name, one in item.funcargs.items() if isinstance(one, Stack)}
        report.sections += [(f"stack {name!r}", last_words(one)) for name, one in stacks.items()]
    return report


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The quickstart, ready, for a whole module."""
    with Stack(quickstart(), short_folder(tmp_path_factory)) as made:
        made.wait_for_models()
        yield made


def short_folder(factory: pytest.TempPathFactory) -> Path:
    """A data directory whose socket path stays below the 108 bytes that a unix socket may have."""
    return factory.mktemp("w")
