"""Where tools lie is decided by everything that decides what they are."""

from pathlib import Path

import pytest

from cluster import build, machine, tools
from cluster.errors import BuildFailed, ToolMissing


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_another_version_lies_in_another_folder(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = tools.folder()
    assert before.is_relative_to(cache)
    changed = tools.MODULES[-1]._replace(version="v0.0.0")
    monkeypatch.setattr(tools, "MODULES", (*tools.MODULES[:-1], changed))
    assert tools.folder() != before


def test_no_two_tools_share_a_name() -> None:
    names = [module.name for module in tools.MODULES]
    assert len(names) == len(set(names))


def test_a_tool_that_is_not_built_says_what_to_run(cache: Path) -> None:
    with pytest.raises(ToolMissing, match="make cluster-tools"):
        tools.path("etcd")


def test_versions_of_go_mod_are_those_that_are_told() -> None:
    for module in tools.MODULES:
        if module.folder is not None:
            required = (tools.SOURCES / module.folder / "go.mod").read_text()
            assert any(f" {part} {module.version}\n" in required for part in _parents(module.package))


def test_what_is_there_is_not_built_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools.folder().mkdir(parents=True)
    for module in tools.MODULES:
        (tools.folder() / module.name).touch()
    monkeypatch.setenv("PATH", "")  # there is no compiler that could be asked
    build.build(tools.MODULES)


def test_a_build_without_go_says_so(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ToolMissing, match="Go is not installed"):
        build.build(tools.MODULES[:1])


def test_a_failed_build_fails_with_the_compilers_words_and_leaves_nothing(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiler = tmp_path / "tool" / "go"
    compiler.parent.mkdir()
    compiler.write_text("#!/bin/sh\necho 'no such module' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{compiler.parent}:/usr/bin:/bin")
    with pytest.raises(BuildFailed, match="no such module"):
        build.build(tools.MODULES[:1])
    assert list(tools.folder().iterdir()) == []


def _parents(package: str) -> list[str]:
    parts = package.split("/")
    return ["/".join(parts[: count + 1]) for count in range(len(parts))]


def test_a_machine_without_anything_is_told_all_that_a_node_lacks(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ToolMissing) as told:
        machine.check_node()
    for missing in ("containerd", "runc", "iptables", "conntrack", "pause", "make cluster-tools"):
        assert missing in str(told.value)
