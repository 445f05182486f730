"""What a played runner says, to a supervisor's port that writes down what it hears."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import pytest

from harness.waiting import PATIENCE_S
from weft.wire.v1 import supervisor_pb2 as pb
from weft.wire.v1.supervisor_pb2_grpc import SupervisorServicer, add_SupervisorServicer_to_server
from weft_bench.played_runners import PlayedRunners, ready_status, spec_of

FLAGS = {
    "pool": "ours/base",
    "base-digest": "sha256:aa",
    "page-tokens": "16",
    "kv-pages": "64",
    "max-sequences": "8",
    "max-adapters": "4",
    "max-rank": "32",
}


def pod(name: str = "runner-1", **metadata: Any) -> dict[str, Any]:
    arguments = [word for flag, value in FLAGS.items() for word in (f"--{flag}", value)]
    return {
        "metadata": {"name": name, "namespace": "ours", "uid": f"uid-{name}", **metadata},
        "spec": {"containers": [{"name": "runner", "args": arguments}]},
    }


class Supervisor(SupervisorServicer):
    """One order with one adapter, then it listens."""

    def __init__(self) -> None:
        self.heard: asyncio.Queue[pb.RunnerToSupervisor] = asyncio.Queue()
        self.left = asyncio.Event()

    async def Runner(self, request_iterator: AsyncIterator[pb.RunnerToSupervisor], context: Any) -> Any:  # noqa: N802
        try:
            yield pb.SupervisorToRunner(registered=pb.Registered(lease_ms=40, report_ms=50))
            yield pb.SupervisorToRunner(order={"change": {"version": 7, "full": True}})
            yield pb.SupervisorToRunner(resync={})
            async for message in request_iterator:
                self.heard.put_nowait(message)
        finally:
            self.left.set()


class Pods:
    """The part of CoreV1Api that writes a pod's status."""

    def __init__(self) -> None:
        self.ready: asyncio.Queue[tuple[str, str]] = asyncio.Queue()

    async def patch_namespaced_pod_status(self, name: str, namespace: str, body: dict[str, Any]) -> None:
        assert {c["status"] for c in body["status"]["conditions"]} == {"True"}
        self.ready.put_nowait((namespace, name))


@pytest.fixture
async def supervisor() -> AsyncIterator[tuple[Supervisor, str]]:
    made, server = Supervisor(), grpc.aio.server()
    add_SupervisorServicer_to_server(made, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield made, f"127.0.0.1:{port}"
    await server.stop(None)


async def test_a_pod_becomes_ready_and_its_runner_reports(supervisor: tuple[Supervisor, str]) -> None:
    played, pods = supervisor[0], Pods()
    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as tasks:
        runners = PlayedRunners(pods, supervisor[1], tasks)
        runners.hear(pod(), False)
        runners.hear(pod(), False)  # a later event of the same pod
        assert await pods.ready.get() == ("ours", "runner-1")
        hello, state = await played.heard.get(), await played.heard.get()
        assert (hello.hello.name, hello.hello.pool) == ("runner-1", "ours/base")
        assert (state.report.full, state.report.ready, state.report.free_pages) == (True, True, 64)
        for version in (2, 3):  # after the order, after the resync
            while (message := await played.heard.get()).WhichOneof("message") != "report":
                pass
            assert (message.report.version, message.report.full, message.report.desired_version) == (version, True, 7)
        while (await played.heard.get()).WhichOneof("message") != "heartbeat":
            pass
        runners.hear(pod(), True)
        await played.left.wait()
    assert pods.ready.empty()


async def test_pods_that_leave_are_not_begun(supervisor: tuple[Supervisor, str]) -> None:
    pods = Pods()
    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as tasks:
        runners = PlayedRunners(pods, supervisor[1], tasks)
        runners.hear(pod("leaving", deletionTimestamp="2026-01-01T00:00:00Z"), False)
        runners.hear(pod("staying"), False)
        assert await pods.ready.get() == ("ours", "staying")
        runners.close()
    assert pods.ready.empty()


def test_a_hello_says_what_the_pods_flags_say() -> None:
    hello = spec_of(pod(), "10.244.0.1")
    assert (hello.address, hello.base_digest) == ("10.244.0.1:7400", "sha256:aa")
    assert (hello.total_pages, hello.max_context_tokens, hello.max_adapters) == (64, 1024, 4)
    assert hello.runner.uuid == f"{hello.pool.partition('/')[0]}.uid-runner-1"
    assert hello.runner.incarnation != spec_of(pod(), "10.244.0.1").runner.incarnation


def test_a_ready_status_has_an_address() -> None:
    assert ready_status("10.244.0.9")["status"]["podIPs"] == [{"ip": "10.244.0.9"}]
