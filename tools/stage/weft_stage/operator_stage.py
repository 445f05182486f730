"""What `weft bench operator` and the operator's tests have beside an API server: the processes, and a namespace.

They are processes of this machine; the API server is somebody else's. Everything lies in one namespace of our own and
in one temporary folder, and is gone at the end.
"""

import asyncio
import contextlib
import json
import secrets
import shutil
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from pathlib import Path
from random import SystemRandom
from typing import Any, Generic, TypeVar

from kubernetes.aio.client import ApiClient, ApiException, CoreV1Api, CustomObjectsApi

from weft.leadership.lease_api import load_configuration
from weft_operator.local.sockets import PortSource
from weft_stage.errors import NoResources
from weft_stage.process import Process
from weft_stage.scrape import Sample, total
from weft_stage.stack import copy_adapter, quickstart

GROUP, VERSION = "serving.weft.dev", "v1alpha1"
POOLS, ADAPTERS = "servingpools", "loraadapters"
POOL = "bench"
USER_AGENT = "weft-bench"
MERGE_PATCH = "application/merge-patch+json"
NOT_FOUND = 404
CONNECTIONS = 16

P = TypeVar("P")
Start = Callable[[str, str, Mapping[str, object]], P]


class Cluster:
    """Our namespace on that API server."""

    def __init__(self, client: ApiClient, namespace: str) -> None:
        self.namespace = namespace
        self.core: Any = CoreV1Api(client)
        self.custom: Any = CustomObjectsApi(client)

    async def create(self, kind: str, plural: str, name: str, spec: Mapping[str, Any]) -> None:
        metadata = {"name": name, "namespace": self.namespace}
        body = {"apiVersion": f"{GROUP}/{VERSION}", "kind": kind, "metadata": metadata, "spec": spec}
        await self.custom.create_namespaced_custom_object(GROUP, VERSION, self.namespace, plural, body)

    async def edit(self, plural: str, name: str, spec: Mapping[str, Any]) -> int:
        """Merge into an object's spec. Returns its new generation."""
        edited = await self.custom.patch_namespaced_custom_object(
            GROUP, VERSION, self.namespace, plural, name, {"spec": spec}, _content_type=MERGE_PATCH
        )
        return edited["metadata"]["generation"]

    async def delete(self, plural: str, name: str) -> None:
        await self.custom.delete_namespaced_custom_object(GROUP, VERSION, self.namespace, plural, name)

    async def remove(self) -> None:
        """Delete the namespace with everything in it, also with what waits for an operator that is no more."""
        await self.core.delete_namespace(self.namespace)
        permits = asyncio.Semaphore(CONNECTIONS)

        async def let_go(name: str) -> None:
            where = (GROUP, VERSION, self.namespace, ADAPTERS, name)
            async with permits:
                try:
                    patch = {"metadata": {"finalizers": None}}
                    await self.custom.patch_namespaced_custom_object(*where, patch, _content_type=MERGE_PATCH)
                except ApiException as error:
                    if error.status != NOT_FOUND:
                        raise

        left = await self.custom.list_namespaced_custom_object(GROUP, VERSION, self.namespace, ADAPTERS)
        await asyncio.gather(*(let_go(item["metadata"]["name"]) for item in left["items"]))

    async def mark(self, name: str) -> None:
        """Write without a change, which the audit log has under the field manager `name`."""
        await self.core.patch_namespace(self.namespace, {}, dry_run="All", field_manager=name)


@contextlib.asynccontextmanager
async def cluster(kubeconfig: Path) -> AsyncGenerator[Cluster]:
    """Make a namespace of our own. Raises NoResources, NoCluster."""
    configuration = await load_configuration(str(kubeconfig))
    configuration.connection_pool_maxsize = CONNECTIONS * 2
    async with ApiClient(configuration) as client:
        client.user_agent = USER_AGENT
        made = Cluster(client, f"weft-bench-{secrets.token_hex(3)}")
        try:
            await made.custom.list_cluster_custom_object(GROUP, VERSION, ADAPTERS, limit=1)
        except ApiException as error:
            if error.status != NOT_FOUND:
                raise
            raise NoResources(f"the API server does not know {ADAPTERS}.{GROUP}: kubectl apply -f crds") from error
        await made.core.create_namespace({"metadata": {"name": made.namespace}})
        try:
            yield made
        finally:
            await made.remove()


