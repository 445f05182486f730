"""The depot as a process: ports, settings, SIGTERM, kill -9, one owner of a data directory."""

import signal
import socket
from pathlib import Path

import pytest

from tests.unit.artifacts.making import write_adapter, write_model
from tests.unit.depot.running import Process
from weft.artifacts.blobs import BlobStore, check_blobs
from weft.artifacts.fetch import fetch
from weft_depot.main import build_sources
from weft_depot.settings import Settings
from weft_depot.sources.network import Network


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_model(tmp_path / "root" / "tiny")
    write_adapter(tmp_path / "root" / "upper")
    return tmp_path / "root"


def test_it_serves_survives_kill_9_and_stops_at_sigterm(root: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    first = Process("--data-dir", data, "--file-root", root)
    base = first.resolve(kind="model", uri="file:tiny")["digest"]
    adapter = first.resolve(kind="adapter", uri="file:upper", base={"digest": base, "name": "tiny"}, maxRank=8)
    assert first.end(signal.SIGKILL) == -signal.SIGKILL
    (data / "blobs" / "partial" / "tmp-1-dead").write_bytes(b"half")
    second = Process("--data-dir", data, "--file-root", root, "--log-format", "text")
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


def test_without_a_file_root_file_is_refused(tmp_path: Path) -> None:
    process = Process("--data-dir", tmp_path / "data")
    assert process.resolve(kind="model", uri="file:tiny")["reason"] == "SchemeNotAllowed"
    assert process.end() == 0


def test_a_port_or_a_data_directory_in_use_ends_it_with_2_and_says_which(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        busy = Process("--data-dir", tmp_path / "a", "--http", address)
        assert busy.wait() == 2
        assert address in busy.lines[-1]
    owner = Process("--data-dir", tmp_path / "b")
    second = Process("--data-dir", tmp_path / "b")
    assert second.wait() == 2
    assert "in use by another depot" in second.lines[-1]
    assert owner.end() == 0


def test_wrong_settings_are_all_listed(tmp_path: Path) -> None:
    process = Process("--file-root", tmp_path / "none", "--threads", "0", "--log-level", "LOUD", "--http", "nowhere")
    assert process.wait() == 2
    text = "".join(process.lines)
    for flag in ("--file-root", "--threads", "--log-level", "--http"):
        assert flag in text


@pytest.mark.parametrize(
    ("flags", "flag"),
    [
        (("--schemes", "file,oci"), "--schemes"),
        (("--secrets", "/nowhere"), "--secrets"),
        (("--hf-endpoint", "huggingface.co"), "--hf-endpoint"),
        (("--hf-endpoint", "https://u:p@huggingface.co"), "--hf-endpoint"),
        (("--s3-endpoints", "minio:9000,ce ph:x"), "--s3-endpoints"),
        (("--pvc-root", "/nowhere"), "--pvc-root"),
        (("--recheck-s", "-1"), "--recheck-s"),
    ],
)
def test_a_wrong_setting_of_a_source_stops_the_start(
    flags: tuple[str, ...], flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        Settings.parse(flags)
    assert flag in capsys.readouterr().err


def test_lists_are_given_with_commas_by_flag_and_by_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_DEPOT__S3_ENDPOINTS", "minio:9000, ceph")
    settings = Settings.parse(["--schemes", "file,s3"])
    assert settings.schemes == ("file", "s3")
    assert settings.s3_endpoints == ("minio:9000", "ceph")
    assert Settings.parse([]).schemes == ("file", "pvc", "hf", "s3")


def test_only_what_is_allowed_and_has_its_root_is_a_source(tmp_path: Path) -> None:
    def sources(*flags: str) -> set[str]:
        return set(build_sources(Settings.parse(flags), Network()))

    roots = ("--file-root", str(tmp_path), "--pvc-root", str(tmp_path))
    assert sources() == {"hf", "s3"}
    assert sources(*roots) == {"file", "pvc", "hf", "s3"}
    assert sources(*roots, "--schemes", "file") == {"file"}
    assert sources(*roots, "--schemes", "") == set()


def test_secrets_of_the_cluster_need_a_pod(tmp_path: Path) -> None:
    process = Process("--data-dir", tmp_path / "data", "--secrets", "kubernetes")
    assert process.wait() == 2
    assert "service account" in process.lines[-1]


def test_flags_win_over_the_environment_over_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_DEPOT__THREADS", "5")
    monkeypatch.setenv("WEFT_DEPOT__HTTP", "127.0.0.1:1")
    settings = Settings.parse(["--http", "127.0.0.1:2", "--file-root", str(tmp_path)])
    assert (settings.http, settings.threads, settings.log_format) == ("127.0.0.1:2", 5, "text")


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"WEFT_DATA_DIR": "/w"}, "/w/depot"),
        ({"XDG_STATE_HOME": "/s"}, "/s/weft/depot"),
        ({"HOME": "/h"}, "/h/.local/state/weft/depot"),
    ],
)
def test_the_data_directory_has_a_place(env: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WEFT_DATA_DIR", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert Settings().data_dir == Path(expected)
