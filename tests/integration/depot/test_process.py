"""The depot as a process: ports, probes, settings, SIGTERM, kill -9, one owner of a data directory."""

import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import pytest

from harness import processes
from harness.blobs import check_blobs
from harness.ports import free_addresses
from harness.waiting import PATIENCE_S
from tests.integration.depot.conftest import Run
from tests.unit.artifacts.making import write_adapter, write_model
from weft.artifacts.blobs import BlobStore
from weft.artifacts.fetch import FetchLimits, fetch
from weft_depot.main import main

PROBES = ("/healthz", "/readyz", "/metrics")
QUICK = ("--schemes", "file")  # loads no library for others


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_model(tmp_path / "root" / "tiny")
    write_adapter(tmp_path / "root" / "upper")
    return tmp_path / "root"


def test_it_serves_survives_kill_9_and_stops_at_sigterm(root: Path, tmp_path: Path, run: Run) -> None:
    data = tmp_path / "data"
    first = run("--data-dir", data, "--file-root", root)
    base = first.resolve(kind="model", uri="file:tiny")["digest"]
    adapter = first.resolve(kind="adapter", uri="file:upper", base={"digest": base, "name": "tiny"}, maxRank=8)
    assert first.end(signal.SIGKILL) == -signal.SIGKILL
    (data / "blobs" / "partial" / "tmp-1-dead").write_bytes(b"half")
    second = run("--data-dir", data, "--file-root", root, "--log-format", "text")
    again = BlobStore(tmp_path / "runner")
    manifest = fetch(second.url, adapter["digest"], again)
    assert (
        again.file(manifest, "adapter_model.safetensors").read_bytes()
        == (root / "upper" / "adapter_model.safetensors").read_bytes()
    )
    assert second.resolve(kind="model", uri="file:tiny")["digest"] == base
    assert not (data / "blobs" / "partial" / "tmp-1-dead").exists()
    assert second.end() == 0
    assert "stopped" in second.lines[-1]
    check_blobs(BlobStore(data / "blobs"))


def test_a_blob_that_rots_in_the_depot_is_noticed_by_a_runner_and_fetched_again_within_one_load(
    root: Path, tmp_path: Path, run: Run
) -> None:
    depot = run(*QUICK, "--data-dir", tmp_path / "data", "--file-root", root)
    base = {"digest": depot.resolve(kind="model", uri="file:tiny")["digest"], "name": "tiny"}
    request = {"kind": "adapter", "uri": "file:upper", "base": base, "maxRank": 8}
    digest = depot.resolve(**request)["digest"]
    store = BlobStore(tmp_path / "data" / "blobs")
    weights = store.path(store.manifest(digest).file("adapter_model.safetensors").digest)
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with ThreadPoolExecutor(1) as thread:
        runner = BlobStore(tmp_path / "runner")
        load = thread.submit(fetch, depot.url, digest, runner, limits=FetchLimits(tries=40))
        assert depot.says("damaged blob removed")
        assert depot.resolve(**request)["digest"] == digest  # what the operator does all the time
        manifest = load.result(PATIENCE_S)
    check_blobs(runner)
    assert runner.file(manifest, "adapter_model.safetensors").stat().st_size == len(content)
    metrics = httpx2.get(f"{depot.url}/metrics", timeout=PATIENCE_S, trust_env=False)
    assert "weft_depot_damaged_blobs_total 1.0" in metrics.text
    check_blobs(store)


@pytest.mark.usefixtures("main_here")
def test_a_port_or_a_data_directory_in_use_ends_it_with_2_and_says_which(
    tmp_path: Path, run: Run, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert main([*QUICK, "--data-dir", str(tmp_path / "a"), "--http", address]) == 2
        assert address in capfd.readouterr().err.splitlines()[-1]
    owner = run(*QUICK, "--data-dir", tmp_path / "b")
    second = run(*QUICK, "--data-dir", tmp_path / "b")
    assert second.wait() == 2
    assert "in use by another depot" in second.lines[-1]
    assert owner.resolve(kind="model", uri="file:tiny")["reason"] == "SchemeNotAllowed", "without a file root"
    assert owner.end() == 0


@pytest.mark.usefixtures("main_here")
def test_secrets_of_the_cluster_need_a_pod(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    flags = [*QUICK, "--http", "127.0.0.1:0", "--data-dir", str(tmp_path / "data"), "--secrets", "kubernetes"]
    assert main(flags) == 2
    assert "service account" in capfd.readouterr().err.splitlines()[-1]


def test_a_foreign_pages_name_is_refused_where_nobody_needs_a_certificate(tmp_path: Path, run: Run) -> None:
    depot = run(*QUICK, "--data-dir", tmp_path, "--allowed-hosts", "weft-depot.weft-system.svc")
    with httpx2.Client(base_url=depot.url, trust_env=False, timeout=PATIENCE_S) as http:
        for host, status in (("weft-depot.weft-system.svc:7430", 200), ("localhost", 200), ("evil.example", 403)):
            assert http.get("/v1/operations", headers={"host": host}).status_code == status, host
        refused = http.put("/v1/uploads?namespace=acme", headers={"host": "evil.example"}).json()
        assert (refused["reason"], "--allowed-hosts" in refused["message"]) == ("HostNotAllowed", True)


def test_probes_are_on_the_apis_port_or_on_their_own(tmp_path: Path, run: Run) -> None:
    own = f"http://{free_addresses(1)[0]}"
    beside = run(*QUICK, "--data-dir", tmp_path / "a", "--probes", own.removeprefix("http://"))
    alone = run(*QUICK, "--data-dir", tmp_path / "b")
    with httpx2.Client(trust_env=False, timeout=PATIENCE_S) as http:
        for path in PROBES:
            assert http.get(f"{alone.url}{path}").status_code == 200
            assert http.get(f"{own}{path}").status_code == 200
            assert http.get(f"{beside.url}{path}").status_code == 404
    assert (beside.end(), alone.end()) == (0, 0)


def test_a_bug_in_housekeeping_ends_the_process_with_1(tmp_path: Path) -> None:
    code = """
import sys
from weft_depot.core import Operations
from weft_depot.main import main

def lost(self, now):
    raise KeyError("a lease")

Operations.forget = lost
sys.exit(main(sys.argv[1:]))
"""
    flags = (*QUICK, "--http", "127.0.0.1:0", "--data-dir", tmp_path)
    with processes.started(sys.executable, "-c", code, *flags, stderr=subprocess.PIPE, text=True) as process:
        _, said = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert "housekeeping has ended" in said
    assert "a lease" in said
