"""The depot as a process with remote sources: killed in the middle, stopped in the middle, silent about secrets."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.blobs import check_blobs
from harness.fake_hub import FakeHub
from harness.s3_server import ROOT_KEYS, s3_server
from harness.waiting import PATIENCE_S
from tests.integration.depot.conftest import Run
from tests.unit.artifacts.making import MODEL_CONFIG, lora, write_adapter, write_model
from tests.unit.depot.reading import folder_bytes
from weft.artifacts.blobs import BlobStore
from weft.domain.model.config import parse_model_config
from weft_devcluster.errors import ToolMissing

TOKEN = "hf_TheTokenOfTeamA"
WIDE = {"hidden_size": 256, "intermediate_size": 256}


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    shape = parse_model_config(json.dumps({**MODEL_CONFIG, **WIDE}).encode())
    with FakeHub() as fake:
        fake.repo("org/tiny", folder_bytes(write_model(tmp_path / "m", config=WIDE, shards=2, of=shape)))
        adapter = write_adapter(tmp_path / "a", config={"r": 64}, tensors=lora(rank=64, of=shape))
        fake.repo("org/lora", folder_bytes(adapter), tokens=frozenset((TOKEN,)))
        yield fake


@pytest.fixture
def secrets(tmp_path: Path) -> Path:
    for name, values in (("hub", {"token": TOKEN.encode()}), ("s3", ROOT_KEYS)):
        folder = tmp_path / "secrets" / "team-a" / name
        folder.mkdir(parents=True)
        for key, value in values.items():
            (folder / key).touch(0o600)
            (folder / key).write_bytes(value)
    return tmp_path / "secrets"


def adapter_body(base: str, **fields: Any) -> dict[str, Any]:
    return {
        "kind": "adapter",
        "namespace": "team-a",
        "credentialsRef": {"name": "hub"},
        "base": {"digest": base, "name": "tiny"},
        "maxRank": 64,
        "uri": "hf:org/lora",
        **fields,
    }


def visible(data: Path) -> set[str]:
    return {path.name for path in (data / "blobs" / "sha256").iterdir()}


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_end_in_the_middle_of_a_download_leaves_nothing_half_done(
    hub: FakeHub, secrets: Path, tmp_path: Path, number: int, run: Run
) -> None:
    data, flags = tmp_path / "data", ("--schemes", "hf", "--hf-endpoint", hub.url, "--secrets", secrets)
    first = run("--data-dir", data, *flags)
    base = first.resolve(kind="model", uri="hf:org/tiny")["digest"]
    before = visible(data)
    hub.fault("adapter_model.safetensors bytes=65536-", times=100, hang=True)
    first.submit(**adapter_body(base))
    assert hub.hung.wait(PATIENCE_S)
    assert list((data / "blobs" / "partial").iterdir())
    first.popen.send_signal(number)
    if number == signal.SIGTERM:
        assert first.says("Waiting for application shutdown")
        hub.closing.set()  # or the depot's own patience would run out, ten seconds later
    assert first.wait() == (-signal.SIGKILL if number == signal.SIGKILL else 0)
    assert visible(data) == before
    hub.faults.clear()
    second = run("--data-dir", data, *flags)
    assert not list((data / "blobs" / "partial").glob("tmp-*"))
    assert second.resolve(**adapter_body(base))["state"] == "Fetched"
    assert second.end() == 0
    check_blobs(BlobStore(data / "blobs"))
    assert not list((data / "blobs" / "partial").iterdir())


def test_a_private_repository_and_a_bucket_are_served_and_no_secret_is_told(
    hub: FakeHub, secrets: Path, tmp_path: Path, run: Run
) -> None:
    """With every library at DEBUG, which is where some of them print headers and answers."""
    try:
        with s3_server(tmp_path / "s3") as s3:
            s3.bucket("models")
            s3.put_folder("models", "lora", tmp_path / "a")
            flags = ("--hf-endpoint", hub.url, "--secrets", secrets, "--s3-endpoints", s3.url, "--log-level", "DEBUG")
            depot = run("--data-dir", tmp_path / "data", *flags)
            base = depot.resolve(kind="model", uri="hf:org/tiny")["digest"]
            bucket = {"uri": "s3://models/lora", "endpoint": s3.url, "credentialsRef": {"name": "s3"}}
            found = [depot.resolve(**adapter_body(base, **fields)) for fields in ({}, bucket)]
            refused = depot.resolve(**adapter_body(base, **{**bucket, "endpoint": "http://169.254.169.254"}))
            assert depot.end() == 0
    except ToolMissing as error:
        pytest.skip(str(error))
    assert [one["state"] for one in found] == ["Fetched", "Fetched"], found
    assert found[0]["digest"] == found[1]["digest"], "the digest is of the content, wherever it came from"
    assert refused["reason"] == "EndpointNotAllowed"
    said = "".join(depot.lines) + json.dumps([found, refused])
    kept = b"".join(path.read_bytes() for path in (tmp_path / "data").rglob("*") if path.is_file())
    for value in (TOKEN, *(value.decode() for value in ROOT_KEYS.values())):
        assert value not in said
        assert value.encode() not in kept
