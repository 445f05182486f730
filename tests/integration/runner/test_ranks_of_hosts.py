"""A runner whose ranks are on two hosts (network namespaces): TCP under mutual TLS, tensors over Gloo, lost as one.

This process is rank 0; rank 1 is beside it, ranks 2 and 3 are behind a cable: hosts of one rank each, or of two.
Whoever may not make namespaces has them all here.
"""

import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import torch

from harness.certificates import Authority, mount
from harness.hosts import Hosts, two_hosts
from harness.native_library import native_library
from harness.ports import free_ports
from harness.processes import started
from harness.random_models import FAMILIES, OracleModel, write_adapters, write_base
from harness.ranks import base_of, settings_of, staged, words_of
from harness.small_runner import Depot
from harness.split_models import ADAPTERS, PAGES, SIZES, steps_of
from harness.waiting import PATIENCE_S, wait_until
from weft.wire.tls import Tls
from weft_runner.errors import ExecutorLost, ExecutorUnavailable, StoppedAtStart
from weft_runner.executors import ModelSource, make_executor
from weft_runner.offload import MachineRates
from weft_runner.parallel import Channel, ChannelLost, MultiProcessExecutor, OffloadedPipeline
from weft_runner.parallel.hosts import connect
from weft_runner.settings import RunnerSettings
from weft_runner.shell.depot import DepotSource
from weft_runner.shell.engine_factory import build_engine
from weft_runner.shell.rank_link import gather_ranks, group_of, secured

native_library()

FLAGS: dict[str, Any] = {"executor": "cpu", "kv_pages": PAGES, "max_adapters": len(ADAPTERS)}
GRID = {"pipeline_parallel": 2, "tensor_parallel": 2}
RANKS = 4


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with two_hosts() as made:
        yield made


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> OracleModel:
    folder, seed = tmp_path_factory.mktemp("model"), FAMILIES.index("llama")
    sizes = {"vocab_size": 128, "hidden_size": 128, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 32}
    write_base(
        folder / "base", "llama", seed, num_hidden_layers=3, max_position_embeddings=256, **SIZES["llama"] | sizes
    )
    return write_adapters(folder, ADAPTERS, seed)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Authority().folder(tmp_path_factory.mktemp("tls") / "runner", "runner", "team.runner")


class Runner(NamedTuple):
    """Rank 0 in this process, and the other ranks'."""

    executor: MultiProcessExecutor
    others: list["subprocess.Popen[bytes]"]
    stopping: threading.Event


def command_of(**flags: object) -> list[str]:
    """Return the command of a host's first rank."""
    return [sys.executable, "-m", "weft_runner", *words_of(listen="127.0.0.1:1", supervisor="127.0.0.1:1", **flags)]


