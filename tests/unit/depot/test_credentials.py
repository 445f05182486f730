"""Secrets: read from one place, told to nobody."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.artifacts.errors import ArtifactError, Reason, Refused
from weft_depot.credentials import FolderSecrets, NoSecrets, Secret, Secrets


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "team-a" / "hub"
    folder.mkdir(parents=True)
    (folder / "token").touch(0o600)
    (folder / "token").write_text("hf_VerySecret\n")
    return tmp_path


def refused(secrets: Secrets, namespace: str, name: str) -> ArtifactError:
    with pytest.raises(Refused) as caught:
        secrets.read(namespace, name)
    return caught.value


def test_a_value_is_a_file(root: Path) -> None:
    (root / "team-a" / "hub" / ".swp").write_text("an editor's")
    secret = FolderSecrets(root).read("team-a", "hub")
    assert dict(secret.values) == {"token": b"hf_VerySecret\n"}
    assert secret.text("token") == "hf_VerySecret"
    assert secret.text("other") is None


def test_a_secret_that_is_not_there_says_what_to_make(root: Path) -> None:
    error = refused(FolderSecrets(root), "team-a", "other")
    assert error.reason == Reason.SECRET_MISSING
    assert "team-a/other" in error.message
    assert refused(FolderSecrets(root), "team-b", "hub").reason == Reason.SECRET_MISSING


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o660, 0o777])
def test_a_file_that_others_may_read_is_no_secret(root: Path, mode: int) -> None:
    (root / "team-a" / "hub" / "token").chmod(mode)
    error = refused(FolderSecrets(root), "team-a", "hub")
    assert error.reason == Reason.SECRET_FORBIDDEN
    assert f"{mode:o}" in error.message
    assert "chmod 600" in error.message


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (os.mkfifo, Reason.SECRET_INVALID),
        (Path.mkdir, Reason.SECRET_INVALID),
        (lambda path: path.symlink_to("/etc/hostname"), Reason.SECRET_FORBIDDEN),
    ],
)
def test_what_is_no_file_is_not_read_and_a_link_is_what_it_leads_to(
    root: Path, make: Callable[[Path], None], reason: Reason
) -> None:
    make(root / "team-a" / "hub" / "other")
    assert refused(FolderSecrets(root), "team-a", "hub").reason == reason


@pytest.mark.parametrize(
    ("namespace", "name"),
    [
        *(
            ("team-a", ".."),
            ("team-a", "../team-b/x"),
            ("..", "team-a"),
            ("", "hub"),
            ("team-a", ""),
            ("team-a", "a/b"),
        ),
        *(("Team", "hub"), ("team-a", "hub\0"), ("team-a", "a" * 300), ("team-a", "a..b"), ("team.a", "hub")),
    ],
)
def test_no_name_leads_out_of_its_namespace(root: Path, namespace: str, name: str) -> None:
    assert refused(FolderSecrets(root), namespace, name).reason == Reason.SECRET_INVALID


def test_without_secrets_every_reference_is_refused() -> None:
    error = refused(NoSecrets(), "team-a", "hub")
    assert error.reason == Reason.SECRET_FORBIDDEN
    assert "--secrets" in error.message


UNUSABLE = "Secret team/s: its key 'token' is empty, too long, or holds characters not allowed in credentials"
CONTENTS = st.dictionaries(st.text(max_size=5), st.binary(max_size=8), max_size=4)


@given(CONTENTS, CONTENTS)
def test_fingerprints_are_equal_exactly_for_equal_contents(one: dict[str, bytes], two: dict[str, bytes]) -> None:
    same = Secret("n/a", one).fingerprint == Secret("n/b", two).fingerprint
    assert same == (one == two)


@given(st.binary(max_size=40))
def test_a_text_is_printable_or_refused_without_quoting_it(value: bytes) -> None:
    secret = Secret("team/s", {"token": value})
    assert "values" not in repr(secret)
    try:
        text = secret.text("token")
    except Refused as error:
        assert error.message == UNUSABLE  # noqa: PT017 (either outcome is right)
    else:
        assert text
        assert text.isprintable()
        assert text.encode() == value.strip()
