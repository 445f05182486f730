"""A kubelet without containers: pods of a namespace are bound, run and end, and each plays a Weft runner.

    with FakeKubelet(control_plane.kubeconfig, namespace, supervisor="127.0.0.1:7420") as kubelet:
        kubelet.crash("quickstart-runners")   # from now on pods of that name's beginning end again and again

What is faked is the container alone. Pods are the real objects, made by the real Deployment controller, their status is
written as a kubelet writes it, and the runner that a pod plays speaks the real protocol to a real supervisor
(`weft_stage.played_runners`) until its pod is deleted. Everything runs on a loop in a thread of its own.
"""

import asyncio
import itertools
import threading
import uuid
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from kubernetes.aio import config as kube_config
from kubernetes.aio import watch
from kubernetes.aio.client import ApiClient, ApiException, Configuration, CoordinationV1Api, CoreV1Api

from harness.cluster.cluster import PLAYED_NODE
from harness.waiting import PATIENCE_S
from weft.domain.ids import RunnerId
from weft.domain.runner import RunnerSpec
from weft_stage.played_runners import PlayedRunner, spec_of

SELECTOR = "app.kubernetes.io/component=runner"
NODE_LEASE_S = 10.0
NODE: str = PLAYED_NODE["metadata"]["name"]
POD_INDEX = "apps.kubernetes.io/pod-index"


@dataclass
class Played:
    """A pod that runs: the runner that it plays and the task that plays it."""

    spec: RunnerSpec
    task: asyncio.Task[None]


class FakeKubelet:
    """A kubelet without containers, for one namespace. `supervisor` None: pods become Ready and play nothing."""

    def __init__(self, kubeconfig: Path, namespace: str, supervisor: str | None = None, node: str = NODE) -> None:
        self._kubeconfig, self._namespace, self._supervisor, self._node = kubeconfig, namespace, supervisor, node
        self._addresses = (f"10.244.{n // 250}.{n % 250 + 1}" for n in itertools.count())
        self._crashing: set[str] = set()
        self._crashed: dict[str, dict[str, Any]] = {}
        self.runners: dict[str, Played] = {}  # by pod; read it, the loop's thread writes it
        self._starting: set[str] = set()
        self._thread = threading.Thread(target=self._main, name="fake kubelet", daemon=True)
        self._up = threading.Event()
        self._failure: BaseException | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._up.wait(PATIENCE_S), "the fake kubelet does not start"
        self.check()
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(RuntimeError):  # it has ended by itself: `check` tells why
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(PATIENCE_S)
        self.check()

    def check(self) -> None:
        """Raise what its thread has failed with."""
        if self._failure is not None:
            raise self._failure

    def crash(self, beginning: str) -> None:
        """Let pods whose names begin so, those that start from now on, end again and again."""
        self._crashing.add(beginning)

    def heal(self, beginning: str) -> None:
        """Let pods start as they should again, also those that crash now."""
        self._crashing.discard(beginning)
        self._call(self._start_again(beginning))

    def kill(self, pod: str) -> None:
        """End the runner in the pod without a word; a new incarnation of it starts at once, as restarts do."""
        self._call(self._restart(pod))

    # ------------------------------------------------------------------------------------------------- the thread

    def _call(self, work: Any) -> Any:
        future: Future[Any] = asyncio.run_coroutine_threadsafe(work, self._loop)
        return future.result(PATIENCE_S)

    def _main(self) -> None:
        try:
            asyncio.run(self._run())
        except BaseException as error:  # noqa: BLE001 (told to the test by `check`)
            self._failure = error
        finally:
            self._up.set()

    async def _run(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        configuration = Configuration()
        await kube_config.load_kube_config(config_file=str(self._kubeconfig), client_configuration=configuration)
        async with ApiClient(configuration) as client:
            # Bodies are given as JSON, not as the client's models: the API says it shorter.
            self._core: Any = CoreV1Api(client)
            self._leases: Any = CoordinationV1Api(client)
            await self._register()
            self._up.set()
            tasks = [asyncio.create_task(work) for work in (self._watch(), self._renew(), self._stop.wait())]
            done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            ending = [*pending, *(played.task for played in self.runners.values())]
            for task in ending:
                task.cancel()
            await asyncio.gather(*ending, return_exceptions=True)
            for task in done:
                task.result()

    # --------------------------------------------------------------------------------------------------- the node

    async def _register(self) -> None:
        """Make a node of that name, Ready: the node controller takes pods of others for lost."""
        with suppress(ApiException):  # it is there already
            await self._core.create_node({"metadata": {"name": self._node}})
        ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": ""}
        ready |= {"lastHeartbeatTime": _now(), "lastTransitionTime": _now()}
        await self._core.patch_node_status(self._node, {"status": {"conditions": [ready]}})

    async def _renew(self) -> None:
        """Renew the node's Lease, which tells the node controller that it lives."""
        body = {
            "metadata": {"name": self._node, "namespace": "kube-node-lease"},
            "spec": {"holderIdentity": self._node, "leaseDurationSeconds": 40},
        }
        with suppress(ApiException):
            await self._leases.create_namespaced_lease("kube-node-lease", body)
        while True:
            renewal = {"spec": {"renewTime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")}}
            await self._leases.patch_namespaced_lease(self._node, "kube-node-lease", renewal)
            await asyncio.sleep(NODE_LEASE_S)

    # --------------------------------------------------------------------------------------------------- its pods

    async def _watch(self) -> None:
        async for pod in self._pods():
            name = pod["metadata"]["name"]
            if pod["metadata"].get("deletionTimestamp"):
                await self._end(pod)
            elif not pod["spec"].get("nodeName"):
                if not (await self._core.read_node(self._node)).spec.unschedulable:
                    await self._bind(name)
            elif pod["spec"]["nodeName"] == self._node and name not in self.runners and name not in self._starting:
                self._starting.add(name)
                await self._start(pod)

    async def _pods(self) -> AsyncIterator[dict[str, Any]]:
        while True:
            listed = await self._core.list_namespaced_pod(self._namespace, label_selector=SELECTOR)
            for item in listed.items:
                yield self._core.api_client.sanitize_for_serialization(item)
            stream: Any = watch.Watch().stream(
                self._core.list_namespaced_pod,
                self._namespace,
                label_selector=SELECTOR,
                resource_version=listed.metadata.resource_version,
            )
            with suppress(ApiException):  # a version that is forgotten: list again
                async for event in stream:
                    if event["type"] != "DELETED":
                        yield event["raw_object"]

    async def _bind(self, name: str) -> None:
        binding = {"metadata": {"name": name}, "target": {"kind": "Node", "apiVersion": "v1", "name": self._node}}
        # The answer is not read: the API server gives another type than the client expects. A refusal says that the
        # pod is gone, or bound by a word of ours that we hear again.
        await self._core.create_namespaced_pod_binding_without_preload_content(name, self._namespace, binding)

    async def _start(self, pod: dict[str, Any]) -> None:
        name, address = pod["metadata"]["name"], next(self._addresses)
        if any(name.startswith(beginning) for beginning in self._crashing):
            self._crashed[name] = pod
            await self._status(name, _crashed(pod, address))
            return
        if pod["metadata"]["labels"].get(POD_INDEX, "0") == "0":  # the others of a runner of several pods are ranks
            spec = spec_of(pod, address)
            self.runners[name] = Played(spec, asyncio.create_task(self._play(spec)))
        await self._status(name, _running(pod, address))

    async def _start_again(self, beginning: str) -> None:
        for name in [name for name in self._crashed if name.startswith(beginning)]:
            await self._start(self._crashed.pop(name))

    async def _play(self, spec: RunnerSpec) -> None:
        if self._supervisor is None:
            await asyncio.Event().wait()
        else:
            await PlayedRunner(spec, self._supervisor).run()

    async def _end(self, pod: dict[str, Any]) -> None:
        name = pod["metadata"]["name"]
        self._starting.discard(name)
        self._crashed.pop(name, None)
        if played := self.runners.pop(name, None):
            played.task.cancel()
        force = {"gracePeriodSeconds": 0, "preconditions": {"uid": pod["metadata"]["uid"]}}
        try:
            await self._core.delete_namespaced_pod(name, self._namespace, body=force)
        except ApiException as error:
            if error.status not in (404, 409):  # gone by now, or another pod of that name
                raise

    async def _status(self, name: str, status: dict[str, Any]) -> None:
        with suppress(ApiException):  # deleted meanwhile: its next event tells
            await self._core.patch_namespaced_pod_status(name, self._namespace, {"status": status})

    async def _restart(self, pod: str) -> None:
        played = self.runners[pod]
        played.task.cancel()
        played.spec = replace(played.spec, runner=RunnerId(played.spec.runner.uuid, uuid.uuid4().hex))
        played.task = asyncio.create_task(self._play(played.spec))


