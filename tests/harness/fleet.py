"""Every service of a stack as a real process, with the flags of a test.

The operator is played by the test: it resolves at the depot and tells the scheduler's registry, over the same TLS.
"""

import asyncio
import contextlib
import itertools
import os
import signal
import subprocess
import time
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2

from harness import processes
from harness.crowd import SLOW
from harness.other_constants import Constants, command
from harness.ports import free_addresses
from harness.quickstart import QUICKSTART, Case
from harness.waiting import PATIENCE_S, eventually
from weft.domain.routes import AdapterSpec, PoolSpec, PoolStatus, RegistryChange
from weft.wire.codec.registry import REGISTRY_TO_SCHEDULER, SCHEDULER_TO_REGISTRY
from weft.wire.streams import ClientStream, channel
from weft.wire.tls import Tls
from weft.wire.v1 import scheduler_pb2
from weft.wire.v1.scheduler_pb2_grpc import SchedulerStub

POOL = "weft-system/quickstart"
ADDRESSES = 24  # enough for a fleet
ROLES = ("depot", "scheduler", "supervisor", "predictor", "batch", "gateway", "runner", "operator", "admin")
# Nothing here is about these times, so that none of them runs out on a slow machine, and keys are known soon.
PATIENT: Mapping[str, Constants] = {
    "scheduler": {"weft_scheduler.settings:SchedulerConfig": {"absent_s": 60.0, "assign_s": 60.0}},
    "gateway": {"weft_gateway.shell.request_manager:GatewayConfig": {"connect_s": 60.0}},
    "supervisor": {"weft_supervisor.main:SupervisorConfig": {"lease_s": 60.0}, "weft_supervisor.main:KEYS_S": 0.1},
}
FLAGS = {"depot": ("--schemes", "file"), "gateway": ("--hold-seconds", "600")}


