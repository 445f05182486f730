"""The whole stack's services under mutual TLS, as processes: who gets in, who does not, what a rotation changes."""

import asyncio
import datetime
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx2
import pytest

from harness.certificates import Authority
from harness.fleet import ROLES, Fleet
from harness.processes import tied
from harness.quickstart import DEMO, Case, sure_cases
from harness.waiting import PATIENCE_S
from weft.wire.roles import ANYONE, CALLERS, DEPOT_CALLERS, Role, dns_name
from weft.wire.streams import channel
from weft.wire.tls import Tls

REFUSED = grpc.StatusCode.PERMISSION_DENIED
STREAMS = ("Gateway", "Cluster", "Registry", "Runner", "Session", "Observe", "Lines")
SERVERS: dict[str, Role] = {
    "weft.v1.Scheduler": "scheduler",
    "weft.v1.Supervisor": "supervisor",
    "weft.v1.Admin": "supervisor",
    "weft.v1.Predictor": "predictor",
    "weft.v1.Runner": "runner",
    "weft.v1.Batch": "batch",
}


class Secured:
    """A running fleet, and the authority of its certificates."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.authority = folder, Authority()
        self.fleet = Fleet(folder, self.authority.folders(folder / "tls", ROLES))

    def stranger(self) -> Tls:
        """A gateway of another authority, which believes ours."""
        return Tls(Authority().folder(self.folder / "stranger", "gateway"), "gateway")


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    """For all tests; the one that changes its certificates comes last."""
    made = Secured(tmp_path_factory.mktemp("fleet"))
    with made.fleet.running() as fleet:
        fleet.control_plane()
        yield made


@pytest.fixture
async def secured(started: Secured) -> AsyncIterator[Secured]:
    fleet = started.fleet
    adapters = await fleet.resolved()
    if "runner" not in fleet.processes:
        fleet.runner("runner")
    async with fleet.registry(adapters) as registry:
        await registry.until_ready(1)
        await fleet.ready("gateway")
        yield started


@pytest.mark.slow
async def test_a_stack_under_tls_answers_and_every_call_has_its_door(secured: Secured) -> None:
    fleet = secured.fleet
    for case in DEMO[:2]:
        assert await fleet.completion(case) == case.expect
    for method, allowed in CALLERS.items():
        if method.startswith("/weft."):
            await _refuses_all_but(fleet, method, allowed)
    await _depot_refuses_all_but_its_callers(fleet)
    await _strangers_are_kept_out(secured)


async def _refuses_all_but(fleet: Fleet, method: str, allowed: frozenset[Role]) -> None:
    server = SERVERS[method.split("/")[1]]
    for role in ANYONE - allowed:
        async with channel(fleet.at[server], fleet.identity(role), server) as opened:
            code, said = await _answer(opened, method, speak=False)
        assert (code, said) == (
            REFUSED,
            f"the caller's certificate is of {role}; {method} needs {' or '.join(sorted(allowed))}",
        )
    for role in allowed:
        async with channel(fleet.at[server], fleet.identity(role), server) as opened:
            assert (await _answer(opened, method))[0] is not REFUSED, method


async def _answer(opened: grpc.aio.Channel, method: str, *, speak: bool = True) -> tuple[grpc.StatusCode, str]:
    """How a call ends. A stream that may speak says an empty message, and is left after the answer's first word.

    One that is about to be refused says nothing: gRPC tells INTERNAL where a message meets the refusal half-way.
    """
    call: Any
    if method.rpartition("/")[2] in STREAMS:
        call = opened.stream_stream(method)(iter([b""]) if speak else None, timeout=PATIENCE_S)
    else:
        call = opened.unary_unary(method)(b"", timeout=PATIENCE_S)
    try:
        await call.initial_metadata()
        if method.rpartition("/")[2] in STREAMS and (await call.read()) is not grpc.aio.EOF:
            return grpc.StatusCode.OK, ""
    except grpc.aio.AioRpcError:
        pass
    return await call.code(), str(await call.details())


async def _depot_refuses_all_but_its_callers(fleet: Fleet) -> None:
    for path, allowed in DEPOT_CALLERS.items():
        method, url = ("GET", f"{path}/x") if path in ("/v1/operations", "/v1/blobs") else ("POST", path)
        for role in sorted(ANYONE):
            async with fleet.depot_client(role) as http:
                answer = await http.request(method, url, json={} if method == "POST" else None)
            if role in allowed:
                assert answer.status_code not in (401, 403), (role, url, answer.text)
                continue
            assert answer.status_code == 403, (role, url, answer.text)
            assert f"is of {role}; {url} needs {' or '.join(sorted(allowed))}" in answer.json()["message"]
    async with httpx2.AsyncClient(trust_env=False, timeout=PATIENCE_S) as http:
        for path in ("/healthz", "/readyz", "/metrics"):
            assert (await http.get(f"http://{fleet.at['depot_probes']}{path}")).status_code == 200
        with pytest.raises(httpx2.HTTPError):
            await http.get(f"http://{fleet.at['depot']}/healthz")  # no plain text on the depot's own port


async def _strangers_are_kept_out(secured: Secured) -> None:
    """Without TLS, of another authority, expired: nobody gets as far as a call."""
    fleet, ours = secured.fleet, secured.authority
    expired = ours.issue(dns_name("gateway"), valid=-datetime.timedelta(seconds=1))
    foreign = secured.stranger().present()
    for server in ("scheduler", "supervisor", "predictor", "runner"):
        name = (("grpc.ssl_target_name_override", dns_name(server)),)
        for key, certificate in ((expired[1], expired[0]), (foreign.key, foreign.certificate), (None, None)):
            credentials = grpc.ssl_channel_credentials(ours.pem, key, certificate)
            async with grpc.aio.secure_channel(fleet.at[server], credentials, options=name) as opened:
                assert (await _answer(opened, "/grpc.health.v1.Health/Check"))[0] is grpc.StatusCode.UNAVAILABLE
        async with grpc.aio.insecure_channel(fleet.at[server]) as opened:
            assert (await _answer(opened, "/grpc.health.v1.Health/Check"))[0] is grpc.StatusCode.UNAVAILABLE


@pytest.mark.slow
async def test_the_command_makes_keys_and_shows_runners_with_an_admins_certificate(secured: Secured) -> None:
    at, tls = ("--supervisor", secured.fleet.at["supervisor"]), secured.fleet.tls or {}
    admin = (*at, "--tls-dir", str(tls["admin"]))
    code, key, _ = await _weft("key", "create", "-n", "acme", *admin)
    assert (code, key[:5]) == (0, "weft-")
    assert "acme" in (await _weft("key", "list", *admin))[1]
    assert "weft-system/quickstart" in (await _weft("get", "runners", *admin))[1]
    code, _, said = await _weft("key", "list", *at, "--tls-dir", str(tls["gateway"]))
    assert code != 0
    assert "not valid for 'admin.weft.internal'" in said
    code, _, said = await _weft("key", "list", *at)
    assert code != 0
    assert "does not answer" in said


async def _weft(*words: str) -> tuple[int, str, str]:
    command = tied(sys.executable, "-m", "weft_cli", *words)
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, err = await process.communicate()
    return process.returncode or 0, out.decode(), err.decode()


@pytest.mark.slow
@pytest.mark.parametrize("component", ["scheduler", "supervisor", "predictor", "depot", "gateway", "runner"])
async def test_bad_files_stop_the_start_with_exit_2_and_the_reason(component: str, tmp_path: Path) -> None:
    folder = Authority().folder(tmp_path / "tls", "admin")
    with Fleet(tmp_path, dict.fromkeys(ROLES, folder)).running() as fleet:
        fleet.base_digest = "sha256:" + "0" * 64
        fleet.at["supervisor"] = "127.0.0.1:1"
        match component:
            case "runner":
                fleet.runner(component)
            case "supervisor":
                fleet.supervisor(component)
            case _:
                fleet.serve(component)
        assert await asyncio.to_thread(fleet.ended, component) == 2
    said = fleet.log(component).read_text()
    assert "cannot start" in said
    name = {"runner": "weft-system.runner"}.get(component, component)  # a runner's has its pool's namespace
    assert f"not valid for '{name}.weft.internal'" in said


@pytest.mark.slow
async def test_a_rotation_to_another_authority_disturbs_no_stream_and_restarts_nobody(secured: Secured) -> None:
    fleet = secured.fleet
    pids = {name: process.pid for name, process in fleet.processes.items()}
    case = sure_cases(("acme/upper",), 1, seed=11)[0]
    fresh = Authority()
    text = ""
    async with _streamed(fleet, case) as pieces:
        text += await anext(pieces)
        fleet.processes["runner"].send_signal(signal.SIGSTOP)  # so that the rotation comes in the middle
        assert fleet.tls
        fresh.folders(fleet.tls["runner"].parent, tuple(fleet.tls))
        fleet.processes["runner"].send_signal(signal.SIGCONT)
        async for piece in pieces:
            text += piece
    assert text == case.expect
    fleet.runner("second")  # new connections in all directions: supervisor, depot, and the gateway's to it
    await fleet.ready("second")
    assert await asyncio.to_thread(fleet.stop, "runner") == 0
    assert await fleet.completion(DEMO[1]) == DEMO[1].expect
    assert {name: process.pid for name, process in fleet.processes.items() if name in pids} == {
        name: pid for name, pid in pids.items() if name != "runner"
    }
    old = secured.authority.issue(dns_name("gateway"))
    credentials = grpc.ssl_channel_credentials(fresh.pem, old[1], old[0])
    name = (("grpc.ssl_target_name_override", dns_name("predictor")),)
    async with grpc.aio.secure_channel(fleet.at["predictor"], credentials, options=name) as opened:
        assert (await _answer(opened, "/weft.v1.Predictor/Predict"))[0] is grpc.StatusCode.UNAVAILABLE


class _streamed:  # noqa: N801 (read as a verb)
    """A completion piece by piece."""

    def __init__(self, fleet: Fleet, case: Case) -> None:
        gateway = f"http://{fleet.at['gateway']}"
        self._http = httpx2.AsyncClient(base_url=gateway, trust_env=False, timeout=PATIENCE_S)
        messages = [{"role": "user", "content": case.prompt}]
        self._body = {"model": case.model, "messages": messages, "temperature": 0, "stream": True, "max_tokens": 400}

    async def __aenter__(self) -> AsyncIterator[str]:
        self._open = self._http.stream("POST", "/v1/chat/completions", json=self._body)
        return self._pieces(await self._open.__aenter__())

    async def __aexit__(self, *_: object) -> None:
        await self._open.__aexit__(None, None, None)
        await self._http.aclose()

    async def _pieces(self, response: httpx2.Response) -> AsyncIterator[str]:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    if piece := choice["delta"].get("content"):
                        yield piece