def _running(pod: dict[str, Any], address: str) -> dict[str, Any]:
    conditions = [_condition(kind, "True") for kind in ("PodScheduled", "Initialized", "ContainersReady", "Ready")]
    container = _container(pod) | {"ready": True, "started": True, "state": {"running": {"startedAt": _now()}}}
    return _status_of("Running", address, conditions, container)


def _crashed(pod: dict[str, Any], address: str) -> dict[str, Any]:
    waiting = {"reason": "CrashLoopBackOff", "message": "back-off 10s restarting failed container"}
    ended = {"exitCode": 2, "reason": "Error", "message": "cannot start: told to by the test", "finishedAt": _now()}
    container = _container(pod) | {"restartCount": 3, "state": {"waiting": waiting}, "lastState": {"terminated": ended}}
    conditions = [_condition("PodScheduled", "True"), _condition("Ready", "False", "ContainersNotReady")]
    return _status_of("Running", address, conditions, container)


def _status_of(phase: str, address: str, conditions: list[Any], container: dict[str, Any]) -> dict[str, Any]:
    ips = [{"ip": address}]
    return {"phase": phase, "podIP": address, "podIPs": ips, "conditions": conditions, "containerStatuses": [container]}


def _container(pod: dict[str, Any]) -> dict[str, Any]:
    container = pod["spec"]["containers"][0]
    return {"name": container["name"], "image": container["image"], "imageID": "", "ready": False, "restartCount": 0}


def _condition(kind: str, status: str, reason: str = "") -> dict[str, Any]:
    return {"type": kind, "status": status, "reason": reason, "lastTransitionTime": _now()}


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