class Fleet:
    """Processes by name. `tls`: role -> folder; None: plain text."""

    def __init__(self, folder: Path, tls: Mapping[str, Path] | None = None) -> None:
        self.folder, self.tls = folder, tls
        self._addresses = iter(free_addresses(ADDRESSES))  # all different, also those that nobody listens on yet
        names = ("depot", "depot_probes", "scheduler", "predictor", "batch", "gateway")
        self.at = {name: next(self._addresses) for name in names}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._commands: dict[str, Sequence[str]] = {}
        self.base_digest = ""

    # ---------------------------------------------------------------------------------------------- processes

    def control_plane(
        self, *supervisor_flags: str, supervisors: Sequence[str] = ("supervisor",), auth: bool = False
    ) -> None:
        """Start everything but runners."""
        for component in ("depot", "scheduler", "predictor", "batch"):
            self.serve(component)
        for name in supervisors:
            self.supervisor(name, *supervisor_flags)
        self.serve("gateway", "--auth" if auth else "--no-auth")

    def serve(self, component: str, *flags: str) -> None:
        """Start a component of which there is one."""
        match component:
            case "depot":
                at = ("--http", self.at["depot"], "--probes", self.at["depot_probes"], "--file-root", str(QUICKSTART))
            case "gateway":
                at = (
                    "--http",
                    self.at["gateway"],
                    "--depot",
                    self.depot_url,
                    "--batch",
                    self.at["batch"],
                    *self._peers(),
                )
            case _:
                at = ("--listen", self.at[component], "--probes", self._own(component))
        self.start(component, component, *at, *flags)

    def supervisor(self, name: str, *flags: str) -> None:
        self.at[name] = next(self._addresses)
        listen = ("--listen", self.at[name], "--probes", self._own(name))
        self.start(name, "supervisor", *listen, *self._peers(), *flags)

    def runner(self, name: str, *, supervisor: str = "") -> None:
        """Start a runner of the quickstart's base, after `resolved`. `supervisor`: an address, else the only one's."""
        self.at[name] = next(self._addresses)
        report_to = supervisor or self.at["supervisor"]
        flags = ("--listen", self.at[name], "--probes", self._own(name), "--supervisor", report_to)
        which = ("--depot", self.depot_url, "--pool", POOL, "--base-digest", self.base_digest, "--threads", "1")
        self.start(name, "runner", *flags, *which)

    def start(self, name: str, component: str, *flags: str) -> None:
        secure = ("--tls-dir", str(self.tls[component])) if self.tls else ()
        data = ("--data-dir", str(self.folder / "data" / name))
        process = command(f"weft_{component}", PATIENT.get(component, {}))
        self._commands[name] = (*process, *data, *FLAGS.get(component, ()), *flags, *secure)
        self.start_again(name)

    def start_again(self, name: str) -> None:
        with self.log(name).open("ab") as log:
            environment = {**os.environ, **SLOW}
            self.processes[name] = processes.start(*self._commands[name], stderr=log, env=environment)

    def kill(self, *names: str) -> None:
        for name in names:
            processes.end(self.processes.pop(name))

    def stop(self, name: str) -> int:
        """Send SIGTERM and wait: it leaves in order. Returns its exit code."""
        self.processes[name].send_signal(signal.SIGTERM)
        return self.ended(name)

    def ended(self, name: str) -> int:
        """Return the exit code of one that ends by itself."""
        return self.processes.pop(name).wait(PATIENCE_S)

    def check(self) -> None:
        """Check that nobody has ended by itself."""
        for name, process in self.processes.items():
            code = process.poll()
            assert code is None, f"{name} ended with {code}:\n{self.log(name).read_text()[-2000:]}"

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    @contextlib.contextmanager
    def running(self) -> Generator["Fleet"]:
        """Run for as long as the block. At its end SIGTERM to all at once: each ends in order, none did before."""
        try:
            yield self
            self.check()
            for process in self.processes.values():
                process.send_signal(signal.SIGTERM)
            codes = {name: process.wait(PATIENCE_S) for name, process in self.processes.items()}
            assert set(codes.values()) <= {0}, f"exit codes: {codes}"
        finally:
            self.kill(*self.processes)

    def _peers(self) -> tuple[str, ...]:
        return ("--scheduler", self.at["scheduler"], "--predictor", self.at["predictor"])

    def _own(self, name: str) -> str:
        self.at[f"{name}_probes"] = next(self._addresses)
        return self.at[f"{name}_probes"]

    # ---------------------------------------------------------------------------------------------- clients

    @property
    def depot_url(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self.at['depot']}"

    def identity(self, role: Any) -> Tls | None:
        """Return the test's own certificate of that role."""
        return Tls(self.tls[role], role) if self.tls else None

    def depot_client(self, role: Any) -> httpx2.AsyncClient:
        tls = self.identity(role)
        verify = tls.client_context("depot") if tls else True
        return httpx2.AsyncClient(base_url=self.depot_url, verify=verify, trust_env=False, timeout=PATIENCE_S)

    async def ready(self, name: str, path: str = "/readyz") -> None:
        """Wait until a component's probe says yes. Fails at once when the process has ended."""
        at = self.at.get(f"{name}_probes", self.at[name])

        async def says_yes() -> bool:
            self.check()
            with contextlib.suppress(httpx2.HTTPError):
                return (await http.get(f"http://{at}{path}")).status_code == 200
            return False

        async with httpx2.AsyncClient(trust_env=False, timeout=PATIENCE_S) as http:
            await eventually(says_yes)

    async def resolved(self) -> dict[str, str]:
        """Resolve base and adapters through the depot: source -> digest."""
        await self.ready("depot")
        async with self.depot_client("operator") as http:
            self.base_digest = await _resolve(http, kind="model", uri="file:model")
            base = {"digest": self.base_digest, "name": "weft-quickstart"}
            upper = await _resolve(http, kind="adapter", uri="file:adapters/upper", base=base)
        return {"acme/upper": upper}

    @contextlib.asynccontextmanager
    async def registry(
        self, adapters: Mapping[str, str], *, runners: int = 1, others: Sequence[str] = ()
    ) -> AsyncGenerator["Registry"]:
        """Open the operator's stream to the scheduler, with one pool and these adapters; other pools have none."""
        registry = Registry(self, adapters, runners, others)
        work = asyncio.create_task(registry.link.run())
        try:
            yield registry
        finally:
            registry.link.close()
            await work
            await registry.channel.close(None)

    async def completion(self, case: Case, key: str = "") -> str:
        """Return one answer, as a client gets it."""
        gateway = f"http://{self.at['gateway']}"
        async with httpx2.AsyncClient(base_url=gateway, trust_env=False, timeout=PATIENCE_S) as http:
            messages = [{"role": "user", "content": case.prompt}]
            body = {"model": case.model, "messages": messages, "temperature": 0, "max_tokens": 200}
            headers = {"Authorization": f"Bearer {key}"} if key else None
            answer = await http.post("/v1/chat/completions", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["message"]["content"]


class Service:
    """One address for several servers, as a Kubernetes Service is: a new connection goes to the first that takes it."""

    def __init__(self, *targets: str) -> None:
        self._targets = targets
        self._pipes = set[asyncio.Task[None]]()

    async def __aenter__(self) -> "Service":
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        self.address = f"{host}:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for pipe in self._pipes:
            pipe.cancel()
        await asyncio.gather(*self._pipes, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for target in self._targets:
            host, _, port = target.rpartition(":")
            with contextlib.suppress(OSError):
                there, back = await asyncio.open_connection(host, int(port))
                for pipe in (_pipe(reader, back), _pipe(there, writer)):
                    task = asyncio.create_task(pipe)
                    self._pipes.add(task)
                    task.add_done_callback(self._pipes.discard)
                return
        writer.close()


async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()


class Registry:
    """What an operator tells: one complete snapshot for each connection."""

    def __init__(self, fleet: Fleet, adapters: Mapping[str, str], runners: int, others: Sequence[str]) -> None:
        self._fleet, self._adapters, self._runners, self._others = fleet, adapters, runners, others
        self._versions = itertools.count(time.time_ns() // 1_000_000)
        self.pools: dict[str, PoolStatus] = {}
        self.channel = channel(fleet.at["scheduler"], fleet.identity("operator"), "scheduler")
        self.link: ClientStream[Any, Any] = ClientStream(
            "registry", SchedulerStub(self.channel).Registry, hello=lambda: [self._snapshot()], on_message=self._hear
        )

    async def until_ready(self, runners: int) -> None:
        async def are_ready() -> bool:
            self._fleet.check()
            return POOL in self.pools and self.pools[POOL].ready_runners == runners

        await eventually(are_ready)

    def _snapshot(self) -> scheduler_pb2.RegistryToScheduler:
        served = PoolSpec(POOL, self._fleet.base_digest, "weft-quickstart", shared_all=True)
        pools = [replace(served, min_runners=self._runners, max_runners=self._runners)]
        pools += [PoolSpec(name, self._fleet.base_digest, name, max_runners=9) for name in self._others]
        adapters = [
            AdapterSpec(name, name.partition("/")[0], POOL, digest, 16, name, bytes=1)
            for name, digest in self._adapters.items()
        ]
        version = next(self._versions)
        return REGISTRY_TO_SCHEDULER.encode(RegistryChange(True, tuple(pools), tuple(adapters), version=version))

    def _hear(self, message: scheduler_pb2.SchedulerToRegistry) -> None:
        status = SCHEDULER_TO_REGISTRY.decode(message)
        if isinstance(status, PoolStatus):
            self.pools[status.pool] = status


async def _resolve(http: httpx2.AsyncClient, **body: Any) -> str:
    asked = await http.post("/v1/resolve", json={"namespace": "weft-system", **body})
    assert asked.status_code == 202, asked.text
    while True:
        found = (await http.get(f"/v1/operations/{asked.json()['operation']}", params={"wait_s": 20})).json()
        if found["state"] in ("Fetched", "Failed"):
            assert found["state"] == "Fetched", found
            return found["digest"]
