"""Runner pods without containers: Ready by a patch of their status, and each plays a runner to a real supervisor.

The pods are the real objects, made by the cluster's Deployment controller. A played runner sends what a real one
without any requests sends: its specification, reports and heartbeats; it has every adapter that it has to hold at once.
"""

import asyncio
import itertools
import uuid
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from kubernetes.aio.client import ApiException

from weft.api.servingpool import PAGE_TOKENS
from weft.domain.ids import RunnerId
from weft.domain.runner import Heartbeat, Registered, Resync, RunnerFigures, RunnerOrder, RunnerReport, RunnerSpec
from weft.wire.codec.cluster import RUNNER_TO_SUPERVISOR, SUPERVISOR_TO_RUNNER
from weft.wire.streams import ClientStream, channel
from weft.wire.v1 import supervisor_pb2 as pb
from weft.wire.v1.supervisor_pb2_grpc import SupervisorStub
from weft_runner.settings import KV_PAGES, MAX_SEQUENCES
from weft_stage.following import Object

RunnerLink = ClientStream[pb.RunnerToSupervisor, pb.SupervisorToRunner]
HEARTBEATS_A_LEASE = 4
NOT_FOUND = 404


class PlayedRunners:
    """Feed it with pods (`hear`); `core` is a CoreV1Api. End it with `aclose()`."""

    def __init__(self, core: Any, supervisor: str, tasks: asyncio.TaskGroup) -> None:
        self._core, self._supervisor, self._tasks = core, supervisor, tasks
        self._playing: dict[str, asyncio.Task[None]] = {}
        self._addresses = (f"10.244.{n // 250}.{n % 250 + 1}" for n in itertools.count())

    def hear(self, pod: Object, gone: bool) -> None:
        """A pod is there, or is gone."""
        uid = pod["metadata"]["uid"]
        if gone or pod["metadata"].get("deletionTimestamp"):
            if task := self._playing.pop(uid, None):
                task.cancel()
        elif uid not in self._playing:
            self._playing[uid] = self._tasks.create_task(self._live(pod, next(self._addresses)))

    def close(self) -> None:
        """All of them leave."""
        for task in self._playing.values():
            task.cancel()

    async def _live(self, pod: Object, address: str) -> None:
        await self._become_ready(pod, address)
        await PlayedRunner(spec_of(pod, address), self._supervisor).run()

    async def _become_ready(self, pod: Object, address: str) -> None:
        metadata = pod["metadata"]
        try:
            await self._core.patch_namespaced_pod_status(metadata["name"], metadata["namespace"], ready_status(address))
        except ApiException as error:
            if error.status != NOT_FOUND:  # deleted meanwhile: its last event comes
                raise


class PlayedRunner:
    """One runner without requests."""

    def __init__(self, spec: RunnerSpec, supervisor: str) -> None:
        self.spec, self._supervisor = spec, supervisor
        self._version, self._desired_version = 0, 0
        self._heartbeat_s = 0.5

    async def run(self) -> None:
        """Until cancelled."""
        opened = channel(self._supervisor)
        link: RunnerLink = ClientStream(
            f"played runner {self.spec.name}",
            SupervisorStub(opened).Runner,
            hello=lambda: [RUNNER_TO_SUPERVISOR.encode(self.spec), self._report()],
            on_message=lambda message: self._receive(link, message),
        )
        heartbeats = asyncio.create_task(self._heartbeat(link))
        try:
            await link.run()
        finally:
            heartbeats.cancel()
            with suppress(asyncio.CancelledError):
                await heartbeats
            link.close()
            await opened.close(None)

    def _receive(self, link: RunnerLink, message: pb.SupervisorToRunner) -> None:
        match SUPERVISOR_TO_RUNNER.decode(message):
            case Registered(lease_ms=lease_ms):
                self._heartbeat_s = lease_ms / 1000 / HEARTBEATS_A_LEASE
            case RunnerOrder(desired=desired) if desired is not None:
                self._desired_version = desired.version
                link.send(self._report())
            case Resync():
                link.send(self._report())
            case _:
                pass

    async def _heartbeat(self, link: RunnerLink) -> None:
        while True:
            await asyncio.sleep(self._heartbeat_s)
            link.send(RUNNER_TO_SUPERVISOR.encode(Heartbeat()))

    def _report(self) -> pb.RunnerToSupervisor:
        self._version += 1
        figures = RunnerFigures(free_pages=self.spec.total_pages, desired_version=self._desired_version)
        return RUNNER_TO_SUPERVISOR.encode(RunnerReport(self._version, True, figures))


def flags_of(pod: Object) -> Mapping[str, str]:
    """The runner's flags from its arguments."""
    words: list[str] = pod["spec"]["containers"][0].get("args", [])
    return {flag.removeprefix("--"): value for flag, value in zip(words[::2], words[1::2], strict=True)}


def spec_of(pod: Object, address: str) -> RunnerSpec:
    """The specification of the runner in this pod, from its flags."""
    flags = flags_of(pod)
    pages, pool = int(flags["kv-pages"]) or KV_PAGES, flags["pool"]
    return RunnerSpec(
        runner=RunnerId(f"{pool.partition('/')[0]}.{pod['metadata']['uid']}", uuid.uuid4().hex),
        name=pod["metadata"]["name"],
        address=f"{address}:7400",
        pool=pool,
        base_digest=flags["base-digest"],
        numerics_class="played",
        page_tokens=PAGE_TOKENS,
        total_pages=pages,
        max_sequences=int(flags["max-sequences"]) or MAX_SEQUENCES,
        max_adapters=int(flags.get("max-adapters", pages)),
        max_rank=int(flags["max-rank"]),
        max_context_tokens=pages * PAGE_TOKENS,
    )


def ready_status(address: str) -> Object:
    """The patch of a pod's status by which it runs and is ready."""
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    kinds = ("PodScheduled", "Initialized", "ContainersReady", "Ready")
    conditions = [{"type": kind, "status": "True", "lastTransitionTime": now} for kind in kinds]
    return {"status": {"phase": "Running", "podIP": address, "podIPs": [{"ip": address}], "conditions": conditions}}
