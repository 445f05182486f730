"""A controller to talk to: the real object store, API and unix socket, in a thread; the supervisor's Admin is a fake
servicer behind a real gRPC server. No component runs."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from harness.waiting import PATIENCE_S
from weft.domain.adapter import AdapterState, Tier
from weft.domain.ids import Epoch, RunnerId
from weft.domain.runner import ReportedRunner, RunnerFigures, RunnerReport, RunnerSpec, SequenceState
from weft.wire.codec.cluster import REPORTED
from weft.wire.v1 import supervisor_pb2 as pb
from weft.wire.v1.supervisor_pb2_grpc import AdminServicer, add_AdminServicer_to_server
from weft_operator.core import Ref
from weft_operator.local import Durable, LocalApi, LogFile, ObjectStore, admit, open_store, serve

DIGEST = "sha256:" + "a" * 64


class Admin(AdminServicer):
    """One runner with one adapter on its device; keys in a dict."""

    def __init__(self) -> None:
        self.keys: dict[str, pb.KeyInfo] = {}
        self.limits: dict[tuple[str, str], pb.LimitRule] = {}

    async def ListRunners(self, request: Any, context: Any) -> pb.ListRunnersResponse:  # noqa: N802 (gRPC's name)
        spec = RunnerSpec(
            RunnerId("0123456789abcdef", "1"), address="127.0.0.1:7000", pool="default/base", page_tokens=16,
            total_pages=64, max_sequences=8, max_adapters=4, max_rank=8, max_context_tokens=1024, best_batch=6,
            step_ms_1=1.25, step_ms_best=2.5, prefill_tokens_per_s=12_345.6,
        )  # fmt: skip
        report = RunnerReport(
            1,
            True,
            RunnerFigures(used_pages=3),
            sequences=[SequenceState(name, Epoch(1, 1), "g", "", 1, 1, 1) for name in ("r1", "r2")],
            adapters=[AdapterState(DIGEST, Tier.DEVICE, running=2)],
        )
        answer = pb.ListRunnersResponse()
        REPORTED.fill(ReportedRunner(spec.runner, report, spec), answer.runners.add())
        return answer

    async def CreateKey(self, request: Any, context: Any) -> pb.CreateKeyResponse:  # noqa: N802 (gRPC's name)
        if not request.namespace.islower():
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"namespace {request.namespace!r} is not a DNS label")
        bounds: Any = {"scope": request.scope, "models": request.models, "expires_unix_ms": request.expires_unix_ms}
        known: Any = {"namespace": request.namespace, "note": request.note, "created_unix_s": 1}
        key_id = f"k{len(self.keys) + 1}"
        self.keys[key_id] = pb.KeyInfo(key_id=key_id, **known, **bounds)
        return pb.CreateKeyResponse(key=f"weft-{key_id}-secret", key_id=key_id)

    async def RevokeKey(self, request: Any, context: Any) -> pb.RevokeKeyResponse:  # noqa: N802 (gRPC's name)
        found = self.keys.get(request.key_id)
        if found is not None:
            found.revoked = True
        return pb.RevokeKeyResponse(existed=found is not None)

    async def SetLimit(self, request: Any, context: Any) -> pb.SetLimitResponse:  # noqa: N802 (gRPC's name)
        self.limits[request.subject, request.model] = request
        return pb.SetLimitResponse()

    async def ListLimits(self, request: Any, context: Any) -> pb.ListLimitsResponse:  # noqa: N802 (gRPC's name)
        return pb.ListLimitsResponse(limits=self.limits.values())

    async def GetUsage(self, request: Any, context: Any) -> pb.GetUsageResponse:  # noqa: N802 (gRPC's name)
        days = [(20_000, "acme", "acme/m"), (20_001, "acme", "acme/m"), (20_001, "b", "b/m, the second")]
        sums: Any = {"requests": 1, "prompt_tokens": 20, "completion_tokens": 3}
        key_id = "k1" if request.by_key else ""
        rows = [pb.UsageOfDay(day=day, namespace=n, model_name=m, key_id=key_id, **sums) for day, n, m in days]
        return pb.GetUsageResponse(rows=[row for row in rows if row.day >= request.since_day])

    async def ListKeys(self, request: Any, context: Any) -> pb.ListKeysResponse:  # noqa: N802 (gRPC's name)
        return pb.ListKeysResponse(keys=self.keys.values())


class Running:
    """A controller in another thread. `do` runs something on its loop."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.stack: dict[str, Any] = {
            "pid": 1,
            "dataDir": str(folder),
            "gateway": "http://127.0.0.1:8080",
            "auth": False,
            "registryUp": True,
            "components": {"depot": component("Ready")},
        }
        self.store: ObjectStore
        self._loop = asyncio.new_event_loop()
        self._up: Future[None] = Future()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._run(),))
        self._stop = asyncio.Event()

    def start(self) -> None:
        self._thread.start()
        self._up.result(PATIENCE_S)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(PATIENCE_S)
        self._loop.close()

    def do(self, what: Callable[[], Any]) -> Any:
        async def call() -> Any:
            return what()

        return asyncio.run_coroutine_threadsafe(call(), self._loop).result(PATIENCE_S)

    def set_status(self, kind: Any, namespace: str, name: str, status: dict[str, Any]) -> None:
        ref = Ref(kind, namespace, name)

        def write() -> None:
            meta = self.store.get(ref)["metadata"]
            self.store.set_status(ref, meta["uid"], meta["resourceVersion"], status)

        self.do(write)

    async def _run(self) -> None:
        self.store = open_store(self.folder / "objects.json", lambda: 1_700_000_000.0)
        keeper = Durable(self.store, self.folder / "objects.json")
        self.log = LogFile(self.folder / "logs" / "depot.log")
        server = grpc.aio.server()
        add_AdminServicer_to_server(Admin(), server)
        self.stack["supervisor"] = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        api = LocalApi(self.store, keeper, admit=admit, logs={"depot": self.log}, describe=lambda: self.stack)
        tasks = [asyncio.create_task(keeper.run()), asyncio.create_task(serve(api, self.folder / "weft.sock"))]
        await asyncio.sleep(0)  # the socket listens now
        self._up.set_result(None)
        await self._stop.wait()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await server.stop(None)
        self.log.close()


