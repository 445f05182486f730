"""The digest of an artifact: the SHA-256 of its manifest.

A manifest lists the files of an artifact with their SHA-256, as canonical JSON (names sorted, no blanks). So equal
contents have equal digests, whatever their source.
"""

import hashlib
import json
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NewType, cast, get_args

from weft.artifacts.errors import BadDigest, Reason, Refused
from weft.domain.strict_json import JsonError, JsonObject, is_int, parse_object

Digest = NewType("Digest", str)  # "sha256:" and 64 lower-case hex digits
Kind = Literal["adapter", "model", "template"]
KINDS: tuple[Kind, ...] = get_args(Kind)

MAX_MANIFEST_BYTES = 1 << 20
MANIFEST_BEGINS = b'{"files":['  # in its canonical form
MAX_FILES = 4096
MAX_FILE_BYTES = 1 << 50
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}", re.ASCII)
TEMPLATES_FOLDER = "additional_chat_templates/"  # of Hugging Face's named templates: the only folder in an artifact
_FILE_NAME = re.compile(rf"({TEMPLATES_FOLDER})?[A-Za-z0-9_][A-Za-z0-9._-]{{0,254}}", re.ASCII)


def parse_digest(text: str) -> Digest:
    """Check the form of a digest and return it. Raises BadDigest (a ValueError too)."""
    if not _DIGEST.fullmatch(text):
        raise BadDigest(text)
    return Digest(text)


def digest_of(data: bytes) -> Digest:
    """Return the digest of some bytes."""
    return from_hex(hashlib.sha256(data).hexdigest())


def from_hex(hex_digits: str) -> Digest:
    """Return the digest with the 64 hex digits of a SHA-256."""
    return parse_digest(f"sha256:{hex_digits}")


def hex_of(digest: str) -> str:
    """Return the 64 hex digits of a digest, the name of its blob. Raises BadDigest."""
    return parse_digest(digest).removeprefix("sha256:")


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A file of an artifact: its plain name (without folders), the hex SHA-256 of its content, its size."""

    name: str
    sha256: str
    size_bytes: int

    @property
    def digest(self) -> Digest:
        return from_hex(self.sha256)


@dataclass(frozen=True)  # no slots: the digest is computed once
class Manifest:
    """The files of an artifact, sorted by name. Its digest identifies the artifact everywhere."""

    kind: Kind
    files: tuple[FileEntry, ...]

    def __post_init__(self) -> None:
        names = [entry.name for entry in self.files]
        assert names == sorted(set(names)), "files are sorted and appear once"

    @cached_property
    def digest(self) -> Digest:
        return digest_of(self.to_bytes())

    @property
    def size_bytes(self) -> int:
        return sum(entry.size_bytes for entry in self.files)

    def find(self, name: str) -> FileEntry | None:
        return next((entry for entry in self.files if entry.name == name), None)

    def file(self, name: str) -> FileEntry:
        """Return the entry of a required file. Raises Refused(MissingFile)."""
        if entry := self.find(name):
            return entry
        raise Refused(Reason.MISSING_FILE, f"{self.digest} has no file {name}")

    def to_bytes(self) -> bytes:
        """Return the canonical JSON, the input of the digest."""
        files = [{"name": f.name, "sha256": f.sha256, "size": f.size_bytes} for f in self.files]
        value = {"files": files, "kind": self.kind, "version": 1}
        return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, raw: bytes) -> "Manifest":
        """Parse a manifest. Raises Refused(DigestMismatch) for anything but its canonical form."""
        try:
            manifest = _manifest(parse_object(raw, max_bytes=MAX_MANIFEST_BYTES))
        except (JsonError, BadDigest) as error:
            raise Refused(Reason.DIGEST_MISMATCH, f"invalid manifest: {error}") from error
        if manifest.to_bytes() != raw:
            raise Refused(Reason.DIGEST_MISMATCH, "invalid manifest: not in canonical form")
        return manifest


def build_manifest(kind: Kind, files: list[FileEntry]) -> Manifest:
    """Return the manifest of files in any order."""
    return Manifest(kind, tuple(sorted(files, key=lambda entry: entry.name)))


def is_file_name(name: str) -> bool:
    """Return whether a name is a plain file name: no folder except that of templates, no leading dot, at most 255
    characters."""
    return bool(_FILE_NAME.fullmatch(name))


def _manifest(value: JsonObject) -> Manifest:
    if value.get("version") != 1 or value.get("kind") not in KINDS:
        raise JsonError("unknown version or kind")
    rows = value.get("files")
    if not isinstance(rows, list) or len(cast("list[object]", rows)) > MAX_FILES:
        raise JsonError(f"'files' is not a list of at most {MAX_FILES}")
    files = [_entry(row) for row in cast("list[object]", rows)]
    if len({entry.name for entry in files}) != len(files):
        raise JsonError("a file appears twice")
    return build_manifest(cast("Kind", value["kind"]), files)


def _entry(row: object) -> FileEntry:
    if not isinstance(row, dict):
        raise JsonError("a file is not an object")
    name, sha256, size = (cast("JsonObject", row).get(key) for key in ("name", "sha256", "size"))
    if not isinstance(name, str) or not is_file_name(name) or not isinstance(sha256, str):
        raise JsonError("a file without a plain name or SHA-256")
    if not isinstance(size, int) or not is_int(size) or not 0 <= size <= MAX_FILE_BYTES:
        raise JsonError(f"{name} has no size")
    return FileEntry(name, hex_of(f"sha256:{sha256}"), size)
