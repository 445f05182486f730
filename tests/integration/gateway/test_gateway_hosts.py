"""Names under which a gateway without keys answers, and the port of its probes."""

import asyncio
import re
import sys
from pathlib import Path
from typing import Any

import httpx2
import pytest
from prometheus_client import CollectorRegistry

from weft.domain.routes import Route, Routes
from weft.wire.v1 import supervisor_pb2
from weft_gateway.core import Gateway, GatewayConfig
from weft_gateway.main import probing
from weft_gateway.shell import GatewayMetrics

from .conftest import PATIENCE_S, World, key_route, serving, until
from .test_gateway_refusals import TEXT, refused, with_keys

EVIL = {"host": "evil.example:8000", "origin": "http://evil.example:8000", "sec-fetch-site": "same-origin"}


async def test_a_foreign_name_reaches_no_path_of_a_gateway_without_keys(world: World) -> None:
    application: Any = world.server.config.app
    paths = {(method, route.path) for route in application.routes for method in route.methods} | {
        ("OPTIONS", "/nothing")
    }
    assert len(paths) > 50
    async with world.http() as http:
        for method, path in paths:
            url = re.sub(r"{\w+(:path)?}", "any", path)
            answer = await http.request(method, url, headers=EVIL, json=TEXT)
            assert answer.status_code == 403, (method, path)
            if method != "HEAD" and path != "/v1/messages" and not path.startswith("/v1/messages/"):
                error = refused(answer, 403, "host_not_allowed")
                assert "--allowed-hosts" in error["message"], path
                assert "evil.example" in error["message"], path
    assert not world.gateway.machine.admission.in_flight
    assert world.gateway.registry.get_sample_value("weft_gateway_requests_total", {"model": "-", "status": "403"})


async def test_addresses_localhost_and_allowed_names_are_answered(parts: World, tmp_path: Path) -> None:
    async with serving(parts, parts.settings(tmp_path, allowed_hosts=["gpu-box"])) as world, world.http() as http:
        for host in ("127.0.0.1:1", "[::1]", "localhost:8000", "gpu-box:8000"):
            answer = await http.post("/v1/completions", json=TEXT, headers={"host": host})
            assert answer.status_code == 200, host


async def test_with_keys_every_name_is_answered(parts: World, tmp_path: Path) -> None:
    parts.scheduler.routes = with_keys(parts)
    async with serving(parts, parts.settings(tmp_path, auth=True)) as world, world.http() as http:
        assert (await http.get("/healthz", headers=EVIL)).status_code == 200
        headers = EVIL | {"authorization": "Bearer key-of-acme"}
        assert (await http.get("/v1/models", headers=headers)).status_code == 200


def connections(world: World) -> list[Any]:
    return list(world.server.server_state.connections)


async def test_a_crowd_of_clients_keeps_no_probe_out(parts: World, tmp_path: Path) -> None:
    routes = with_keys(parts)
    routes.keys.append(key_route("platform", scope=supervisor_pb2.KEY_SCOPE_PLATFORM))
    parts.scheduler.routes = routes
    settings = parts.settings(tmp_path, auth=True)
    async with (
        serving(parts, settings, connections=1) as world,
        probing("127.0.0.1:0", world.gateway) as probes,
        httpx2.AsyncClient(base_url=f"http://127.0.0.1:{probes.port}", timeout=PATIENCE_S) as kubelet,
    ):
        _, writer = await asyncio.open_connection("127.0.0.1", int(world.url.rpartition(":")[2]))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer key-of-acme\r\n")
        writer.write(b"content-type: application/json\r\ncontent-length: 9\r\n\r\n")  # and no body
        await until(lambda: any(each.cycle for each in connections(world)))
        async with world.http() as late:
            assert (await late.get("/healthz")).json()["error"]["code"] == "too_many_connections"
        assert [(await kubelet.get(path)).text for path in ("/healthz", "/readyz")] == ["ok\n", "ok\n"]
        anonymous = (await kubelet.get("/metrics")).text
        assert "weft_gateway_in_flight" in anonymous
        assert "team/base" not in anonymous
        shown = await kubelet.get("/metrics", headers={"authorization": "Bearer platform"})
        assert 'vllm:num_requests_waiting{model_name="tiny"}' in shown.text
        world.gateway.stopping = True
        ended = await kubelet.get("/readyz")
        assert (ended.status_code, ended.text) == (503, "draining\n")
        writer.close()


async def test_the_openapi_document_is_made_once(world: World) -> None:
    application: Any = world.server.config.app
    (document,) = [route.endpoint for route in application.routes if route.path == "/openapi.json"]
    assert document(None).body is document(None).body


def test_metrics_without_a_key_cost_the_same_for_any_number_of_models() -> None:
    def calls(models: int) -> int:
        gateway = Gateway(GatewayConfig(), "gateway", lambda _: b"")
        routes = [Route(f"acme/{number}", "acme", "team/base", "sha256:a") for number in range(models)]
        gateway.routes.take(Routes(1, True, routes=tuple(routes)))
        metrics = GatewayMetrics(gateway, CollectorRegistry())
        metrics.count_request(None, 401)
        for route in routes:
            metrics.count_request(route.model_name, 200)
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
        assert f'model="acme/{models - 1}"'.encode() in metrics.exposition(None)
        return count

    assert calls(1) == pytest.approx(calls(150), rel=0.05)
