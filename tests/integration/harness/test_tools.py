"""A tool's folder follows from everything that decides what the tool is; what is there is whole."""

import os
import shutil
import time
from pathlib import Path

import pytest

from weft_devcluster import build, tools
from weft_devcluster.errors import BuildFailed


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "weft" / "cluster-tools"


def compiler(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """A `go` that does this, and no other one."""
    folder.mkdir()
    (folder / "go").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "go").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_another_version_of_a_tool_lies_elsewhere_and_other_tools_stay_where_they_are(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first, *others, last = tools.TOOLS
    before = {tool.name: tools.place(tool.name) for tool in tools.TOOLS}
    assert all(place.is_relative_to(cache) for place in before.values())
    assert len(set(before.values())) == len(before)
    with monkeypatch.context() as patch:
        patch.setattr(tools, "TOOLS", (first, *others, last._replace(version="v0.0.0")))
        assert {name for name, place in before.items() if tools.place(name) != place} == {last.name}
    modules = shutil.copytree(tools.MODULES, tmp_path / "modules")
    with (modules / "tools" / "go.sum").open("a") as sums:
        sums.write("\n")
    monkeypatch.setattr(tools, "MODULES", modules)
    of_the_module = {tool.name for tool in tools.TOOLS if not tool.version and tool.module == "tools"}
    assert {name for name, place in before.items() if tools.place(name) != place} == of_the_module


def test_the_newer_cluster_has_the_next_versions_and_shares_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    before, version = {name: tools.place(name) for name in tools.chosen()}, tools.kubernetes()
    monkeypatch.setenv("WEFT_CLUSTER", "newer")
    assert tools.kubernetes() > version
    changed = {name for name, place in before.items() if tools.place(name) != place}
    assert changed == {*tools.KUBERNETES, "helm"}


def test_what_is_there_is_not_built_again_and_other_versions_stay_for_a_while(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long_ago = time.time() - 2 * build.KEPT_S
    ours = tools.place("etcd")
    young, old = cache / "etcd-young", cache / "etcd-old"
    for folder in (ours.parent, young, old):
        folder.mkdir(parents=True)
    ours.touch()
    for folder in (ours.parent, old):
        os.utime(folder, (long_ago, long_ago))
    monkeypatch.setenv("PATH", "")  # there is no compiler that could be asked
    build.build(["etcd"])
    assert tools.path("etcd") == ours
    assert [ours.parent.exists(), young.exists(), old.exists()] == [True, True, False]


def test_a_build_that_fails_or_is_cut_off_leaves_nothing(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiler(tmp_path / "go", monkeypatch, "echo half > etcd; echo 'no such module' >&2; exit 1")
    half = cache / "building-of-a-killed-one"
    half.mkdir(parents=True)
    (half / "owner.lock").touch()
    with pytest.raises(BuildFailed, match="no such module"):
        build.build(["etcd"])
    assert [path.name for path in cache.iterdir()] == ["lock"]
