"""`file:` never leaves its root, whatever paths and links say."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.artifacts.making import refused, write_adapter
from tests.unit.depot.reading import Asked, asked
from weft.artifacts.depot_api import ResolveRequest
from weft.artifacts.errors import Reason, Refused
from weft_depot.sources import RACY_NS, FileSource, source_of


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_adapter(tmp_path / "outside", config={"secret": 1})
    write_adapter(tmp_path / "root" / "a" / "b")
    return tmp_path / "root"


def names(root: Path, path: str) -> list[str]:
    with FileSource(root).open(*at(path), lambda _: True) as snapshot:
        for name in snapshot.sizes:
            snapshot.open(name).close()
        assert snapshot.unchanged()
        return sorted(snapshot.sizes)


def at(path: str) -> Asked:
    return asked(f"file:{path}")


def refusal(root: Path, path: str) -> Reason:
    with pytest.raises(Refused) as caught:
        names(root, path)
    return caught.value.reason


BOTH = ["adapter_config.json", "adapter_model.safetensors"]


def test_a_folder_below_the_root_is_read(root: Path) -> None:
    assert names(root, "a/b") == BOTH


OUTSIDE = "../outside a/../../outside a/b/.. .. . /etc //etc a//b a/./b a/b/ ///outside a/b\0".split()


@pytest.mark.parametrize("path", [*OUTSIDE, "", "a/b\n", "\x1b[31m"])
def test_a_path_that_could_leave_the_root_is_a_bad_uri(root: Path, path: str) -> None:
    assert refusal(root, path) == Reason.BAD_URI


@pytest.mark.parametrize(
    "path", ["nothing", "a/c", "a/b/adapter_config.json", "a/b/adapter_config.json/x", "~", "%2e%2e"]
)
def test_what_is_no_folder_is_not_found(root: Path, path: str) -> None:
    assert refusal(root, path) == Reason.SOURCE_NOT_FOUND


def test_a_link_to_a_folder_outside_is_refused(root: Path) -> None:
    (root / "link").symlink_to(root.parent / "outside")
    (root / "relative").symlink_to("../outside")
    (root / "a" / "up").symlink_to("../..")
    assert refusal(root, "link") == Reason.BAD_URI
    assert refusal(root, "relative") == Reason.BAD_URI
    assert refusal(root, "a/up/outside") == Reason.BAD_URI


def test_a_file_that_links_outside_is_refused(root: Path) -> None:
    config = root / "a" / "b" / "adapter_config.json"
    config.unlink()
    config.symlink_to(root.parent / "outside" / "adapter_config.json")
    assert refusal(root, "a/b") == Reason.BAD_URI
    config.unlink()
    config.symlink_to("/etc/passwd")
    assert refusal(root, "a/b") == Reason.BAD_URI


def test_links_that_stay_below_the_root_work(root: Path) -> None:
    (root / "latest").symlink_to("a/b")
    (root / "blobs").mkdir()
    (root / "a" / "b" / "adapter_config.json").rename(root / "blobs" / "1234")
    (root / "a" / "b" / "adapter_config.json").symlink_to("../../blobs/1234")
    assert names(root, "latest") == BOTH


@pytest.mark.parametrize("target", ["nowhere", "adapter_config.json"])
def test_a_link_to_nothing_or_itself_is_not_found(root: Path, target: str) -> None:
    config = root / "a" / "b" / "adapter_config.json"
    config.unlink()
    config.symlink_to(target)
    assert refusal(root, "a/b") == Reason.SOURCE_NOT_FOUND


def test_the_root_itself_may_be_a_link(root: Path) -> None:
    (root.parent / "alias").symlink_to(root)
    assert names(root.parent / "alias", "a/b") == BOTH


def test_a_link_that_is_swapped_between_check_and_use_leads_nowhere(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is a link's innocent target when it is checked and a link to the outside when it is opened."""
    real = os.path.realpath

    def meddle(path: object, *, strict: bool = False) -> str:
        found = real(path, strict=strict)  # type: ignore[arg-type]
        if strict and found.endswith("a/b"):
            (root / "a" / "b").rename(root / "a" / "old")
            (root / "a" / "b").symlink_to(root.parent / "outside")
        return found

    monkeypatch.setattr(os.path, "realpath", meddle)
    assert refusal(root, "a/b") == Reason.SOURCE_NOT_FOUND


def test_pipes_and_folders_are_not_opened(root: Path) -> None:
    os.mkfifo(root / "a" / "b" / "tokenizer.json")
    (root / "a" / "b" / "config.json").mkdir()
    assert names(root, "a/b") == BOTH
    (root / "a" / "b" / "link.json").symlink_to("tokenizer.json")
    assert refusal(root, "a/b") == Reason.SOURCE_NOT_FOUND


def test_a_folder_with_too_many_entries_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft_depot.sources.folder.MAX_ENTRIES", 100)
    for number in range(101):
        (root / "a" / "b" / f"{number}").touch()
    assert refusal(root, "a/b") == Reason.TOO_LARGE


def test_names_that_are_not_asked_for_are_not_looked_at(root: Path) -> None:
    (root / "a" / "b" / "evil").symlink_to("/etc/passwd")
    with FileSource(root).open(*at("a/b"), lambda name: name.endswith(".json")) as snapshot:
        assert list(snapshot.sizes) == ["adapter_config.json"]


def test_a_signature_exists_for_old_files_only_and_changes_with_them(root: Path) -> None:
    config = root / "a" / "b" / "adapter_config.json"
    newest = max(path.stat().st_ctime_ns for path in (root / "a" / "b").iterdir())

    def signature(now_ns: int) -> str | None:
        with FileSource(root, wall_ns=lambda: now_ns).open(*at("a/b"), lambda _: True) as snapshot:
            return snapshot.signature

    assert signature(newest + RACY_NS - 1) is None
    old = signature(newest + RACY_NS)
    assert old is not None
    assert signature(newest + RACY_NS * 9) == old
    stat = config.stat()
    config.write_bytes(config.read_bytes())
    os.utime(config, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert signature(1 << 62) != old, "same size, same mtime, same inode: the change time still tells"


@given(st.text(max_size=40) | st.lists(st.sampled_from(["..", ".", "", "a", "b", "outside", "root"])).map("/".join))
def test_no_path_leads_outside(tmp_path_factory: pytest.TempPathFactory, path: str) -> None:
    base = tmp_path_factory.getbasetemp() / "containment"
    if not base.exists():
        write_adapter(base / "outside")
        write_adapter(base / "root" / "a" / "b")
    try:
        with FileSource(base / "root").open(*at(path), lambda _: True) as snapshot:
            for name in snapshot.sizes:
                with snapshot.open(name) as file:
                    real = os.path.realpath(f"/proc/self/fd/{file.fileno()}")
                assert real.startswith(os.path.realpath(base / "root") + "/")
    except Refused as error:
        assert error.reason in (Reason.BAD_URI, Reason.SOURCE_NOT_FOUND)  # noqa: PT017 (either outcome is right)


@pytest.mark.parametrize(
    "uri", ["", "file", "adapters/upper", "FILE:a", "fi le:a", ":a", "../a:b", "file:" + "x" * 2048]
)
def test_what_is_no_uri_is_a_bad_uri(uri: str) -> None:
    with refused(Reason.BAD_URI):
        source_of({}, ResolveRequest("adapter", uri, "default"))