@contextmanager
def runner_of(
    hosts: Hosts, model: OracleModel, certificates: Path, data: Path, depot: Depot, ranks_per_host: int
) -> Iterator[Runner]:
    """Half of the hosts are behind the cable. Each has the base on a disk of its own: the depot is not there."""
    digest = depot.publish("model", model.folder / "base")
    port, *probes = free_ports(count := RANKS // ranks_per_host)
    shared = {
        **FLAGS, **GRID, "tls_dir": certificates, "base_digest": digest, "pool": "team/demo",
        "depot": "https://depot:1", "leader": f"{hosts.address}:{port}",
    }  # fmt: skip
    with ExitStack() as stack:
        others: list[subprocess.Popen[bytes]] = []
        for index, probe in enumerate(probes, 1):
            folder = data / f"host-{index}"
            DepotSource(depot.url, folder / "blobs", digest, lambda: False).base()
            where = hosts.enter if 2 * index > len(probes) else ()
            command = command_of(**shared, data_dir=folder, host=f"{index}/{count}", probes=f"127.0.0.1:{probe}")
            others.append(stack.enter_context(started(*where, *command)))
        settings = settings_of(**shared, host=f"0/{count}", advertise=f"{hosts.address}:1")
        base = base_of(model.files)
        stopping = threading.Event()
        gather = gather_ranks(settings, Tls(certificates, "runner"), stopping.set)
        executor = make_executor(settings, ModelSource(base.spec, base.files, 1, lambda: False, gather))
        assert isinstance(executor, MultiProcessExecutor)
        stack.callback(executor.close)
        yield Runner(executor, others, stopping)


@pytest.mark.slow
@pytest.mark.parametrize("ranks_per_host", [1, 2])
def test_ranks_of_two_hosts_give_the_bits_of_one_host_and_are_lost_as_one(
    hosts: Hosts, model: OracleModel, certificates: Path, tmp_path: Path, depot: Depot, ranks_per_host: int
) -> None:
    """Stages of tensor ranks: sums and hidden rows cross the cable, and adapters do."""
    with staged(model.files, 2, tensor_parallel=2, **FLAGS) as executor:
        expected, numerics_class = steps_of(model, executor), executor.numerics_class
    with runner_of(hosts, model, certificates, tmp_path, depot, ranks_per_host) as runner:
        found = steps_of(model, runner.executor)
        assert runner.executor.numerics_class == numerics_class
        for one, other in zip(expected, found, strict=True):
            assert one.keys() == other.keys()
            assert all(torch.equal(one[key], other[key]) for key in one)
        lost: list[str] = []
        runner.executor.watch(lambda error: lost.append(str(error)))
        runner.others[-1].send_signal(signal.SIGTERM)
        wait_until(runner.stopping.is_set, "rank 0 is to drain the runner")
        steps_of(model, runner.executor)  # meanwhile the rank stays
        runner.others[-1].send_signal(signal.SIGKILL)
        wait_until(lambda: bool(lost), "rank 0 hears of it")
        last = range(RANKS)[-ranks_per_host:]
        assert any(f"rank {rank} of the model" in lost[0] for rank in last)
        with pytest.raises(ExecutorLost):
            steps_of(model, runner.executor)
        runner.executor.close()
        assert {other.wait(PATIENCE_S) for other in runner.others[:-1]} <= {0}


@pytest.mark.slow
def test_each_host_of_an_offloading_pipeline_measures_itself_and_its_stages_report_to_rank_0(
    hosts: Hosts, model: OracleModel, certificates: Path, tmp_path: Path, depot: Depot
) -> None:
    digest = depot.publish("model", model.folder / "base")
    port, probe = free_ports(2)
    folders = [tmp_path / f"host-{index}" for index in range(2)]
    sources = [DepotSource(depot.url, folder / "blobs", digest, lambda: False) for folder in folders]
    files, _ = (source.base() for source in sources)
    shared = {
        "executor": "cpu", "pipeline_parallel": 2, "tls_dir": certificates, "base_digest": digest, "pool": "team/demo",
        "depot": "https://depot:1", "offload": f"device={8 << 20}", "kv_pages": 0, "max_sequences": 0,
        "max_batch_tokens": 0, "leader": f"{hosts.address}:{port}",
    }  # fmt: skip
    settings = settings_of(**shared, data_dir=folders[0], host="0/2", advertise=f"{hosts.address}:1", profile=False)
    command = command_of(**shared, data_dir=folders[1], host="1/2", probes=f"127.0.0.1:{probe}")
    with started(*hosts.enter, *command) as other:
        gather = gather_ranks(settings, Tls(certificates, "runner"))
        bundle = build_engine(settings, files, sources[0], lambda _: None, gather=gather)
        try:
            executor = bundle.engine.executor
            assert isinstance(executor, OffloadedPipeline)
            assert [len(list((folder / "offload").glob("machine-*.json"))) for folder in folders] == [1, 1]
            assert [len(list((folder / "offload").glob("*.packed"))) for folder in folders] == [1, 1]
            figures = [stage.figures for stage in executor.stages()]
            assert all(one.planned_pass_s > 0.0 and one.accuracy is not None for one in figures)
        finally:
            bundle.close()
        assert other.wait(PATIENCE_S) == 0


STUCK = """
import ctypes, os, threading
from weft_runner.shell.rank_link import stop_on_sigterm

def wait(stopping):
    print("waits", flush=True)
    stopping.wait()
    os._exit(7)

threading.Thread(target=wait, args=(stop_on_sigterm(),)).start()
mutex = ctypes.create_string_buffer(64)
for _ in range(2):  # the second time it waits for itself, and no signal ends that
    ctypes.CDLL(None).pthread_mutex_lock(mutex)
"""


def test_sigterm_counts_while_the_main_thread_is_in_a_call_that_does_not_return() -> None:
    with started(sys.executable, "-c", STUCK, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"waits\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 7


# ---- ranks that the first one of a host starts


@pytest.mark.slow
def test_rank_0_does_not_wait_for_a_rank_of_its_own_host_that_has_ended(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    settings = settings_at(port, tensor_parallel=4, tls_dir=tmp_path, depot="https://d:1")  # no certificates
    with pytest.raises(ExecutorLost, match=r"rank 1 \(pid \d+\), started here, ended with 1, see its log"):
        gather_ranks(settings, None)(2, {}, lambda: False)


@pytest.mark.slow
def test_the_first_rank_of_a_host_ends_with_one_that_it_has_started(
    model: OracleModel, tmp_path: Path, depot: Depot
) -> None:
    """A pod starts both anew; rank 0, which may not be there yet, would wait for the other."""
    digest = depot.publish("model", model.folder / "base")
    leader, probe = free_ports(2)
    command = command_of(
        tensor_parallel=4, host="1/2", leader=f"127.0.0.1:{leader}", data_dir=tmp_path, pool="team/demo",
        depot=depot.url, base_digest=digest, probes=f"127.0.0.1:{probe}", **FLAGS,
    )  # fmt: skip
    with started(*command) as first:
        workers: list[psutil.Process] = []  # not what else it starts for a moment
        wait_until(lambda: workers.extend(_workers_of(first.pid)) or bool(workers), "it has started the other rank")
        workers[0].kill()
        assert first.wait(PATIENCE_S) == 1


def _workers_of(pid: int) -> Iterator[psutil.Process]:
    for child in psutil.Process(pid).children():
        with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            if "weft_runner.worker" in child.cmdline():
                yield child


# ---- who may connect


@contextmanager
def listening(settings: RunnerSettings, tls: Tls | None) -> Iterator[tuple[str, int]]:
    """Rank 0 of two waits for rank 1, and is stopped when the block is left."""
    stop, ended = threading.Event(), threading.Event()

    def wait() -> None:
        try:
            gather_ranks(settings, tls)(2, {}, stop.is_set)
        except StoppedAtStart:
            ended.set()

    thread = threading.Thread(target=wait)
    thread.start()
    try:
        host, _, port = settings.ranks_listen.rpartition(":")
        yield host, int(port)
    finally:
        stop.set()
        thread.join(PATIENCE_S)
        assert ended.is_set()


def settings_at(port: int, **flags: object) -> RunnerSettings:
    where = {"tensor_parallel": 2, "host": "0/2", "leader": f"127.0.0.1:{port}", "pool": "team/demo"}
    return settings_of(**where | flags)


RATES = MachineRates(1e9, 5e8, 1e10, 1e10, 2e10, 1e10, 1e10, 1e11, {"bf16": ((1, 1e-10), (16, 3e-10))})


def test_a_machine_that_is_none_is_refused_by_name() -> None:
    (port,) = free_ports(1)
    settings, wrong = settings_at(port), replace(RATES, disk_read=0.0)
    with listening(settings, None) as address, pytest.raises(ExecutorUnavailable, match="rates of a machine that are"):
        connect(address, 1, group_of(settings), lambda end: end, lambda: False, wrong)


@pytest.mark.parametrize(
    ("change", "why"),
    [({"pool": "team/other"}, "another pool than"), ({"base": "sha256:0"}, "another base than"), ({}, "none of the 2")],
)
def test_a_rank_of_another_runner_is_refused_by_name(change: dict[str, str], why: str) -> None:
    (port,) = free_ports(1)
    settings = settings_at(port)
    with listening(settings, None) as address, pytest.raises(ExecutorUnavailable, match=why):
        connect(address, 1 if change else 2, group_of(settings) | change, lambda end: end, lambda: False)


ROLES = {
    "another role": (("gateway.weft.internal",), "the caller's certificate is of gateway"),
    "another namespace": (("runner.weft.internal", "else.runner.weft.internal"), "is for runners of else"),
}


@pytest.mark.parametrize("kind", ROLES)
def test_a_certificate_of_another_role_or_namespace_is_no_rank(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    authority, (names, why) = Authority(), ROLES[kind]
    (port,) = free_ports(1)
    certificate, key = authority.issue(*names)
    theirs = mount(tmp_path / "theirs", {"tls.crt": certificate, "tls.key": key, "ca.crt": authority.pem})
    own = authority.folder(tmp_path / "own", "runner")
    settings = settings_at(port, tls_dir=own, depot="https://d:1")
    role = "gateway" if kind == "another role" else "runner"
    with listening(settings, Tls(own, "runner")) as address:
        end = wait_for(address)
        secure = Tls(theirs, role).client_context("runner").wrap_socket(end)
        channel = Channel(secure)
        with suppress(ChannelLost):  # it may be closed already
            channel.send_bytes(json.dumps({}).encode())
        with pytest.raises(ChannelLost):
            channel.receive_bytes(100)
        channel.close()
    assert why in caplog.text


def wait_for(address: tuple[str, int]) -> socket.socket:
    found: list[socket.socket] = []

    def listens() -> bool:
        try:
            found.append(socket.create_connection(address, PATIENCE_S))
        except ConnectionRefusedError:
            return False
        return True

    wait_until(listens, "rank 0 listens")
    return found[0]


def test_secured_needs_no_certificates_where_nothing_has_any() -> None:
    settings, end = settings_at(1), socket.socket()
    assert secured(settings, None, server=True)(end) is end
    end.close()
