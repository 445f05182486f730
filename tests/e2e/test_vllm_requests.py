"""vLLM's tests as requests to a whole stack: what they assert holds, or the reply is what the list says instead."""

from collections.abc import Iterator

import httpx2
import pytest

from harness.vllm_requests import CHECKS
from harness.vllm_requests.checks import SECONDS, Check, Server
from weft_bench.stack import Stack


@pytest.fixture(scope="module")
def server(stack: Stack) -> Iterator[Server]:
    (runner,) = stack.names("runner")
    with httpx2.Client(timeout=SECONDS) as client:
        yield Server(stack.url, f"http://{stack.components()[runner]['probes']}/metrics", client)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.test)
def test_a_request_of_vllms_tests_is_answered_as_listed(server: Server, check: Check) -> None:
    check.run(server)
