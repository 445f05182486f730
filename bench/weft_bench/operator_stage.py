"""Everything around the API server that `weft bench operator` needs: real depot, scheduler, supervisor and operator.

They are processes of this machine; the API server is somebody else's. Everything lies in one namespace of our own and
in one temporary folder, and is gone at the end.
"""

import asyncio
import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from pathlib import Path
from random import SystemRandom
from typing import Any

from kubernetes.aio.client import ApiClient, ApiException, CoreV1Api, CustomObjectsApi

from weft_bench.errors import NoResources, StackFailed
from weft_bench.scrape import Sample, scrape, total
from weft_bench.stack import quickstart
from weft_operator.kubernetes.client import load_configuration
from weft_operator.local.ports import PortSource

GROUP, VERSION = "serving.weft.dev", "v1alpha1"
POOLS, ADAPTERS = "servingpools", "loraadapters"
POOL = "bench"
USER_AGENT = "weft-bench"
MERGE_PATCH = "application/merge-patch+json"
START_S, STOP_S, POLL_S = 60.0, 15.0, 0.02
NOT_FOUND = 404
CONNECTIONS = 16
LOG_CHARS = 3000
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


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
        """Merge into an object's spec; its new generation."""
        edited = await self.custom.patch_namespaced_custom_object(
            GROUP, VERSION, self.namespace, plural, name, {"spec": spec}, _content_type=MERGE_PATCH
        )
        return edited["metadata"]["generation"]

    async def delete(self, plural: str, name: str) -> None:
        await self.custom.delete_namespaced_custom_object(GROUP, VERSION, self.namespace, plural, name)

    async def remove(self) -> None:
        """The namespace goes with everything in it, also with what waits for an operator that is no more."""
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
        """A write that changes nothing, in the audit log under the field manager `name`."""
        await self.core.patch_namespace(self.namespace, {}, dry_run="All", field_manager=name)


@contextlib.asynccontextmanager
async def cluster(kubeconfig: Path) -> AsyncGenerator[Cluster]:
    """A namespace of our own. Raises NoResources, NoCluster."""
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


class Process:
    """One of ours, with its log and its probes."""

    def __init__(self, name: str, module: str, flags: Mapping[str, object], folder: Path) -> None:
        self.name, self.probes, self.log = name, str(flags["probes"]), folder / f"{name}.log"
        words = [word for flag, value in flags.items() for word in (f"--{flag}", str(value))]
        self.started_at = time.perf_counter()
        with self.log.open("ab") as log:
            self._child = subprocess.Popen([sys.executable, "-m", module, *words], stdout=log, stderr=log)

    def samples(self) -> list[Sample]:
        """Its metrics; nothing while it does not listen. Raises StackFailed when it has ended."""
        self._require_alive()
        try:
            return scrape(self.probes)
        except OSError:
            return []

    def ready(self) -> bool:
        """Whether it answers /readyz with 200. Raises StackFailed when it has ended."""
        self._require_alive()
        try:
            with urllib.request.urlopen(f"http://{self.probes}/readyz", timeout=5):
                return True
        except OSError:  # an HTTPError is one
            return False

    async def until(self, holds: Callable[[], bool], what: str) -> float:
        """When it held, by asking; for what a process tells nobody of. Raises StackFailed."""
        end = time.perf_counter() + START_S
        while not await asyncio.to_thread(holds):
            if time.perf_counter() > end:
                raise StackFailed(f"not within {START_S:.0f} s: {self.name} {what}\n{self._said()}")
            await asyncio.sleep(POLL_S)
        return time.perf_counter()

    def stop(self) -> None:
        """SIGTERM and its end; killed when it does not end in time."""
        self._child.terminate()
        try:
            self._child.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()

    def _require_alive(self) -> None:
        if (code := self._child.poll()) is not None:
            raise StackFailed(f"{self.name} ended with {code}:\n{self._said()}")

    def _said(self) -> str:
        return self.log.read_text(errors="replace")[-LOG_CHARS:]


@contextlib.asynccontextmanager
async def stage(namespace: str, kubeconfig: Path, folder: Path) -> AsyncGenerator["Stage"]:
    """Everything started, and an operator that leads. Raises StackFailed."""
    async with contextlib.AsyncExitStack() as ends:
        exits = contextlib.ExitStack()
        ends.push_async_callback(asyncio.to_thread, exits.close)
        made = Stage(namespace, kubeconfig, folder, exits)
        await made.operator.until(lambda: leads(made.operator.samples()), "leads")
        yield made


class Stage:
    """The processes, for one namespace. `folder` holds their logs and data, and the sources of adapters."""

    def __init__(self, namespace: str, kubeconfig: Path, folder: Path, exits: contextlib.ExitStack) -> None:
        self._namespace, self._kubeconfig, self._folder, self._exits = namespace, kubeconfig, folder, exits
        self._ports, self._starts = PortSource(SystemRandom()), 0
        self._sources = folder / "sources"
        for name in ("model", "adapters"):
            shutil.copytree(quickstart() / name, self._sources / name)
        depot, self._scheduler, self.supervisor, nobody = self._addresses(4)
        self._depot_url = f"http://{depot}"
        scheduler = {"scheduler": self._scheduler}
        self.others = [
            self._start("depot", {"http": depot, "file-root": self._sources}),
            self._start("scheduler", {"listen": self._scheduler}),
            self._start("supervisor", {"listen": self.supervisor, "predictor": nobody, **scheduler}),
        ]
        self.operator = self._start_operator()

    async def restart_operator(self) -> Process:
        """SIGTERM, its end, and another one, which has just been started."""
        await asyncio.to_thread(self.operator.stop)
        self.operator = self._start_operator()
        return self.operator

    def make_source(self, number: int) -> str:
        """The URI of an adapter of its own: the weights of one of the quickstart's, another digest."""
        originals = sorted((self._sources / "adapters").iterdir())
        original, name = originals[number % len(originals)], f"copy-{number}"
        (copy := self._sources / name).mkdir()
        os.link(original / WEIGHTS, copy / WEIGHTS)
        config = json.loads((original / CONFIG).read_text())
        (copy / CONFIG).write_text(json.dumps({**config, "revision": f"copy {number}"}))
        return f"file:{name}"

    def _start_operator(self) -> Process:
        site = self._folder / "site.yaml"
        site.write_text(
            json.dumps({"image": "weft-runner:none", "supervisor": self.supervisor, "depot": "http://none"})
        )
        self._starts += 1
        flags: dict[str, object] = {
            "namespace": self._namespace,
            "pool-namespaces": self._namespace,
            "scheduler": self._scheduler,
            "depot": self._depot_url,
            "site": site,
            "kubeconfig": self._kubeconfig,
        }
        return self._run(f"operator-{self._starts}", "weft_operator.kubernetes", flags)

    def _start(self, name: str, flags: Mapping[str, object]) -> Process:
        return self._run(name, f"weft_{name}", {**flags, "data-dir": self._folder / name})

    def _run(self, name: str, module: str, flags: Mapping[str, object]) -> Process:
        process = Process(name, module, {**flags, "probes": self._addresses(1)[0]}, self._folder)
        self._exits.callback(process.stop)
        return process

    def _addresses(self, count: int) -> list[str]:
        return [f"127.0.0.1:{port}" for port in self._ports(count)]


def leads(samples: Sequence[Sample]) -> bool:
    """Whether an operator with these metrics leads."""
    return total(samples, "weft_operator_leader") == 1.0
