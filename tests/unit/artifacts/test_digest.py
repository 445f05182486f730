"""Digests and manifests: one form, one identity."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.artifacts.making import refused
from weft.artifacts.digest import FileEntry, Manifest, build_manifest, digest_of, hex_of, is_file_name, parse_digest
from weft.artifacts.errors import BadDigest, Reason, Refused

HEX = "ab" * 32


@pytest.mark.parametrize(
    "text",
    [
        "", "sha256:", HEX, f"sha256:{HEX}0", f"sha256:{HEX[:-1]}", f"SHA256:{HEX}", f"sha256:{HEX.upper()}",
        f"sha256:{HEX}\n", f"sha256:../{HEX[3:]}", f"sha512:{HEX}", f" sha256:{HEX}",
    ],
)  # fmt: skip
def test_a_text_that_is_no_digest_is_refused(text: str) -> None:
    with pytest.raises(BadDigest):
        parse_digest(text)
    with pytest.raises(ValueError, match="not a digest"):
        hex_of(text)


@given(st.text(max_size=90))
def test_only_the_exact_form_is_a_digest(text: str) -> None:
    try:
        digest = parse_digest(text)
    except BadDigest:
        return
    assert digest == text
    assert len(text) == 71
    assert set(hex_of(text)) <= set("0123456789abcdef")


ENTRIES = st.lists(
    st.builds(
        lambda name, data, size: FileEntry(name, hex_of(digest_of(data)), size),
        st.from_regex(r"\A[A-Za-z0-9_][A-Za-z0-9._-]{0,20}\Z"),
        st.binary(max_size=8),
        st.integers(0, 1 << 50),
    ),
    max_size=8,
    unique_by=lambda entry: entry.name,
)


@given(ENTRIES, st.randoms())
def test_a_manifest_is_one_text_whatever_the_order_and_reads_back(entries: list[FileEntry], random) -> None:
    manifest = build_manifest("adapter", entries)
    random.shuffle(entries)
    again = build_manifest("adapter", entries)
    assert again.digest == manifest.digest == digest_of(manifest.to_bytes())
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest


def test_the_canonical_form_is_the_documented_one() -> None:
    manifest = build_manifest("model", [FileEntry("b", HEX, 2), FileEntry("a", HEX, 1)])
    assert manifest.to_bytes() == (
        b'{"files":[{"name":"a","sha256":"'
        + HEX.encode()
        + b'","size":1},{"name":"b","sha256":"'
        + HEX.encode()
        + b'","size":2}],"kind":"model","version":1}'
    )
    assert manifest.size_bytes == 3


def _with(**change: object) -> bytes:
    value = {"files": [{"name": "a", "sha256": HEX, "size": 1}], "kind": "model", "version": 1, **change}
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[]",
        b"{}",
        _with(version=2),
        _with(version=True),
        _with(kind="virus"),
        _with(extra=1),
        _with(files={}),
        _with(files=[{"name": "../a", "sha256": HEX, "size": 1}]),
        _with(files=[{"name": "a", "sha256": "x", "size": 1}]),
        _with(files=[{"name": "a", "sha256": HEX, "size": -1}]),
        _with(files=[{"name": "a", "sha256": HEX, "size": True}]),
        _with(files=[{"name": "a", "sha256": HEX, "size": 1}] * 2),
        _with(files=["a"]),
        _with().replace(b":", b": "),
        _with() + b" ",
        b"{" * 100_000,
    ],
)
def test_anything_but_the_canonical_form_is_no_manifest(raw: bytes) -> None:
    with refused(Reason.DIGEST_MISMATCH):
        Manifest.from_bytes(raw)


@given(st.binary(max_size=200))
def test_no_bytes_make_reading_a_manifest_fail_in_another_way(raw: bytes) -> None:
    with pytest.raises(Refused):
        Manifest.from_bytes(raw)


@pytest.mark.parametrize("name", ["", ".", "..", ".hidden", "a/b", "a\\b", "a\0", "a\n", "ü", "a" * 256])
def test_a_file_name_is_plain(name: str) -> None:
    assert not is_file_name(name)
