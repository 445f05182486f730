"""A watch: whether a source is what it was, for the price of a few looks."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.artifacts.making import write_adapter
from tests.unit.depot.conftest import Bench
from weft_depot.watches import KEEP_S, OWN_DISK, Watches


def edit(bench: Bench) -> None:
    path = bench.root / "adapters" / "upper" / "adapter_config.json"
    path.write_bytes(path.read_bytes() + b" ")


def replace_file(bench: Bench) -> None:
    """Same name, same size, same time stamps."""
    path = bench.root / "adapters" / "upper" / "adapter_config.json"
    copy = path.with_name("copy")
    shutil.copy2(path, copy)
    copy.replace(path)


def add_file(bench: Bench) -> None:
    (bench.root / "adapters" / "upper" / "adapter_model.bin").write_bytes(b"pickle")


def remove_folder(bench: Bench) -> None:
    shutil.rmtree(bench.root / "adapters" / "upper")


def lose_a_blob(bench: Bench) -> None:
    entry = bench.manifest(bench.resolved.digest).files[0]
    bench.store.path(entry.digest).unlink()


def lose_the_manifest(bench: Bench) -> None:
    bench.store.path(bench.resolved.digest).unlink()


def watch(bench: Bench, uri: str = "file:adapters/upper") -> str:
    bench.at_rest()
    bench.resolve(uri)
    assert bench.resolved.watch is not None
    return bench.resolved.watch


def test_a_source_at_rest_has_not_changed_and_is_not_opened(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    watches = {watch(bench), watch(bench)}
    assert len(watches) == 1, "one state, one watch"

    def unexpected(*_: object, **__: object) -> None:
        raise AssertionError("opened")

    monkeypatch.setattr(os, "open", unexpected)
    monkeypatch.setattr("builtins.open", unexpected)
    assert bench.resolver.watches.changed(watches) == []


@pytest.mark.parametrize(
    "change", [edit, replace_file, add_file, remove_folder, lose_a_blob, lose_the_manifest], ids=lambda it: it.__name__
)
def test_every_change_is_noticed(bench: Bench, change: Callable[[Bench], None]) -> None:
    name = watch(bench)
    change(bench)
    assert bench.resolver.watches.changed([name]) == [name]


def test_a_link_on_the_way_that_leads_elsewhere_is_a_change(bench: Bench) -> None:
    adapters = bench.root / "adapters"
    write_adapter(adapters / "v2")
    (adapters / "now").symlink_to("upper")
    name = watch(bench, "file:adapters/now")
    assert bench.resolver.watches.changed([name]) == []
    (adapters / "next").symlink_to("v2")
    (adapters / "next").replace(adapters / "now")
    assert bench.resolver.watches.changed([name]) == [name]


def test_two_states_of_a_source_have_two_watches(bench: Bench) -> None:
    first = watch(bench)
    edit(bench)
    second = watch(bench)
    assert bench.resolver.watches.changed([first, second]) == [first]


def test_a_young_source_has_no_watch(bench: Bench) -> None:
    bench.resolve("file:adapters/upper")
    assert bench.resolved.watch is None


def test_what_is_not_known_has_changed_and_the_longest_unasked_go_first(tmp_path: Path) -> None:
    watched = Watches(set[str], lambda _: False, limit=2)
    status = tmp_path.stat()
    mark = (str(tmp_path), (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns))
    first, second = watched.add("a", (mark,), ()), watched.add("b", (mark,), ())
    assert watched.by_host([first]) == {"a": [first]}
    third = watched.add("c", (mark,), ())
    assert watched.by_host([first, second, third, "x"]) == {"a": [first], None: [second, "x"], "c": [third]}
    assert watched.changed([first, second, third]) == [second]


def test_what_nobody_asks_for_is_forgotten(tmp_path: Path) -> None:
    now = 0.0
    watched = Watches(set[str], lambda _: False, lambda: now)
    status = tmp_path.stat()
    mark = (str(tmp_path), (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns))
    asked, unasked = watched.add("a", (mark,), ()), watched.add("b", (mark,), ())
    now = KEEP_S / 2
    assert watched.by_host([asked]) == {"a": [asked]}
    now = KEEP_S
    assert watched.by_host([asked, unasked]) == {"a": [asked], None: [unasked]}
    assert watched.changed([asked, unasked]) == [unasked]


def test_the_digest_of_an_artifact_is_current_while_the_depot_holds_it_whole(bench: Bench) -> None:
    watch(bench)
    digest, absent = bench.resolved.digest, "sha256:" + "0" * 64
    watches = bench.resolver.watches
    assert watches.by_host([digest, "sha256:1"]) == {OWN_DISK: [digest], None: ["sha256:1"]}
    assert watches.changed([digest, absent]) == [absent]
    manifest = bench.store.manifest(digest)
    bench.store.path(manifest.files[0].digest).unlink()
    assert watches.changed([digest]) == [digest]
