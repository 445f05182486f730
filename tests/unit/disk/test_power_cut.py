"""The power goes, at any moment: what was acknowledged is there; every other file is whole, gone or seen through."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.blobs import check_blobs
from harness.power_cut import Disk
from tests.unit.artifacts.test_fetch import BIG, Server, take
from tests.unit.depot.conftest import Bench
from weft.artifacts.blobs import BlobStore
from weft.artifacts.digest import hex_of
from weft.files import write_atomically
from weft_batch.storage import FolderStorage
from weft_depot.resolution_cache import ResolutionCache
from weft_operator.local import Durable, ObjectStore, open_store
from weft_predictor.checkpoint import save
from weft_predictor.core import RidgeModel
from weft_predictor.models import SAVED, first_models


def test_a_test_disk_loses_what_was_not_synced(disk: Disk, tmp_path: Path) -> None:
    """A writer that forgets its syncs is found: the harness is worth something."""
    with disk.record():
        write_atomically(disk.root / "kept", b"kept")
        write_atomically(disk.root / "lost", b"lost", durable=False)
    found = {
        (name, (state / name).read_bytes() if (state / name).exists() else None)
        for state, _ in disk.states(tmp_path / "states")
        for name in ("kept", "lost")
    }
    assert found == {("kept", b"kept"), ("kept", None), ("lost", b""), ("lost", b"\0\0\0\0"), ("lost", None)}


def test_a_file_that_is_replaced_is_the_old_one_or_the_new_one(disk: Disk, tmp_path: Path) -> None:
    (disk.root / "file").write_bytes(b"0")
    with disk.record():
        for number in range(1, 4):
            write_atomically(disk.root / "file", b"%d" % number)
            disk.done(str(number))
    for state, acknowledged in disk.states(tmp_path / "states"):
        assert int((state / "file").read_bytes()) >= max(map(int, acknowledged), default=0)


def test_objects_are_those_of_one_moment_and_acknowledged_ones_stay(disk: Disk, tmp_path: Path) -> None:
    store = ObjectStore(lambda: 0.0)
    durable = Durable(store, disk.root / "objects.json")
    with disk.record():
        for number in range(4):
            metadata = {"name": f"a{number}", "namespace": "n"}
            store.apply({"apiVersion": "v1", "kind": "LoRAAdapter", "metadata": metadata, "spec": {}})
            durable.flush()
            disk.done(f"a{number}")
    for state, acknowledged in disk.states(tmp_path / "states"):
        again = open_store(state / "objects.json", lambda: 0.0)
        assert acknowledged <= {obj["metadata"]["name"] for obj in again.objects()}


def test_a_depot_has_whole_blobs_alone_and_resolves_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a second content, and the removal of the first; what a resolution is remembered by may be damaged."""
    bench = Bench(tmp_path / "bench")
    bench.at_rest()
    disk = Disk(bench.folder / "data", monkeypatch)
    config = bench.root / "adapters" / "upper" / "adapter_config.json"
    with disk.record():
        first = bench.resolve("file:adapters/upper")
        disk.done(hex_of(first))
        config.write_bytes(config.read_bytes() + b" ")
        second = bench.resolve("file:adapters/upper")
        disk.done(hex_of(second))
    for state, acknowledged in disk.states(tmp_path / "states"):
        store = BlobStore(state / "blobs")
        store.clean()
        check_blobs(store)
        assert acknowledged <= store.names()
        assert all(store.holds(f"sha256:{name}") for name in acknowledged)
        ResolutionCache(state / "resolved")
        (bench.folder / "data").rename(bench.folder / "before")
        state.rename(bench.folder / "data")
        bench.open()
        assert bench.resolve("file:adapters/upper") == second
        bench.check()
        (bench.folder / "data").rename(state)
        (bench.folder / "before").rename(bench.folder / "data")


def test_a_download_resumes_or_restarts(server: Server, disk: Disk, tmp_path: Path) -> None:
    manifest = server.artifact(config=b"{}", weights=BIG)
    blobs = BlobStore(disk.root)
    server.script = ["fine", "fine", "cut", "cut"]
    with disk.record():
        take(server, manifest.digest, blobs)
        disk.done(manifest.digest)
    for state, acknowledged in disk.states(tmp_path / "states"):
        again = BlobStore(state)
        check_blobs(again)
        assert all(again.holds(digest) for digest in acknowledged)
        assert take(server, manifest.digest, again)[0] == manifest
        check_blobs(again)


def test_a_batchs_file_is_whole_once_it_has_its_name(disk: Disk, tmp_path: Path) -> None:
    storage = FolderStorage(disk.root)
    with disk.record():
        writer = storage.writer("file-1")
        for _ in range(3):
            writer.write(BIG)
        writer.close()
        disk.done("file-1")
    for state, acknowledged in disk.states(tmp_path / "states"):
        again = FolderStorage(state)
        again.clean()
        left = {path.name: path.read_bytes() for path in state.iterdir() if path.is_file()}
        assert left in ({}, {"file-1": BIG * 3})
        assert acknowledged <= left.keys()


def test_a_predictor_starts_with_a_model_that_it_saved(disk: Disk, tmp_path: Path) -> None:
    with disk.record():
        for number in range(3):
            save(disk.root / SAVED, RidgeModel.cold(f"ridge-{number}").save())
            disk.done(f"ridge-{number}")
    for state, acknowledged in disk.states(tmp_path / "states"):
        model, _ = first_models(state, None)
        assert not acknowledged or model.family >= max(acknowledged)
        assert not (state / f"{SAVED}.corrupt").exists()


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(tmp_path / "disk", monkeypatch)


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()
