"""Data directories and addresses: where they are by default, whose they are, and what is said otherwise."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from harness.processes import started
from weft.process import (
    AddressInUse,
    CannotStart,
    DataDirInUse,
    DataDirUnusable,
    default_data_dir,
    listen,
    lock_data_dir,
    split_address,
)
from weft.telemetry.probes import Probes


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"WEFT_DATA_DIR": "/w", "XDG_STATE_HOME": "/s"}, "/w/depot"),
        ({"WEFT_DATA_DIR": "~/w"}, "/h/w/depot"),
        ({"XDG_STATE_HOME": "/s"}, "/s/weft/depot"),
        ({"WEFT_DATA_DIR": "", "XDG_STATE_HOME": ""}, "/h/.local/state/weft/depot"),
        ({}, "/h/.local/state/weft/depot"),
    ],
)
def test_the_default_data_directory(env: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WEFT_DATA_DIR", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in ({"HOME": "/h"} | env).items():
        monkeypatch.setenv(name, value)
    assert default_data_dir("depot") == Path(expected)


def test_a_data_directory_has_one_owner_and_the_other_is_told_what_to_do(tmp_path: Path) -> None:
    folder = tmp_path / "made" / "gateway"
    with lock_data_dir(folder, "gateway"):
        assert folder.stat().st_mode & 0o777 == 0o700
        says = f"{folder} is in use by another gateway: stop .* --data-dir"
        with pytest.raises(DataDirInUse, match=says), lock_data_dir(folder, "gateway"):
            pass
    with lock_data_dir(folder, "gateway"):
        pass


def test_kill_9_leaves_no_lock(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from weft.process import lock_data_dir\n"
        "with lock_data_dir(Path(sys.argv[1]), 'x'): print(flush=True); input()"
    )
    with started(sys.executable, "-c", program, tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"\n"
        with pytest.raises(DataDirInUse), lock_data_dir(tmp_path, "x"):
            pass
        other.kill()
        other.wait()
        with lock_data_dir(tmp_path, "x"):
            pass


def test_a_failure_inside_is_not_taken_for_the_lock(tmp_path: Path) -> None:
    with pytest.raises(BlockingIOError), lock_data_dir(tmp_path, "depot"):
        raise BlockingIOError


def test_a_data_directory_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "depot"):
        with (
            pytest.raises(DataDirUnusable, match=f"{folder} cannot be used .* --data-dir"),
            lock_data_dir(folder, "depot"),
        ):
            pass


@pytest.mark.parametrize(
    "bad", ["8080", "host", "host:", ":80", "a:b", "a:-1", "a:65536", "a:²", "a:٣", "a:" + "9" * 5000]
)
def test_an_address_without_host_or_port_is_refused(bad: str) -> None:
    with pytest.raises(ValueError, match="HOST:PORT"):
        split_address(bad)


def test_an_address_is_split() -> None:
    assert split_address("127.0.0.1:65535") == ("127.0.0.1", 65535)
    assert split_address("[::1]:0") == ("::1", 0)


def test_an_address_in_use_names_flag_address_and_cure() -> None:
    with listen("127.0.0.1:0", "--http") as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        says = f"{address}: Address already in use: stop what listens there, or give another"
        with pytest.raises(AddressInUse, match=f"--http {says}"):
            listen(address, "--http")
        with pytest.raises(AddressInUse, match=f"--probes {says}"):
            Probes(address, lambda: None)


def test_a_host_that_is_not_here_cannot_be_listened_on() -> None:
    with pytest.raises(CannotStart, match=r"--http 192\.0\.2\.1:80"):
        listen("192.0.2.1:80", "--http")


def test_a_client_may_connect_before_anything_serves() -> None:
    with listen("127.0.0.1:0", "--http") as listener, socket.create_connection(listener.getsockname()):
        pass
