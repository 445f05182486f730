"""The depot's settings, and who may call what."""

import sys
from pathlib import Path
from types import ModuleType

import pytest

from weft.process import CannotStart
from weft.wire.roles import ANYONE
from weft_depot import credentials, sources
from weft_depot.main import build, build_sources, main
from weft_depot.role_auth import callers
from weft_depot.settings import DepotSettings
from weft_depot.sources import RetryPolicy


@pytest.mark.parametrize(
    ("flags", "flag"),
    [
        (("--schemes", "file,ftp"), "--schemes"),
        (("--oci-registries", "ghcr.io/acme"), "--oci-registries"),
        (("--https-hosts", "https://host"), "--https-hosts"),
        (("--secrets", "/nowhere"), "--secrets"),
        (("--hf-endpoint", "huggingface.co"), "--hf-endpoint"),
        (("--hf-endpoint", "https://u:p@huggingface.co"), "--hf-endpoint"),
        (("--s3-endpoints", "minio:9000,ce ph:x"), "--s3-endpoints"),
        (("--pvc-root", "/nowhere"), "--pvc-root"),
        (("--lease", "weft-system/weft-depot"), "--lease needs --probes"),
    ],
)
def test_a_wrong_setting_of_a_source_stops_the_start(
    flags: tuple[str, ...], flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        DepotSettings.parse(flags)
    assert flag in capsys.readouterr().err


def test_wrong_settings_are_all_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--file-root", str(tmp_path / "none"), "--log-level", "LOUD", "--http", "nowhere"])
    assert ended.value.code == 2
    told = capsys.readouterr().err
    for flag in ("--file-root", "--log-level", "--http"):
        assert flag in told


def test_lists_are_given_with_commas_by_flag_and_by_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_DEPOT__S3_ENDPOINTS", "minio:9000, ceph")
    settings = DepotSettings.parse(["--schemes", "file,s3"])
    assert settings.schemes == ("file", "s3")
    assert settings.s3_endpoints == ("minio:9000", "ceph")
    assert DepotSettings.parse([]).schemes == ("file", "pvc", "hf", "s3", "oci", "https")


def test_only_what_is_allowed_and_has_its_root_is_a_source(tmp_path: Path) -> None:
    def sources(*flags: str) -> set[str]:
        return set(build_sources(DepotSettings.parse(flags), RetryPolicy()))

    roots = ("--file-root", str(tmp_path), "--pvc-root", str(tmp_path))
    assert sources() == {"hf", "s3", "oci"}
    assert sources(*roots, "--https-hosts", "*.example.org") == {"file", "pvc", "hf", "s3", "oci", "https"}
    assert sources(*roots, "--schemes", "file") == {"file"}
    assert sources(*roots, "--schemes", "") == set()


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
    assert DepotSettings().data_dir == Path(expected)


@pytest.mark.parametrize("path", ["/v1", "/v1/", "/v1/secrets", "/v1//blobs", "/v1/blobsx/1", "/v1/Blobs/x"])
def test_a_path_below_v1_that_the_table_does_not_name_is_for_nobody(path: str) -> None:
    assert callers(path) == frozenset()


def test_what_is_below_a_named_path_is_for_the_same_callers() -> None:
    assert callers("/v1/blobs/sha256:x/y") == callers("/v1/blobs") == {"runner", "gateway", "operator"}
    assert callers("/v1/operations/7") == callers("/v1/resolve") == {"operator"}
    assert callers("/readyz") == ANYONE


def test_secrets_of_the_cluster_without_its_client_name_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    monkeypatch.delitem(sys.modules, "weft_depot.credentials.kubernetes", raising=False)
    with pytest.raises(CannotStart, match=r"pip install 'weft\[kubernetes\]'"):
        build(DepotSettings.parse(["--data-dir", str(tmp_path), "--secrets", "kubernetes"]))


@pytest.mark.parametrize("front", [credentials, sources])
def test_a_front_has_no_name_that_nobody_gave_it(front: ModuleType) -> None:
    with pytest.raises(AttributeError, match="Nothing"):
        front.Nothing  # noqa: B018
