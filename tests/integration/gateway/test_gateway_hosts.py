"""What a gateway without keys answers to, and at which cost."""

import sys
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from weft_gateway.core import Gateway, GatewayConfig
from weft_gateway.shell import GatewayMetrics

from .conftest import World


async def test_the_openapi_document_is_made_once(world: World) -> None:
    application: Any = world.server.config.app
    (document,) = [route.endpoint for route in application.routes if route.path == "/openapi.json"]
    assert document(None).body is document(None).body


def test_metrics_without_a_key_cost_the_same_for_any_number_of_models() -> None:
    def calls(models: int) -> int:
        metrics = GatewayMetrics(Gateway(GatewayConfig(), "gateway", lambda _: b""), CollectorRegistry())
        metrics.count_request(None, 401)
        for number in range(models):
            metrics.count_request(f"acme/{number}", 200)
        count = 0

        def counted(*_: object) -> None:
            nonlocal count
            count += 1

        sys.setprofile(counted)
        try:
            text = metrics.exposition(frozenset())
        finally:
            sys.setprofile(None)
        assert b'weft_gateway_requests_total{model="-",status="401"} 1.0' in text
        assert b"acme/" not in text
        return count

    assert calls(1) == pytest.approx(calls(150), rel=0.05)
