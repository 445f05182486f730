"""A real depot below a temporary folder: a file root with a tiny model and one adapter, the resolver, no fakes."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from harness.blobs import check_blobs
from harness.quick import one_ssl_context, quick_disk  # noqa: F401 (fixtures)
from tests.unit.artifacts.making import write_adapter, write_model
from weft.artifacts.blobs import BlobStore
from weft.artifacts.depot_api import ResolveRequest
from weft.artifacts.digest import Digest, Manifest
from weft_depot.artifact_layout import ArtifactLimits
from weft_depot.resolution_cache import ResolutionCache
from weft_depot.resolve import Resolver, Verdict
from weft_depot.sources import FileSource


class Bench:
    """The resolver with its folders, and short ways to use it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.root = folder, folder / "root"
        write_model(self.root / "models" / "tiny")
        write_adapter(self.root / "adapters" / "upper")
        self.now_ns = 0  # far in the past: every file looks young, nothing is remembered
        self.limits = ArtifactLimits()
        self.open()

    def open(self) -> None:
        """A new process on the same folders."""
        self.store = BlobStore(self.folder / "data" / "blobs")
        self.store.clean()
        self.resolutions = ResolutionCache(self.folder / "data" / "resolved")
        source = FileSource(self.root, wall_ns=lambda: self.now_ns)
        self.resolver = Resolver({"file": source}, self.store, self.resolutions, self.limits)

    def at_rest(self) -> None:
        """Time passes: files that exist now are old enough to be remembered."""
        self.now_ns = 1 << 62

    def resolve(self, uri: str, kind: str = "adapter", *, check_cancelled: Any = lambda: None, **fields: Any) -> Digest:
        self.verdicts: list[Verdict] = []
        if kind == "adapter" and "base" not in fields:
            fields["base"] = {"digest": self.base(), "name": "tiny"}
        body = {"kind": kind, "uri": uri, "namespace": "default", **fields}
        given = {name: value for name, value in body.items() if value is not None}
        request = ResolveRequest.parse(json.dumps(given).encode())
        self.verdicts = []
        with self.store.lease() as lease:
            self.resolved = self.resolver.resolve(request, lease, self.verdicts.append, check_cancelled)
            return self.resolved.digest

    def base(self) -> Digest:
        return self.resolve("file:models/tiny", "model")

    def manifest(self, digest: str) -> Manifest:
        return self.store.manifest(digest)

    def blobs(self) -> set[str]:
        return {path.name for path in (self.folder / "data" / "blobs" / "sha256").iterdir()}

    def check(self) -> None:
        """Nothing half-done is left, every blob is what it is named."""
        check_blobs(self.store)
        assert os.listdir(self.folder / "data" / "blobs" / "partial") == []  # noqa: PTH208


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)