@contextlib.asynccontextmanager
async def stage(namespace: str, kubeconfig: Path, folder: Path) -> AsyncGenerator["Stage"]:
    """Start everything, and an operator that leads. Raises StackFailed."""
    async with contextlib.AsyncExitStack() as ends:
        exits = contextlib.ExitStack()
        ends.push_async_callback(asyncio.to_thread, exits.close)
        made = Stage(namespace, kubeconfig, folder, exits)
        await made.operator.until(lambda: leads(made.operator.samples()), "leads")
        yield made


class Services(Generic[P]):
    """Depot, scheduler and supervisor, and what an operator is told of them.

    `folder` holds their data and the sources of adapters; `start(name, module, flags)` starts a process, with probes.
    """

    def __init__(self, folder: Path, addresses: Callable[[int], list[str]], start: Start[P]) -> None:
        self._folder, self._start = folder, start
        self.sources = folder / "sources"
        for name in ("model", "adapters"):
            shutil.copytree(quickstart() / name, self.sources / name)
        self.depot, self.scheduler, self.supervisor, self._nobody = addresses(4)

    def start(self, **scheduler: object) -> list[P]:
        """Start all three, the scheduler with these flags beside."""
        depot = self._start_one("depot", {"http": self.depot, "file-root": self.sources})
        return [depot, self.start_scheduler(**scheduler), self._start_supervisor()]

    def start_scheduler(self, **flags: object) -> P:
        return self._start_one("scheduler", {"listen": self.scheduler, **flags})

    def operator_flags(self, namespace: str, **defaults: object) -> dict[str, object]:
        """Return an operator's flags for pools of that namespace; `defaults` are laid over those of runner pods."""
        told = {"image": "weft-runner:none", "supervisor": self.supervisor, "depot": "http://none", **defaults}
        path = self._folder / "runner-defaults.yaml"
        path.write_text(json.dumps(told))
        return {
            "namespace": namespace,
            "pool-namespaces": namespace,
            "scheduler": self.scheduler,
            "depot": f"http://{self.depot}",
            "runner-defaults": path,
        }

    def _start_supervisor(self) -> P:
        flags = {"listen": self.supervisor, "predictor": self._nobody, "scheduler": self.scheduler}
        return self._start_one("supervisor", flags)

    def _start_one(self, name: str, flags: Mapping[str, object]) -> P:
        return self._start(name, f"weft_{name}", {**flags, "data-dir": self._folder / name})


class Stage:
    """The processes of a benchmark, for one namespace. `folder` holds their logs and data, and sources of adapters."""

    def __init__(self, namespace: str, kubeconfig: Path, folder: Path, exits: contextlib.ExitStack) -> None:
        self._namespace, self._kubeconfig, self._folder, self._exits = namespace, kubeconfig, folder, exits
        self._ports, self._starts = PortSource(SystemRandom()), 0
        self._services = Services(folder, self._addresses, self._run)
        self.supervisor, self._sources = self._services.supervisor, self._services.sources
        self.others = self._services.start()
        self.operator = self._start_operator()

    async def restart_operator(self) -> Process:
        """End the operator by SIGTERM and start another one."""
        await asyncio.to_thread(self.operator.stop)
        self.operator = self._start_operator()
        return self.operator

    def make_source(self, number: int) -> str:
        """Write an adapter: the weights of one of the quickstart's, another digest. Returns its URI."""
        originals = sorted((self._sources / "adapters").iterdir())
        original, name = originals[number % len(originals)], f"copy-{number}"
        copy_adapter(original, self._sources / name, f"copy {number}")
        return f"file:{name}"

    def _start_operator(self) -> Process:
        self._starts += 1
        flags = self._services.operator_flags(self._namespace)
        return self._run(f"operator-{self._starts}", "weft_operator.kubernetes", flags)

    def _run(self, name: str, module: str, flags: Mapping[str, object]) -> Process:
        told = {**flags, "probes": (probes := self._addresses(1)[0])}
        access = {"KUBECONFIG": str(self._kubeconfig)}
        process = Process(name, module, told, probes, self._folder, environment=access)
        self._exits.callback(process.stop)
        return process

    def _addresses(self, count: int) -> list[str]:
        return [f"127.0.0.1:{port}" for port in self._ports(count)]


def leads(samples: Sequence[Sample]) -> bool:
    """Return whether an operator with these metrics leads."""
    return total(samples, "weft_operator_leader") == 1.0
