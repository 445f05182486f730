"""Predictions far too short in a pool far too small: sequences grow, are swapped, are doubled; the texts stay."""

import asyncio
from collections.abc import Iterator

import grpc.aio
import pytest

from harness.crowd import assert_undisturbed, finished
from harness.quickstart import copy_manifests, sure_cases
from harness.waiting import PATIENCE_S, eventually
from weft.wire.v1.supervisor_pb2_grpc import AdminStub
from weft_stage.reports import listed, runners
from weft_stage.stack import Stack

pytestmark = pytest.mark.slow

MODELS = ("weft-quickstart", "acme/upper", "acme/reverse-words", "initech/cipher")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Pages for about four of these requests at their full length, and predictions of a tenth.

    The gateway waits for a prediction as long as it may: a request without one reserves all that it may use.
    """
    manifests = copy_manifests(tmp_path_factory.mktemp("m"), advanced={"kvPages": 80})
    short = {"WEFT_PREDICTOR__SCALE": "0.1", "WEFT_GATEWAY__PREDICT_MS": "5000"}
    with Stack(manifests, tmp_path_factory.mktemp("w"), environment=short) as made:
        made.wait_for_models()
        yield made


async def counters(small: Stack) -> dict[str, float]:
    """Reservations that grew in place and were doubled, and KV swapped out and in."""
    async with grpc.aio.insecure_channel(small.address("supervisor")) as channel:
        answer = await listed(AdminStub(channel))
    found: dict[str, float] = {name: getattr(answer, name) for name in ("grows", "doublings")}
    for direction in ("out", "in"):
        found[direction] = small.metric("runner", "weft_runner_swapped_bytes_total", direction=direction)
    return found


async def test_a_third_of_the_requests_overrun_and_every_text_is_the_same(small: Stack) -> None:
    """On a slow machine requests may end before others need their pages: then they come again."""
    cases = sure_cases(MODELS, 24, seed=3)
    assert_undisturbed(await finished(small.url, cases, "overrun"))
    assert small.metric("gateway", "weft_gateway_overrun_requests_total") >= 0.3 * len(cases)
    async with asyncio.timeout(3 * PATIENCE_S):
        while not all((await counters(small)).values()):
            assert_undisturbed(await finished(small.url, cases, "again"))
    found = await counters(small)
    assert found["in"] <= found["out"]

    async def idle() -> bool:
        (runner,) = await runners(small.address("supervisor"))
        return runner.figures.free_pages == runner.spec.total_pages and runner.figures.used_pages == 0

    await eventually(idle)
