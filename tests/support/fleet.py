"""Every service of a stack as a real process, with the flags of a test.

The operator is played by the test: it resolves at the depot and tells the scheduler's registry, over the same TLS.
"""

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx2

from crowd import SLOW
from quickstart import QUICKSTART, Case
from waiting import eventually
from weft.wire.channels import Link, channel
from weft.wire.tls import Tls
from weft.wire.v1 import scheduler_pb2
from weft.wire.v1.scheduler_pb2_grpc import SchedulerStub

POOL = "weft-system/quickstart"
ROLES = ("depot", "scheduler", "supervisor", "predictor", "gateway", "runner", "operator", "admin")


def free_addresses(count: int) -> list[str]:
    """Loopback addresses that nobody listens on, all different."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [f"127.0.0.1:{one.getsockname()[1]}" for one in sockets]


class Fleet:
    """Processes by name. `tls`: role -> folder; None: plain text."""

    def __init__(self, folder: Path, tls: Mapping[str, Path] | None = None) -> None:
        self.folder, self.tls = folder, tls
        names = ("depot", "depot_probes", "scheduler", "predictor", "gateway")
        self.at = dict(zip(names, free_addresses(len(names)), strict=True))
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._commands: dict[str, Sequence[str]] = {}
        self.base_digest = ""

    # ---------------------------------------------------------------------------------------------- processes

    def control_plane(
        self, *supervisor_flags: str, supervisors: Sequence[str] = ("supervisor",), auth: bool = False
    ) -> None:
        """Everything but runners."""
        who = "--auth" if auth else "--no-auth"
        peers = ("--scheduler", self.at["scheduler"], "--predictor", self.at["predictor"])
        depot = ("--http", self.at["depot"], "--probes", self.at["depot_probes"], "--file-root", str(QUICKSTART))
        self.start("depot", "depot", *depot)
        self.start("scheduler", "scheduler", "--listen", self.at["scheduler"], "--probes", self._own("scheduler"))
        self.start("predictor", "predictor", "--listen", self.at["predictor"], "--probes", self._own("predictor"))
        for name in supervisors:
            self.at[name] = free_addresses(1)[0]
            listen = ("--listen", self.at[name], "--probes", self._own(name))
            self.start(name, "supervisor", *listen, *peers, *supervisor_flags)
        self.start("gateway", "gateway", "--http", self.at["gateway"], "--depot", self.depot_url, *peers, who)

    def runner(self, name: str, *, supervisor: str = "") -> None:
        """A runner of the quickstart's base, after `resolved`. `supervisor`: an address, else that of the only one."""
        self.at[name] = free_addresses(1)[0]
        report_to = supervisor or self.at["supervisor"]
        flags = ("--listen", self.at[name], "--probes", self._own(name), "--supervisor", report_to)
        which = ("--depot", self.depot_url, "--pool", POOL, "--base-digest", self.base_digest, "--threads", "1")
        self.start(name, "runner", *flags, *which)

    def start(self, name: str, component: str, *flags: str) -> None:
        module = {"runner": "weft_runner"}.get(component, f"weft_{component}")
        secure = ("--tls-dir", str(self.tls[component])) if self.tls else ()
        data = ("--data-dir", str(self.folder / "data" / name))
        self._commands[name] = (sys.executable, "-m", module, *data, *flags, *secure)
        self.start_again(name)

    def start_again(self, name: str) -> None:
        with self.log(name).open("ab") as log:
            self.processes[name] = subprocess.Popen(self._commands[name], stderr=log, env={**os.environ, **SLOW})

    def kill(self, name: str, number: int = signal.SIGKILL) -> int:
        process = self.processes.pop(name)
        process.send_signal(number)
        return process.wait(20)

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def close(self) -> None:
        """SIGTERM to all at once; nobody may need longer than 20 s, nor end by itself before."""
        early = {name: process.poll() for name, process in self.processes.items() if process.poll() is not None}
        for process in self.processes.values():
            process.terminate()
        codes = {name: process.wait(20) for name, process in self.processes.items()}
        assert not early, f"ended by themselves: {early}"
        assert set(codes.values()) <= {0}, f"exit codes: {codes}"

    def _own(self, name: str) -> str:
        self.at[f"{name}_probes"] = free_addresses(1)[0]
        return self.at[f"{name}_probes"]

    # ---------------------------------------------------------------------------------------------- clients

    @property
    def depot_url(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self.at['depot']}"

    def identity(self, role: Any) -> Tls | None:
        """The test's own certificate of that role."""
        return Tls(self.tls[role], role) if self.tls else None

    def depot_client(self, role: Any) -> httpx2.AsyncClient:
        tls = self.identity(role)
        verify = tls.client_context("depot") if tls else True
        return httpx2.AsyncClient(base_url=self.depot_url, verify=verify, trust_env=False, timeout=30.0)

    async def ready(self, name: str, path: str = "/readyz") -> None:
        """Its probe says yes. Fails at once when the process has ended."""
        at = self.at.get(f"{name}_probes", self.at[name])

        async def says_yes() -> bool:
            code = self.processes[name].poll()
            assert code is None, f"{name} ended with {code}:\n{self.log(name).read_text()[-2000:]}"
            async with httpx2.AsyncClient(trust_env=False) as http:
                with contextlib.suppress(httpx2.HTTPError):
                    return (await http.get(f"http://{at}{path}", timeout=5)).status_code == 200
            return False

        await eventually(says_yes, 60)

    async def resolved(self) -> dict[str, str]:
        """Base and adapters through the depot: source -> digest."""
        await self.ready("depot")
        async with self.depot_client("operator") as http:
            self.base_digest = await _resolve(http, kind="model", uri="file:model")
            base = {"digest": self.base_digest, "name": "weft-quickstart"}
            upper = await _resolve(http, kind="adapter", uri="file:adapters/upper", base=base)
        return {"acme/upper": upper}

    @contextlib.asynccontextmanager
    async def registry(self, adapters: Mapping[str, str], *, runners: int = 1) -> AsyncGenerator["Registry"]:
        """The operator's stream to the scheduler, with one pool and these adapters."""
        registry = Registry(self, adapters, runners)
        work = asyncio.create_task(registry.link.run())
        try:
            yield registry
        finally:
            registry.link.close()
            await work
            await registry.channel.close(None)

    async def completion(self, case: Case, key: str = "") -> str:
        """One answer, as a client gets it."""
        async with httpx2.AsyncClient(base_url=f"http://{self.at['gateway']}", trust_env=False, timeout=60) as http:
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

    def __init__(self, fleet: Fleet, adapters: Mapping[str, str], runners: int) -> None:
        self._fleet, self._adapters, self._runners = fleet, adapters, runners
        self._versions = itertools.count(time.time_ns() // 1_000_000)
        self.pools: dict[str, scheduler_pb2.PoolStatus] = {}
        self.heard = asyncio.Condition()
        self.channel = channel(fleet.at["scheduler"], fleet.identity("operator"), "scheduler")
        self.link: Link[Any, Any] = Link(
            "registry", SchedulerStub(self.channel).Registry, hello=lambda: [self._snapshot()], on_message=self._hear
        )

    async def until_ready(self, runners: int) -> None:
        async with asyncio.timeout(90), self.heard:
            await self.heard.wait_for(lambda: POOL in self.pools and self.pools[POOL].ready_runners == runners)

    def _snapshot(self) -> scheduler_pb2.RegistryToScheduler:
        message = scheduler_pb2.RegistryToScheduler(version=next(self._versions), snapshot=True)
        message.pools.add(
            pool=POOL,
            base_digest=self._fleet.base_digest,
            base_model_name="weft-quickstart",
            shared_all=True,
            max_queue=1000,
            max_moves=8,
            placement="punica",
            queue="fcfs",
            reservation="calibrated",
            min_runners=self._runners,
            max_runners=self._runners,
        )
        for name, digest in self._adapters.items():
            namespace, _, short = name.partition("/")
            message.adapters.add(
                uid=name, namespace=namespace, name=short, model_name=name, pool=POOL, digest=digest, rank=16, bytes=1
            )
        return message

    def _hear(self, message: scheduler_pb2.SchedulerToRegistry) -> None:
        if message.WhichOneof("message") == "pool":
            self.pools[message.pool.pool] = message.pool
            asyncio.get_running_loop().create_task(self._tell())

    async def _tell(self) -> None:
        async with self.heard:
            self.heard.notify_all()


async def _resolve(http: httpx2.AsyncClient, **body: Any) -> str:
    asked = await http.post("/v1/resolve", json={"namespace": "weft-system", **body})
    assert asked.status_code == 202, asked.text
    while True:
        found = (await http.get(f"/v1/operations/{asked.json()['operation']}", params={"wait_s": 20})).json()
        if found["state"] in ("Fetched", "Failed"):
            assert found["state"] == "Fetched", found
            return found["digest"]
