"""What must hold of a store of blobs whatever has happened to it."""

import hashlib

from weft.artifacts.blobs import BlobStore


def check_blobs(store: BlobStore) -> None:
    """Every blob's content has the SHA-256 it is named by."""
    for path in sorted((store.path("sha256:" + "0" * 64).parent).iterdir()):
        with path.open("rb") as file:
            actual = hashlib.file_digest(file, "sha256").hexdigest()
        assert actual == path.name, f"blob {path.name} holds {actual}"
