"""How many threads: affinity, and quotas of both versions of cgroups, in trees like those the kernel shows."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft_kernels.cpu.threads import cgroup_cpu_limits, cpu_quota


class Tree:
    """A cgroup file system in a folder."""

    def __init__(self, folder: Path) -> None:
        self.mount, self.membership = folder / "cgroup", folder / "self"
        self.mount.mkdir()
        self.membership.write_text("0::/\n")

    def member_of(self, *lines: str) -> None:
        self.membership.write_text("".join(f"{line}\n" for line in lines))

    def v2(self, path: str, text: str) -> None:
        self._write(self.mount / path.lstrip("/") / "cpu.max", text)

    def v1(self, path: str, quota_us: int, period_us: int = 100_000, controller: str = "cpu") -> None:
        folder = self.mount / controller / path.lstrip("/")
        self._write(folder / "cpu.cfs_quota_us", str(quota_us))
        self._write(folder / "cpu.cfs_period_us", str(period_us))

    def cpus(self, allowed: int = 64) -> int:
        return cpu_quota(self.mount, self.membership, allowed)

    def _write(self, file: Path, text: str) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_without_any_quota_the_affinity_counts(tree: Tree):
    assert tree.cpus(6) == 6
    tree.v2("/", "max 100000")
    assert tree.cpus(6) == 6


def test_the_quota_of_a_sibling_does_not_count(tree: Tree):
    tree.member_of("0::/kubepods/mine")
    tree.v2("/kubepods/other", "100000 100000")
    assert tree.cpus(5) == 5


@pytest.mark.parametrize("controller", ["cpu", "cpu,cpuacct"])
def test_version_1_counts_too(tree: Tree, controller: str):
    tree.member_of("9:name=systemd:/", f"4:{controller}:/docker/abc", "0::/")
    tree.v1("/docker/abc", 300_000, controller=controller)
    assert tree.cpus() == 3


def test_in_a_container_of_version_1_the_hosts_path_is_not_there_but_the_root_is(tree: Tree):
    tree.member_of("4:cpu:/kubepods/pod1/abc")
    tree.v1("/", 200_000)
    assert tree.cpus() == 2


def test_version_1_without_a_quota_says_minus_one(tree: Tree):
    tree.member_of("4:cpu:/")
    tree.v1("/", -1)
    assert tree.cpus(7) == 7


def test_cpuacct_alone_grants_nothing(tree: Tree):
    tree.member_of("3:cpuacct:/", "2:cpuset:/")
    tree.v1("/", 100_000, controller="cpuacct")
    assert tree.cpus(7) == 7


def test_a_path_that_leads_out_of_the_mount_is_not_followed(tree: Tree, tmp_path: Path):
    (tmp_path / "cpu.max").write_text("100000 100000\n")
    tree.member_of("0::/../")
    assert tree.cpus(7) == 7


def test_where_nothing_can_be_read_the_affinity_counts(tmp_path: Path):
    assert cpu_quota(tmp_path / "none", tmp_path / "none", 3) == 3


@given(
    allowed=st.integers(1, 256),
    levels=st.lists(st.one_of(st.none(), st.tuples(st.integers(1_000, 10**8), st.integers(1_000, 10**6))), max_size=4),
)
def test_never_more_than_any_level_grants_and_never_none(
    tmp_path_factory: pytest.TempPathFactory, allowed: int, levels: list[tuple[int, int] | None]
):
    tree = Tree(tmp_path_factory.mktemp("tree"))
    path = ""
    for i, level in enumerate(levels):
        path += f"/level{i}"
        tree.v2(path, "max 100000" if level is None else f"{level[0]} {level[1]}")
    tree.member_of(f"0::{path or '/'}")
    granted = [quota / period for quota, period in filter(None, levels)]
    assert sorted(cgroup_cpu_limits(tree.mount, tree.membership)) == sorted(granted)
    cpus = tree.cpus(allowed)
    assert 1 <= cpus <= allowed
    assert all(cpus <= max(1.0, grant) for grant in granted)
    assert cpus == allowed or cpus == max(1, int(min(granted)))
