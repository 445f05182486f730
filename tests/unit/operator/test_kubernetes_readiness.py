"""When a replica is ready: it knows the cluster, and its servers listen. It leads without waiting for them.

The API server is played, and of kopf only what decides when its webhook server begins.
"""

import asyncio
import json
import ssl
import urllib.error
import urllib.request
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import kopf
import pytest
from prometheus_client import CollectorRegistry

from harness.certificates import Authority, mount
from harness.ports import free_ports
from harness.waiting import PATIENCE_S, eventually, soon
from weft_operator.kubernetes import KubeApi, Metrics, Settings, manager

HOST = "127.0.0.1"
NEEDED = ["--namespace=weft-system", "--pool-namespaces=ml"]
AUTHORITY = Authority()


class Cluster:
    """An API server without objects. `holder` leads, if anybody does. What kopf asks may take."""

    configuration = None

    def __init__(self, holder: str = "") -> None:
        self.holder = holder
        self.elected, self.scanned = asyncio.Event(), asyncio.Event()

    async def request(self, method: str, path: str, **how: Any) -> Any:
        return {"metadata": {"uid": "u", "resourceVersion": "2"}}

    async def pages(self, *what: Any, **how: Any) -> AsyncIterator[tuple[Any, ...]]:
        yield ()


class PlayedLease:
    """The Lease of the cluster."""

    def __init__(self, cluster: Cluster, configuration: None, namespace: str, name: str) -> None:
        self._cluster = cluster

    async def read(self) -> Any:
        spec = {"holderIdentity": self._cluster.holder, "leaseDurationSeconds": 3600, "leaseTransitions": 1}
        return {"metadata": {"uid": "u", "resourceVersion": "1"}, "spec": spec}

    async def replace(self, spec: Any, **how: Any) -> Any:
        self._cluster.elected.set()
        return {"metadata": {"uid": "u", "resourceVersion": "2"}, "spec": spec}

    async def aclose(self) -> None:
        pass


class PlayedWatches:
    """kopf, which serves admission only after it has looked up the resources."""

    def __init__(self, cluster: Cluster, configuration: None, **on_event: Any) -> None:
        self._cluster = cluster

    def registry(self, resources: Any) -> kopf.OperatorRegistry:
        return kopf.OperatorRegistry()

    async def run_own(self, registry: kopf.OperatorRegistry, server: kopf.WebhookServer | None) -> None:
        await self._cluster.scanned.wait()
        if server is not None:
            async with server:
                async for _ in server(nobody_asks):
                    pass
        await asyncio.Event().wait()

    async def run_owned(self, namespaces: Any) -> None:
        await asyncio.Event().wait()


async def nobody_asks(*what: Any, **how: Any) -> Any:
    raise AssertionError("admission is not asked here")


@pytest.fixture
def ports() -> Iterator[int]:
    return iter(free_ports(5))


@pytest.fixture
def tls_dir(tmp_path: Path) -> Path:
    certificate, key = AUTHORITY.issue("localhost")
    return mount(tmp_path / "tls", {"tls.crt": certificate, "tls.key": key})


@pytest.fixture(autouse=True)
def own_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager, "Metrics", lambda: Metrics(CollectorRegistry()))


class Asked:
    """The replica, by its probes."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def readyz(self) -> str:
        return await asyncio.to_thread(self._get)

    async def says(self, text: str) -> bool:
        return await self.readyz() == f"{text}\n"

    def _get(self) -> str:
        try:
            with urllib.request.urlopen(f"http://{HOST}:{self._port}/readyz", timeout=PATIENCE_S) as answer:
                return answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.read().decode()
        except urllib.error.URLError:
            return "not even this listens yet"


@asynccontextmanager
async def running(
    cluster: Cluster, folder: Path, port: int, monkeypatch: pytest.MonkeyPatch, *flags: str
) -> AsyncGenerator[Asked]:
    """A replica that ends as it should."""
    monkeypatch.setattr(manager, "KubernetesWatches", partial(PlayedWatches, cluster))
    monkeypatch.setattr(manager, "LeaseApi", partial(PlayedLease, cluster))
    monkeypatch.setattr(manager, "DRAIN_S", 0.0)
    defaults, stop = folder / "runner-defaults.yaml", asyncio.Event()
    defaults.write_text(json.dumps({"image": "i", "supervisor": f"{HOST}:1", "depot": "d"}))
    away = [f"--scheduler={HOST}:1", f"--depot=http://{HOST}:1"]
    settings = Settings.parse([*NEEDED, *away, f"--runner-defaults={defaults}", f"--probes={HOST}:{port}", *flags])
    work = asyncio.create_task(manager.Manager(settings, cast("KubeApi", cluster), None, stop).run())
    try:
        yield Asked(port)
    finally:
        stop.set()
        assert await work == 0


async def handshake(port: int) -> None:
    """Raises OSError where nobody listens."""
    trusting = ssl.create_default_context(cadata=AUTHORITY.pem.decode())
    _, writer = await asyncio.open_connection(HOST, port, ssl=trusting, server_hostname="localhost")
    writer.close()
    await writer.wait_closed()


@pytest.mark.parametrize("holder", ["", "another"], ids=["it-leads", "another-leads"])
async def test_a_replica_is_not_ready_before_its_webhook_listens(
    holder: str, ports: Iterator[int], tls_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, webhook = Cluster(holder), next(ports)
    flags = f"--webhook={HOST}:{webhook}", f"--webhook-tls-dir={tls_dir}"
    async with running(cluster, tmp_path, next(ports), monkeypatch, *flags) as asked:
        await eventually(lambda: asked.says("the admission webhook does not listen yet"))
        with pytest.raises(ConnectionRefusedError):
            await handshake(webhook)
        if not holder:
            await soon(cluster.elected.wait())
        cluster.scanned.set()
        await eventually(lambda: asked.says("ok"))
        await handshake(webhook)
        assert cluster.elected.is_set() == (not holder)


async def test_a_replica_without_servers(ports: Iterator[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster()
    async with running(cluster, tmp_path, next(ports), monkeypatch) as asked:
        await eventually(lambda: asked.says("ok"))
        assert not cluster.scanned.is_set()
