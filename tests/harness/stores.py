"""What must hold of stores whatever has happened to them."""

import hashlib

from weft.artifacts.blobs import BlobStore
from weft_operator.local.objects import ObjectStore


def check_blobs(store: BlobStore) -> None:
    """Every blob's content has the SHA-256 it is named by."""
    for path in sorted((store.path("sha256:" + "0" * 64).parent).iterdir()):
        with path.open("rb") as file:
            actual = hashlib.file_digest(file, "sha256").hexdigest()
        assert actual == path.name, f"blob {path.name} holds {actual}"


def check_store(store: ObjectStore) -> None:
    """Versions are unique and none is above the store's; generations start at 1."""
    versions = [int(obj["metadata"]["resourceVersion"]) for obj in store.objects()]
    assert len(set(versions)) == len(versions), "two objects share a version"
    assert all(version <= store.version for version in versions), "an object is newer than the store"
    assert all(obj["metadata"]["generation"] >= 1 for obj in store.objects()), "generation"
