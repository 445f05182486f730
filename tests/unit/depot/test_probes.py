"""The depot's probes: on the API's port, or on one of their own over plain HTTP."""

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest

from fleet import free_addresses
from weft.wire.roles import ANYONE
from weft_depot.door import callers

PROBES = ("/healthz", "/readyz", "/metrics")


@contextmanager
def depot(data: Path, *flags: str) -> Iterator[str]:
    """A running depot; its API's address."""
    command = [sys.executable, "-m", "weft_depot", "--http", "127.0.0.1:0", "--data-dir", str(data), *flags]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr
        try:
            for line in process.stderr:
                if found := re.search(r"listen=(\S+)", line):
                    yield found[1]
                    break
            else:
                pytest.fail("the depot did not start")
        finally:
            process.terminate()
            process.stderr.read()
            assert process.wait(20) == 0


def test_without_an_address_of_their_own_probes_are_on_the_apis(tmp_path: Path) -> None:
    with depot(tmp_path) as api:
        for path in PROBES:
            assert httpx2.get(f"http://{api}{path}", trust_env=False).status_code == 200


def test_with_one_they_are_there_and_not_on_the_apis(tmp_path: Path) -> None:
    (own,) = free_addresses(1)
    with depot(tmp_path, "--probes", own) as api:
        for path in PROBES:
            assert httpx2.get(f"http://{own}{path}", trust_env=False).status_code == 200
            assert httpx2.get(f"http://{api}{path}", trust_env=False).status_code == 404


@pytest.mark.parametrize("path", ["/v1", "/v1/", "/v1/secrets", "/v1//blobs", "/v1/blobsx/1", "/v1/Blobs/x"])
def test_a_path_below_v1_that_the_table_does_not_name_is_for_nobody(path: str) -> None:
    assert callers(path) == frozenset()


def test_what_is_below_a_named_path_is_for_the_same_callers() -> None:
    assert callers("/v1/blobs/sha256:x/y") == callers("/v1/blobs") == {"runner", "gateway", "operator"}
    assert callers("/v1/operations/7") == callers("/v1/resolve") == {"operator"}
    assert callers("/readyz") == ANYONE
