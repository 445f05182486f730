"""What several folders share. One worker runs a file, so nobody else uses a server at the same time."""

from collections.abc import Iterator

import pytest

from harness.postgres import Postgres, postgres_server
from harness.quick import one_ssl_context  # noqa: F401 (a fixture)


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    with postgres_server() as server:
        yield server
