"""Runner pods without containers: Ready by a patch of their status, and each plays a runner to a real supervisor.

The pods are the real objects, made by the cluster's Deployment controller. What a played runner says is what a real one
without any requests says: its hello, a heartbeat, and that it knows each list of adapters that it is told.
"""

import asyncio
import itertools
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from kubernetes.aio.client import ApiException

from weft.wire.channels import Link, channel
from weft.wire.v1 import common_pb2 as common
from weft.wire.v1 import supervisor_pb2 as pb
from weft.wire.v1.supervisor_pb2_grpc import SupervisorStub
from weft_bench.following import Object

HEARTBEATS_A_LEASE = 4
NOT_FOUND = 404


class PlayedRunners:
    """Feed it with pods (`hear`); `core` is a CoreV1Api. End it with `aclose()`."""

    def __init__(self, core: Any, supervisor: str, tasks: asyncio.TaskGroup) -> None:
        self._core, self._supervisor, self._tasks = core, supervisor, tasks
        self._playing: dict[str, asyncio.Task[None]] = {}
        self._runners: dict[str, Runner] = {}
        self._told = asyncio.Event()  # a runner was told a list
        self._addresses = (f"10.244.{n // 250}.{n % 250 + 1}" for n in itertools.count())

    def hear(self, pod: Object, gone: bool) -> None:
        """A pod is there, or is gone."""
        uid = pod["metadata"]["uid"]
        if gone or pod["metadata"].get("deletionTimestamp"):
            if task := self._playing.pop(uid, None):
                task.cancel()
        elif uid not in self._playing:
            self._playing[uid] = self._tasks.create_task(self._live(pod, next(self._addresses)))

    async def until_known(self, digest: str) -> float:
        """When (`time.perf_counter`) every runner has been told of that digest."""
        while not all(digest in runner.digests for runner in self._runners.values()):
            self._told.clear()
            await self._told.wait()
        return time.perf_counter()

    def close(self) -> None:
        """All of them leave."""
        for task in self._playing.values():
            task.cancel()

    async def _live(self, pod: Object, address: str) -> None:
        await self._become_ready(pod, address)
        uid = pod["metadata"]["uid"]
        runner = self._runners[uid] = Runner(hello_of(pod, address), self._supervisor, self._told.set)
        try:
            await runner.run()
        finally:
            del self._runners[uid]

    async def _become_ready(self, pod: Object, address: str) -> None:
        metadata = pod["metadata"]
        try:
            await self._core.patch_namespaced_pod_status(metadata["name"], metadata["namespace"], ready_status(address))
        except ApiException as error:
            if error.status != NOT_FOUND:  # deleted meanwhile: its last event comes
                raise


class Runner:
    """One runner that nobody asks for tokens. `on_told` hears that it was told a list of adapters."""

    def __init__(self, hello: pb.RunnerHello, supervisor: str, on_told: Callable[[], None]) -> None:
        self.digests: frozenset[str] = frozenset()
        self._hello, self._supervisor, self._on_told = hello, supervisor, on_told
        self._reports, self._desired_version = 0, 0
        self._heartbeat_s = 0.5

    async def run(self) -> None:
        """Until cancelled."""
        opened = channel(self._supervisor)
        link: Link[pb.RunnerToSupervisor, pb.SupervisorToRunner] = Link(
            f"played runner {self._hello.name}",
            SupervisorStub(opened).Runner,
            hello=lambda: [pb.RunnerToSupervisor(hello=self._hello), self._state()],
            on_message=lambda message: self._hear(link, message),
        )
        beats = asyncio.create_task(self._beat(link))
        try:
            await link.run()
        finally:
            beats.cancel()
            with suppress(asyncio.CancelledError):
                await beats
            link.close()
            await opened.close(None)

    def _hear(self, link: Link[pb.RunnerToSupervisor, pb.SupervisorToRunner], message: pb.SupervisorToRunner) -> None:
        match message.WhichOneof("message"):
            case "registered":
                self._heartbeat_s = message.registered.lease_ms / 1000 / HEARTBEATS_A_LEASE
            case "order" if message.order.has_desired:
                self._desired_version = message.order.desired_version
                self.digests = frozenset(adapter.digest for adapter in message.order.desired)
                link.send(self._state())
                self._on_told()
            case _:
                pass

    async def _beat(self, link: Link[pb.RunnerToSupervisor, pb.SupervisorToRunner]) -> None:
        while True:
            await asyncio.sleep(self._heartbeat_s)
            link.send(pb.RunnerToSupervisor(heartbeat=pb.Heartbeat()))

    def _state(self) -> pb.RunnerToSupervisor:
        self._reports += 1
        state = pb.RunnerState(
            runner=self._hello,
            id=self._hello.runner,
            sequence=self._reports,
            free_pages=self._hello.total_pages,
            ready=True,
            desired_version=self._desired_version,
        )
        return pb.RunnerToSupervisor(state=state)


def hello_of(pod: Object, address: str) -> pb.RunnerHello:
    """What the runner in this pod says of itself: what its flags say."""
    words: list[str] = pod["spec"]["containers"][0]["args"]
    flags = {flag.removeprefix("--"): value for flag, value in zip(words[::2], words[1::2], strict=True)}
    pages, page_tokens = int(flags["kv-pages"]), int(flags["page-tokens"])
    namespace = flags["pool"].partition("/")[0]
    return pb.RunnerHello(
        runner=common.RunnerId(uuid=f"{namespace}.{pod['metadata']['uid']}", incarnation=uuid.uuid4().hex),
        name=pod["metadata"]["name"],
        address=f"{address}:7400",
        pool=flags["pool"],
        base_digest=flags["base-digest"],
        numerics_class="played",
        page_tokens=page_tokens,
        total_pages=pages,
        max_sequences=int(flags["max-sequences"]),
        max_adapters=int(flags["max-adapters"]),
        max_rank=int(flags["max-rank"]),
        max_context_tokens=pages * page_tokens,
    )


def ready_status(address: str) -> Object:
    """The patch of a pod's status by which it runs and is ready."""
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    kinds = ("PodScheduled", "Initialized", "ContainersReady", "Ready")
    conditions = [{"type": kind, "status": "True", "lastTransitionTime": now} for kind in kinds]
    return {"status": {"phase": "Running", "podIP": address, "podIPs": [{"ip": address}], "conditions": conditions}}
