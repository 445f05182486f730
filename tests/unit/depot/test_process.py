"""The depot as a process: ports, settings, SIGTERM, kill -9, one owner of a data directory."""

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.unit.artifacts.making import write_adapter, write_model
from weft.artifacts.blobs import BlobStore, check_blobs
from weft.artifacts.fetch import fetch
from weft_depot.settings import Settings


class Process:
    """`python -m weft_depot` on a port of the kernel's choice; ready when it says so."""

    def __init__(self, *flags: str | Path, env: dict[str, str] | None = None) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "weft_depot", "--http", "127.0.0.1:0", *map(str, flags)],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(env or {})},
        )
        assert self.popen.stderr
        self.lines: list[str] = []
        self.url = ""
        for line in self.popen.stderr:
            self.lines.append(line)
            if found := re.search(r"listen=(\S+)", line):
                self.url = f"http://{found[1]}"
                break

    def end(self, number: int = signal.SIGTERM) -> int:
        self.popen.send_signal(number)
        assert self.popen.stderr
        self.lines += list(self.popen.stderr)
        return self.popen.wait(20)

    def resolve(self, **body: Any) -> dict[str, Any]:
        with httpx2.Client(base_url=self.url, trust_env=False, timeout=30) as http:
            operation = http.post("/v1/resolve", json={"namespace": "default", **body}).json()["operation"]
            while True:
                found = http.get(f"/v1/operations/{operation}", params={"wait_s": 20}).json()
                if found["state"] in ("Fetched", "Failed"):
                    return found


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
        assert busy.popen.wait(20) == 2
        assert address in busy.lines[-1]
    owner = Process("--data-dir", tmp_path / "b")
    second = Process("--data-dir", tmp_path / "b")
    assert second.popen.wait(20) == 2
    assert "in use by another depot" in second.lines[-1]
    assert owner.end() == 0


def test_wrong_settings_are_all_listed(tmp_path: Path) -> None:
    process = Process("--file-root", tmp_path / "none", "--threads", "0", "--log-level", "LOUD", "--http", "nowhere")
    assert process.popen.wait(20) == 2
    text = "".join(process.lines)
    for flag in ("--file-root", "--threads", "--log-level", "--http"):
        assert flag in text


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
