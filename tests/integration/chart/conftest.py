"""Renders are made once a session. Without helm (`make cluster-tools`) these tests cannot run, and say so."""

import pytest

from harness import chart
from weft_devcluster import tools
from weft_devcluster.errors import ToolMissing


@pytest.fixture(scope="session", autouse=True)
def _helm() -> None:
    try:
        tools.path("helm")
    except ToolMissing as error:
        pytest.skip(f"the chart is not rendered: {error}")


@pytest.fixture(scope="session")
def texts(_helm: None) -> dict[str, str]:
    """Value set -> its manifests."""
    return {name: chart.render(name) for name in chart.VALUE_SETS}


@pytest.fixture(scope="session")
def rendered(texts: dict[str, str]) -> dict[str, list[chart.Json]]:
    """Value set -> its objects. Shared: do not change them."""
    return {name: chart.objects(text) for name, text in texts.items()}