def component(phase: str) -> dict[str, Any]:
    return {"phase": phase, "pid": 7, "restarts": 0, "detail": "", "listen": "127.0.0.1:1", "probes": None, "log": ""}


@pytest.fixture
def controller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    """Commands find this controller through $WEFT_DATA_DIR."""
    monkeypatch.setenv("WEFT_DATA_DIR", str(tmp_path))
    running = Running(tmp_path)
    running.start()
    yield running
    running.stop()


@pytest.fixture
def manifests(tmp_path: Path) -> Path:
    """A pool and two adapters in two files."""
    folder = tmp_path / "manifests"
    folder.mkdir()
    (folder / "pool.yaml").write_text(POOL)
    (folder / "adapters.yaml").write_text(ADAPTERS)
    return folder


POOL = """
apiVersion: serving.weft.dev/v1alpha1
kind: ServingPool
metadata: {name: base}
spec:
  model: {uri: "file:model"}
  replicas: 2
  allowedNamespaces: ["*"]
"""
ADAPTERS = """
apiVersion: serving.weft.dev/v1alpha1
kind: LoRAAdapter
metadata: {name: upper, namespace: acme}
spec: {poolRef: {name: base, namespace: default}, source: {uri: "file:upper"}}
---
apiVersion: serving.weft.dev/v1alpha1
kind: LoRAAdapter
metadata: {name: lower, namespace: globex}
spec: {poolRef: {name: base, namespace: default}, source: {uri: "file:lower"}}
"""
