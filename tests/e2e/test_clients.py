"""Clients of other projects with their defaults, against the whole stack (`harness.clients`, `e2e/clients/`)."""

import pytest

from harness.clients import CLIENTS, Client, missing, use
from weft_stage.stack import Stack


@pytest.mark.long
@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.script)
def test_a_client_works_with_its_defaults(stack: Stack, client: Client) -> None:
    if reason := missing(client):
        pytest.skip(reason)
    use(client, stack.url)
