"""`pvc:` reads a claim of the requesting namespace and nothing else."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.artifacts.making import write_adapter
from tests.unit.depot.reading import Asked, asked, folder_bytes, read_all, refusal
from weft.artifacts.errors import Reason, Refused
from weft_depot.sources import PvcSource


@pytest.fixture
def claims(tmp_path: Path) -> Path:
    for namespace in ("team-a", "team-b"):
        write_adapter(tmp_path / namespace / "weights" / "upper", config={"of": namespace})
    write_adapter(tmp_path / "outside")
    return tmp_path


def at(path: str, namespace: str = "team-a") -> Asked:
    return asked(f"pvc:{path}", namespace=namespace)


def test_a_folder_of_a_claim_is_read(claims: Path) -> None:
    found = read_all(PvcSource(claims), at("weights/upper"))
    assert found == folder_bytes(claims / "team-a" / "weights" / "upper")
    (claims / "team-a" / "flat").symlink_to(claims / "team-a" / "weights" / "upper")
    assert read_all(PvcSource(claims), at("flat")) == found, "a claim may be one artifact"


def test_each_namespace_reads_its_own_claim_of_that_name(claims: Path) -> None:
    other = read_all(PvcSource(claims), at("weights/upper", "team-b"))
    assert b"team-b" in other["adapter_config.json"]


def test_a_claim_that_is_not_mounted_says_who_mounts_it(claims: Path) -> None:
    error = refusal(PvcSource(claims), at("other/upper"))
    assert error.reason == Reason.SOURCE_NOT_FOUND
    for said in ("other", "team-a", "--pvc-root"):
        assert said in error.message
    assert refusal(PvcSource(claims), at("weights/upper", "team-c")).reason == Reason.SOURCE_NOT_FOUND


@pytest.mark.parametrize(
    ("path", "namespace"),
    [
        *(("", "team-a"), ("/weights/upper", "team-a"), ("../team-b/weights/upper", "team-a"), ("..", "team-a")),
        *(("weights/../../team-b/weights", "team-a"), ("weights/", "team-a"), ("weights//upper", "team-a")),
        *(("Weights/upper", "team-a"), (".hidden/x", "team-a"), ("a..b/x", "team-a"), ("weights/\0", "team-a")),
        *(("weights/upper", ".."), ("weights/upper", "team-a/../team-b"), ("upper", "team-a/weights"), ("weights", "")),
    ],
)
def test_neither_path_nor_namespace_leads_elsewhere(claims: Path, path: str, namespace: str) -> None:
    assert refusal(PvcSource(claims), at(path, namespace)).reason == Reason.BAD_URI


@pytest.mark.parametrize("target", ["../../team-b/weights/upper", "/etc", "../../outside", "../.."])
def test_links_that_leave_the_claim_are_refused(claims: Path, target: str) -> None:
    (claims / "team-a" / "weights" / "link").symlink_to(target)
    assert refusal(PvcSource(claims), at("weights/link")).reason == Reason.BAD_URI
    inner = claims / "team-a" / "weights" / "upper" / "adapter_config.json"
    inner.unlink()
    inner.symlink_to(f"../{target}/adapter_config.json" if target.startswith("..") else "/etc/passwd")
    assert refusal(PvcSource(claims), at("weights/upper")).reason == Reason.BAD_URI


@given(st.text(max_size=30), st.text(max_size=20) | st.sampled_from(["team-a", "team-b"]))
def test_no_text_reads_another_namespace(tmp_path_factory: pytest.TempPathFactory, path: str, namespace: str) -> None:
    base = tmp_path_factory.getbasetemp() / "claims"
    if not base.exists():
        for owner in ("team-a", "team-b"):
            write_adapter(base / owner / "c", config={"of": owner})
    try:
        found = read_all(PvcSource(base), at(path, namespace))
    except Refused as error:
        assert error.reason in (Reason.BAD_URI, Reason.SOURCE_NOT_FOUND)  # noqa: PT017 (either outcome is right)
    else:
        assert path == "c"
        assert namespace.encode() in found["adapter_config.json"]


def test_each_claim_is_a_host_of_its_own() -> None:
    source = PvcSource(Path("/none"))
    hosts = {source.host(at(path, namespace)[0]) for path in ("a/x", "a/y", "b/x") for namespace in ("n", "m")}
    assert len(hosts) == 4
